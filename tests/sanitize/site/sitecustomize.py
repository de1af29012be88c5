"""Puts the native module of KVPOOL_NATIVE, built with a sanitizer, in the place of the installed one.

Python runs this at its start when the folder is on PYTHONPATH, so it holds for child processes as well.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from types import ModuleType


class SanitizedNative(MetaPathFinder):
    def __init__(self, path: str) -> None:
        self._path = path

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_file_location(fullname, self._path) if fullname == "kvpool._native" else None


if os.environ.get("KVPOOL_NATIVE"):
    sys.meta_path.insert(0, SanitizedNative(os.environ["KVPOOL_NATIVE"]))
