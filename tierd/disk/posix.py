"""A folder as a disk: preallocated files, O_DIRECT where the file system allows.

Invariants:
  a handle is never used again; a deleted or released file's last user closes its fds
  files are reached through fds of their folders, never through a path
  a file that has no name (ephemeral) is gone when it is closed, whatever happens
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import secrets
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from tierd.disk import removed
from tierd.disk.ports import (
    FOLDERS,
    FULL,
    assert_whole_sectors,
    folder_of,
    is_name,
    storage_errors,
)
from tierd.disk.slotlocks import locked_ranges
from tierd.errors import NotFound, StorageError
from tierd.units import SECTOR_BYTES, format_size

_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_STAT_BLOCK_BYTES = 512
_IOV_MAX = os.sysconf("SC_IOV_MAX")  # buffers that one call takes


@dataclass(slots=True)
class _File:
    """An open file; `name` is "" where it has none, `users` counts the I/O under way."""

    fd: int
    name: str
    size_bytes: int
    reader_fd: int = -1
    users: int = 0


class PosixDisk:
    """A folder on a file system. Every method may be called from any thread.

    `ephemeral`: files have no name, so that nothing can outlive the process
    and any number of processes can share the folder; there is then nothing to
    open, rename or list. Otherwise the folder has one owner at a time (flock on
    LOCK), and its files stay when it is closed.
    """

    def __init__(self, folder: str, *, ephemeral: bool) -> None:
        self.folder, self.ephemeral = folder, ephemeral
        self._files: dict[int, _File] = {}
        self._handles = itertools.count(1)
        self._mutex = threading.Lock()  # of the files' users; never held during I/O
        self._naming = threading.Lock()  # of the files' names, on the disk and here
        self._lock_fd = -1
        self._folder_fds: dict[str, int] = {}
        with self._errors():
            os.makedirs(folder, mode=0o700, exist_ok=True)
            self._folder_fds[""] = os.open(folder, _FOLDER_FLAGS)
        try:
            if not ephemeral:
                self._refuse_foreign()
                self._lock()
                self._open_folders()
            with self._errors():
                self.direct = self._probe()
        except BaseException:
            self.close()
            raise

    def _errors(self, doing: str = "") -> AbstractContextManager[None]:
        return storage_errors(f"cold folder {self.folder}{doing}")

    def _folder_fd(self, folder: str) -> int:
        """Return the fd of one of our folders. Raises OSError once the disk is closed."""
        if folder not in self._folder_fds:  # a lane may look while the daemon ends
            raise OSError(errno.EBADF, "it is closed")
        return self._folder_fds[folder]

    def _refuse_foreign(self) -> None:
        """Raise StorageError for a folder that holds others' files and nothing of a store."""
        with self._errors():
            names = sorted(os.listdir(self._folder_fds[""]))
            others = [name for name in names if not _may_be_ours(name)]
            if not others or "superblock" in names or any(map(self._has_ours, FOLDERS)):
                return
        more = ", ..." * (len(others) > 3)
        raise StorageError(
            f"cold folder {self.folder} holds other files ({', '.join(others[:3])}{more}) and no "
            "store; name an empty folder, or a new one"
        )

    def _has_ours(self, folder: str) -> bool:
        """Return whether a file of a store is there. Raises OSError."""
        try:
            fd = os.open(folder, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=self._folder_fds[""])
        except (FileNotFoundError, NotADirectoryError):
            return False
        try:
            return any(is_name(f"{folder}/{name}") for name in os.listdir(fd))
        finally:
            os.close(fd)

    def _lock(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._errors(", LOCK"):
            self._lock_fd = os.open("LOCK", flags, 0o600, dir_fd=self._folder_fds[""])
            try:
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(self._lock_fd, 32, 0).decode(errors="replace").strip()
                raise StorageError(
                    f"cold folder {self.folder} is in use by process {holder or 'unknown'}"
                ) from None
        with contextlib.suppress(OSError):  # for people; a full disk must not keep us out
            holder_line = f"{os.getpid()}\n".encode()
            os.pwrite(self._lock_fd, holder_line, 0)
            os.ftruncate(self._lock_fd, len(holder_line))

    def _open_folders(self) -> None:
        top = self._folder_fds[""]
        for name in FOLDERS:
            with self._errors(f", {name}"):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=top)
                flags = _FOLDER_FLAGS | os.O_NOFOLLOW
                self._folder_fds[name] = os.open(name, flags, dir_fd=top)
        self.sync_folder("")

    def _probe(self) -> bool:
        """Return whether this file system takes O_DIRECT, by writing a sector. Raises OSError."""
        probe = self._open_unnamed(0)
        try:
            direct = _reopen(probe, os.O_RDWR | os.O_DIRECT)
            try:
                os.pwrite(direct, mmap.mmap(-1, SECTOR_BYTES), 0)
            finally:
                os.close(direct)
        except OSError as error:
            # On a full disk the open alone has to tell: what is there can still be read.
            if error.errno not in (*_NO_DIRECT, *FULL):
                raise
            return error.errno in FULL
        finally:
            os.close(probe)
        return True

    # -- names ----------------------------------------------------------------

    def _open_unnamed(self, flags: int) -> int:
        """Return the fd of a new file that has no name. Raises OSError."""
        flags |= os.O_RDWR | os.O_CLOEXEC
        top = self._folder_fd("")
        try:
            return os.open(".", flags | os.O_TMPFILE, 0o600, dir_fd=top)
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
        name = f".{os.getpid()}-{secrets.token_hex(8)}"
        fd = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=top)
        os.unlink(name, dir_fd=top)
        return fd

    def _open_named(self, name: str, flags: int) -> int:
        """Return the fd of a file by name. Raises OSError."""
        flags |= os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        if self.direct:
            flags |= os.O_DIRECT
        return os.open(_base(name), flags, 0o600, dir_fd=self._dir_fd(name))

    def _dir_fd(self, name: str) -> int:
        return self._folder_fd(folder_of(name))

    def create(self, name: str, size_bytes: int) -> int:
        """Make a file of `size_bytes`, allocated. Raises StorageFull, StorageError."""
        folder_of(name)
        with self._errors(f", {name} of {format_size(size_bytes)}"):
            if self.ephemeral:
                fd = self._open_unnamed(os.O_DIRECT if self.direct else 0)
            else:
                fd = self._open_named(name, os.O_CREAT | os.O_EXCL)
            handle = self._add(_File(fd, "" if self.ephemeral else name, size_bytes))
            try:
                os.posix_fallocate(fd, 0, size_bytes)
                self._open_reader(handle)
            except OSError:
                self.delete(handle)
                raise
        return handle

    def open(self, name: str) -> int:
        """Open a file that is there. Raises NotFound, StorageError."""
        folder_of(name)
        if self.ephemeral:
            raise NotFound(f"cold folder {self.folder} is ephemeral: its files have no names")
        with self._errors(f", {name}"):
            try:
                fd = self._open_named(name, os.O_NONBLOCK)  # a fifo in its place must not hang us
            except FileNotFoundError:
                raise NotFound(f"cold folder {self.folder}: there is no {name}") from None
            status = os.fstat(fd)
            handle = self._add(_File(fd, name, status.st_size))
            try:
                if not stat.S_ISREG(status.st_mode):
                    raise StorageError(f"cold folder {self.folder}: {name} is not a file")
                self._open_reader(handle)
            except (OSError, StorageError):
                self.release(handle)
                raise
        return handle

    def _add(self, file: _File) -> int:
        with self._mutex:
            handle = next(self._handles)
            self._files[handle] = file
        return handle

    def _open_reader(self, handle: int) -> None:
        file = self._files[handle]
        file.reader_fd = _reopen(file.fd, os.O_RDONLY | (os.O_DIRECT if self.direct else 0))

    def names(self, folder: str) -> list[str]:
        """Return the files of ours in a folder, sorted; of an ephemeral disk none."""
        return sorted(name for name, _ in self._regular_files(folder))

    def _regular_files(self, folder: str) -> list[tuple[str, os.stat_result]]:
        """Return (name, status) of our files in a folder. Raises StorageError."""
        assert folder in ("", *FOLDERS), folder
        if self.ephemeral:
            return []
        found = []
        with self._errors(f", {folder}"), os.scandir(self._folder_fd(folder)) as entries:
            for entry in entries:
                name = f"{folder}/{entry.name}" if folder else entry.name
                if is_name(name) and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                        found.append((name, entry.stat(follow_symlinks=False)))
        return found

    def rename(self, old: str, new: str) -> None:
        """Give a file another name in its folder. Raises NotFound, StorageError."""
        assert folder_of(old) == folder_of(new), f"{old=} {new=}"
        if self.ephemeral:
            raise NotFound(f"cold folder {self.folder} is ephemeral: its files have no names")
        folder = self._dir_fd(old)
        with self._naming, self._errors(f", {old}"):
            try:
                os.rename(_base(old), _base(new), src_dir_fd=folder, dst_dir_fd=folder)
            except FileNotFoundError:
                raise NotFound(f"cold folder {self.folder}: there is no {old}") from None
            if old != new:
                self._forget_name(new)
            for file in list(self._files.values()):
                if file.name == old:
                    file.name = new

    def remove(self, name: str) -> None:
        """Remove a file by name, if it is there and can be removed."""
        folder_of(name)
        if self.ephemeral:
            return
        with self._naming, contextlib.suppress(OSError):
            os.unlink(_base(name), dir_fd=self._dir_fd(name))
            self._forget_name(name)

    def _forget_name(self, name: str) -> None:
        for file in list(self._files.values()):
            if file.name == name:
                file.name = ""

    def sync_folder(self, folder: str) -> None:
        """Make a folder's names durable. Raises StorageError."""
        assert folder in ("", *FOLDERS), folder
        if self.ephemeral:
            return
        with self._errors(f", {folder}, sync"):
            os.fsync(self._folder_fd(folder))
        self.require_there()

    def require_there(self) -> None:
        """Raise StorageError if the folder, or one of ours in it, was removed or moved: what is
        written there goes with the last process that has it open, or is found by nobody. Or if
        LOCK was: the next process takes the folder for free."""
        if self.ephemeral:
            return
        with self._errors():
            top, folders = self._folder_fd(""), dict(self._folder_fds)  # it may be closed meanwhile
            gone = [name for name, fd in folders.items() if os.fstat(fd).st_nlink == 0]
            moved = [name for name, fd in folders.items() if not self._stands(name, fd, top)]
            is_unlocked = os.fstat(self._lock_fd).st_nlink == 0
        if gone:
            raise StorageError(removed.folders_gone(self.folder, gone))
        if moved:
            raise StorageError(removed.folders_moved(self.folder, moved))
        if is_unlocked:
            raise StorageError(removed.lock_gone(self.folder))

    def _stands(self, name: str, fd: int, top: int) -> bool:
        """Return whether a folder of ours is where it was opened. Raises OSError."""
        try:
            if name:
                found = os.stat(name, dir_fd=top, follow_symlinks=False)
            else:
                found = os.stat(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            return False
        own = os.fstat(fd)
        return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)

    def is_there(self, handle: int) -> bool:
        """Return whether an open file has its name yet: nobody else removed it."""
        try:
            with self._using(handle) as file:
                return not file.name or os.fstat(file.fd).st_nlink > 0
        except StorageError:  # it is closed
            return True

    # -- bytes ----------------------------------------------------------------

    def size_bytes(self, handle: int) -> int:
        """Return a file's size as it was opened. Raises StorageError."""
        with self._using(handle) as file:
            return file.size_bytes

    def read_into(self, handle: int, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`. Raises StorageError."""
        self.scatter(handle, offset, [buffer])

    def scatter(self, handle: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill all buffers, one after the other, from `offset`. Raises StorageError."""
        with self._errors(", read"), self._using(handle) as file:
            assert_whole_sectors(file.size_bytes, offset, buffers)
            _read_all(file.fd, offset, buffers)

    def write(self, handle: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write all buffers at `offset`. Raises StorageFull, StorageError."""
        with self._errors(", write"), self._using(handle) as file:
            assert_whole_sectors(file.size_bytes, offset, buffers)
            _write_all(file.fd, offset, buffers)

    def sync(self, handle: int) -> None:
        """Make what was written to a file durable. Raises StorageError, StorageFull."""
        with self._errors(", sync"), self._using(handle) as file:
            os.fdatasync(file.fd)
            self.require_there()
            with self._naming:  # so that it was not us
                if file.name and os.fstat(file.fd).st_nlink == 0:
                    raise OSError(errno.ENOENT, f"somebody removed {file.name}: it is not kept")

    def reader_fd(self, handle: int) -> int:
        """Return an fd opened for reading alone; it stays the disk's."""
        return self._files[handle].reader_fd

    def locked_ranges(self, handle: int) -> list[tuple[int, int]]:
        """Return what others have locked of a file; see DiskPort. Raises StorageError."""
        with self._errors(", locks"), self._using(handle) as file:
            return locked_ranges(file.fd, 0, file.size_bytes)

    def release(self, handle: int) -> None:
        """Close a file and keep it."""
        with self._using(handle):
            del self._files[handle]

    def delete(self, handle: int) -> None:
        """Remove a file; its blocks are free at once, whoever still has it open."""
        with self._using(handle) as file:
            # An undeletable file must not wedge those who make room: its blocks go all the
            # same, and its name at the next start.
            del self._files[handle]
            with contextlib.suppress(OSError):
                os.ftruncate(file.fd, 0)
            with self._naming:
                if file.name:
                    with contextlib.suppress(OSError):
                        os.unlink(_base(file.name), dir_fd=self._dir_fd(file.name))
                    file.name = ""

    @contextlib.contextmanager
    def _using(self, handle: int) -> Iterator[_File]:
        """Keep a file open meanwhile. Raises StorageError if it was deleted."""
        with self._mutex:
            file = self._files.get(handle)
            if file is None:
                raise StorageError(f"cold folder {self.folder}: the file was deleted")
            file.users += 1
        try:
            yield file
        finally:
            with self._mutex:
                file.users -= 1
                if file.users == 0 and handle not in self._files:
                    os.close(file.fd)
                    if file.reader_fd >= 0:
                        os.close(file.reader_fd)

    # -- the whole ------------------------------------------------------------

    def free_bytes(self) -> int:
        """Return the bytes that this user may still allocate. Raises StorageError."""
        with self._errors():
            status = os.fstatvfs(self._folder_fd(""))
        return status.f_bavail * status.f_frsize

    def used_bytes(self) -> int:
        """Return the bytes allocated to our files, named or open. Raises StorageError."""
        with self._mutex:
            unnamed = [file for file in self._files.values() if not file.name]
        named = [status for folder in ("", *FOLDERS) for _, status in self._regular_files(folder)]
        blocks = sum(status.st_blocks for status in named)
        return blocks * _STAT_BLOCK_BYTES + sum(file.size_bytes for file in unnamed)

    def describe(self) -> str:
        """Return one line for people."""
        how = "O_DIRECT" if self.direct else "buffered: the file system refuses O_DIRECT"
        return f"posix, {how}"

    def check_integrity(self) -> None:
        """Raise AssertionError if two files share an fd or a name, or a use is negative."""
        with self._mutex:
            fds = [fd for file in self._files.values() for fd in (file.fd, file.reader_fd)]
            users = [file.users for file in self._files.values()]
        assert len(set(fds)) == len(fds), f"{sorted(fds)=}"
        assert min(users, default=0) >= 0, f"{users=}"

    def close(self) -> None:
        """Close every file, release the lock. What has a name stays. Idempotent."""
        for handle in list(self._files):
            self.release(handle)
        for fd in (self._lock_fd, *self._folder_fds.values()):
            if fd >= 0:
                os.close(fd)
        self._lock_fd = -1
        self._folder_fds.clear()

    def __enter__(self) -> PosixDisk:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _may_be_ours(name: str) -> bool:
    """Return whether a name in a cold folder says nothing of another use of it."""
    # "." begins our files without names where a file system has none; a new disk has lost+found.
    return is_name(name) or name in ("LOCK", "lost+found", *FOLDERS) or name.startswith(".")


def _base(name: str) -> str:
    return name.rpartition("/")[2]


def _reopen(fd: int, flags: int) -> int:
    """Return another open file description of a file that may have no name. Raises OSError."""
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)


def _read_all(fd: int, offset: int, buffers: Sequence[memoryview]) -> None:
    left = [buffer for buffer in buffers if len(buffer)]
    while left:
        got = os.preadv(fd, left[:_IOV_MAX], offset)
        if got == 0:
            raise StorageError(f"the file ends at {offset}, before the page does")
        offset += got
        _advance(left, got)


def _write_all(fd: int, offset: int, buffers: Sequence[memoryview]) -> None:
    left = [buffer for buffer in buffers if len(buffer)]
    while left:
        wrote = os.pwritev(fd, left[:_IOV_MAX], offset)
        if wrote == 0:
            raise StorageError("the disk took no bytes")
        offset += wrote
        _advance(left, wrote)


def _advance(left: list[memoryview], done: int) -> None:
    """Drop the first `done` bytes of `left`."""
    while left and done >= len(left[0]):
        done -= len(left.pop(0))
    if done:
        left[0] = left[0][done:]
