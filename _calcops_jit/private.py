"""Private folders of a process, which are garbage once it has ended, in whatever way.

    <kind>.<host>.<pid>.<start>.<x>/    says whose it is; the owner also holds a lock on it while it lives

They are removed when the interpreter exits. Those of a process that was killed are swept away by the next one.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import signal
import socket
import time

from . import inputs

DAY_S = 24 * 3600.0
MARK = "CALCOPS_STAGING"  # in the environment of all that a build starts: its private folder

_ours: dict[str, int] = {}  # {folder: the descriptor that is locked}


def make(parent: str, kind: str) -> str:
    """A new folder in `parent`, where those of dead processes are removed first."""
    sweep(parent, kind)
    host, pid = socket.gethostname(), os.getpid()
    path = f"{parent}/{kind}.{host}.{pid}.{_start_time(pid)}.{os.urandom(4).hex()}"
    os.mkdir(path, 0o700)
    _ours[path] = fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # where there are no locks, the name has to do
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return path


def remove(path: str) -> None:
    """Removes a folder that make() gave, and ends what still runs in it; not in a child of the process that made it."""
    if path.rsplit(".", 3)[1] == str(os.getpid()):
        _destroy(path)
        if (fd := _ours.pop(path, None)) is not None:
            os.close(fd)


@atexit.register
def remove_all() -> None:
    """Removes them all, also those of builds that still run in daemon threads."""
    for path in list(_ours):
        _destroy(path)


def _forget() -> None:
    """A child would keep the locks after its parent died."""
    for fd in _ours.values():
        os.close(fd)
    _ours.clear()


os.register_at_fork(after_in_child=_forget)


def sweep(parent: str, kind: str) -> None:
    """Removes the folders whose owners died, and ends the compilers that these left running."""
    for entry in os.listdir(parent):
        if entry.startswith(f"{kind}.") and _is_orphan(path := f"{parent}/{entry}", kind):
            _destroy(path)


def is_alive(path: str, kind: str) -> bool:
    """Whether it is such a folder, and its owner may still work in it."""
    return os.path.basename(path).startswith(f"{kind}.") and not _is_orphan(path, kind)


def _is_orphan(path: str, kind: str) -> bool:
    with contextlib.suppress(OSError, ValueError):  # a name that is none of ours
        host, pid, start, _ = os.path.basename(path).removeprefix(f"{kind}.").rsplit(".", 3)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            status = os.fstat(fd)
            if status.st_uid != os.getuid():
                return False
            if host != socket.gethostname():
                return time.time() - status.st_mtime > DAY_S and _is_free(fd)
            # Containers may share a host's name and a folder, but not its processes: the lock knows.
            return _start_time(int(pid)) != start and _is_free(fd)
        finally:
            os.close(fd)
    return False


def _is_free(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)  # where there are no locks, nobody holds one
    return True


def _start_time(pid: int) -> str:
    """When a process started, in ticks since boot; "" if it is dead or a zombie. With the pid it names it for good."""
    fields = inputs.text_of(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if fields and fields[0] not in "ZX" else ""


def _destroy(path: str) -> None:
    for _ in range(100):
        gone = not os.path.lexists(path)  # nothing more can start in it, but something may just have done so
        if not [pid for pid in os.listdir("/proc") if pid.isdigit() and _ended(int(pid), path)] and gone:
            break
        if gone:
            time.sleep(0.01)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _ended(pid: int, folder: str) -> bool:
    """Ends a process if a build in `folder` started it: a shell of the user's may have gone there, too."""
    with contextlib.suppress(OSError):  # it has ended, or is somebody else's
        if os.readlink(f"/proc/{pid}/cwd").removesuffix(" (deleted)") == os.path.realpath(folder):
            with open(f"/proc/{pid}/environ", "rb") as file:
                variables = file.read().decode(errors="surrogateescape").split("\0")
            if any(v.startswith(f"{MARK}=") and v.endswith(f"/{os.path.basename(folder)}") for v in variables):
                os.kill(pid, signal.SIGKILL)
                return True
    return False
