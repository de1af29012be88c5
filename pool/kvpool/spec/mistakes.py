"""Mistakes that the schema finds in a manifest, as sentences: the field, what is wrong, what to write."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from kvpool import rules
from kvpool.quantity import shown

FieldPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake. `line` is 0 when the manifest did not come from a text."""

    path: str
    message: str
    line: int = 0

    def __str__(self) -> str:
        where = f" (line {self.line})" if self.line else ""
        return f"{self.path}: {self.message}{where}" if self.path else f"{self.message}{where}"


def path_text(path: FieldPath) -> str:
    """('spec', 'tiers', 1, 'capacity') -> spec.tiers[1].capacity"""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def field_problem(error: ErrorDetails, root: type[BaseModel]) -> tuple[FieldPath, str]:
    """The field and the sentence for one error that pydantic found."""
    path = tuple(part for part in error["loc"] if part != "[key]")
    kind, given = error["type"], error["input"]
    match kind:
        case "kvpool_rule" | "value_error":
            return path, str(error["msg"]).removeprefix("Value error, ")
        case "missing":
            example = rules.MISSING_EXAMPLE.get(_pattern(path), f"{path[-1]}: ...")
            return path, f"{rules.MISSING}; write {example}."
        case "extra_forbidden":
            return path, _unknown_field(path, root)
        case "literal_error":
            return path, _not_one_of(path, given, root)
        case "string_pattern_mismatch" | "string_too_short" | "string_too_long":
            return path, f"{_shown(given)} is not a name; {_name_rule(path)}"
        case "too_short":
            return path, f"is empty; {rules.TIERS_EMPTY}"
        case "too_long":
            return path, f"has {len(given)} entries; {_TOO_MANY[str(path[-1])]}"
        case "greater_than_equal" | "less_than_equal":
            return path, f"{_shown(given)} is out of range; {_range_rule(path)}"
        case _:
            return path, _wrong_type(kind, given, rules.MISSING_EXAMPLE.get(_pattern(path)))


def _pattern(path: FieldPath) -> str:
    """('spec', 'tiers', 1, 'name') -> spec.tiers[].name"""
    text = ""
    for part in path:
        text += "[]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _wrong_type(kind: str, given: object, example: str | None) -> str:
    expected = {
        "string_type": "a text",
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "bool_type": "true or false",
        "list_type": "a list",
        "dict_type": "a mapping (key: value)",
        "model_type": "a mapping (key: value)",
        "model_attributes_type": "a mapping (key: value)",
        "invalid_key": "a text as the key",
    }.get(kind, "something else")
    if given is None:
        return f"is empty; write {example or f'{expected}, or leave the field out'}."
    hint = f"; write {example}." if example else "."
    if kind == "string_type" and isinstance(given, int | float):
        hint = f'; write "{_yaml_text(given)}" in quotes.'
    elif kind in ("int_type", "bool_type") and isinstance(given, str):
        hint = "; write it without quotes." if given.isdigit() or given in ("true", "false") else "."
    return f"{_shown(given)} is {_kind_of(given)}, expected {expected}{hint}"


def _yaml_text(value: object) -> str:
    return shown(value).lower() if isinstance(value, bool) else shown(value)


def _kind_of(value: object) -> str:
    if isinstance(value, bool):
        return "true/false"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a text"
    if isinstance(value, list):
        return "a list"
    return "a mapping" if isinstance(value, dict) else f"a {type(value).__name__}"


def _shown(value: object) -> str:
    if isinstance(value, dict | list):
        return "this" if value else "an empty value"
    return _yaml_text(value)


_TOO_MANY = {
    "tiers": rules.TIERS_TOO_MANY,
    "tolerations": rules.TOLERATIONS_TOO_MANY,
    "nodeSelector": rules.LABELS_TOO_MANY,
    "requests": rules.RESOURCES_TOO_MANY,
    "limits": rules.RESOURCES_TOO_MANY,
}


