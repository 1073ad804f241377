"""Which way bytes get from a disk into VRAM: found out by a read, never guessed.

    gds      the bytes came whole, and nvidia-fs counted reads meanwhile
    compat   they came whole, and nothing shows that they did not pass through RAM
    posix    kvikio is not there, or its bytes were wrong, late, or an error

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
from dataclasses import asdict, dataclass
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
    """What a disk's path is, and why it is no better. `disk`: major:minor, or a folder."""

    disk: str
    kind: PathKind
    reason: str
    seconds: float = 0.0


def counted_reads(stats: Path = NVIDIA_FS_STATS) -> int | None:
    """Return how many reads nvidia-fs has done; None if it is not loaded or does not count."""
    try:
        text = stats.read_text()
    except OSError:
        return None
    found = re.search(r"^Reads\s*:.*?\bok=(\d+)", text, re.MULTILINE)
    return int(found.group(1)) if found else None


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
    after = counts()
    if failure:
        return ProbeResult(disk, PathKind.POSIX, failure, seconds)
    if before is None or after is None:
        reason = f"nvidia-fs is not loaded, or does not count its reads ({_COUNTS_HINT})"
        return ProbeResult(disk, PathKind.COMPAT, reason, seconds)
    if after == before:
        return ProbeResult(disk, PathKind.COMPAT, "nvidia-fs did none of the reads", seconds)
    return ProbeResult(disk, PathKind.GDS, "", seconds)


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
    """

    def __init__(
        self, device: Device, path: ColdPath | None, reason: str = "",
        *, counts: Callable[[], int | None] = counted_reads,
        kinds: frozenset[PathKind] = frozenset({PathKind.GDS}),
    ) -> None:  # fmt: skip
        self._device, self._path, self._reason, self._counts = device, path, reason, counts
        self._kinds = kinds
        self._found: dict[int, ProbeResult] = {}

    def path_for(self, fd: int) -> ColdPath | None:
        """Return the path that takes this file's pages to VRAM, None if that is the cold reader."""
        if self._path is None:
            return None
        return self._path if self.result(fd).kind in self._kinds else None

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
        return [{**asdict(found), "kind": str(found.kind)} for found in self._found.values()]

    def close(self) -> None:
        """Take no more reads."""
        if self._path is not None:
            self._path.close()


def probe_folder(paths: ColdPaths, folder: Path) -> ProbeResult:
    """Write a file of a known pattern to a folder, probe its disk with it, and remove it.

    Raises OSError where the folder cannot be written to.
    """
    name = folder / f".tierd-probe-{os.getpid()}"
    fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        pattern = bytes(range(251)) * (PROBE_BYTES // 251 + 1)
        os.pwrite(fd, pattern[:PROBE_BYTES], 0)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return paths.result(fd)
    finally:
        os.unlink(name)
        os.close(fd)
