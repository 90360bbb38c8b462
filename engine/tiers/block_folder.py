"""BlockFolder: the files of a disk tier in one folder, each written whole or not at all. Plain Python; never torch.

The folder has mode 0700, its files 0600. All calls go through a descriptor of the folder, so that no link in its place
is followed. Links and other things that are no regular files are left alone, whatever their names.

A file is written under a temporary name and renamed. It is not flushed to the device: after a loss of power a file may
have its name without its bytes, which its checksum finds (engine/tiers/block_file.py); a flush for each block would
cost more than the few blocks that it saves. A process that is killed loses nothing that was renamed, since the kernel
has it. The writer holds a lock on its temporary file; one whose lock is free was left by a killed process.

Several servers may use one folder. Each holds a shared lock on the file `lock`, so one that gets the lock for itself
alone knows that it is alone. Blocks are shared: equal names have equal bytes, and a file is complete when it appears.

Errors of the device are raised as OSError; engine/tiers/disk_store.py counts them. A folder that was deleted is made
again by the next write.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from engine.interface.errors import StartupError
from engine.tiers.block_file import HEADER_BYTES, header_of, is_intact

FOLDER_NAME = "quire-kv"  # within the folder that the operator names, in which nothing else is touched
_LOCK = "lock"
_BLOCK_FILE = re.compile(r"([0-9a-f]{64})\.kv")
_TEMPORARY_FILE = re.compile(r"[0-9a-f]{32}\.tmp")
_PAGE_BYTES = 4096
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe is opened without waiting
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FILES_AT_ONCE = 128
_LONGEST_PIN_NS = 2 * 86_400 * 10**9  # a file with a later time was written under another clock


class DamagedBlock(Exception):
    """A file does not hold the block of its name."""


class FoundFile(NamedTuple):
    """A block's file in the folder."""

    name: bytes
    num_bytes: int  # on the device
    used_ns: int  # when it was written or read, by the folder's clock; in the future: until when it is pinned


def is_pinned(used_ns: int, now_ns: int) -> bool:
    """Return whether a file's time is the end of a pin."""
    return now_ns < used_ns <= now_ns + _LONGEST_PIN_NS


