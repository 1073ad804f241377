"""Direct cold I/O by kvikio: cuFile where the system has it, else kvikio's own copies.

The one module that imports kvikio, and only when a path is opened: kvikio needs libcuda.so.1.
Interfaces used, read off the wheels of 25.4 and 26.10: CuFile(file, flags) with "r" to read and
"r+" to write, CuFile.pread(buf, size, file_offset) and pwrite alike -> IOFuture, IOFuture.get()
-> bytes done, CuFile.close(), defaults.set(name, value). What its C++ throws comes as
RuntimeError, ValueError, MemoryError, IndexError or ArithmeticError (Cython's rule). Its import
loads libcufile since 26.x, and raises a RuntimeError of cuda.pathfinder's where that is not there.

Invariants:
  `start` and `start_write` never wait: all of kvikio runs on this object's threads
  a tensor is referenced by its read or write until that has ended, so its memory stays
  a write never keeps a read waiting for a thread: they have their own

kvikio is left to AUTO: with its mode OFF it "may error out, crash or hang" where cuFile cannot
work, so that mode is no way to ask. What happened is proven by the driver's counts (probing.py).
`pread` and `pwrite` first wait for the null stream, which torch computes on: so they begin behind
the attention queued before them. That costs overlap, not correctness; a read is asked for units
ahead, and a write is waited for by no step.
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
_WRITE_THREADS = 4  # scattered slots are a write each
_TASK_THREADS = 8
_STACK_BYTES = 8 << 20  # the first read opens cuFile's driver on it: what that takes is not ours
_GDS_BYTES_MIN = 4096  # kvikio's own 1 MiB would send single pages through RAM
_KVIKIO_ERRORS = (
    RuntimeError, OSError, ValueError, TypeError, MemoryError, LookupError, ArithmeticError,
)  # fmt: skip


class KvikioWork:
    """One read or write on a thread."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self, seconds: float) -> bool:
        """See PathRead, PathWrite."""
        try:
            self._future.exception(timeout=seconds)
        except FutureTimeout:
            return False
        return True

    @property
    def error(self) -> str:
        """See PathRead, PathWrite."""
        assert self._future.done()
        found = self._future.exception()
        return "" if found is None else str(found)


class KvikioPath:
    """Reads files that are open in this process into VRAM, and writes them from there.

    Raises DeviceUnavailable.
    """

    def __init__(self) -> None:
        self._kvikio = _import_kvikio()
        self._threads = WorkThreads(_THREADS, "tierd-direct", DeviceFailed, _STACK_BYTES)
        self._write_threads: WorkThreads | None = None  # most sessions never write
        self._files: dict[tuple[int, int, str], Any] = {}

    def start(self, fd: int, offset: int, target: torch.Tensor) -> KvikioWork:
        """See ColdPath."""
        return KvikioWork(self._threads.submit(lambda: self._read(fd, offset, target)))

    def start_write(self, fd: int, offset: int, source: torch.Tensor) -> KvikioWork:
        """See ColdPath."""
        if self._write_threads is None:
            self._write_threads = WorkThreads(
                _WRITE_THREADS, "tierd-direct-write", DeviceFailed, _STACK_BYTES
            )
        return KvikioWork(self._write_threads.submit(lambda: self._write(fd, offset, source)))

    def _read(self, fd: int, offset: int, target: torch.Tensor) -> None:
        size = target.numel()
        try:
            got = self._file(fd, "r").pread(target, size, offset).get()
        except _KVIKIO_ERRORS as error:
            raise DeviceFailed(f"direct read: {error}") from error
        if got != size:
            raise DeviceFailed(f"direct read: {got} of {size} bytes were read")

    def _write(self, fd: int, offset: int, source: torch.Tensor) -> None:
        size = source.numel()
        try:
            done = self._file(fd, "r+").pwrite(source, size, offset).get()
        except _KVIKIO_ERRORS as error:
            raise DeviceFailed(f"direct write: {error}") from error
        if done != size:
            raise DeviceFailed(f"direct write: {done} of {size} bytes were written")

    def _file(self, fd: int, flags: str) -> Any:
        """Return kvikio's handle of an open file. A slab is known by its inode: fds come again."""
        status = os.fstat(fd)
        key = status.st_dev, status.st_ino, flags
        if key not in self._files:
            # kvikio opens by name alone; this one is the file itself, whatever became of its own.
            opened = self._kvikio.CuFile(f"/proc/self/fd/{fd}", flags)
            if self._files.setdefault(key, opened) is not opened:
                opened.close()
        return self._files[key]

    def close(self) -> None:
        """See ColdPath. Files are closed with the process: what is stuck may use one."""
        self._threads.stop()
        if self._write_threads is not None:
            self._write_threads.stop()


def _import_kvikio() -> Any:
    try:
        import kvikio
        from kvikio import defaults

        defaults.set("gds_threshold", _GDS_BYTES_MIN)
        defaults.set("num_threads", _TASK_THREADS)
    except (ImportError, *_KVIKIO_ERRORS) as error:  # its loader's are RuntimeErrors
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise DeviceUnavailable(f"kvikio cannot be used: {why}") from error
    return kvikio
