"""What a disk can do: fio, or a plain O_DIRECT loop where fio is not installed."""

from __future__ import annotations

import errno
import json
import mmap
import os
import shutil
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tierd.errors import StorageError, TierdError
from tierd.memory.regions import anonymous

_SECONDS_MAX = 600  # 1 GiB at 2 MiB/s
HOW_TO_GET_FIO = "fio is not installed (apt-get install fio): measured against a plain loop"


class FioFailed(TierdError):
    """fio ran and said no; the message is its own."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A disk measured in one folder: `depth` I/Os of `io_bytes` at a time, `total_bytes` in all.

    `write` makes a preallocated file and fills it, as a spill fills a new slab;
    `read` reads the file of the last `write`. Both return bytes per second. `plain`: not fio
    but a loop over huge pages. fio's buffers are of small ones, of which a disk's request holds
    fewer bytes: where requests are dear, in virtual machines, the loop is the harder limit.
    """

    folder: Path
    io_bytes: int
    depth: int
    total_bytes: int

    @property
    def tool(self) -> str:
        """Name who measures."""
        return "fio" if shutil.which("fio") else "loop"

    @property
    def path(self) -> Path:
        """The file that is written and read."""
        return self.folder / "limit"

    def write(self, *, plain: bool = False) -> float:
        """Fill a new file."""
        self.path.unlink(missing_ok=True)
        with self.path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, self.total_bytes)
        return self._measure("write", plain)

    def read(self, *, plain: bool = False) -> float:
        """Read the file."""
        return self._measure("read", plain)

    def _measure(self, direction: str, plain: bool) -> float:
        is_fio = self.tool == "fio" and not plain
        return self._fio(direction) if is_fio else self._loop(direction)

    def _fio(self, direction: str) -> float:
        command = [
            "fio", "--name=limit", f"--filename={self.path}", f"--rw={direction}", "--direct=1",
            "--ioengine=libaio", f"--iodepth={self.depth}", f"--bs={self.io_bytes}",
            f"--size={self.total_bytes}", "--fallocate=none", "--overwrite=0",
            "--create_on_open=1", "--output-format=json",
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            raise FioFailed(f"fio did not end in {_SECONDS_MAX} s") from None
        if done.returncode:
            raise FioFailed(f"fio: {done.stderr.strip() or done.stdout.strip()}")
        job = json.loads(done.stdout)["jobs"][0][direction]
        return float(job["io_bytes"] / (job["runtime"] / 1000))

    def _loop(self, direction: str) -> float:
        offsets = iter(range(0, self.total_bytes, self.io_bytes))
        mutex = threading.Lock()
        fd = os.open(self.path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        errors: list[OSError] = []

        def work() -> None:
            _, buffer = anonymous(self.io_bytes)
            buffer[:: mmap.PAGESIZE] = bytes(-(-self.io_bytes // mmap.PAGESIZE))
            move = os.pwritev if direction == "write" else os.preadv
            try:
                while True:
                    with mutex:
                        offset = next(offsets, None)
                    if offset is None:
                        return
                    if move(fd, [buffer], offset) != self.io_bytes:
                        raise OSError(errno.EIO, "an I/O was cut short")
            except OSError as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(self.depth)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=_SECONDS_MAX)
        seconds = time.perf_counter() - start
        os.close(fd)
        if errors:
            raise StorageError(f"{self.path}: {errors[0].strerror}") from errors[0]
        return self.total_bytes / seconds
