"""`tierd doctor`: what on this machine helps or hinders tierd, with the fix for each."""

from __future__ import annotations

import enum
import mmap
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from tierd.cli import options
from tierd.cli.terminal import print_json, print_table, versioned
from tierd.errors import TierdError
from tierd.units import GIB, SECTOR_BYTES, format_size

EXIT_FAILED = 1
EXIT_DEGRADED = 4
SOCKET_PATH_BYTES_MAX = 107  # sun_path holds 108 bytes, the last of them zero
FREE_DISK_BYTES = 1 * GIB  # a 128k-token job of a 1B model spills about as much
PACKAGES = {
    "grpcio": "",
    "numpy": "",
    "structlog": "daemon",
    "numba": "engine",
    "torch": "engine",
    "transformers": "engine",
}

ColdDir = Annotated[
    Path | None,
    typer.Option("--cold-dir", metavar="DIR", help="Folder to check.  \\[default: /var/tmp]"),
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
    findings = list(_findings(cold_dir, daemon))
    if as_json:
        print_json(versioned(checks=[asdict(finding) for finding in findings]))
    else:
        rows = ((f.health, f.name, f.found, f.fix) for f in findings)
        print_table("", ["", "check", "found", "fix"], rows, text_columns=4)
    healths = {finding.health for finding in findings}
    if Health.FAILED in healths:
        raise typer.Exit(EXIT_FAILED)
    raise typer.Exit(EXIT_DEGRADED if Health.DEGRADED in healths else 0)


def _findings(cold_dir: Path | None, socket: str | None) -> Iterator[Finding]:
    yield from (_check_package(package, extra) for package, extra in PACKAGES.items())
    yield _check_memfd()
    yield _check_pidfd()
    yield _check_memory()
    yield _check_memlock()
    yield from _check_cold(cold_dir or Path("/var/tmp"))
    yield _check_socket(socket)


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


def _check_memory() -> Finding:
    available = _available_bytes()
    limit = _cgroup_headroom_bytes()
    headroom = available if limit is None else min(available, limit)
    found = f"{format_size(headroom)} free" + (
        "" if limit is None else " within the cgroup's limit"
    )
    if headroom < GIB:
        return Finding(
            "memory", Health.DEGRADED, found, "free some, or keep the hot and warm tiers small"
        )
    return Finding("memory", Health.OK, found)


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _cgroup_headroom_bytes() -> int | None:
    """Return what the cgroup (v2) still allows, or None where it sets no limit."""
    base = Path("/sys/fs/cgroup")
    try:
        limit = (base / "memory.max").read_text().strip()
        used = int((base / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used)


def _check_memlock() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "no limit" if soft == resource.RLIM_INFINITY else format_size(soft)
    on_cuda = Path("/proc/driver/nvidia").exists()
    if on_cuda and soft != resource.RLIM_INFINITY:
        return Finding(
            "locked memory",
            Health.DEGRADED,
            shown,
            "raise it: ulimit -l unlimited (pins warm slabs)",
        )
    return Finding("locked memory", Health.OK, shown if on_cuda else f"{shown} (no GPU to pin for)")


def _check_cold(folder: Path) -> Iterator[Finding]:
    name = f"cold folder {folder}"
    try:
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


def _check_socket(socket: str | None) -> Finding:
    if socket is None:
        from tierd.config import load_config

        try:
            socket = load_config().service.socket
        except TierdError as error:
            return Finding("settings", Health.FAILED, str(error), "mend the setting it names")
    length = len(os.fsencode(socket))
    if length > SOCKET_PATH_BYTES_MAX:
        return Finding(
            "socket path",
            Health.FAILED,
            f"{length} bytes",
            f"choose one of at most {SOCKET_PATH_BYTES_MAX} bytes: TIERD_SERVICE__SOCKET",
        )
    return Finding("socket path", Health.OK, f"{socket} ({length} bytes)")
