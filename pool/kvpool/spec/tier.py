"""A tier as a manifest declares it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
    WithJsonSchema,
)
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from kvpool import rules
from kvpool.quantity import PATTERN, TEXT_MAX, format_quantity, parse_quantity, shown

Medium = Literal["GPU", "DRAM", "CXL", "SSD"]
Coherence = Literal["hardware", "software"]


def _quantity(value: object) -> int:
    try:
        return parse_quantity(value)
    except ValueError as error:
        raise broken(str(error)) from None


def broken(sentence: str) -> PydanticCustomError:
    """What a validator raises over a value that breaks the rule of that sentence."""
    return PydanticCustomError("kvpool_rule", "{sentence}", {"sentence": sentence})


@dataclass(frozen=True)
class Text:
    """A text that matches `pattern`; `rule` is what to say when it does not."""

    pattern: str
    length_max: int
    rule: str

    def check(self, value: str) -> str:
        if len(value) > self.length_max or not re.search(self.pattern, value) or value.endswith("\n"):
            raise broken(f"{shown(value)} cannot be used; {self.rule}")
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {**handler(schema), "maxLength": self.length_max, "pattern": self.pattern}


def size_schema(pattern: str, length_max: int) -> dict[str, Any]:
    """A number, or a text with a unit: what Kubernetes calls int-or-string."""
    return {"x-kubernetes-int-or-string": True, "maxLength": length_max, "pattern": pattern}


Name = Annotated[str, Field(pattern=rules.NAME_PATTERN, min_length=1, max_length=rules.NAME_MAX)]
DeviceClass = Annotated[str, Text(rules.OBJECT_NAME_PATTERN, rules.OBJECT_NAME_MAX, rules.DEVICE_CLASS)]
Quantity = Annotated[
    int,
    BeforeValidator(_quantity),
    PlainSerializer(format_quantity, return_type=str),
    WithJsonSchema(size_schema(PATTERN, TEXT_MAX)),
]
# Its rules are in `consistency`, because a tier that is wrong there is still compared with the others.
FilePath = Annotated[str, WithJsonSchema({"type": "string", "maxLength": rules.PATH_MAX})]
Percent = Annotated[int, Field(ge=1, le=99)]


class Model(BaseModel):
    # Strict: YAML has types of its own, and "1" for 1 or yes for "yes" is a mistake that hides the next one.
    model_config = ConfigDict(alias_generator=to_camel, extra="forbid", frozen=True, strict=True)


class Source(Model):
    """Where a tier's bytes lie: exactly one of the three."""

    path: FilePath | None = None
    device_class: DeviceClass | None = None
    host_path: FilePath | None = None


class TierSpec(Model):
    """One tier as declared."""

    name: Name
    medium: Medium
    capacity_bytes: Quantity = Field(alias="capacity")
    optional: bool = False
    shared: bool = False
    coherence: Coherence | None = None
    source: Source | None = None
    extent_bytes: Quantity | None = Field(default=None, alias="extentSize")
    min_block_bytes: Quantity | None = Field(default=None, alias="minBlockSize")
    huge_pages: bool = False

    @property
    def coherence_mode(self) -> Coherence:
        """The declared mode; else software for shared CXL: hosts on CXL 2.0 don't see each other's caches."""
        if self.coherence:
            return self.coherence
        return "software" if self.shared and self.medium == "CXL" else "hardware"


class Eviction(Model):
    """Between which fillings (percent) the daemon keeps a tier."""

    high_watermark: Percent = 95
    low_watermark: Percent = 90
