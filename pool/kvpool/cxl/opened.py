"""The backend that a text names: sysfs, file:/folder, or file:/folder?memories=2x1Gi."""

from __future__ import annotations

import re

from kvpool.cxl.backend import Backend, WrongWanted
from kvpool.cxl.file import FileBackend
from kvpool.cxl.sysfs import SysfsBackend
from kvpool.quantity import parse_quantity

_MEMORIES = re.compile(r"memories=([0-9]{1,3})x(.+)")
EXPECTED = "sysfs, file:/FOLDER, or 'file:/FOLDER?memories=2x1Gi'"


def open_backend(text: str) -> Backend:
    """The backend that `text` names: `sysfs` is this machine's CXL memory, `file:/FOLDER` files in a folder.

    `?memories=2x1Gi` makes the folder, and two memories of 1 GiB in it, where they are missing.
    Raises:  WrongWanted for another text, ComposeError for a folder that does not exist.
    """
    if text == "sysfs":
        return SysfsBackend()
    kind, _, rest = text.partition(":")
    if kind == "file" and rest.startswith("/"):
        folder, _, query = rest.partition("?")
        if not query:
            return FileBackend(folder)
        match = _MEMORIES.fullmatch(query)
        if match:
            try:
                return FileBackend.with_memories(folder, int(match[1]), parse_quantity(match[2]))
            except ValueError as error:
                raise WrongWanted(f'backend "{text}": memories: {error}') from None
    raise WrongWanted(f'backend "{text}" does not exist; expected {EXPECTED}.')
