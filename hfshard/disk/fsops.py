"""System calls of a commit, each with a fallback for file systems that do not support it."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from hfshard._util.threads import run_in_threads
from hfshard.constants import COPY_BYTES
from hfshard.errors import DirectoryLockedError, NotEnoughSpaceError, SaveDirectoryError

logger = logging.getLogger(__name__)

UNSUPPORTED: Final = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK})
"""Errors of a file system that does not support a call."""

NO_LINKS: Final = UNSUPPORTED | {errno.EPERM, errno.EACCES, errno.EXDEV, errno.EMLINK}
"""Errors of `link` without hard links, for another user's file, or for a file that has 65,000 of them already. A full
or failing disk gives other errors."""

_NO_FULL_FLUSH: Final = UNSUPPORTED | {errno.EINVAL, errno.ENOTTY, errno.ENODEV}
"""Errors of macOS file systems that cannot flush the disk, such as SMB."""

_LOCK_WAIT_SECONDS: Final = 0.02

_LOCK_TRIES: Final = 100
"""The most directories that are locked in turn because each was removed or replaced before."""

_SILENT_SECONDS: Final = 2.0
"""Duration of a wait for a lock before it is logged."""

_SPARE_BYTES: Final = 16 * 1024 * 1024
"""Free space needed in addition to the weights: for indexes, configs, manifests, directory blocks."""


@contextmanager
def locked_directory(
    directory: str, *, wait_seconds: float, make: Callable[[], list[str]] | None = None
) -> Iterator[list[str]]:
    """Hold the directory's own lock, which needs no lock file and dies with the process.

    Args:
        directory: The directory.
        wait_seconds: How long to wait for another process that holds it; after 2 s a warning names that process.
        make: As in `lock`.

    Yields:
        The directories that `make` created, to which the block may add, deepest last. If it fails, the empty ones are
        removed, while no other save can be in them.

    Raises:
        DirectoryLockedError: Another process held it for all that time.
    """
    own = ForkSafeDescriptor()
    try:
        made = lock(own, directory, wait_seconds, make)
        try:
            yield made
        except BaseException:
            if own.is_open:
                remove_empty_directories(made)
            raise
    finally:
        if own.is_open:  # in a process that was forked inside the block it is not, and the lock is its parent's
            unlock(own.fd, directory)
            own.close()


def unlock(fd: int, directory: str) -> None:
    """Release a lock; log a warning if that fails."""
    # Closing is not enough: a process that C code forked without Python's hooks has the descriptor too.
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)
    except OSError as error:
        if error.errno not in UNSUPPORTED:  # otherwise it was never locked, and a warning said so
            logger.warning(
                "The lock of '%s' cannot be released (%s): the next save waits for processes forked during this one.",
                directory,
                error,
            )


def lock(
    own: ForkSafeDescriptor, directory: str, wait_seconds: float, make: Callable[[], list[str]] | None = None
) -> list[str]:
    """Open and lock a directory, and the next one at its path if it was removed or replaced meanwhile.

    Args:
        own: The descriptor to open.
        directory: The directory.
        wait_seconds: How long to wait for another process; a warning names it.
        make: Creates the directory if it is missing, as `make_directories`. None: it must exist.

    Returns:
        The directories that `make` created, deepest last.

    Raises:
        DirectoryLockedError: Another process held it for all that time; `actual` describes the process.
        FileNotFoundError: It is missing.
    """
    made: list[str] = []
    for left in reversed(range(_LOCK_TRIES)):
        try:
            made += make() if make is not None else []
            own.open(directory)
        except FileNotFoundError:  # a save that failed has removed a directory that it had created
            if make is None or not left:
                raise
            continue
        _wait_for_lock(own.fd, directory, wait_seconds)
        if is_still_at(directory, own.fd):
            return made
        unlock(own.fd, directory)
        own.close()
    raise DirectoryLockedError(
        f"'{directory}' was removed or replaced each time it was locked. Find out which program does that, or save "
        "into another directory.",
        path=directory,
        actual="another process",
    )


def is_still_at(directory: str, fd: int) -> bool:
    """Return whether a path leads to the directory that was opened: it may have been removed or renamed since."""
    try:
        opened, found = os.fstat(fd), os.stat(directory)
        if os.path.samestat(opened, found):
            return True
        # Some network file systems change a directory's number each time: then its contents equal those at the path.
        return opened.st_nlink > 0 and sorted(os.listdir(fd)) == sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _wait_for_lock(fd: int, directory: str, wait_seconds: float) -> None:
    began = time.monotonic()
    deadline = began + wait_seconds
    was_told = False
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            now = time.monotonic()
            if now >= deadline:
                holder = lock_holder(fd)
                raise DirectoryLockedError(
                    f"'{directory}' is locked: {holder} was still saving there after {wait_seconds:g} s. "
                    "Wait for it, or save into another directory.",
                    path=directory,
                    actual=holder,
                ) from error
            if not was_told and now - began >= _SILENT_SECONDS:
                was_told = True
                logger.warning(
                    "Waiting for up to %g s: %s is saving into '%s'.", wait_seconds, lock_holder(fd), directory
                )
            time.sleep(_LOCK_WAIT_SECONDS)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            logger.warning(
                "'%s' cannot be locked (%s): nothing prevents two processes from saving there at once.",
                directory,
                error,
            )
            return


def require_space(directory: str, need_bytes: int, *, doing: str, todo: str) -> None:
    """Check for enough space before the first byte is written; pass if the file system does not report it.

    Args:
        directory: The target directory.
        need_bytes: Bytes to be written; a reserve is added for small files.
        doing: Beginning of the message: what needs the space.
        todo: End of the message: what to do.

    Raises:
        NotEnoughSpaceError: The file system has less free space.
    """
    space = os.statvfs(directory)
    free_bytes, need_bytes = space.f_bavail * space.f_frsize, need_bytes + _SPARE_BYTES
    if space.f_blocks and free_bytes < need_bytes:
        raise NotEnoughSpaceError(
            f"{doing} needs {need_bytes:,} bytes, but only {free_bytes:,} are free{todo}",
            path=directory,
            expected=need_bytes,
            actual=free_bytes,
        )


def sync_directory(directory: str) -> None:
    """Make a directory's entries durable; skip it with a warning if the file system cannot."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(fd, directory)
    finally:
        os.close(fd)


