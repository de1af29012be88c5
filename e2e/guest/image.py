"""What a guest boots from: Debian's kernel, and this machine's tools and Python in an initial file system.

The kernel's package is only unpacked, never installed. What is large is kept in the cache; kvpool itself,
from the checkout, is a second archive that the kernel unpacks behind it.
"""

from __future__ import annotations

import compileall
import gzip
import hashlib
import importlib.metadata
import lzma
import os
import py_compile
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from guest.places import CACHE, HERE, ROOT, GuestError

# The driver stack from the CXL host bridge to /dev/daxX.Y.
MODULES = (
    *("cxl_core", "cxl_port", "cxl_acpi", "cxl_pci", "cxl_mem", "cxl_pmem"),
    *("libnvdimm", "nd_btt", "nd_pmem", "dax_pmem", "device_dax"),
)
TOOLS = ("ndctl", "daxctl", "cxl")
# Of Python's library: what nothing in a guest imports, and takes memory there.
LEFT_OUT = (
    *("site-packages", "test", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip", "pydoc_data"),
    *("distutils", "unittest", "wsgiref", "xmlrpc", "venv", "curses", "sqlite3", "dbm"),
    *("_tkinter.*.so", "_test*.so", "_ctypes_test.*.so", "_sqlite3.*.so", "_codecs_*.so"),
)
PROGRAMS = ("busybox", *TOOLS, "qemu-system-x86_64", "dpkg-deb", "apt-get", "ldd", "strip")
META_PACKAGE = "linux-image-amd64"  # depends on Debian's newest kernel
OLD_S = 7 * 86400.0
RECIPE = 2  # raise it when what is built from the same packages changes


def lacking() -> list[str]:
    """Why no guest can be made here; empty when one can."""
    found = [f"{name} is not installed" for name in PROGRAMS if shutil.which(name) is None]
    if os.uname().machine != "x86_64" or sys.platform != "linux":
        found.append("guests are made on Linux on x86-64 only")
    if not found and _folder() is None:
        found.append(f"apt does not know the package {META_PACKAGE} (Debian has it; run apt-get update)")
    return found


def base() -> Path:
    """The folder with `kernel` and `base.cpio`, made when it is not there."""
    folder = _folder()
    if folder is None:
        raise GuestError("; ".join(lacking()))
    if (folder / "base.cpio").exists():
        return folder
    began = CACHE / f"new.{os.getpid()}"
    root = began / "root"
    root.mkdir(parents=True)
    try:
        unpacked = _kernel(_kernel_package(), began)
        (began / "kernel").write_bytes(_bootable(next(unpacked.glob("boot/vmlinuz-*"))))
        _modules(unpacked, root / "mods")
        _system(root)
        _python(root)
        pack(root, began / "base.cpio")
        for path in (root, unpacked):
            shutil.rmtree(path)
        shutil.rmtree(folder, ignore_errors=True)
        began.rename(folder)
    finally:
        shutil.rmtree(began, ignore_errors=True)
    _forget_old(folder)
    return folder


def _folder() -> Path | None:
    """Where the base is or will be kept; None when there is none and none can be made."""
    tools = [str(Path(tool).stat().st_mtime_ns) for tool in map(shutil.which, TOOLS) if tool]
    words = [str(RECIPE), sys.version, *tools, *(f"{d.name} {d.version}" for d in _distributions())]
    key = hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]
    package = _kernel_package()
    if package:
        return CACHE / f"{package}.{key}"
    return max(CACHE.glob(f"linux-image-*.{key}"), default=None)  # apt has no lists: what there is will do


def _forget_old(folder: Path) -> None:
    """A base is 110 MB, and each newer kernel or package makes another one."""
    for other in CACHE.glob("linux-image-*"):
        if other != folder and time.time() - other.stat().st_mtime > OLD_S:
            shutil.rmtree(other, ignore_errors=True)


def kvpool(archive: Path) -> None:
    """The archive with kvpool and the agent of the checkout."""
    root = archive.with_suffix(".root")
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(
        ROOT / "pool/kvpool", root / "app/kvpool", ignore=shutil.ignore_patterns("__pycache__", "static")
    )
    import kvpool._native as native

    assert native.__file__
    shutil.copy2(native.__file__, root / "app/kvpool")
    shutil.copy2(HERE / "inside/init", root / "init")
    (root / "init").chmod(0o755)
    for name in ("agent.py", "work.py"):
        shutil.copy2(HERE / "inside" / name, root / "app")
    _compile(root / "app")
    _libraries(root, [Path(native.__file__)])
    _strip(root.rglob("*.so*"))
    pack(root, archive)
    shutil.rmtree(root)


def pack(root: Path, archive: Path) -> None:
    """A folder as an archive that the kernel unpacks at boot."""
    command = ["busybox", "cpio", "-o", "-H", "newc"]
    listed = subprocess.run(["find", "."], cwd=root, capture_output=True, check=True).stdout
    with archive.open("wb") as out:
        subprocess.run(command, cwd=root, input=listed, stdout=out, stderr=subprocess.DEVNULL, check=True)


# -- kernel ------------------------------------------------------------------------------------------------


def _kernel_package() -> str:
    done = subprocess.run(["apt-cache", "depends", META_PACKAGE], capture_output=True, text=True)
    match = re.search(r"Depends: (linux-image-\S+)", done.stdout)
    return match[1] if match else ""


