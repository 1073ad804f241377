"""`tierd doctor`: what on this machine helps or hinders tierd, with the fix for each."""

from __future__ import annotations

import enum
import errno
import json
import mmap
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from tierd.cli import checks, exits, options
from tierd.cli.terminal import print_json, print_table, versioned
from tierd.config import DaemonConfig, available_memory_bytes, check_memory, load_config
from tierd.errors import TierdError
from tierd.memory import regions
from tierd.units import GIB, SECTOR_BYTES, format_size

FREE_DISK_BYTES = 1 * GIB  # a 128k-token job of a 1B model spills about as much
PACKAGES = {
    "grpcio": "",
    "numpy": "",
    "structlog": "daemon",
    "numba": "engine",
    "torch": "engine",
    "transformers": "engine",
}
NVIDIA = Path("/proc/driver/nvidia")
# torch and CUDA start in ten seconds on a slow disk; the probe itself is bounded by five.
PROBE_SECONDS_MAX = 60.0

ColdDir = Annotated[
    str | None,
    typer.Option(
        "--cold-dir",
        metavar="DIR",
        callback=options.checked("--cold-dir", checks.named),
        help="Folder to check.  \\[default: cold.folder]",
    ),
]


class Health(enum.StrEnum):
    """OK; DEGRADED: works, but slower or with less; FAILED: does not work."""

    OK = "ok"
    DEGRADED = "degraded"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: what was found, and what to do about it where it is not OK."""

    name: str
    health: Health
    found: str
    fix: str = ""


def doctor(
    cold_dir: ColdDir = None, daemon: options.Daemon = None, as_json: options.AsJson = False
) -> None:
    """Check this machine: kernel features, memory, disk, packages. Prints the fix for each."""
    folder = None if cold_dir is None else Path(cold_dir).expanduser()
    findings = list(_findings(folder, daemon))
    if as_json:
        print_json(versioned(checks=[asdict(finding) for finding in findings]))
    else:
        rows = ((f.health, f.name, f.found, f.fix) for f in findings)
        print_table("", ["", "check", "found", "fix"], rows, text_columns=4)
    healths = {finding.health for finding in findings}
    if Health.FAILED in healths:
        raise typer.Exit(exits.FAILED)
    raise typer.Exit(exits.DEGRADED if Health.DEGRADED in healths else 0)


def _findings(cold_dir: Path | None, socket: str | None) -> Iterator[Finding]:
    yield from (_check_package(package, extra) for package, extra in PACKAGES.items())
    yield _check_memfd()
    yield _check_huge_pages()
    yield _check_pidfd()
    yield _check_memlock()
    settings = {} if socket is None else {"service.socket": socket}
    try:
        config = load_config(overrides=settings)
    except TierdError as error:
        yield Finding("settings", Health.FAILED, str(error), "mend the setting it names")
        return
    yield Finding("settings", Health.OK, f"socket {config.service.socket}")
    yield _check_memory(config)
    # The usual folder is made with its parents; one that is named, only if its parent is there.
    if cold_dir is None:
        yield from _check_cold(Path(config.cold.folder), make_parents=True)
    else:
        yield from _check_cold(cold_dir, make_parents=False)


def _check_package(package: str, extra: str) -> Finding:
    try:
        return Finding(f"package {package}", Health.OK, metadata.version(package))
    except metadata.PackageNotFoundError:
        wanted = f"tierd[{extra}]" if extra else "tierd"
        health = Health.DEGRADED if extra else Health.FAILED
        return Finding(f"package {package}", health, "not installed", f"pip install '{wanted}'")


def _check_memfd() -> Finding:
    try:
        os.close(os.memfd_create("tierd-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except OSError as error:
        return Finding(
            "sealed memfd", Health.FAILED, str(error.strerror), "run a Linux kernel of 5.1 or newer"
        )
    return Finding("sealed memfd", Health.OK, "available")


def _check_huge_pages() -> Finding:
    name, fd = "huge pages", -1
    try:
        fd = os.memfd_create("tierd-doctor", os.MFD_CLOEXEC)
        os.ftruncate(fd, regions.HUGE_PAGE_BYTES)
        if regions.make_huge(fd, regions.HUGE_PAGE_BYTES):
            return Finding(name, Health.OK, "available to warm slabs")
        found = "this kernel makes none on request, or has none left"
    except OSError as error:
        found = str(error.strerror)
    finally:
        if fd >= 0:
            os.close(fd)
    fix = "run Linux 6.1 or newer; until then spills and cold reads take more, smaller requests"
    return Finding(name, Health.DEGRADED, found, fix)


def _check_pidfd() -> Finding:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return Finding(
            "pidfd",
            Health.DEGRADED,
            str(error.strerror),
            "run a Linux kernel of 5.3 or newer; until then only a closed socket tells "
            "that an engine died",
        )
    return Finding("pidfd", Health.OK, "available")


def _check_memory(config: DaemonConfig) -> Finding:
    found = f"{format_size(available_memory_bytes())} free"
    try:
        check_memory(config)
    except TierdError as error:
        return Finding("memory", Health.DEGRADED, str(error), "lower it, or free some memory")
    return Finding("memory", Health.OK, found)


def _check_memlock() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "no limit" if soft == resource.RLIM_INFINITY else format_size(soft)
    on_cuda = NVIDIA.exists()
    if on_cuda and soft != resource.RLIM_INFINITY:
        return Finding(
            "locked memory",
            Health.DEGRADED,
            shown,
            "raise it: ulimit -l unlimited (pins warm slabs)",
        )
    return Finding("locked memory", Health.OK, shown if on_cuda else f"{shown} (no GPU to pin for)")


def _check_cold(folder: Path, *, make_parents: bool) -> Iterator[Finding]:
    name = f"cold folder {folder}"
    try:
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "it is a file, not a folder")
        folder.mkdir(mode=0o700, parents=make_parents, exist_ok=True)
        free = shutil.disk_usage(folder).free
        with tempfile.NamedTemporaryFile(dir=folder, prefix="tierd-doctor-") as probe:
            direct = _writes_direct(probe.name)
    except OSError as error:
        fix = "give a writable folder on a local disk with --cold-dir"
        yield Finding(name, Health.FAILED, str(error.strerror), fix)
        return
    if free < FREE_DISK_BYTES:
        yield Finding(name, Health.DEGRADED, f"{format_size(free)} free", "free some space")
    else:
        yield Finding(name, Health.OK, f"{format_size(free)} free")
    if direct:
        yield Finding("direct I/O", Health.OK, "the cold folder takes O_DIRECT")
    else:
        yield Finding(
            "direct I/O",
            Health.DEGRADED,
            "the cold folder refuses O_DIRECT; reads go through the page cache",
            "put the cold folder on ext4 or xfs on NVMe",
        )
    yield _check_path_to_vram(folder)


def _check_path_to_vram(folder: Path) -> Finding:
    """Say how cold pages get to VRAM, and back: gds, compat or posix; found in a process apart."""
    name = "cold pages to VRAM"
    if not NVIDIA.exists():
        return Finding(name, Health.OK, "posix (no GPU)")
    command = [sys.executable, "-m", "tierd_engine.device.probemain", str(folder)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PROBE_SECONDS_MAX, check=True
        )
        found = json.loads(done.stdout)
        kind, reason = str(found["kind"]), str(found["reason"])
        writes = found.get("writes"), found.get("writes_reason")
    except subprocess.TimeoutExpired:
        kind, reason = "posix", f"the probe did not end within {PROBE_SECONDS_MAX:g} s"
    except subprocess.CalledProcessError as error:
        kind, reason = "posix", f"the probe ended with code {error.returncode}"
    except (OSError, ValueError, KeyError) as error:
        kind, reason = "posix", f"the probe failed: {error}"
    if kind == "gds":
        # Pages that are demoted through RAM are a few a step; those read are nearly all.
        back = (
            "written past RAM too"
            if writes[0] == "gds"
            else (f"written through RAM ({writes[0]}: {writes[1]})")
        )
        return Finding(name, Health.OK, f"gds: read past RAM, counted by nvidia-fs; {back}")
    fix = "install the extra cuda12 or cuda13 and nvidia-fs; until then they pass through RAM"
    return Finding(name, Health.DEGRADED, f"{kind}: {reason}", fix)


def _writes_direct(path: str) -> bool:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, SECTOR_BYTES) as aligned:
            return os.write(fd, aligned) == SECTOR_BYTES
    except OSError:
        return False
    finally:
        os.close(fd)
