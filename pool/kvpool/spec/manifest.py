"""The KVPool manifest: a YAML text or a Kubernetes object in, a `PoolSpec` or a `ManifestError` out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from kvpool import rules
from kvpool.errors import ManifestError
from kvpool.spec.cluster import Daemon, LabelKey, LabelValue, PriorityClass, Toleration
from kvpool.spec.consistency import (
    cross_problems,
    eviction_problems,
    resource_problems,
    toleration_problems,
)
from kvpool.spec.document import read_yaml
from kvpool.spec.mistakes import FieldPath, Problem, field_problem, path_text
from kvpool.spec.tier import Eviction, Model, Name, TierSpec

PoolName = Annotated[str, Field(pattern=rules.NAME_PATTERN, min_length=1, max_length=rules.POOL_NAME_MAX)]


class Metadata(BaseModel):
    """The object's name. What a cluster adds (uid, managedFields, ...) is accepted and not used."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, alias_generator=to_camel)

    name: PoolName
    namespace: Name | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    # Set by the API server: a manifest saved with `kubectl get -o yaml` is a manifest too.
    uid: Any = Field(default=None, exclude=True)
    resource_version: Any = Field(default=None, exclude=True)
    generation: Any = Field(default=None, exclude=True)
    creation_timestamp: Any = Field(default=None, exclude=True)
    deletion_timestamp: Any = Field(default=None, exclude=True)
    deletion_grace_period_seconds: Any = Field(default=None, exclude=True)
    finalizers: Any = Field(default=None, exclude=True)
    owner_references: Any = Field(default=None, exclude=True)
    managed_fields: Any = Field(default=None, exclude=True)
    self_link: Any = Field(default=None, exclude=True)


class Body(Model):
    """The `spec:` of a manifest. From `node_selector` on it is for the operator, and not used by `up`."""

    hosts: int = Field(default=1, ge=1, le=rules.HOSTS_MAX)
    tiers: list[TierSpec] = Field(min_length=1, max_length=rules.TIERS_MAX)
    eviction: Eviction = Eviction()
    verify: Literal["always", "sampled", "off"] = "always"
    deletion_policy: Literal["Retain", "Delete"] = "Retain"
    node_selector: dict[LabelKey, LabelValue] = Field(default_factory=dict, max_length=rules.LABELS_MAX)
    paused: bool = False
    priority_class_name: PriorityClass | None = None
    tolerations: list[Toleration] = Field(default_factory=list, max_length=rules.TOLERATIONS_MAX)
    daemon: Daemon = Daemon()


