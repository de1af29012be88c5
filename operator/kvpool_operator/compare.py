"""Whether an object in the cluster is as it shall be: then nothing is written."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from kvpool_operator.names import APPLIED_ANNOTATION

Object = dict[str, Any]

_QUANTITY = re.compile(r"([0-9.]+)(m|Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?")
_UNITS = {
    "m": Decimal("0.001"),
    "": Decimal(1),
    **{unit + "i": Decimal(1024) ** power for power, unit in enumerate("KMGTP", 1)},
    **{unit: Decimal(1000) ** power for power, unit in enumerate("kMGTP", 1)},
}


def marked(wanted: Object) -> Object:
    """`wanted` with the digest of all of it as an annotation: a field taken out of it shows, too."""
    text = json.dumps(wanted, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    metadata = wanted["metadata"]
    annotations = {**(metadata.get("annotations") or {}), APPLIED_ANNOTATION: digest}
    return {**wanted, "metadata": {**metadata, "annotations": annotations}}


def is_applied(wanted: Object, live: Mapping[str, Any] | None) -> bool:
    """Whether `live` has everything that `wanted`, as `marked` made it, says."""
    return live is not None and not live["metadata"].get("deletionTimestamp") and contains(live, wanted)


def contains(live: Any, wanted: Any) -> bool:
    """Whether all of `wanted` is in `live`, which may have more fields: defaults, other managers'."""
    if isinstance(wanted, Mapping):
        if not isinstance(live, Mapping):
            return not wanted and live is None
        return all(contains(live.get(key), value) for key, value in wanted.items())
    if isinstance(wanted, list):
        if not isinstance(live, list):
            return not wanted and live is None
        return len(live) == len(wanted) and all(contains(a, b) for a, b in zip(live, wanted, strict=True))
    if live == wanted:
        return True
    if wanted in ("", False, 0) and live is None:
        return True  # the API server leaves out what is empty
    return _amount(live) is not None and _amount(live) == _amount(wanted)


def _amount(value: Any) -> Decimal | None:
    """What a quantity means: 1024Mi is 1Gi."""
    match = _QUANTITY.fullmatch(str(value)) if isinstance(value, str | int) else None
    if match is None or match[1].count(".") > 1 or match[1] == ".":
        return None
    return Decimal(match[1]) * _UNITS[match[2] or ""]
