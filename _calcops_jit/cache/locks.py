"""What keeps processes apart: private folders, which end with their process, and the lock of a
slot.

    <kind>.<host>.<pid>.<start>.<x>/    a private folder, named after its owner, who locks it

Private folders are removed when the interpreter exits, and those of a killed process by the next
process. A flock is released the moment its holder dies. Where a file system does not support it,
two processes may build the same thing, and the second finds the first one's folder when it renames
its own: no harm.
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
# This variable names a build's private folder to every process that the build starts.
MARK = "CALCOPS_STAGING"

_ours: dict[str, int] = {}  # {private folder: the descriptor that holds its lock}
_held: set[int] = set()  # descriptors of slots' locks

# ---- private folders -----------------------------------------------------------------------------


def make(parent: str, kind: str) -> str:
    """Make a private folder in `parent`, after removing those of dead processes."""
    sweep(parent, kind)
    pid = os.getpid()
    path = f"{parent}/{kind}.{socket.gethostname()}.{pid}.{_start_time(pid)}.{os.urandom(4).hex()}"
    os.mkdir(path, 0o700)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    _ours[path] = fd
    with contextlib.suppress(OSError):  # without locks, the name has to do
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return path


def remove(path: str) -> None:
    """Remove a folder that make() returned, and end the processes that a build left in it.

    A forked child does not remove its parent's.
    """
    if path.rsplit(".", 3)[1] == str(os.getpid()):
        _destroy(path)
        fd = _ours.pop(path, None)
        if fd is not None:
            os.close(fd)


@atexit.register
def remove_all() -> None:
    """Remove all private folders of this process, also those of builds in daemon threads."""
    for path in list(_ours):
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
    """Return True if a path is a private folder whose owner may still work in it."""
    return os.path.basename(path).startswith(f"{kind}.") and not _is_orphan(path, kind)


def _is_orphan(path: str, kind: str) -> bool:
    with contextlib.suppress(OSError, ValueError):  # a name of another form is not ours
        host, pid, start, _ = os.path.basename(path).removeprefix(f"{kind}.").rsplit(".", 3)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            status = os.fstat(fd)
            if status.st_uid != os.getuid():
                return False
            if host != socket.gethostname():
                return time.time() - status.st_mtime > DAY_S and _is_free(fd)
            # Containers may share a host name and a folder but not see each other's processes: ask
            # the lock, too.
            return _start_time(int(pid)) != start and _is_free(fd)
        finally:
            os.close(fd)
    return False


def _is_free(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)  # without locks, nobody holds one
    return True


def _start_time(pid: int) -> str:
    """Return when a process started, in ticks since boot; "" if it is dead or a zombie.

    No other process ever has the same pid and start.
    """
    fields = closure.text_of(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if fields and fields[0] not in "ZX" else ""


def _destroy(path: str) -> None:
    for _ in range(100):
        # Nothing more can start in a folder that is gone, but something may just have done so.
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
        for variable in variables:  # a user's shell in the folder has none
            if variable.startswith(f"{MARK}=") and variable.endswith(
                f"/{os.path.basename(folder)}"
            ):
                os.kill(pid, signal.SIGKILL)
                return True
    return False


# ---- the lock of a slot --------------------------------------------------------------------------


@contextlib.contextmanager
def locked(slot: str, waiting: Callable[..., contextlib.AbstractContextManager]) -> Iterator[None]:
    """Hold a slot's lock.

    While another process has it, the context `waiting(holder)` is entered. holder() returns which
    process has it, and for how many seconds.
    """
    fd = _open_lock(slot)
    try:
        with contextlib.ExitStack() as stack:
            is_shown = False
            while True:
                is_locked = _try_lock(fd)
                if is_locked and _is_current(fd, slot):
                    break
                if is_locked:
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
    """Hold a slot's lock unless somebody has it, or builds there. Yield True if it is held."""
    fd = _open_lock(slot)
    try:
        yield _try_lock(fd) and not any(is_alive(entry.path, "stage") for entry in os.scandir(slot))
    finally:
        _close_lock(fd)


def _open_lock(slot: str) -> int:
    os.makedirs(slot, 0o755, exist_ok=True)
    fd = os.open(f"{slot}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    _held.add(fd)
    return fd


def _close_lock(fd: int) -> None:
    _held.discard(fd)
    os.close(fd)


def _is_current(fd: int, slot: str) -> bool:
    """Return True if an open file is still the slot's lock. An empty slot may have been removed."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(fd), os.stat(f"{slot}/lock"))
    return False


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    return True  # also without locks: a double build is harmless


def _holder(slot: str) -> tuple[str, float]:
    """Return (the process that builds in a slot, for how many seconds)."""
    words = closure.text_of(f"{slot}/lock").split()
    if len(words) != 3:
        return "another process", 0.0
    return f"pid {words[0]} on {words[1]}", max(0.0, time.time() - float(words[2]))


def _forget() -> None:
    """Close the parent's descriptors in a forked child, which would keep the locks."""
    for fd in (*_ours.values(), *_held):
        os.close(fd)
    _ours.clear()
    _held.clear()


os.register_at_fork(after_in_child=_forget)
