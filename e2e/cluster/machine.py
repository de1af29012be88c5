"""A machine of the cluster: one init process in namespaces and cgroups of its own.

Its pid is recorded. Killing that one process ends everything in the machine, and the kernel drops its mounts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from . import pki
from .needs import HIERARCHIES
from .places import CONTROL_PLANE_IP, HERE, ClusterError, Places, wait_until
from .services import Service

SCRIPT = HERE / "machine.sh"
INSIDE = "/run/machine/machine.sh"


class Machine:
    """`cp` is the control plane, `n0`, `n1`... are nodes."""

    def __init__(self, places: Places, name: str) -> None:
        self.places = places
        self.name = name
        self.netns = places.netns(name)
        self.folder = places.state / name

    # --- power ----------------------------------------------------------------------------------------------

    def on(self, services: dict[str, Service]) -> None:
        """Boot with clean mounts; /var/lib and /var/log are as they were."""
        self.off()
        for name in ("log", "lib", "pid"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        run("ip", "netns", "add", self.netns)
        try:
            self._boot()
        except ClusterError:
            self.off()
            raise
        for path, text in {**self._own_files(), **_files(services)}.items():
            self.root(path).write_text(text)
        shutil.copy(SCRIPT, self.root(INSIDE))
        for name in pki.needed_by(self.name):
            shutil.copy(self.places.pki / name, self.root(f"/run/machine/pki/{name}"))
        if self.name == "cp":
            run("ip", "-n", self.netns, "link", "add", "br0", "type", "bridge")
            run("ip", "-n", self.netns, "addr", "add", f"{CONTROL_PLANE_IP}/24", "dev", "br0")
            run("ip", "-n", self.netns, "link", "set", "br0", "up")
        else:
            self._plug_in()

    def off(self) -> None:
        """The power cut; also tidies up what a crash left. Nothing happens when there is nothing."""
        for name in ("init", "outer"):
            self._kill(name)
        if Path("/run/netns", self.netns).exists():
            run("ip", "netns", "del", self.netns)
        self._remove_cgroups()

    def is_on(self) -> bool:
        return self._pid("init") is not None

    def _boot(self) -> None:
        cgroups = self._make_cgroups()
        environment = os.environ | {
            "MACHINE": self.name,
            "PROGRAMS": str(self.places.programs),
            "STATE": str(self.places.state),
            "SHARED": str(self.places.shared),
            "CACHE": str(self.places.cache),
        }
        log = self.folder / "log" / "init.log"
        command = ["bash", str(SCRIPT), "enter", self.netns, *cgroups]
        # No Popen: the process outlives this one, and whoever made it.
        outer = os.posix_spawnp(
            command[0],
            command,
            environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
        )
        self._record("outer", outer)

        def ready() -> bool:
            if not _runs(outer):
                raise ClusterError(f"machine {self.name} did not start:\n{log.read_text()[-800:]}")
            children = _read(f"/proc/{outer}/task/{outer}/children").split()
            if not children or not Path(f"/proc/{children[0]}/root/run/machine/ready").exists():
                return False
            self._record("init", int(children[0]))
            return True

        wait_until(f"machine {self.name} boots", 60, ready, every=0.05)

    def _own_files(self) -> dict[str, str]:
        address = self.places.address(self.name)
        return {
            "/etc/resolv.conf": f"nameserver {CONTROL_PLANE_IP}\n",
            "/etc/hosts": f"127.0.0.1 localhost\n{address} {self.name}\n",
        }

    # --- network --------------------------------------------------------------------------------------------

    def _plug_in(self) -> None:
        cp, number = self.places.netns("cp"), self.name[1:]
        address = self.places.address(self.name)
        ends = ("type", "veth", "peer", "name", "eth0", "netns", self.netns)
        run("ip", "link", "add", f"v{number}", "netns", cp, *ends)
        run("ip", "-n", cp, "link", "set", f"v{number}", "master", "br0", "up")
        run("ip", "-n", self.netns, "addr", "add", f"{address}/24", "dev", "eth0")
        run("ip", "-n", self.netns, "link", "set", "eth0", "up")
        # The default route leads nowhere; what is asked there is answered "unreachable" at once.
        run("ip", "-n", self.netns, "route", "add", "default", "via", CONTROL_PLANE_IP)
        for other in self.places.node_names:
            if other != self.name:
                via = ("via", self.places.address(other))
                run("ip", "-n", self.netns, "route", "add", self.places.pods(other), *via)
        # From the control plane's namespace to the pods, and to Services by way of the first node.
        run("ip", "-n", cp, "route", "replace", self.places.pods(self.name), "via", address)
        if number == "0":
            run("ip", "-n", cp, "route", "replace", "10.96.0.0/16", "via", address)

    def cable(self, state: str) -> None:
        """`down`: the node is cut off, everything on it runs on. `up`: it is back."""
        run("ip", "-n", self.places.netns("cp"), "link", "set", f"v{self.name[1:]}", state)

    # --- commands and services ------------------------------------------------------------------------------

    def root(self, path: str) -> Path:
        """A path of the machine as the host sees it."""
        return Path(f"/proc/{self._needed_pid()}/root{path}")

    def command(self, *command: str) -> list[str]:
        spaces = ("-m", "-n", "-p", "-u", "-i", "-C")
        return ["nsenter", "-t", str(self._needed_pid()), *spaces, "--", *command]

    def run(self, *command: str) -> str:
        return run(*self.command(*command))

    def start(self, name: str, service: Service) -> None:
        self.run("bash", INSIDE, "start", name, *service.command)

    def stop(self, name: str, signal_name: str = "TERM") -> None:
        self.run("bash", INSIDE, "stop", name, signal_name)

    def runs(self, name: str) -> bool:
        return subprocess.run(self.command("bash", INSIDE, "alive", name), check=False).returncode == 0

    # --- processes that are ours ----------------------------------------------------------------------------

    def _record(self, name: str, pid: int) -> None:
        (self.folder / "pid" / name).write_text(f"{pid} {_started(pid)}\n")

    def _pid(self, name: str) -> int | None:
        """The recorded process, when it still lives. The start time tells it from a later one."""
        pid, _, since = _read(self.folder / "pid" / name).strip().partition(" ")
        return int(pid) if pid and since and _started(int(pid)) == since and _runs(int(pid)) else None

    def _needed_pid(self) -> int:
        pid = self._pid("init")
        if pid is None:
            raise ClusterError(f"machine {self.name} of cluster {self.places.name} is off")
        return pid

    def _kill(self, name: str) -> None:
        pid = self._pid(name)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            wait_until(f"process {pid} of machine {self.name} ends", 60, lambda: not _runs(pid), every=0.02)
            with contextlib.suppress(ChildProcessError):  # when it was this process that made it
                os.waitpid(pid, os.WNOHANG)
        (self.folder / "pid" / name).unlink(missing_ok=True)

    # --- cgroups --------------------------------------------------------------------------------------------

    def _make_cgroups(self) -> list[str]:
        """A cgroup below our own in each v1 hierarchy, so that our limits hold for the machine too."""
        made = []
        own = [line.split(":", 2) for line in _read("/proc/self/cgroup").splitlines()]
        ours = {name.removeprefix("name="): path for _, name, path in own}
        for hierarchy in (*HIERARCHIES, "systemd"):
            if hierarchy not in ours:
                continue
            parent = Path(f"/sys/fs/cgroup/{hierarchy}{ours[hierarchy]}")
            group = parent / self.netns
            group.mkdir(exist_ok=True)
            if hierarchy == "cpuset":
                for setting in ("cpuset.cpus", "cpuset.mems"):
                    (group / setting).write_text((parent / setting).read_text())
                (group / "cgroup.clone_children").write_text("1")
            made.append(str(group))
        (self.folder / "pid" / "cgroups").write_text("\n".join(made))
        return made

    def _remove_cgroups(self) -> None:
        record = self.folder / "pid" / "cgroups"
        for group in _read(record).split():
            for _ in range(50):  # the kernel takes a moment to see that they are empty
                if _remove_tree(Path(group)):
                    break
                time.sleep(0.1)
        record.unlink(missing_ok=True)


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise ClusterError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr).strip()[-2000:]}")
    return done.stdout


def _files(services: dict[str, Service]) -> dict[str, str]:
    return {path: text for service in services.values() for path, text in service.files.items()}


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When the process began, in the kernel's ticks; empty when there is none."""
    fields = _stat(pid)
    return fields[19] if fields else ""


def _runs(pid: int) -> bool:
    fields = _stat(pid)
    return bool(fields) and fields[0] != "Z"


def _stat(pid: int) -> Sequence[str]:
    return _read(f"/proc/{pid}/stat").rpartition(") ")[2].split()


def _remove_tree(group: Path) -> bool:
    """Remove a cgroup with those below it; False while something is still in one of them."""
    if not group.exists():
        return True
    try:
        for folder, _, _ in os.walk(group, topdown=False):
            os.rmdir(folder)
    except OSError:
        return False
    return True
