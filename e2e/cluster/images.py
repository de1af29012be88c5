"""Container images as oci-archives, built with buildah and no registry."""

from __future__ import annotations

import configparser
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from .machine import run
from .places import HERE, ROOT, ClusterError, Places, say
from .services import PAUSE_IMAGE

SUITE = "bookworm"  # its Python is 3.11
BASE_IMAGE = "localhost/python:3.11-slim"
PACKAGES = "python3-minimal,libpython3-stdlib,libnuma1"  # the last is what real engines in pods need
TRIMMED = (
    "var/cache/apt",
    "var/lib/apt/lists",
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "usr/share/info",
)
SOURCES = (
    "Containerfile",
    "pyproject.toml",
    "CMakeLists.txt",
    "README.md",
    "LICENSE",
    "pool",
    "connector",
    "operator",
)
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


def make_base(places: Places) -> list[Path]:
    """What every cluster needs: the pause image, and a Debian with Python to build on."""
    pause, base = places.images / "pause.tar", places.images / "python.tar"
    places.images.mkdir(parents=True, exist_ok=True)
    if not pause.exists():
        with tempfile.TemporaryDirectory(prefix="kvpool-image-") as folder:
            run("gcc", "-Os", "-static", "-s", "-o", f"{folder}/pause", str(HERE / "pause.c"))
            _commit(places, Path(folder), PAUSE_IMAGE, pause, "--entrypoint", '["/pause"]', "--user", "65535")
    if not base.exists():
        say(f"base image: Debian {SUITE} with Python, by debootstrap (a minute)")
        with tempfile.TemporaryDirectory(prefix="kvpool-image-") as folder:
            root = Path(folder) / "root"
            mirror = [os.environ["KVPOOL_DEBIAN_MIRROR"]] if "KVPOOL_DEBIAN_MIRROR" in os.environ else []
            run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(root), *mirror)
            for name in TRIMMED:
                shutil.rmtree(root / name, ignore_errors=True)
            (root / "usr/bin/python").symlink_to("python3")
            _commit(places, root, BASE_IMAGE, base, "--cmd", '["python3"]')
    return [pause]


def reference() -> str:
    """The name of kvpool's image."""
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    return f"localhost/kvpool:{version[1]}"


def make_kvpool(places: Places) -> Path:
    """The image of the operator, the daemon and the API; built anew when what goes into it changed."""
    name = reference()
    archive = places.images / f"{name.rpartition('/')[2].replace(':', '-')}.tar"
    stamp, sources = archive.with_suffix(".sources"), _digest()
    if archive.exists() and stamp.exists() and stamp.read_text() == sources:
        return archive
    make_base(places)
    if not _has_image(places, BASE_IMAGE):  # the store was lost, the archive was not
        _buildah(places, "pull", "--quiet", f"oci-archive:{places.images / 'python.tar'}")
    say(f"image: building {name} (minutes when nothing is cached)")
    with tempfile.TemporaryDirectory(prefix="kvpool-image-") as folder:
        secrets = _pip_secrets(Path(folder))
        build = ["bud", "--isolation", "chroot", "--layers", "--file", str(ROOT / "Containerfile")]
        _buildah(places, *build, "--build-arg", f"BASE={BASE_IMAGE}", *secrets, "--tag", name, str(ROOT))
    _save(places, name, archive)
    stamp.write_text(sources)
    say(f"image: {archive} ({archive.stat().st_size / 2**20:.0f} MiB)")
    return archive


def _digest() -> str:
    digest = hashlib.sha256()
    for file in _files(ROOT / name for name in SOURCES):
        digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def _files(paths: Iterable[Path]) -> Iterable[Path]:
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".so":
                yield file


def _pip_secrets(folder: Path) -> list[str]:
    """This machine's settings of pip (its index, its certificates) for the time of the build only."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    settings = dict(re.findall(r"^(?:global|install|:env:)\.([a-z-]+)='(.*)'$", listed.stdout, re.MULTILINE))
    wanted = (
        "index-url",
        "extra-index-url",
        "trusted-host",
        "default-timeout",
        "timeout",
        "retries",
        "proxy",
    )
    configuration = configparser.RawConfigParser()
    configuration["global"] = {
        name: settings[name].replace("\\n", "\n") for name in wanted if name in settings
    }
    with (folder / "pip.conf").open("w") as out:
        configuration.write(out)
    secrets = ["--secret", f"id=pip,src={folder}/pip.conf"]
    certificates = Path(settings.get("cert") or CERTIFICATES)
    return [*secrets, "--secret", f"id=ca,src={certificates}"] if certificates.exists() else secrets


def _commit(places: Places, root: Path, reference: str, archive: Path, *configuration: str) -> None:
    """An image of one layer: this folder."""
    container = _buildah(places, "from", "scratch").strip()
    _buildah(places, "copy", "--quiet", container, str(root), "/")
    _buildah(places, "config", *configuration, container)
    _buildah(places, "commit", "--quiet", "--rm", "--timestamp", "0", container, reference)
    _save(places, reference, archive)


def _save(places: Places, reference: str, archive: Path) -> None:
    new = archive.with_suffix(".new")
    new.unlink(missing_ok=True)
    _buildah(places, "push", "--quiet", reference, f"oci-archive:{new}:{reference}")
    new.rename(archive)


def _has_image(places: Places, reference: str) -> bool:
    images = json.loads(_buildah(places, "images", "--json") or "null") or []
    return any(reference in (image.get("names") or []) for image in images)


def _buildah(places: Places, word: str, *arguments: str) -> str:
    """buildah with a store of its own; its caches of build steps go there as well (TMPDIR)."""
    store = places.cache / "cluster" / "storage"
    scratch = places.cache / "cluster" / "buildah"
    scratch.mkdir(parents=True, exist_ok=True)
    command = [
        "buildah",
        "--root",
        str(store),
        "--runroot",
        f"{store}.run",
        "--storage-driver",
        "overlay",
        word,
    ]
    if word in ("from", "bud"):
        command += ["--cni-config-dir", f"{store}.cni"]
    done = subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"TMPDIR": str(scratch)},
    )
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
        raise ClusterError(f"buildah {word} failed with exit code {done.returncode}:\n{tail}")
    return done.stdout
