"""The part of a manifest that is for a cluster's operator; on one machine it is checked and not used."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from kvpool import rules
from kvpool.quantity import BINARY_UNITS, DECIMAL_UNITS, shown
from kvpool.spec.tier import Model, Text, broken, size_schema

PriorityClass = Annotated[str, Text(rules.OBJECT_NAME_PATTERN, rules.OBJECT_NAME_MAX, rules.PRIORITY_CLASS)]
LabelKey = Annotated[str, Text(rules.LABEL_KEY_PATTERN, rules.LABEL_KEY_MAX, rules.LABEL_KEY)]
LabelValue = Annotated[str, Text(rules.LABEL_VALUE_PATTERN, rules.NAME_MAX, rules.LABEL_VALUE)]
Image = Annotated[str, Text(r"^[^ \t\n]+$", rules.IMAGE_MAX, rules.IMAGE)]

_AMOUNT = re.compile(rules.AMOUNT_PATTERN)
_FACTORS = {
    "m": Fraction(1, 1000),
    "": Fraction(1),
    "E": Fraction(10**18),
    "Ei": Fraction(1 << 60),
    **{unit: Fraction(factor) for unit, factor in (BINARY_UNITS | DECIMAL_UNITS).items()},
}


def _amount(value: object) -> str:
    """An amount of a resource as pods write it: 500m, 2, 1Gi. Kept as it was written."""
    given = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(given, str) or len(given) > rules.AMOUNT_MAX or not _AMOUNT.fullmatch(given):
        raise broken(f"{shown(value)} is no amount; {rules.AMOUNT}")
    return given


def amount(written: str) -> Fraction:
    """What a checked amount means: cores, bytes, pieces."""
    digits = re.match(r"[0-9.]+", written)
    assert digits is not None
    return Fraction(digits[0]) * _FACTORS[written[digits.end() :]]


Amount = Annotated[
    str, BeforeValidator(_amount), WithJsonSchema(size_schema(rules.AMOUNT_PATTERN, rules.AMOUNT_MAX))
]
Amounts = Annotated[dict[LabelKey, Amount], Field(max_length=rules.RESOURCES_MAX)]


class Toleration(Model):
    """A taint that the daemons' pods tolerate, as in a pod."""

    key: LabelKey | None = None
    operator: Literal["Equal", "Exists"] | None = None
    value: LabelValue | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: int | None = None


class Resources(Model):
    """Requests and limits of the daemon, without the memory of its tiers."""

    requests: Amounts | None = None
    limits: Amounts | None = None


class Daemon(Model):
    """The pod that serves the pool on each node."""

    image: Image | None = None
    resources: Resources | None = None