def sync(fd: int, path: str) -> None:
    """Make a file's bytes durable; skip it with a warning if the file system cannot."""
    try:
        _flush(fd)
    except OSError as error:
        if error.errno not in UNSUPPORTED | {errno.EINVAL}:
            raise
        logger.warning("'%s' cannot be flushed to disk (%s): a power failure may lose it.", path, error)


def _flush(fd: int) -> None:
    """Flush a file, and on macOS also the disk's cache, which `fsync` does not flush (fsync(2) of macOS)."""
    flush_disk = getattr(fcntl, "F_FULLFSYNC", None)
    if flush_disk is not None:
        try:
            fcntl.fcntl(fd, flush_disk)
            return
        except OSError as error:
            if error.errno not in _NO_FULL_FLUSH:
                raise
    os.fsync(fd)


def make_directories(directory: str, *, flush: bool = True) -> list[str]:
    """Create a directory and its missing parents, durably.

    Args:
        directory: An absolute path, so that the working directory, which may be gone, is not needed.
        flush: False: the caller flushes the parent of each created directory.

    Returns:
        The created directories, deepest last.
    """
    missing = []
    at = directory  # not normalized: ".." after a link does not lead to the part before it
    while not os.path.isdir(at):
        missing.append(at)
        at = os.path.dirname(at)
    made: list[str] = []
    try:
        for path in reversed(missing):
            made.append(path)  # before it exists: Ctrl-C may come in between
            try:
                os.mkdir(path)
            except FileExistsError:
                made.pop()
                if not os.path.isdir(path):
                    raise
            else:
                if flush:
                    sync_directory(os.path.dirname(path))
    except BaseException:
        remove_empty_directories(made)
        raise
    return made


