"""Writes the golden region of the format that this build writes.

Run once for each format version, and commit what it made:

    cd tests && python -m format.make_golden

It refuses to touch a golden region that exists.
"""

from __future__ import annotations

import lzma
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from format.blocks import store
from format.golden_content import EVICTED_1, FOLDER, INTERRUPTED_1, STORED_1
from kvpool import _native
from kvpool.region import FORMAT_VERSION, Geometry, Region


def write(path: Path) -> None:
    Region.format(
        path,
        Geometry(
            1 << 20,
            hosts=4,
            min_block_bytes=256,
            extent_bytes=24 << 10,
            participants=3,
            namespaces=4,
            align_bytes=4096,
            coherence="software",
        ),
    )
    for host, batches in STORED_1.items():
        with Region.attach(path, host=host, node_name=f"golden-node-{host}") as region:
            if host == 1:
                assert store(region, EVICTED_1) == ["", ""]
                assert region.evict(0.0, 2) == 2
            for blocks in batches:
                assert store(region, blocks) == [""] * len(blocks)
    with Region.attach(path, host=1, node_name="golden-node-1") as region:
        assert region.adopt(3, 7).kept == 4
    died = subprocess.run([sys.executable, "-m", "format.make_golden", "interrupted", str(path)], check=False)
    assert died.returncode == -signal.SIGKILL


def interrupted(path: Path) -> None:
    region = Region.attach(path, host=2, node_name="golden-node-2")
    _native.stop_at("store.header.body")
    store(region, INTERRUPTED_1)


def main() -> None:
    if sys.argv[1:2] == ["interrupted"]:
        interrupted(Path(sys.argv[2]))
        return
    target = FOLDER / f"format-{FORMAT_VERSION}.region.xz"
    if target.exists():
        sys.exit(
            f"{target} exists: a golden region is never written twice. A new format needs a new version."
        )
    os.environ["KVPOOL_NODE_NAME"] = "golden"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "region"
        write(path)
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(lzma.compress(path.read_bytes(), preset=9))
    print(f"{target}: {target.stat().st_size} bytes. Commit it.")


if __name__ == "__main__":
    main()