class PoolSpec(Model):
    """A valid manifest. Make one with `from_file`, `from_text` or `from_object`, which check all rules."""

    api_version: Literal["kvpool.dev/v1alpha1"]
    kind: Literal["KVPool"]
    metadata: Metadata
    spec: Body
    status: Any = Field(default=None, exclude=True)  # written by the operator; no input

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def hosts(self) -> int:
        return self.spec.hosts

    @property
    def tiers(self) -> list[TierSpec]:
        return self.spec.tiers

    @property
    def eviction(self) -> Eviction:
        return self.spec.eviction

    @property
    def deletion_policy(self) -> Literal["Retain", "Delete"]:
        return self.spec.deletion_policy

    def tier(self, name: str) -> TierSpec:
        """The tier of that name. Raises: KeyError."""
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise KeyError(name)

    def shards(self, tier: TierSpec) -> int:
        """How many hosts' shards the region of `tier` has: all hosts' when shared, else one."""
        return self.hosts if tier.shared else 1

    def shard_of(self, tier: TierSpec, host: int) -> int:
        """Which shard of the region of `tier` host number `host` owns."""
        return host if tier.shared else 0

    @classmethod
    def from_file(cls, path: str | Path) -> PoolSpec:
        """The manifest in a file.

        Raises:  ManifestError, also for a file that cannot be read.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ManifestError(
                f"{path}: {error.strerror}. Expected the file of a KVPool manifest."
            ) from None
        except UnicodeDecodeError:
            raise ManifestError(f"{path}: not UTF-8 text. Expected the file of a KVPool manifest.") from None
        except ValueError as error:  # a path with a zero byte
            raise ManifestError(f"{path!r}: {error}. Expected the file of a KVPool manifest.") from None
        return cls.from_text(text, source=str(path))

    @classmethod
    def from_text(cls, text: str, source: str = "manifest") -> PoolSpec:
        """The manifest in `text`; `source` names it in messages.

        Raises:  ManifestError with every mistake, each with its field and line.
        """
        document, lines = read_yaml(text, source)
        return cls.from_object(document, source=source, lines=lines)

    @classmethod
    def from_object(
        cls, document: object, *, source: str = "manifest", lines: Mapping[FieldPath, int] | None = None
    ) -> PoolSpec:
        """The manifest that is already parsed: an object of the Kubernetes API, or a test's dict.

        Raises:  InvalidManifest with every mistake, each with its field.
        """
        spec, found = _validate(document)
        if spec is not None and not found:
            return spec
        problems = [Problem(path_text(path), sentence, _line(path, lines or {})) for path, sentence in found]
        problems.sort(key=lambda problem: problem.line)
        raise InvalidManifest(source, problems)

    def to_object(self) -> dict[str, Any]:
        """The manifest as plain objects, defaults left out."""
        return self.model_dump(by_alias=True, exclude_defaults=True, exclude_none=True) | {
            "apiVersion": self.api_version,
            "kind": self.kind,
        }

    def to_yaml(self) -> str:
        """The manifest as text; reading it back gives an equal `PoolSpec`."""
        return yaml.safe_dump(self.to_object(), sort_keys=False)


class InvalidManifest(ManifestError):
    """A manifest with mistakes, listed in `problems`."""

    def __init__(self, source: str, problems: list[Problem]) -> None:
        self.source = source
        self.problems = problems
        if len(problems) == 1:
            super().__init__(f"{source}: {problems[0]}")
        else:
            listed = "".join(f"\n  {problem}" for problem in problems)
            super().__init__(f"{source}: {len(problems)} mistakes:{listed}")


def _validate(document: object) -> tuple[PoolSpec | None, list[tuple[FieldPath, str]]]:
    """The spec, if its fields are right one by one, and every mistake, in fields and between them."""
    spec: PoolSpec | None = None
    found: list[tuple[FieldPath, str]] = []
    try:
        spec = PoolSpec.model_validate(document)
    except ValidationError as error:
        found = [field_problem(details, PoolSpec) for details in error.errors()]
    body = document.get("spec") if isinstance(document, Mapping) else None
    raw = body if isinstance(body, Mapping) else {}
    found += cross_problems(_hosts_of(raw), list(_valid_tiers(raw.get("tiers"))))
    found += _body_problems(raw)
    return spec, found


def _valid_tiers(tiers: object) -> Iterator[tuple[int, TierSpec]]:
    """The tiers that are right by themselves: rules between tiers are checked even when one tier is wrong."""
    for index, tier in enumerate(_listed(tiers)):
        try:
            yield index, TierSpec.model_validate(tier)
        except ValidationError:
            continue


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _hosts_of(body: Mapping[str, Any]) -> int:
    hosts = body.get("hosts", 1)
    return hosts if isinstance(hosts, int) and 1 <= hosts <= rules.HOSTS_MAX else 1


def _body_problems(body: Mapping[str, Any]) -> Iterator[tuple[FieldPath, str]]:
    if body.get("verify") in ("sampled", "off"):
        yield ("spec", "verify"), f'"{body["verify"]}" is not in this version; {rules.VERIFY_ALWAYS}'
    with contextlib.suppress(ValidationError):
        yield from eviction_problems(Eviction.model_validate(body.get("eviction", {})))
    for index, toleration in enumerate(_listed(body.get("tolerations"))):
        with contextlib.suppress(ValidationError):
            yield from toleration_problems(index, Toleration.model_validate(toleration))
    with contextlib.suppress(ValidationError):
        yield from resource_problems(Daemon.model_validate(body.get("daemon", {})))


def _line(path: FieldPath, lines: Mapping[FieldPath, int]) -> int:
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path, 0)
