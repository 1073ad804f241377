"""`tierd doctor`: what on this machine helps or hinders tierd, with the fix for each."""

from __future__ import annotations

import _thread
import enum
import errno
import functools
import json
import mmap
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from tierd.cli import checks, exits, options
from tierd.cli.shortage import JOB_ADDRESS_BYTES, address_limit, is_shortage, limit_named
from tierd.cli.streams import writing
from tierd.cli.terminal import print_json, print_table, versioned
from tierd.config import DaemonConfig, available_memory_bytes, check_memory, load_config
from tierd.errors import TierdError
from tierd.memory import regions
from tierd.openfiles import CLIENT_FILES, DAEMON_FILES
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
# A folder on a disk that is alive, or asleep, answers in ten.
FOLDER_SECONDS_MAX = 15.0
_STACK_BYTES = 1 << 20  # of the thread that looks at the folder: the usual 8 MiB may not be there

_OTHER_FOLDER = "give a writable folder on a local disk with --cold-dir"

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
        _print_findings([(f.health, f.name, f.found, f.fix) for f in findings])
    healths = {finding.health for finding in findings}
    if Health.FAILED in healths:
        raise typer.Exit(exits.FAILED)
    raise typer.Exit(exits.DEGRADED if Health.DEGRADED in healths else 0)


def _print_findings(rows: Sequence[tuple[str, str, str, str]]) -> None:
    """Print a table; where memory is too short for what draws it, a line for each finding."""
    try:
        print_table("", ["", "check", "found", "fix"], rows, text_columns=4)
    except (MemoryError, OSError, ImportError) as error:
        if not is_shortage(error):
            raise
        with writing() as out:
            out.writelines("  ".join(row).rstrip() + "\n" for row in rows)


def _findings(cold_dir: Path | None, socket: str | None) -> Iterator[Finding]:
    for package, extra in PACKAGES.items():
        yield _probed(f"package {package}", functools.partial(_check_package, package, extra))
    yield _probed("address space", _check_address_space)
    yield _probed("sealed memfd", _check_memfd)
    yield _probed("huge pages", _check_huge_pages)
    yield _probed("pidfd", _check_pidfd)
    yield _probed("locked memory", _check_memlock)
    yield _probed("open files", _check_open_files)
    loaded: list[DaemonConfig] = []
    yield _probed("settings", lambda: _check_settings(socket, loaded))
    if not loaded:
        return
    yield _probed("memory", lambda: _check_memory(loaded[0]))
    folder = Path(loaded[0].cold.folder) if cold_dir is None else cold_dir
    # The usual folder is made with its parents; one that is named, only if its parent is there.
    found = _cold_in_time(folder, make_parents=cold_dir is None)
    yield from found
    if found[0].health is not Health.FAILED:
        yield _probed("cold pages to VRAM", lambda: _check_path_to_vram(folder))


def _probed(name: str, probe: Callable[[], Finding]) -> Finding:
    """Return what a probe finds; what keeps it from finding anything is a finding too."""
    try:
        return probe()
    except (MemoryError, OSError, ImportError, RuntimeError) as error:
        return _not_probed(name, error)


def _not_probed(name: str, error: Exception) -> Finding:
    """Return the finding that memory, threads or files are too short for a probe."""
    if not isinstance(error, OSError) and not is_shortage(error):
        raise error
    said = str(error.strerror if isinstance(error, OSError) else error) or "out of memory"
    return Finding(name, Health.FAILED, said, limit_named() or "free some memory, or threads")


def _cold_in_time(folder: Path, *, make_parents: bool) -> list[Finding]:
    """Return what `_check_cold` finds, in a thread of its own: a dead disk answers nobody."""
    name = f"cold folder {folder}"
    found: list[Finding] = []

    def look() -> None:
        try:
            found.extend(list(_check_cold(folder, make_parents=make_parents)))  # all, or none
        except (MemoryError, ImportError, RuntimeError) as error:
            found.append(_not_probed(name, error))
        finally:
            done.release()

    done = _thread.allocate_lock()
    done.acquire()
    usual_bytes = threading.stack_size(_STACK_BYTES)
    try:
        # Not a threading.Thread: where one ends for want of memory as it begins, its start waits
        # for ever.
        _thread.start_new_thread(look, ())
    except (MemoryError, RuntimeError) as error:
        return [_not_probed(name, error)]
    finally:
        threading.stack_size(usual_bytes)
    done.acquire(timeout=FOLDER_SECONDS_MAX)
    late = f"its disk did not answer within {FOLDER_SECONDS_MAX:g} s"
    return list(found) or [Finding(name, Health.FAILED, late, _OTHER_FOLDER)]


def _check_settings(socket: str | None, loaded: list[DaemonConfig]) -> Finding:
    """Check the settings, and add them to `loaded` if they hold."""
    given = {} if socket is None else {"service.socket": socket}
    try:
        loaded.append(load_config(overrides=given))
    except TierdError as error:
        return Finding("settings", Health.FAILED, str(error), "mend the setting it names")
    return Finding("settings", Health.OK, f"socket {loaded[0].service.socket}")


def _check_address_space() -> Finding:
    name, most = "address space", address_limit()
    if most is None:
        return Finding(name, Health.OK, "no limit")
    found = f"{format_size(most)} (ulimit -v)"
    if most < JOB_ADDRESS_BYTES:
        fix = (
            f"raise ulimit -v: a job takes {format_size(JOB_ADDRESS_BYTES)} beside model and tiers"
        )
        return Finding(name, Health.FAILED, found, fix)
    return Finding(name, Health.DEGRADED, found, "raise ulimit -v: model and tiers count under it")


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


def _check_open_files() -> Finding:
    """Check the limit that a daemon raises its own to."""
    name, most = "open files", resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if most == resource.RLIM_INFINITY or most >= DAEMON_FILES + CLIENT_FILES:
        found = "no limit" if most == resource.RLIM_INFINITY else f"{most:,d} (ulimit -Hn)"
        return Finding(name, Health.OK, found)
    fix = f"raise ulimit -n: a job with its daemon opens {DAEMON_FILES + CLIENT_FILES}, and more"
    return Finding(name, Health.FAILED, f"{most} (ulimit -Hn)", fix)


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
        yield Finding(name, Health.FAILED, str(error.strerror), _OTHER_FOLDER)
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
