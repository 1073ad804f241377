"""Which way bytes get from a disk into VRAM and back: found out by doing it, never guessed.

    gds      the bytes came whole, and nvidia-fs counted reads meanwhile
    compat   they came whole, and nothing shows that they did not pass through RAM
    posix    kvikio is not there, or its bytes were wrong, late, or an error

Of writes the same words are said apart: by the first pages that go to a disk directly, which are
read back by the CPU; or by `tierd doctor`, of a file of its own.

What counts is the driver's own count (/proc/driver/nvidia-fs/stats): a setting says what was
asked for, not what a read did. Another program's reads at that moment count too; so a machine
with a busy neighbour is to be probed when it is quiet.

Only `gds` is used for cold units. `compat` is the cold reader's own way, with its copy out of
tierd's sight and without xxh3: it is named, and nothing is won by it.
"""

from __future__ import annotations

import mmap
import os
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tierd.errors import DeviceFailed
from tierd.units import MIB, SECTOR_BYTES
from tierd_engine.device.coldpath import ColdPath, PathKind
from tierd_engine.device.port import Device

PROBE_BYTES = 1 * MIB
# The first read opens the driver, which takes a second or so; then 1 MiB at 1 MiB/s.
PROBE_SECONDS = 5.0
_TRIES = 3  # the file may be written to between two reads
_PATTERN = 0x5A
NVIDIA_FS_STATS = Path("/proc/driver/nvidia-fs/stats")
_COUNTS_HINT = "echo 1 > /sys/module/nvidia_fs/parameters/rw_stats_enabled"


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a disk's path is, and why it is no better. `disk`: major:minor, or a folder.

    `writes`: the way back, None where none was tried, and why that is no better.
    """

    disk: str
    kind: PathKind
    reason: str
    seconds: float = 0.0
    writes: PathKind | None = None
    writes_reason: str = ""

    def figures(self) -> dict[str, Any]:
        """Return it for a report."""
        writes = None if self.writes is None else str(self.writes)
        return {**asdict(self), "kind": str(self.kind), "writes": writes}


def counted_reads(stats: Path = NVIDIA_FS_STATS) -> int | None:
    """Return how many reads nvidia-fs has done; None if it is not loaded or does not count."""
    return _counted("Reads", stats)


def counted_writes(stats: Path = NVIDIA_FS_STATS) -> int | None:
    """Return how many writes it has done, as `counted_reads`."""
    return _counted("Writes", stats)


def _counted(what: str, stats: Path) -> int | None:
    try:
        text = stats.read_text()
    except OSError:
        return None
    found = re.search(rf"^{what}\s*:.*?\bok=(\d+)", text, re.MULTILINE)
    return int(found.group(1)) if found else None


def _judged(failure: str, before: int | None, after: int | None, what: str) -> tuple[PathKind, str]:
    """Return what a try has shown: `failure` "" where the bytes were right."""
    if failure:
        return PathKind.POSIX, failure
    if before is None or after is None:
        return PathKind.COMPAT, (
            f"nvidia-fs is not loaded, or does not count its {what} ({_COUNTS_HINT})"
        )
    if after == before:
        return PathKind.COMPAT, f"nvidia-fs did none of the {what}"
    return PathKind.GDS, ""


def probe(
    device: Device, path: ColdPath, fd: int, disk: str,
    counts: Callable[[], int | None] = counted_reads,
) -> ProbeResult:  # fmt: skip
    """Read the start of an open file into VRAM and compare it with the file.

    The file has a sector at least. Takes PROBE_SECONDS and little more, whatever the disk does.
    """
    began = time.monotonic()
    before = counts()
    try:
        failure = _compare(device, path, fd)
    except (OSError, DeviceFailed) as error:
        failure = str(error)
    seconds = time.monotonic() - began
    return ProbeResult(disk, *_judged(failure, before, counts(), "reads"), seconds)


def _compare(device: Device, path: ColdPath, fd: int) -> str:
    """Return "" if the path's bytes are the file's, else what is wrong."""
    size = min(PROBE_BYTES, os.fstat(fd).st_size // SECTOR_BYTES * SECTOR_BYTES)
    if size == 0:
        return "the file is too small to be read"
    target, host = device.allocate(size), device.allocate_host(size)
    stream, ended = device.new_stream(f"probe of {fd}"), device.new_event("the probe")
    is_stuck = False
    try:
        for _ in range(_TRIES):
            expected = _read_direct(fd, size)
            fill = partial(_fill, target.tensor, expected[0] ^ _PATTERN)
            _run(device, stream, ended, fill)
            read = path.start(fd, 0, target.tensor)
            is_stuck = not read.wait(PROBE_SECONDS)
            if is_stuck:
                return f"a read did not end within {PROBE_SECONDS:g} s"
            if read.error:
                return read.error
            device.copy_out(stream, target.address, host.address, size)
            _run(device, stream, ended, None)
            if bytes(host.tensor.numpy()) == expected:
                return ""
        return "the bytes that were read are not the file's"
    finally:
        device.free(host)
        if not is_stuck:  # else it may write there yet
            device.free(target)


def _write_and_compare(device: Device, path: ColdPath, fd: int) -> str:
    """Write the start of a file of ours from VRAM; return "" if the CPU reads it so."""
    source = device.allocate(PROBE_BYTES)
    stream, ended = device.new_stream(f"write probe of {fd}"), device.new_event("the write probe")
    is_stuck = False
    try:
        _run(device, stream, ended, partial(_fill, source.tensor, _PATTERN))
        write = path.start_write(fd, 0, source.tensor)
        is_stuck = not write.wait(PROBE_SECONDS)
        if is_stuck:
            return f"a write did not end within {PROBE_SECONDS:g} s"
        if write.error:
            return write.error
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if _read_direct(fd, PROBE_BYTES) == bytes([_PATTERN]) * PROBE_BYTES:
            return ""
        return "the file does not hold the bytes that were written"
    finally:
        if not is_stuck:  # else it may be read yet
            device.free(source)


def _fill(tensor: torch.Tensor, value: int) -> None:
    tensor.fill_(value)


def _run(device: Device, stream: Any, ended: Any, kernel: Callable[[], None] | None) -> None:
    if kernel is not None:
        device.launch(stream, kernel)
    device.record(ended, stream, "record: probe")
    device.wait_host(ended, PROBE_SECONDS, "wait: probe")


def _read_direct(fd: int, size: int) -> bytes:
    with mmap.mmap(-1, size) as aligned:
        if os.preadv(fd, [aligned], 0) != size:
            raise OSError(f"the file's first {size} bytes cannot be read")
        return bytes(aligned)


class ColdPaths:
    """The path of each disk, probed once, at the first file that is there. Used by one thread.

    `path` None: kvikio cannot be used, for `reason`. `kinds`: those that are used for units.
    `write_counts`: as `counts`, of writes.
    """

    def __init__(
        self, device: Device, path: ColdPath | None, reason: str = "",
        *, counts: Callable[[], int | None] = counted_reads,
        write_counts: Callable[[], int | None] = counted_writes,
        kinds: frozenset[PathKind] = frozenset({PathKind.GDS}),
    ) -> None:  # fmt: skip
        self._device, self._path, self._reason, self._counts = device, path, reason, counts
        self._kinds, self.write_counts = kinds, write_counts
        self._found: dict[int, ProbeResult] = {}

    def path_for(self, fd: int) -> ColdPath | None:
        """Return the path that takes this file's pages to VRAM, None if that is the cold reader."""
        if self._path is None:
            return None
        return self._path if self.result(fd).kind in self._kinds else None

    def write_path_for(self, fd: int) -> ColdPath | None:
        """Return the path that takes pages from VRAM to this file, None if that is the CPU's.

        A disk that reads go from directly gets one until a write has shown that it is no good.
        """
        path = self.path_for(fd)
        if path is None or self.result(fd).writes not in (None, *self._kinds):
            return None
        return path

    def is_write_proven(self, fd: int) -> bool:
        """Return whether `prove_write` has been told of this file's disk."""
        return self.result(fd).writes is not None

    def prove_write(self, fd: int, failure: str, before: int | None) -> None:
        """Note what the first write to a disk has shown; `failure` "" if its bytes are right there.

        `before`: what `write_counts` said before it.
        """
        kind, reason = _judged(failure, before, self.write_counts(), "writes")
        number = os.fstat(fd).st_dev
        self._found[number] = replace(self.result(fd), writes=kind, writes_reason=reason)

    def probe_write(self, fd: int) -> None:
        """Write to the start of an empty file of the caller's, and note what that has shown."""
        assert self._path is not None, "nothing is written without a path"
        before = self.write_counts()
        try:
            failure = _write_and_compare(self._device, self._path, fd)
        except (OSError, DeviceFailed) as error:
            failure = str(error)
        self.prove_write(fd, failure, before)

    def result(self, fd: int) -> ProbeResult:
        """Return what the file's disk allows; the first call for a disk probes it."""
        number = os.fstat(fd).st_dev
        if number not in self._found:
            disk = f"{os.major(number)}:{os.minor(number)}"
            if self._path is None:
                self._found[number] = ProbeResult(disk, PathKind.POSIX, self._reason)
            else:
                self._found[number] = probe(self._device, self._path, fd, disk, self._counts)
        return self._found[number]

    def figures(self) -> list[dict[str, Any]]:
        """Return the report's rows, one a disk that was probed."""
        return [found.figures() for found in self._found.values()]

    def close(self) -> None:
        """Take no more work."""
        if self._path is not None:
            self._path.close()


def probe_folder(paths: ColdPaths, folder: Path) -> ProbeResult:
    """Write a file of a known pattern to a folder, probe its disk with it, and remove it.

    Where reads go directly, writes are tried too. Raises OSError where the folder cannot be
    written to.
    """
    name = folder / f".tierd-probe-{os.getpid()}"
    fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        pattern = bytes(range(251)) * (PROBE_BYTES // 251 + 1)
        os.pwrite(fd, pattern[:PROBE_BYTES], 0)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if paths.path_for(fd) is not None:
            paths.probe_write(fd)
        return paths.result(fd)
    finally:
        os.unlink(name)
        os.close(fd)