def reject_linked_directories(directory: str, below: str) -> None:
    """Reject a path with a part that is not a plain directory: what is emptied later must not be elsewhere.

    Args:
        directory: The parent, which is not checked.
        below: Relative path in it; its parts may be missing.

    Raises:
        SaveDirectoryError: A part of `below` is a link or a file.
    """
    path = directory
    for part in below.split("/"):
        path = os.path.join(path, part)
        if os.path.islink(path) or (os.path.lexists(path) and not os.path.isdir(path)):
            raise SaveDirectoryError(
                f"'{path}' is {'a link' if os.path.islink(path) else 'a file'}, but a save needs a directory there "
                "for unfinished files. Remove or rename it, or save into another directory.",
                path=path,
            )


def remove_empty_directories(paths: Sequence[str]) -> None:
    """Remove the empty ones of the directories that a failed save created, deepest (last) first."""
    for path in reversed(paths):
        try:
            os.rmdir(path)
        except OSError as error:
            logger.debug("'%s' was left in place: %s", path, error)


def write_all(fd: int, raw: bytes | memoryview) -> None:
    """Write all of a buffer at the file's position."""
    left = memoryview(raw)
    while left:
        left = left[os.write(fd, left) :]


def write_file(path: str, raw: bytes, *, like: os.stat_result | None = None) -> None:
    """Write a new small file durably, with the mode and group of the file that it will replace."""
    with FlushBatch() as unflushed:
        unflushed.write_file(path, raw, like=like)
        unflushed.flush(1)


class FlushBatch:
    """A batch of small files and directories that become durable together, before anything that needs them begins.

    They are flushed in parallel: a file system with a journal may write it once for several.
    """

    def __init__(self) -> None:
        self._open: list[tuple[int, str]] = []

    def __enter__(self) -> FlushBatch:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            os.close(self._open.pop()[0])

    def write_file(self, path: str, raw: bytes, *, like: os.stat_result | None = None) -> None:
        """Write a new small file, with the mode and group of the file that it will replace."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._open.append((fd, path))  # only the descriptor that wrote it reports a writeback error
        write_all(fd, raw)
        copy_mode(fd, like)

    def add_directory(self, path: str) -> None:
        """Add a directory whose entries have changed."""
        self._open.append((os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), path))

    def flush(self, threads: int) -> None:
        """Make all durable, at most `threads` at once; skip one with a warning if its file system cannot."""
        run_in_threads(lambda one, _: sync(*one), self._open, threads)


def copy_mode(fd: int, like: os.stat_result | None) -> None:
    """Give an open file the mode and group of another one; skip a group that the user may not set."""
    if like is None:
        return
    mine = os.fstat(fd)
    if mine.st_gid != like.st_gid:
        try:
            os.fchown(fd, -1, like.st_gid)
        except PermissionError:
            logger.info("The group %d of the old file could not be set on the new one.", like.st_gid)
    if stat.S_IMODE(mine.st_mode) != stat.S_IMODE(like.st_mode):
        os.fchmod(fd, stat.S_IMODE(like.st_mode))


def rename(source: str, target: str, folder_fd: int | None = None) -> None:
    """Rename a file over another one; if the file system cannot rename, copy it with a warning.

    Args:
        source: The file.
        target: Its new path.
        folder_fd: The target's open folder, if the path might lead elsewhere by now.
    """
    try:
        os.rename(source, target if folder_fd is None else os.path.basename(target), dst_dir_fd=folder_fd)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        logger.warning(
            "'%s' does not support rename (%s): the file is copied into place.", os.path.dirname(target), error
        )
        _copy_over(source, target, folder_fd)
        os.unlink(source)


def unlink_if_exists(path: str) -> None:
    """Remove a file; do nothing if there is none."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return


