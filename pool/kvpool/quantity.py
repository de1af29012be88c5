"""Amounts of bytes as manifests write them: 64Gi, 1.5Ti, 500M, 4096."""

from __future__ import annotations

import re
from fractions import Fraction

from kvpool import rules

BINARY_UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "Pi": 1 << 50}
DECIMAL_UNITS = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
UNITS = {"": 1, **BINARY_UNITS, **DECIMAL_UNITS}

# The same pattern stands in the CRD, so that both refuse the same texts.
PATTERN = r"^[0-9]+([.][0-9]+)?(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?$"
TEXT_MAX = 60  # characters; longer ones are no sizes, and arithmetic with them is slow
BYTES_MAX = (1 << 63) - 1  # what the region format and the CRD's int64 can hold

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?")
_NEARLY = re.compile(r"\s*([0-9]+(?:[.,][0-9]+)?)\s*([kmgtp])i?(?:b|bytes?)?\s*", re.IGNORECASE)


def parse_quantity(value: object) -> int:
    """The bytes that `value` means.

    Raises:  ValueError with a sentence that says what to write instead.
    """
    if value is None:
        raise ValueError(f"is empty; {_advice('')}")
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"{shown(value)} is not a quantity; {_advice(shown(value))}")
    if isinstance(value, int):
        amount = Fraction(value)
    else:
        match = _QUANTITY.fullmatch(value) if len(value) <= TEXT_MAX else None
        if match is None:
            raise ValueError(f"{shown(value)} is not a quantity; {_advice(value[:TEXT_MAX])}")
        amount = Fraction(match[1]) * UNITS[match[2] or ""]
    if amount <= 0:
        raise ValueError(f"{shown(value)} is not more than zero; {rules.QUANTITY_RANGE}")
    if amount.denominator != 1:
        raise ValueError(f"{shown(value)} cannot be used; {rules.QUANTITY_RANGE}")
    if amount > BYTES_MAX:
        raise ValueError(f"{shown(value)} cannot be addressed; {rules.QUANTITY_RANGE}")
    return int(amount)


def format_quantity(count_bytes: int) -> str:
    """The shortest exact way to write `count_bytes`: 64Gi, 500M, or the plain number."""
    for units in (BINARY_UNITS, DECIMAL_UNITS):
        for unit in reversed(units):
            if count_bytes and count_bytes % units[unit] == 0:
                return f"{count_bytes // units[unit]}{unit}"
    return str(count_bytes)


def human_bytes(count_bytes: float) -> str:
    """A rounded amount for people: 63.9 GiB. Never for anything that is read back."""
    amount = float(count_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def shown(value: object, length_max: int = TEXT_MAX) -> str:
    """A wrong value for a message: texts in quotes, and never longer than a message may be."""
    try:
        text = f'"{value}"' if isinstance(value, str) else str(value)
    except ValueError:  # Python does not write numbers of thousands of digits
        return "a number of thousands of digits"
    if len(text) <= length_max:
        return text
    return text[: length_max - 4] + ('..."' if isinstance(value, str) else "...")


def _advice(text: str) -> str:
    """The rule, with the user's own number and unit in it where they can be guessed."""
    nearly = _NEARLY.fullmatch(text)
    if not nearly:
        return rules.QUANTITY
    number, letter = nearly[1].replace(",", "."), nearly[2].upper()
    decimal = letter.replace("K", "k")
    return rules.QUANTITY.replace("64Gi", f"{number}{letter}i").replace("64G ", f"{number}{decimal} ")
