"""A guest: QEMU with emulated CXL memory on files of the host, and its agent inside, which it asks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from guest.places import GuestError

MEMORY_BYTES = 512 << 20  # of one CXL memory
LABELS_BYTES = 1 << 20  # its label storage
RAM_MIB = 448
BOOT_S = 240.0
CALL_S = 180.0
# In the memory's file: the kernel keeps the first 2 MiB of a region for the namespace's info block.
DEVICE_OFFSET = 2 << 20


@dataclass(frozen=True, slots=True)
class Done:
    """A command that ended."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


class Guest:
    """One guest. `memories`: the files of its CXL memories; `labels`: its own label storage of each."""

    def __init__(
        self, host: int, folder: Path, boots: Sequence[Path], memories: Sequence[Path], labels: Sequence[Path]
    ) -> None:
        """`boots`: the kernel, and the archives to boot from."""
        self.host, self.folder, self.name = host, folder, folder.name
        self._boots, self._memories, self.labels = boots, memories, labels
        self._qemu: subprocess.Popen[bytes] | None = None
        self._port: socket.socket | None = None
        self._answers: dict[int, dict[str, Any]] = {}
        self._changed = threading.Condition()
        self._count = 0
        self._ended = False  # the port is closed: QEMU is gone
        self.boot_s = 0.0

    # -- life ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Powers on, without waiting for what it boots."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for paths, size in ((self._memories, MEMORY_BYTES), (self.labels, LABELS_BYTES)):
            for path in paths:
                if not path.exists():
                    path.touch()
                    os.truncate(path, size)
        initrd = self.folder / "initrd"
        with initrd.open("wb") as out:
            for archive in self._boots[1:]:
                out.write(archive.read_bytes())
        self._answers.clear()
        self._ended = False
        self._count = 0
        (self.folder / "port").unlink(missing_ok=True)
        log = (self.folder / "qemu.log").open("ab")
        self._started = time.monotonic()
        self._qemu = subprocess.Popen(self._command(initrd), stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        log.close()
        # At once: what the guest says while nobody listens is lost.
        self._port = self._connect(self._started + BOOT_S)
        threading.Thread(target=self._listen, args=(self._port,), daemon=True).start()

    def wait(self) -> Guest:
        """Until the agent inside has answered."""
        deadline = self._started + BOOT_S
        self._answer(0, max(1.0, deadline - time.monotonic()))
        self.boot_s = time.monotonic() - self._started
        (self.folder / "initrd").unlink()
        return self

    def kill(self) -> None:
        """As a power failure does."""
        if self._qemu is not None:
            self._qemu.kill()
            self._qemu.wait()
            self._qemu = None
        if self._port is not None:
            self._port.close()
            self._port = None

    def reboot(self) -> Guest:
        """Power off, power on; only the CXL memory and its labels stay."""
        self.kill()
        self.start()
        return self.wait()

    # -- what it does --------------------------------------------------------------------------------------

    def run(self, *command: str, timeout_s: float = CALL_S) -> Done:
        """A command in the guest. `kvpool` is the one of the checkout."""
        said = self._ask({"run": command, "timeout_s": timeout_s}, timeout_s + 10)
        return Done(said["code"], said["out"], said["err"])

    def must(self, *command: str, timeout_s: float = CALL_S) -> Done:
        """A command that has to end well."""
        done = self.run(*command, timeout_s=timeout_s)
        if done.code:
            raise GuestError(
                f"{self.name}: {' '.join(command)}: exit code {done.code}\n{done.out}\n{done.err}"
            )
        return done

    def call(self, function: str, timeout_s: float = CALL_S, **arguments: Any) -> Any:
        """A function of inside/work.py, in the guest."""
        return self._ask({"call": function, "arguments": arguments}, timeout_s)["value"]

    def write(self, path: str, text: str) -> None:
        """A small file in the guest."""
        self.must("python3", "-c", f"open({path!r}, 'w').write({text!r})")

    def console(self) -> str:
        log = self.folder / "console.log"
        return log.read_text(errors="replace") if log.exists() else ""

    # -- the port ------------------------------------------------------------------------------------------

    def _ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        if self._port is None:
            raise GuestError(f"guest {self.name} is off")
        with self._changed:
            self._count += 1
            number = self._count
        self._port.sendall(json.dumps({"id": number, **request}).encode() + b"\n")
        said = self._answer(number, timeout_s)
        if "failed" in said:
            raise GuestError(f"guest {self.name}: {request}\n{said['failed']}")
        return said

    def _answer(self, number: int, timeout_s: float) -> dict[str, Any]:
        with self._changed:
            self._changed.wait_for(lambda: number in self._answers or self._ended, timeout_s)
            if number not in self._answers:
                how = "it is off" if self._ended else f"no answer within {timeout_s:.0f} s"
                raise GuestError(f"guest {self.name}: {how}. Its console:\n{self.console()[-2000:]}")
            return self._answers.pop(number)

    def _connect(self, deadline: float) -> socket.socket:
        port = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        while True:
            try:
                port.connect(str(self.folder / "port"))
                return port
            except OSError:
                ended = self._qemu is None or self._qemu.poll() is not None
                if ended or time.monotonic() > deadline:
                    said = (self.folder / "qemu.log").read_text(errors="replace")[-2000:]
                    raise GuestError(f"guest {self.name}: QEMU did not start: {said}") from None
                time.sleep(0.05)

    def _listen(self, port: socket.socket) -> None:
        pending = b""
        got = b"begin"
        while got:
            try:
                got = port.recv(65536)
            except OSError:
                got = b""
            *lines, pending = (pending + got).split(b"\n")
            with self._changed:
                for line in lines:
                    if line.startswith(b"{"):
                        said = json.loads(line)
                        self._answers[said["id"]] = said
                self._ended = not got
                self._changed.notify_all()

    # -- QEMU ----------------------------------------------------------------------------------------------

    def _command(self, initrd: Path) -> list[str]:
        command = ["qemu-system-x86_64", "-M", "q35,cxl=on,cxl-fmw.0.targets.0=cxl.1,cxl-fmw.0.size=4G"]
        command += ["-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "1"]
        command += ["-m", f"{RAM_MIB}M,slots=2,maxmem=8G", "-nodefaults", "-display", "none", "-no-reboot"]
        command += ["-serial", f"file:{self.folder}/console.log"]
        command += ["-serial", f"unix:{self.folder}/port,server=on,wait=off"]
        command += ["-kernel", str(self._boots[0]), "-initrd", str(initrd)]
        # What the kernel does not know goes into the environment of init.
        words = f"console=ttyS0 panic=-1 quiet mitigations=off cryptomgr.notests KVPOOL_HOST={self.host}"
        command += ["-append", words]
        command += ["-device", "pxb-cxl,bus_nr=12,bus=pcie.0,id=cxl.1"]
        # Two ports at least: with a single one QEMU before 8.1 passes decoding through, and reads back zeros.
        for number in range(max(2, len(self._memories))):
            command += [
                "-device",
                f"cxl-rp,port={number},bus=cxl.1,id=rp{number},chassis=0,slot={number + 2}",
            ]
        for number, (memory, labels) in enumerate(zip(self._memories, self.labels, strict=True)):
            for kind, path in (("mem", memory), ("lsa", labels)):
                size = os.path.getsize(path)
                command += [
                    "-object",
                    f"memory-backend-file,id={kind}{number},share=on,mem-path={path},size={size}",
                ]
            # The serial is what hosts agree on, and part of the namespace's cookie: without one a namespace
            # is not found again at the next boot.
            device = f"cxl-type3,bus=rp{number},memdev=mem{number},lsa=lsa{number},id=pmem{number}"
            command += ["-device", f"{device},sn={0xC1 + number:#x}"]
        return command