def _kernel(package: str, folder: Path) -> Path:
    """The unpacked package of the kernel."""
    command = ["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", package]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise GuestError(f"{' '.join(command)}: {done.stderr.strip()[-400:]}")
    (deb,) = folder.glob("*.deb")
    unpacked = folder / "unpacked"
    subprocess.run(["dpkg-deb", "-x", str(deb), str(unpacked)], check=True)
    deb.unlink()
    return unpacked


def _bootable(image: Path) -> bytes:
    """The kernel without its compression, which takes five seconds of each boot under emulation."""
    packed = image.read_bytes()
    begin = packed.find(b"\xfd7zXZ\x00")
    if begin >= 0:
        plain = lzma.LZMADecompressor().decompress(packed[begin:])
        if plain[1:4] == b"ELF":
            return plain
    return packed  # another compression: it boots as it is, only slower


def _modules(unpacked: Path, to: Path) -> None:
    """The wanted modules, each after those it depends on, as NN-name.ko.

    What depends on what stands in the files themselves; modprobe would answer for this machine's kernel.
    """
    to.mkdir()
    files = {re.split(r"\.ko", path.name)[0].replace("-", "_"): path for path in unpacked.rglob("*.ko*")}
    order: list[str] = []

    def add(name: str) -> None:
        if name in order or name not in files:  # not in files: built in
            return
        data = _module_bytes(files[name])
        match = re.search(rb"\0depends=([^\0]*)\0", data)
        for needed in (match[1].decode() if match else "").split(","):
            add(needed.replace("-", "_"))
        order.append(name)
        (to / f"{len(order):02}-{name}.ko").write_bytes(data)

    for name in MODULES:
        add(name)


def _module_bytes(path: Path) -> bytes:
    data = path.read_bytes()
    unpack = {".xz": lzma.decompress, ".gz": gzip.decompress}.get(path.suffix)
    return unpack(data) if unpack else data


# -- programs ----------------------------------------------------------------------------------------------


def _system(root: Path) -> None:
    for folder in ("bin", "proc", "sys", "dev", "tmp", "run", "root", "etc"):
        (root / folder).mkdir()
    for name in ("busybox", *TOOLS):
        program = shutil.which(name)
        assert program
        shutil.copy2(program, root / "bin" / name)
    listed = subprocess.run(["busybox", "--list"], capture_output=True, text=True, check=True).stdout
    for name in listed.split():
        if not (root / "bin" / name).exists():
            (root / "bin" / name).symlink_to("busybox")
    _libraries(root, [root / "bin" / name for name in TOOLS])


def _python(root: Path) -> None:
    """The Python that runs here, with its standard library and what kvpool needs."""
    paths = sysconfig.get_paths(vars={"base": sys.base_prefix, "platbase": sys.base_prefix})
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    library = root / "py/lib" / version
    ignored = shutil.ignore_patterns("__pycache__", "config-*", *LEFT_OUT)
    shutil.copytree(paths["stdlib"], library, ignore=ignored, symlinks=True)
    program = Path(sys.executable).resolve()
    (root / "py/bin").mkdir()
    shutil.copy2(program, root / "py/bin/python3")
    (root / "bin/python3").symlink_to("/py/bin/python3")
    site = library / "site-packages"
    for distribution in _distributions():
        for file in distribution.files or ():
            source = Path(str(distribution.locate_file(file)))
            if ".." not in file.parts and "__pycache__" not in file.parts and source.is_file():
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, site / file)
    _compile(library)
    _libraries(root, [program, *root.glob("py/**/*.so")])
    _strip([root / "py/bin/python3", *root.glob("py/**/*.so"), *root.glob("lib/*")])


def _distributions() -> list[importlib.metadata.Distribution]:
    """What kvpool needs to be imported, without itself."""
    found: dict[str, importlib.metadata.Distribution] = {}

    def add(name: str) -> None:
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in found:
            return
        found[key] = importlib.metadata.distribution(key)
        for requirement in found[key].requires or ():
            if ";" not in requirement:  # extras, other systems, older Pythons
                match = re.match(r"[\w.-]+", requirement)
                assert match
                add(match[0])

    add("kvpool")
    return [found[key] for key in sorted(found) if key != "kvpool"]


def _compile(folder: Path) -> None:
    """Python without its sources: compiling is slow under emulation, and a guest has little memory."""
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(folder, quiet=2, legacy=True, optimize=1, invalidation_mode=mode)
    for source in folder.rglob("*.py"):
        if source.with_suffix(".pyc").exists():
            source.unlink()


def _strip(programs: Iterable[Path]) -> None:
    """Without symbols for a debugger: half of their size."""
    for program in programs:
        subprocess.run(["strip", "--strip-unneeded", str(program)], capture_output=True)


def _libraries(root: Path, programs: Iterable[Path]) -> None:
    """The shared libraries that programs load, where the guest's loader looks for them."""
    for library in sorted(_loaded(programs)):
        to = root / ("lib64" if library.name.startswith("ld-linux") else "lib") / library.name
        to.parent.mkdir(parents=True, exist_ok=True)
        if not to.exists():
            shutil.copy2(library.resolve(), to)


def _loaded(programs: Iterable[Path]) -> Iterator[Path]:
    seen: set[Path] = set()
    for program in programs:
        told = subprocess.run(["ldd", str(program)], capture_output=True, text=True).stdout
        for match in re.finditer(r"(/\S+) \(0x", told):
            library = Path(match[1])
            if library not in seen:
                seen.add(library)
                yield library
