"""The kernel's CXL, NVDIMM and DAX devices: sysfs, and the tools that write what sysfs has no files for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from kvpool.cxl.backend import ComposeError

TOOL_TIMEOUT_S = 120  # of one call of ndctl or cxl; they wait for the kernel's probes
_PACKAGES = {"ndctl": "ndctl", "cxl": "cxl (Debian has it in ndctl)"}


class Kernel:
    """Attributes below /sys, by their path there, like bus/cxl/devices/mem0/serial."""

    def __init__(self, sys: str | Path = "/sys") -> None:
        self._sys = Path(sys)

    def read(self, path: str) -> str:
        """Without white space around it. Raises: OSError."""
        return (self._sys / path).read_text(errors="replace").strip()

    def write(self, path: str, text: str) -> None:
        """In one write and with a line's end, as sysfs wants it. Raises: OSError that names the attribute."""
        fd = os.open(self._sys / path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, f"{text}\n".encode())
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}: {text!r} to /sys/{path}") from None
        finally:
            os.close(fd)

    def has(self, path: str) -> bool:
        return (self._sys / path).exists()

    def names(self, folder: str) -> list[str]:
        """What is in a folder, numbers in the order of their size; nothing when there is no such folder."""
        try:
            return sorted(os.listdir(self._sys / folder), key=natural)
        except OSError:
            return []

    def target(self, path: str) -> str:
        """The name of what a link points to; empty when there is none."""
        try:
            return os.path.basename(os.readlink(self._sys / path))
        except OSError:
            return ""

    def run(self, *command: str) -> str:
        """What a tool prints. Raises: ComposeError with its message when it fails or is missing."""
        if shutil.which(command[0]) is None:
            raise ComposeError(
                f"{command[0]} is not installed here. Install the package {_PACKAGES.get(command[0])}."
            )
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            raise ComposeError(f"{' '.join(command)}: no answer within {TOOL_TIMEOUT_S} s.") from None
        if done.returncode:
            said = "; ".join(line.strip() for line in done.stderr.splitlines() if line.strip())
            raise ComposeError(f"{' '.join(command)}: exit code {done.returncode}: {said[-400:]}")
        return done.stdout

    def device(self, name: str) -> str:
        """The path through which programs map a device."""
        return f"/dev/{name}"

    def number(self, path: str, otherwise: int = 0) -> int:
        """A number as sysfs writes them, decimal or hexadecimal; `otherwise` when there is none."""
        try:
            return int(self.read(path), 0)
        except (OSError, ValueError):
            return otherwise

    def text(self, path: str) -> str:
        """An attribute; empty when there is none."""
        try:
            return self.read(path)
        except OSError:
            return ""

    def wait(self, happened: Callable[[], bool], seconds: float) -> bool:
        """Whether it happens within that time; devices appear a while after what makes them."""
        deadline = time.monotonic() + seconds
        while not happened():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        return True


def natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts mem10 after mem9."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]