def bytes_on_disk(block_bytes: int) -> int:
    """Return what a block takes of the device: whole pages, its header included."""
    return -(-(HEADER_BYTES + block_bytes) // _PAGE_BYTES) * _PAGE_BYTES


def check_folder(folder: Path, *, size_bytes: int) -> None:
    """Raise StartupError unless blocks of size_bytes together can be kept in this folder. Makes it if it is missing."""
    field = f"--kv-disk {folder}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        own = folder / FOLDER_NAME
        own.mkdir(mode=0o700, exist_ok=True)
        found = own.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise StartupError(f"{field}: {own} is no folder; one of mode 0700 is needed.")
        if found.st_uid != os.geteuid():
            raise StartupError(
                f"{field}: {own} belongs to user {found.st_uid}, and this is user {os.geteuid()}:"
                " keys and values tell prompts, so the folder must belong to the user that serves."
            )
        with BlockFolder(folder) as opened:
            opened.try_out()
    except OSError as error:
        raise StartupError(f"{field}: the folder cannot be written: {error.strerror or error}.") from error
    sizes = os.statvfs(own)
    if size_bytes > sizes.f_blocks * sizes.f_frsize:
        raise StartupError(
            f"--kv-disk-size {_gib(size_bytes)} is larger than the disk of --kv-disk {folder}, which has"
            f" {_gib(sizes.f_blocks * sizes.f_frsize)}."
        )


class BlockFolder:
    """An open folder of blocks. Calls may come from several threads; all may wait for the device."""

    def __init__(self, folder: Path, *, is_member: bool = False, wall_ns: Callable[[], int] = time.time_ns) -> None:
        """Open FOLDER_NAME in `folder`, which is made if it is missing. Raises OSError.

        is_member: another process of the same server has it open, and counts for both. wall_ns: the clock of files.
        """
        self._path = folder / FOLDER_NAME
        self._is_member = is_member
        self._wall_ns = wall_ns
        self._folder, self._lock = self._open()

    def __enter__(self) -> "BlockFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the folder. No call follows."""
        os.close(self._lock)
        os.close(self._folder)

    def is_shared(self) -> bool:
        """Return whether another server has the folder open."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_SH)  # a refused exchange may have lost it
        return False

    def write(self, name: bytes, block: memoryview) -> FoundFile:
        """Write a block's file, whole or not at all."""
        header = header_of(name, block)
        try:
            return self._write(name, header, block)
        except FileNotFoundError:  # the folder was deleted, or the temporary file as a leftover
            self._open_again()
            return self._write(name, header, block)

    def read(self, name: bytes, out: memoryview) -> int:
        """Fill `out` with a block's bytes; return when this use of it was, by the folder's clock.

        Raises DamagedBlock, and FileNotFoundError also for what is no regular file.
        """
        header = bytearray(HEADER_BYTES)
        try:
            file = os.open(_file_name(name), _READ_FLAGS, dir_fd=self._folder)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
                raise FileNotFoundError(error.errno, "no regular file") from error
            raise
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise FileNotFoundError(errno.ENOENT, "no regular file")
            if found.st_size != HEADER_BYTES + len(out) or not self._fill(file, header, out):
                raise DamagedBlock
            if not is_intact(header, name, out):
                raise DamagedBlock
            with contextlib.suppress(OSError):  # a folder that can be read only keeps its order
                if not is_pinned(os.fstat(file).st_mtime_ns, self._wall_ns()):  # now: a pin may have come meanwhile
                    os.utime(file)
            return os.fstat(file).st_mtime_ns
        finally:
            os.close(file)

    def touch(self, name: bytes) -> int:
        """Note a use of a block; return its time, by the folder's clock."""
        used_ns = self.used_ns(name)
        if is_pinned(used_ns, self._wall_ns()):
            return used_ns
        os.utime(_file_name(name), dir_fd=self._folder, follow_symlinks=False)
        return self.used_ns(name)

    def set_time(self, name: bytes, used_ns: int) -> None:
        """Let a block be one that was, or will be, used at some time."""
        os.utime(_file_name(name), ns=(used_ns, used_ns), dir_fd=self._folder, follow_symlinks=False)

    def used_ns(self, name: bytes) -> int:
        """Return when any server used a block last, by the folder's clock."""
        return os.stat(_file_name(name), dir_fd=self._folder, follow_symlinks=False).st_mtime_ns

    def remove(self, name: bytes) -> bool:
        """Delete a block's file; return whether it was there."""
        try:
            os.unlink(_file_name(name), dir_fd=self._folder)
        except FileNotFoundError:
            return False
        return True

    def remove_for_sure(self, names: Iterable[bytes]) -> None:
        """Delete the files of blocks, so that none comes back after a loss of power: one wait for the device."""
        if sum(self.remove(name) for name in names):
            os.fsync(self._folder)

    def scan(self, pause: Callable[[], None]) -> Iterator[FoundFile]:
        """Find all blocks; delete what killed processes left. pause: called between some files."""
        with os.scandir(self._folder) as entries:
            for number, entry in enumerate(entries, 1):
                if number % _FILES_AT_ONCE == 0:
                    pause()
                if _TEMPORARY_FILE.fullmatch(entry.name):
                    self._remove_leftover(entry.name)
                elif match := _BLOCK_FILE.fullmatch(entry.name):
                    try:
                        found = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:  # deleted by another server
                        continue
                    if stat.S_ISREG(found.st_mode):
                        num_bytes = bytes_on_disk(found.st_size - HEADER_BYTES)
                        yield FoundFile(bytes.fromhex(match[1]), num_bytes, found.st_mtime_ns)

    def try_out(self) -> None:
        """Write and delete a file. Raises OSError where blocks cannot be kept."""
        temporary, file = self._new_temporary()
        try:
            self._write_all(file, bytes(_PAGE_BYTES))
        finally:
            os.close(file)
            os.unlink(temporary, dir_fd=self._folder)

    def _open(self) -> tuple[int, int]:
        """Return descriptors of the folder and of its lock."""
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            found = os.fstat(folder)
            if found.st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, f"{self._path} belongs to user {found.st_uid}")
            if stat.S_IMODE(found.st_mode) != 0o700:
                os.fchmod(folder, 0o700)
            lock = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
        except BaseException:
            os.close(folder)
            raise
        try:
            if not self._is_member:
                fcntl.flock(lock, fcntl.LOCK_SH)
        except BaseException:
            os.close(folder)
            os.close(lock)
            raise
        return folder, lock

    def _open_again(self) -> None:
        """Open the folder that has the path now. Descriptors keep their numbers, which other threads may be using."""
        folder, lock = self._open()
        os.dup2(folder, self._folder, inheritable=False)
        os.dup2(lock, self._lock, inheritable=False)
        os.close(folder)
        os.close(lock)

    def _new_temporary(self) -> tuple[str, int]:
        """Create a locked temporary file; return its name and descriptor."""
        while True:
            temporary = f"{secrets.token_hex(16)}.tmp"
            file = os.open(temporary, _WRITE_FLAGS, 0o600, dir_fd=self._folder)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                if os.fstat(file).st_nlink:
                    return temporary, file
            except BaseException:
                os.close(file)
                raise
            os.close(file)  # a scan has deleted it as a leftover before it was locked

    def _write(self, name: bytes, header: bytes, block: memoryview) -> FoundFile:
        temporary, file = self._new_temporary()
        try:
            self._write_all(file, header)
            self._write_all(file, block)
            used_ns = os.fstat(file).st_mtime_ns
            os.rename(temporary, _file_name(name), src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=self._folder)
            raise
        finally:
            os.close(file)
        return FoundFile(name, bytes_on_disk(len(block)), used_ns)

    def _write_all(self, file: int, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(file, rest) :]

    def _fill(self, file: int, header: bytearray, out: memoryview) -> bool:
        """Read header and block; return whether the file had all of them."""
        num_read = os.readv(file, [header, out])
        if num_read < HEADER_BYTES:
            return False
        num_read -= HEADER_BYTES
        while num_read < len(out):
            more = os.readv(file, [out[num_read:]])
            if not more:
                return False
            num_read += more
        return True

    def _remove_leftover(self, temporary: str) -> None:
        """Delete a temporary file, unless its writer lives."""
        with contextlib.suppress(OSError):
            file = os.open(temporary, _READ_FLAGS, dir_fd=self._folder)
            try:
                if stat.S_ISREG(os.fstat(file).st_mode):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(temporary, dir_fd=self._folder)
            finally:
                os.close(file)


def _file_name(name: bytes) -> str:
    return f"{name.hex()}.kv"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
