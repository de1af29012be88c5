"""A tier as a manifest declares it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from kvpool import rules
from kvpool.quantity import format_quantity, parse_quantity

Medium = Literal["GPU", "DRAM", "CXL", "SSD"]
Coherence = Literal["hardware", "software"]


def _quantity(value: object) -> int:
    try:
        return parse_quantity(value)
    except ValueError as error:
        raise PydanticCustomError("kvpool_rule", "{sentence}", {"sentence": str(error)}) from None


Name = Annotated[str, Field(pattern=rules.NAME_PATTERN, min_length=1, max_length=rules.NAME_MAX)]
Quantity = Annotated[int, BeforeValidator(_quantity), PlainSerializer(format_quantity, return_type=str)]
Percent = Annotated[int, Field(ge=1, le=99)]


class Model(BaseModel):
    # Strict: YAML has types of its own, and "1" for 1 or yes for "yes" is a mistake that hides the next one.
    model_config = ConfigDict(alias_generator=to_camel, extra="forbid", frozen=True, strict=True)


class Source(Model):
    """Where a tier's bytes lie: exactly one of the three."""

    path: str | None = None
    device_class: str | None = None
    host_path: str | None = None


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
