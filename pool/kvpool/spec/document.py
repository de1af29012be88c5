"""Reading one YAML document, with the line of every field and no key given twice."""

from __future__ import annotations

from typing import Any

import yaml

from kvpool.errors import ManifestError
from kvpool.spec.mistakes import FieldPath


def read_yaml(text: str, source: str) -> tuple[Any, dict[FieldPath, int]]:
    """The document in `text` as plain objects, and the line (from 1) on which each field stands.

    `source` names the text in messages. Empty documents (a leading or trailing '---') are passed over.

    Raises:  ManifestError for text that is not YAML, for no or several documents, and for a key given twice:
             YAML readers silently keep the last one, and a user would not see which of the two counts.
    """
    try:
        nodes, loader = _nodes(text)
        if not nodes:
            raise ManifestError(f"{source}: no manifest in it. Expected a document with kind: KVPool.")
        if len(nodes) > 1:
            raise ManifestError(
                f"{source}: {len(nodes)} documents, expected one. Put each pool into a file of its own."
            )
        lines: dict[FieldPath, int] = {}
        twice: list[str] = []
        _walk(nodes[0], (), lines, twice, depth=0)
        if twice:
            raise ManifestError(f"{source}: " + " ".join(twice))
        return loader.construct_document(nodes[0]), lines
    except RecursionError:
        raise ManifestError(f"{source}: not a manifest: nested too deep.") from None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise ManifestError(f"{source}: not YAML: {_where(error)}") from None
    except (LookupError, AttributeError, ArithmeticError):
        # The reader's own slips, over a tag that its value does not fit: !!int "", !!bool x, !!timestamp x.
        raise ManifestError(
            f"{source}: not YAML: a tag (!!...) does not fit its value; leave it out."
        ) from None


def _nodes(text: str) -> tuple[list[yaml.Node], yaml.SafeLoader]:
    """The documents in `text` that are not empty, and the loader that can make objects of them."""
    loader = yaml.SafeLoader(text)
    nodes: list[yaml.Node] = []
    while loader.check_node():
        node = loader.get_node()
        if node is not None and not _is_empty(node):
            nodes.append(node)
    return nodes, loader


DEPTH_MAX = 64  # a manifest is five levels deep; more is an alias that contains itself
FIELDS_MAX = 100_000  # as read, aliases included: a few lines of aliases of aliases say billions


def _walk(
    node: yaml.Node, path: FieldPath, lines: dict[FieldPath, int], twice: list[str], depth: int
) -> None:
    if depth > DEPTH_MAX:
        raise ValueError(f"nested deeper than {DEPTH_MAX} levels.")
    if len(lines) > FIELDS_MAX:
        raise ValueError(f"more than {FIELDS_MAX} fields.")
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            name = str(key.value)
            line = key.start_mark.line + 1
            if name in seen and name != "<<":
                twice.append(f'"{name}" is given twice, on lines {seen[name]} and {line}; keep one of them.')
            seen[name] = line
            field = (*path, name)
            lines[field] = line
            _walk(value, field, lines, twice, depth + 1)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _walk(item, (*path, index), lines, twice, depth + 1)


def _is_empty(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _where(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem} (line {mark.line + 1}, column {mark.column + 1})."
    if isinstance(error, yaml.reader.ReaderError):
        return f"{error.reason} (position {error.position}). Is this a text file?"
    text = str(error)
    if "integer string conversion" in text:
        return "a number has thousands of digits."
    return text if text.endswith(".") else f"{text}."
