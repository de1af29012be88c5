"""Carrying out a plan: regions are made completely or not at all."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kvpool.errors import KvpoolError, MediumUnavailable
from kvpool.provision.observe import look_at
from kvpool.provision.plan import Action, Await, ExistingRegion, Format, Shape, refusals

AWAIT_POLL_S = 0.2

Progress = Callable[[str, int, int], None]  # tier, bytes done, bytes in all


class Regions(Protocol):
    """What is needed of regions: kvpool.provision.real_regions, or a test's stand-in."""

    def inspect(self, path: Path) -> ExistingRegion:
        """The valid region at `path`. Raises: RegionError."""

    def check(self, path: Path, shape: Shape) -> None:
        """Whether a region of that shape can be laid out. Raises: GeometryError."""

    def ensure_unused(self, path: Path) -> None:
        """Raises: RegionBusyError while a process of this machine is attached to what is at `path`."""

    def format(self, path: Path, shape: Shape, *, force: bool, progress: Callable[[int, int], None]) -> None:
        """Make a region at `path`: a new file, or a device."""


@dataclass
class _Undo:
    """What to take back when a later tier fails: no half-made pool stays behind."""

    made: list[Path] = field(default_factory=list)
    blank: list[tuple[Path, int]] = field(default_factory=list)

    def run(self) -> None:
        for path in self.made:
            path.unlink(missing_ok=True)
        for path, size in self.blank:
            with open(path, "wb") as file:
                file.truncate(size)


def apply(actions: Sequence[Action], regions: Regions, progress: Progress, *, force: bool = False) -> None:
    """Make the regions that a plan asks for; with `force`, over whatever is there.

    Raises:  what the plan refuses, and GeometryError for sizes that do not fit, before anything is changed;
             MediumUnavailable when a medium turns out full. All that was made by then is taken back.
             RegionBusyError while a process is attached to the file that would be replaced.
    """
    refused = refusals(actions)
    if refused is not None:
        raise refused
    formats = [action for action in actions if isinstance(action, Format)]
    for action in formats:
        try:
            regions.check(action.path, action.shape)
        except KvpoolError as error:
            raise _named(action, type(error)(f"{str(error).rstrip('.')}. Nothing was changed.")) from None
        if action.on == "file":
            regions.ensure_unused(action.path)
    undo = _Undo()
    try:
        for action in formats:
            _format(action, regions, progress, undo, force)
    except BaseException:
        undo.run()
        raise


def _format(action: Format, regions: Regions, progress: Progress, undo: _Undo, force: bool) -> None:
    def report(done: int, total: int) -> None:
        progress(action.tier, done, total)

    try:
        if action.on == "device":
            regions.format(action.path, action.shape, force=force, progress=report)
            return
        # Under another name first: a process that is killed while it fills a file leaves no half-made region
        # behind, only a file that the next start removes.
        making = unfinished(action.path)
        making.unlink(missing_ok=True)
        if action.on == "file" and not force:
            undo.blank.append((action.path, action.path.stat().st_size))
            os.truncate(action.path, 0)  # nothing but zeros; they may take the space that the region needs
        undo.made.append(making)
        regions.format(making, action.shape, force=False, progress=report)
        os.replace(making, action.path)
        undo.made.append(action.path)
    except KvpoolError as error:
        raise _named(action, error) from None
    except OSError as error:
        raise _medium_error(action, error) from None


def unfinished(path: Path) -> Path:
    """Where the file of a region is while it is being made."""
    return path.with_name(path.name + ".making")


def _named(action: Format, error: KvpoolError) -> KvpoolError:
    text = str(error).replace(str(unfinished(action.path)), str(action.path))
    return type(error)(f'tier "{action.tier}": {text}' if action.tier else text)


def _medium_error(action: Format, error: OSError) -> KvpoolError:
    name = f'tier "{action.tier}": {action.path}' if action.tier else str(action.path)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return MediumUnavailable(
            f"{name}: no space left while the region was made, so it was removed again. "
            "Free some space, or lower the capacity."
        )
    return MediumUnavailable(f"{name}: {error.strerror}. The unfinished region was removed again.")


def await_host_zero(
    actions: Sequence[Action],
    regions: Regions,
    waiting: Callable[[str], None],
    deadline: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until host 0 has formatted the shared tiers.

    Raises:  MediumUnavailable when it has not until `deadline`.
    """
    for action in actions:
        if not isinstance(action, Await):
            continue
        name = f'tier "{action.tier}"'
        waiting(f"{name}: waiting for host 0 to format {action.path}")
        while look_at(action.path, regions.inspect).region is None:
            if clock() >= deadline:
                raise MediumUnavailable(
                    f"{name}: host 0 has not formatted {action.path} in time. Host 0 makes the regions of "
                    "shared tiers: run 'kvpool up -f ... --host 0' first, or wait longer with --timeout."
                )
            sleep(AWAIT_POLL_S)
