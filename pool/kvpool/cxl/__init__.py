"""CXL memory: what a machine has of it, and composing it into the DAX devices that regions lie on."""

from kvpool.cxl.backend import Backend, Composed, ComposeError, Device, Memory, RegionInUse, Wanted
from kvpool.cxl.opened import open_backend

__all__ = [
    "Backend",
    "ComposeError",
    "Composed",
    "Device",
    "Memory",
    "RegionInUse",
    "Wanted",
    "open_backend",
]
