"""What the host asks a guest to do: a line of JSON in, one out, over the second serial port."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import traceback
import tty

import work

import kvpool.cli
import kvpool.cxl
import kvpool.daemon
import kvpool.provision
import kvpool.region

PORT = "/dev/ttyS1"
OUTPUT_MAX = 60000  # characters of a program's output; the port is slow


def main() -> None:
    port = os.open(PORT, os.O_RDWR | os.O_NOCTTY)
    tty.setraw(port)
    writing = threading.Lock()

    def answer(said: dict[str, object]) -> None:
        line = json.dumps(said).encode() + b"\n"
        with writing:
            while line:
                line = line[os.write(port, line) :]

    answer({"id": 0, "value": os.uname().release})
    with os.fdopen(port, "rb", buffering=0, closefd=False) as lines:
        pending = b""
        while True:
            pending += lines.read(4096) or b""
            *whole, pending = pending.split(b"\n")
            for line in whole:
                if line.strip():
                    threading.Thread(target=_handle, args=(line, answer), daemon=True).start()


def _handle(line: bytes, answer: object) -> None:
    request = json.loads(line)
    said: dict[str, object] = {"id": request["id"]}
    try:
        if "run" in request:
            said |= _run(request["run"], request["timeout_s"])
        else:
            said["value"] = getattr(work, request["call"])(**request["arguments"])
    except BaseException:
        said["failed"] = traceback.format_exc()[-OUTPUT_MAX:]
    answer(said)  # type: ignore[operator]


def _run(command: list[str], timeout_s: float) -> dict[str, object]:
    # Through files: a daemon that a command leaves behind keeps its pipes open.
    with open(f"/tmp/out.{threading.get_ident()}", "w+b") as out, open(f"{out.name}.err", "w+b") as err:
        if command[0] == "kvpool":
            code = _kvpool(command[1:], out.fileno(), err.fileno(), timeout_s)
        else:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, timeout=timeout_s
            )
            code = done.returncode
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace")[-OUTPUT_MAX:])
    return {"code": code, "out": texts[0], "err": texts[1]}


def _kvpool(arguments: list[str], out: int, err: int, timeout_s: float) -> int:
    """The command line in a process of its own, forked: to import it takes ten seconds under emulation."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
            os.dup2(out, 1)
            os.dup2(err, 2)
            sys.argv = ["kvpool", *arguments]
            kvpool.cli.main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    ends = threading.Timer(timeout_s, os.kill, (pid, 9))
    ends.start()
    status = os.waitpid(pid, 0)[1]
    ends.cancel()
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    main()
