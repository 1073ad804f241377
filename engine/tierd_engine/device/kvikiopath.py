"""Direct cold reads by kvikio: cuFile where the system has it, else kvikio's own copies.

The one module that imports kvikio, and only when a path is opened: kvikio needs libcuda.so.1.
Interfaces used, read off the wheels of 25.4 and 26.10: CuFile(file, flags) with "r" to read and
"r+" to write, CuFile.pread(buf, size, file_offset) and pwrite alike -> IOFuture, IOFuture.get()
-> bytes done, CuFile.close(), defaults.set(name, value). What its C++ throws comes as
RuntimeError, ValueError, MemoryError, IndexError or ArithmeticError (Cython's rule).

Invariants:
  `start` never waits: all of kvikio runs on this object's threads
  a target tensor is referenced by its read until that has ended, so its memory stays

kvikio is left to AUTO: with its mode OFF it "may error out, crash or hang" where cuFile cannot
work, so that mode is no way to ask. What happened is proven by the driver's counts (probing.py).
`pread` first waits for the null stream, which torch computes on: so a read begins behind the
attention queued before it. That costs overlap, not correctness; a read is asked for units ahead.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import torch

from tierd.errors import DeviceFailed, DeviceUnavailable
from tierd_engine.workthreads import WorkThreads

_THREADS = 4  # a unit of 8 MiB each; within one, kvikio has threads of its own
_TASK_THREADS = 8
_GDS_BYTES_MIN = 4096  # kvikio's own 1 MiB would send single pages through RAM
_KVIKIO_ERRORS = (
    RuntimeError, OSError, ValueError, TypeError, MemoryError, LookupError, ArithmeticError,
)  # fmt: skip


class KvikioRead:
    """One read on a thread."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self, seconds: float) -> bool:
        """See PathRead."""
        try:
            self._future.exception(timeout=seconds)
        except FutureTimeout:
            return False
        return True

    @property
    def error(self) -> str:
        """See PathRead."""
        assert self._future.done()
        found = self._future.exception()
        return "" if found is None else str(found)


class KvikioPath:
    """Reads files that are open in this process into VRAM. Raises DeviceUnavailable."""

    def __init__(self) -> None:
        self._kvikio = _import_kvikio()
        self._threads = WorkThreads(_THREADS, "tierd-direct", DeviceFailed)
        self._files: dict[tuple[int, int], Any] = {}

    def start(self, fd: int, offset: int, target: torch.Tensor) -> KvikioRead:
        """See ColdPath."""
        return KvikioRead(self._threads.submit(lambda: self._read(fd, offset, target)))

    def _read(self, fd: int, offset: int, target: torch.Tensor) -> None:
        size = target.numel()
        try:
            got = self._file(fd).pread(target, size, offset).get()
        except _KVIKIO_ERRORS as error:
            raise DeviceFailed(f"direct read: {error}") from error
        if got != size:
            raise DeviceFailed(f"direct read: {got} of {size} bytes were read")

    def _file(self, fd: int) -> Any:
        """Return kvikio's handle of an open file. A slab is known by its inode: fds come again."""
        status = os.fstat(fd)
        key = status.st_dev, status.st_ino
        if key not in self._files:
            # kvikio opens by name alone; this one is the file itself, whatever became of its own.
            opened = self._kvikio.CuFile(f"/proc/self/fd/{fd}", "r")
            if self._files.setdefault(key, opened) is not opened:
                opened.close()
        return self._files[key]

    def close(self) -> None:
        """See ColdPath. Files are closed with the process: a stuck read may use one."""
        self._threads.stop()


def _import_kvikio() -> Any:
    try:
        import kvikio
        from kvikio import defaults
    except (ImportError, OSError) as error:
        raise DeviceUnavailable(f"kvikio cannot be used: {error}") from error
    defaults.set("gds_threshold", _GDS_BYTES_MIN)
    defaults.set("num_threads", _TASK_THREADS)
    return kvikio