def _copy_over(source: str, target: str, folder_fd: int | None) -> None:
    """Copy a file in place of another one, whose bytes stay: other links, or open files, may have them."""
    name = target if folder_fd is None else os.path.basename(target)
    with open(source, "rb") as reading:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder_fd)
        with open(name, "xb", opener=lambda path, flags: os.open(path, flags, 0o666, dir_fd=folder_fd)) as writing:
            while block := reading.read(COPY_BYTES):
                writing.write(block)
            writing.flush()
            copy_mode(writing.fileno(), os.fstat(reading.fileno()))
            sync(writing.fileno(), target)


def can_link(directory: str, source: str) -> bool:
    """Return whether the file system supports hard links: it tries one to `source`, a file in the staging directory."""
    probe = os.path.join(directory, "link-probe")
    try:
        os.link(source, probe)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        return False
    os.unlink(probe)
    return True


# Directory locks that a fork does not inherit, and the process that holds one.


_LOCKS: Final = "/proc/locks"
_LONGEST_COMMAND: Final = 80
"""Number of shown characters of a command line."""

_open: Final[weakref.WeakSet[ForkSafeDescriptor]] = weakref.WeakSet()
_opening = threading.RLock()
"""Held while one is opened, and by `fork`: a process forked between opening it and noting it would keep it."""


class ForkSafeDescriptor:
    """A directory's descriptor, which a forked process closes at once.

    A lock (flock) lives as long as any process has the descriptor with which it was acquired. A DataLoader's worker
    outlives a killed trainer by seconds, a daemon by days.
    """

    def __init__(self) -> None:
        """Open nothing yet."""
        self.fd = -1

    def open(self, directory: str) -> None:
        """Open a directory.

        Raises:
            OSError: It cannot be opened, or is not a directory.
        """
        with _opening:
            self.fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            _open.add(self)

    @property
    def is_open(self) -> bool:
        """True while this process has it; a forked process does not."""
        return self.fd >= 0

    def close(self) -> None:
        """Close it; a second call does nothing."""
        fd = self.fd
        self.fd = -1  # first: a process that is forked now must not close whatever gets the number next
        if fd >= 0:
            os.close(fd)


def _before_fork() -> None:
    _opening.acquire()


def _after_fork() -> None:
    _opening.release()


def _close_in_child() -> None:
    global _opening
    for one in list(_open):
        one.close()
    _opening = threading.RLock()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_close_in_child)


def lock_holder(fd: int) -> str:
    """Describe the process that holds the `flock` of an open directory, with its command line.

    Returns:
        A phrase for a message; "another process" if the system does not tell, for one on another machine or in another
        container.
    """
    pid = _pid_of(os.fstat(fd))
    if pid is None:
        return "another process"
    if pid == os.getpid():
        return f"another thread of this process ({pid})"
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except FileNotFoundError:
        return f"a process forked by process {pid}, which has ended"
    except OSError:
        command = ""
    shown = command if len(command) <= _LONGEST_COMMAND else f"{command[:_LONGEST_COMMAND]}…"
    return f"process {pid} ({shown})" if shown else f"process {pid}"


def _pid_of(status: os.stat_result) -> int | None:
    """Find the process that acquired the lock, by a line like `1: FLOCK  ADVISORY  WRITE 4711 fe:00:2146320 0 EOF`."""
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        with open(_LOCKS, encoding="ascii", errors="replace") as lines:
            for line in lines:
                words = line.split()  # a waiting process has "->" in place of FLOCK
                if len(words) > 5 and words[1] == "FLOCK" and words[5] == file and words[4].isdecimal():
                    return int(words[4]) or None
    except OSError:
        return None
    return None