def _name_rule(path: FieldPath) -> str:
    return rules.POOL_NAME if path == ("metadata", "name") else rules.NAME


def _range_rule(path: FieldPath) -> str:
    return rules.HOSTS_RANGE if path[-1] == "hosts" else rules.WATERMARK_RANGE


def _not_one_of(path: FieldPath, given: object, root: type[BaseModel]) -> str:
    allowed = _literals(path, root)
    if path == ("spec", "verify") and given is False:
        return f"off (which YAML reads as false) is not in this version; {rules.VERIFY_ALWAYS}"
    sentence = f"{_shown(given)} is not known; write {_one_of(allowed)}"
    return f"{sentence}{_did_you_mean(shown(given), allowed) if len(allowed) > 1 else '.'}"


def _one_of(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + f" or {words[-1]}"


def _unknown_field(path: FieldPath, root: type[BaseModel]) -> str:
    model = _model_at(path[:-1], root)
    known = [field.alias or name for name, field in model.model_fields.items()] if model else []
    given = str(path[-1])
    guess = _did_you_mean(given, known)
    if guess != ".":
        return f"no such field{guess}"
    homes = _homes_of(given, root)
    if homes:
        return f"no such field here; it belongs to {homes[0]}."
    if not model or len(known) > 6:
        return f"no such field in {path_text(path[:-1]) or 'a KVPool'}; leave it out."
    return f"no such field; {path_text(path[:-1]) or 'a KVPool'} has {', '.join(known)}."


def _close(given: str, known: Sequence[str]) -> list[str]:
    by_lower = {name.lower(): name for name in known}
    return [by_lower[match] for match in difflib.get_close_matches(_bare(given), by_lower, n=1, cutoff=0.7)]


def _bare(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _did_you_mean(given: str, known: Sequence[str]) -> str:
    close = _close(given, known)
    return f'; did you mean "{close[0]}"?' if close else "."


def _homes_of(name: str, root: type[BaseModel]) -> list[str]:
    """Where else the manifest has a field of this name: users put tiers beside spec, capacity into source."""
    homes: list[str] = []

    def visit(model: type[BaseModel], prefix: str) -> None:
        for field_name, field in model.model_fields.items():
            alias = field.alias or field_name
            if alias.lower() == _bare(name):
                homes.append(f"{prefix}.{alias}".lstrip("."))
            inner = _model_in(field.annotation)
            if inner:
                many = "[]" if _is_list(field.annotation) else ""
                visit(inner, f"{prefix}.{alias}{many}".lstrip("."))

    visit(root, "")
    return homes


def _model_at(path: FieldPath, root: type[BaseModel]) -> type[BaseModel] | None:
    model: type[BaseModel] | None = root
    for part in path:
        if model is None:
            return None
        if isinstance(part, int):
            continue
        fields = {field.alias or name: field for name, field in model.model_fields.items()}
        model = _model_in(fields[part].annotation) if part in fields else None
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    for argument in get_args(annotation):
        found = _model_in(argument)
        if found:
            return found
    # Python 3.10 takes list[...] for a type, which then is no class to ask.
    plain = isinstance(annotation, type) and get_origin(annotation) is None
    return annotation if plain and issubclass(annotation, BaseModel) else None


def _is_list(annotation: Any) -> bool:
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        return any(_is_list(argument) for argument in get_args(annotation))
    return origin is list


def _literals(path: FieldPath, root: type[BaseModel]) -> list[str]:
    model = _model_at(path[:-1], root)
    assert model is not None
    field = next(field for name, field in model.model_fields.items() if (field.alias or name) == path[-1])
    return [word for word in _flat_args(field.annotation) if isinstance(word, str)]


def _flat_args(annotation: Any) -> Iterator[Any]:
    for argument in get_args(annotation):
        yield from _flat_args(argument) if get_args(argument) else [argument]
