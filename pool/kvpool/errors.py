"""The tree of errors that kvpool raises. A miss is never an error: see `kvpool.outcomes`.

KvpoolError
|- WrongUse              what was asked for cannot be meant, on no machine; nothing was changed
|- ManifestError         a KVPool manifest that cannot be used; nothing was changed
|- RegionError           a region that cannot be used as asked
|  |- FormatVersionError     written by another version of the region format
|  |- SuperblockError        no valid superblock: not a region, or both copies are damaged
|  |- GeometryError          sizes that do not fit each other or the region that exists
|  |- RegionBusyError        somebody is using it, or all participant entries are taken
|  |- FencedError            another host owns this shard now
|- MediumUnavailable     missing, no permission, read-only, too small, or no space left
|- BufferShapeError      a caller's buffer has the wrong size, is read-only or not contiguous
|- NamespaceError        a namespace or block hash that cannot be used
"""

from __future__ import annotations


class KvpoolError(Exception):
    """Base of everything that kvpool raises on purpose."""


class WrongUse(KvpoolError):
    """An option, an argument or a setting says what cannot be meant; the message says what to write."""


class ManifestError(KvpoolError):
    """A manifest is wrong; the message names the field's path and what to write."""


class RegionError(KvpoolError):
    """A region cannot be used as asked."""


class FormatVersionError(RegionError):
    """The region was written by another version of the region format."""


class SuperblockError(RegionError):
    """No valid superblock was found."""


class GeometryError(RegionError):
    """Sizes do not fit each other, the medium or the existing region."""


class RegionBusyError(RegionError):
    """Somebody else is using the region, or every participant entry is taken."""


class FencedError(RegionError):
    """Another host holds a higher claim on this host's shard."""


class MediumUnavailable(KvpoolError):
    """The medium is missing, not permitted, read-only, too small or full."""


class BufferShapeError(KvpoolError, ValueError):
    """A buffer does not have the size, the writability or the contiguity that a block needs."""


class NamespaceError(KvpoolError, ValueError):
    """A namespace or a block hash cannot be used."""
