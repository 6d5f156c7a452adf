"""Isolation of processes that build at the same time: private folders, and the lock of a slot.

    <kind>.<host>.<pid>.<start>.<x>/    a private folder, named after the process that locks it

A private folder is removed when its interpreter exits. If the process is killed, a later process
removes the folder: one that makes a private folder beside it, or finds a library there.

The kernel releases a flock when the process that holds it ends. On a file system without flock, two
processes may build the same library. The second one replaces the library of the first, which has
the same contents.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator

from . import closure

DAY_S = 24 * 3600.0
# The name of an environment variable. Every process that a build starts has it, and its value is
# the build's private folder.
MARK = "CALCOPS_STAGING"

_private_folders: dict[str, int] = {}  # {folder of this process: the descriptor of its lock}
_slot_locks: set[int] = set()  # descriptors of slots' locks

# ---- private folders -----------------------------------------------------------------------------


def make(parent: str, kind: str) -> str:
    """Remove the private folders of dead processes from `parent`, make a new one and return it."""
    sweep(parent, kind)
    pid = os.getpid()
    path = f"{parent}/{kind}.{socket.gethostname()}.{pid}.{_start_time(pid)}.{os.urandom(4).hex()}"
    os.mkdir(path, 0o700)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    _private_folders[path] = fd
    with contextlib.suppress(OSError):  # without locks, the name alone shows the owner
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return path


def remove(path: str) -> None:
    """Remove a folder that make() returned, and end the processes that a build left in it.

    A forked child does not remove its parent's folder.
    """
    pid = path.rsplit(".", 3)[1]
    if pid == str(os.getpid()):
        _destroy(path)
        fd = _private_folders.pop(path, None)
        if fd is not None:
            os.close(fd)


@atexit.register
def remove_all() -> None:
    """Remove all private folders of this process, also those of builds in daemon threads."""
    for path in list(_private_folders):
        _destroy(path)


@contextlib.contextmanager
def stage(slot: str) -> Iterator[str]:
    """Make a private folder for one build, and remove it at the end."""
    path = make(slot, "stage")
    try:
        yield path
    finally:
        remove(path)


def sweep(parent: str, kind: str) -> None:
    """Remove the private folders of dead processes, and end the compilers that they left."""
    for entry in os.listdir(parent):
        path = f"{parent}/{entry}"
        if entry.startswith(f"{kind}.") and _is_orphan(path, kind):
            _destroy(path)


def is_alive(path: str, kind: str) -> bool:
    """Return True if a path is a private folder whose process may still be running."""
    return os.path.basename(path).startswith(f"{kind}.") and not _is_orphan(path, kind)


def _is_orphan(path: str, kind: str) -> bool:
    """Return True if a path is a private folder of this user whose process has ended."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: the name has another form
        host, pid, start, _ = os.path.basename(path).removeprefix(f"{kind}.").rsplit(".", 3)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            status = os.fstat(fd)
            if status.st_uid != os.getuid():
                return False
            if host != socket.gethostname():
                return time.time() - status.st_mtime > DAY_S and _is_free(fd)
            # Two containers may have one host name and one folder, but not see each other's
            # processes. So the lock counts, too.
            return _start_time(int(pid)) != start and _is_free(fd)
        finally:
            os.close(fd)
    return False


def _is_free(fd: int) -> bool:
    """Return True if no process holds the lock of a file. Then `fd` holds it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # BlockingIOError, or the file system has no locks
        return not isinstance(error, BlockingIOError)
    return True


def _start_time(pid: int) -> str:
    """Return when a process started, in ticks since boot; "" if it is dead or a zombie.

    The pid and the start identify a process, because a later one with this pid starts later.
    """
    fields = closure.text_of(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if fields and fields[0] not in "ZX" else ""


def _destroy(path: str) -> None:
    """Remove a private folder, and kill the processes that its build started."""
    for _ in range(100):
        # No process can start in a folder that is gone. So the list of processes, which is read
        # after this check, has all that started in it.
        is_gone = not os.path.lexists(path)
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        killed = [pid for pid in pids if _kill(pid, path)]
        if is_gone and not killed:
            break
        if is_gone:
            time.sleep(0.01)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _kill(pid: int, folder: str) -> bool:
    """Kill a process if a build in `folder` started it. Return True if it was killed."""
    with contextlib.suppress(OSError):  # it has ended, or belongs to somebody else
        directory = os.readlink(f"/proc/{pid}/cwd").removesuffix(" (deleted)")
        if directory != os.path.realpath(folder):
            return False
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().decode(errors="surrogateescape").split("\0")
        end = f"/{os.path.basename(folder)}"
        for variable in variables:  # a user's shell in the folder does not have this one
            if variable.startswith(f"{MARK}=") and variable.endswith(end):
                os.kill(pid, signal.SIGKILL)
                return True
    return False


# ---- the lock of a slot --------------------------------------------------------------------------


@contextlib.contextmanager
def locked(slot: str, waiting: Callable[..., contextlib.AbstractContextManager]) -> Iterator[None]:
    """Hold a slot's lock.

    Args:
        slot: its folder.
        waiting: waiting(holder) returns a context manager, which is entered while another process
            has the lock. holder() returns (that process, for how many seconds it has the lock).
    """
    fd = _open_lock(slot)
    try:
        with contextlib.ExitStack() as stack:
            is_shown = False
            while True:
                is_locked = _try_lock(fd)
                if is_locked and _is_current(fd, slot):
                    break
                if is_locked:  # on a file that tidy() removed meanwhile
                    _close_lock(fd)
                    fd = _open_lock(slot)
                    continue
                if not is_shown:
                    stack.enter_context(waiting(lambda: _holder(slot)))
                    is_shown = True
                time.sleep(0.05)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} {socket.gethostname()} {time.time():.0f}".encode(), 0)
        yield
    finally:
        _close_lock(fd)


@contextlib.contextmanager
def locked_if_free(slot: str) -> Iterator[bool]:
    """Hold a slot's lock. Yield False if another process has it, or builds in the slot."""
    fd = _open_lock(slot)
    try:
        is_free = _try_lock(fd)
        if is_free:
            stages = [entry.path for entry in os.scandir(slot) if is_alive(entry.path, "stage")]
            is_free = not stages
        yield is_free
    finally:
        _close_lock(fd)


def _open_lock(slot: str) -> int:
    os.makedirs(slot, 0o755, exist_ok=True)
    fd = os.open(f"{slot}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    _slot_locks.add(fd)
    return fd


def _close_lock(fd: int) -> None:
    _slot_locks.discard(fd)
    os.close(fd)


def _is_current(fd: int, slot: str) -> bool:
    """Return True if an open file is the slot's lock file, which tidy() may have removed."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(fd), os.stat(f"{slot}/lock"))
    return False


def _try_lock(fd: int) -> bool:
    """Lock an open file. Return False if another process has the lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    return True  # also on a file system without locks, where a double build is harmless


def _holder(slot: str) -> tuple[str, float]:
    """Return (the process that builds in a slot, for how many seconds)."""
    words = closure.text_of(f"{slot}/lock").split()
    if len(words) != 3:
        return "another process", 0.0
    return f"pid {words[0]} on {words[1]}", max(0.0, time.time() - float(words[2]))


def _forget() -> None:
    """Close the descriptors of the parent in a forked child, which would keep the locks."""
    for fd in (*_private_folders.values(), *_slot_locks):
        os.close(fd)
    _private_folders.clear()
    _slot_locks.clear()


os.register_at_fork(after_in_child=_forget)
