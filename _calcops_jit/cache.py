"""The cache: built libraries on disk.

    <cache>/<name>-<digest of the request's facts>/     a slot
        lock                 locked (flock) by the process that builds here
        build.<digest>/      where torch and ninja build (build.py), one for each checkout
        failed.log           the compilers' output in the last build that failed
        <digest>/            a generation: one complete build, named by the digest of its contents
            <name>.so        the library
            manifest         its record: facts, digest, operators, inputs

A generation appears by one rename, is never written to, and is loaded only after its bytes were
compared with the manifest. So a process that is killed at any moment leaves nothing half-done.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

from .inputs import Changed, Inputs, digest, digest_of_open
from .messages import Progress, report
from .request import Request

_POLL_S = 0.1  # between two looks at a lock
_KEPT = 8  # generations of a slot; the least recently used ones beyond these are removed
# The exceptions of a generation that is stale, damaged or unreadable.
UNFIT = (Changed, OSError, ValueError, KeyError, TypeError)


class Generation(SimpleNamespace):
    """A complete build whose bytes were verified."""

    path: str  # of the library
    digest: str  # the generation's name
    manifest: dict
    inputs: Inputs


def folder() -> str:
    """Return the cache's folder.

    BuildError: the user has no home, and the folder in its place belongs to somebody else.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = "~/.cache"
    path = os.environ.get("CALCOPS_CACHE") or f"{base}/calcops"
    path = os.path.expanduser(path)
    if f"{path}/".startswith("~/"):  # "~nobody" is the name of a folder, as in a shell
        path = _without_home()
    return os.path.abspath(path)


def _without_home() -> str:
    """Return a folder for a user without HOME and without a name, as in some containers."""
    path = f"{tempfile.gettempdir()}/calcops-{os.getuid()}"
    with contextlib.suppress(FileNotFoundError):
        if os.lstat(path).st_uid != os.getuid():  # its owner could exchange the libraries
            what = f"cannot use {path} as a cache: it belongs to another user"
            raise report(what, ["there is no home folder"], "export CALCOPS_CACHE=<a folder>")
    return path


# ---- finding -------------------------------------------------------------------------------------


def find(request: Request, reasons: list[str] | None = None) -> Generation | None:
    """Return a build of the request whose inputs have not changed, or None.

    Why other builds do not fit is appended to `reasons`.
    """
    for i, path in enumerate(generations(f"{folder()}/{request.slot}")):
        try:
            generation = checked(path, request)
        except UNFIT as problem:
            if reasons is not None:
                reasons.append(str(problem))
            continue
        if i > 0:
            with contextlib.suppress(OSError):  # somebody else's cache is only read
                os.utime(f"{path}/manifest")  # the time of last use, which sorts generations
        return generation
    return None


def generations(slot: str) -> list[str]:
    """Return the folders of a slot's generations, the last used first."""
    paths = map(os.path.dirname, glob.glob(f"{glob.escape(slot)}/*/manifest"))
    return sorted(paths, key=_last_use, reverse=True)


def _last_use(path: str) -> float:
    """Return the time of the last use of a generation; 0 if another process has removed it."""
    with contextlib.suppress(OSError):
        return os.path.getmtime(f"{path}/manifest")
    return 0.0


def checked(path: str, request: Request) -> Generation:
    """Return the generation in a folder. UNFIT: it is stale, damaged or unreadable."""
    manifest = read_record(f"{path}/manifest")
    inputs = Inputs(**manifest["inputs"])
    inputs.check(request)
    library = f"{path}/{request.product}"
    with _verified(library) as file:
        if digest_of_open(file.fileno()) != manifest["digest"]:
            raise ValueError(f"{library} is damaged")
    name = os.path.basename(path)
    return Generation(path=library, digest=name, manifest=manifest, inputs=inputs)


def read_record(path: str) -> dict:
    """Return what write_record() has written. UNFIT: it cannot be used."""
    with _verified(path) as file:
        checksum, _, text = file.read().partition(b"\n")
    if checksum.decode(errors="replace") != digest(text):
        raise ValueError(f"{path} is damaged")
    return json.loads(text)


def _verified(path: str):
    """Open a regular file that only this user and root can have written."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would block
    status = os.fstat(fd)
    is_ours = status.st_uid in (0, os.getuid()) and not status.st_mode & 0o022
    if not stat.S_ISREG(status.st_mode) or not is_ours:
        os.close(fd)
        raise ValueError(f"{path} is no file that only this user and root can write")
    return open(fd, "rb")


def newest(name: str) -> Iterator[dict]:
    """Yield the manifests of all builds of a name, the last used first."""
    of_name = [slot for slot in slots() if os.path.basename(slot)[:-17] == name]
    paths = [path for slot in of_name for path in generations(slot)]
    for path in sorted(paths, key=_last_use, reverse=True):
        with contextlib.suppress(*UNFIT):
            manifest = read_record(f"{path}/manifest")
            if manifest["facts"]["format"] and "asked" in manifest:
                yield manifest


def differences(old: dict, new: dict) -> list[str]:
    """Return a line for each fact that differs, from a manifest's facts and a request's."""
    changed = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    return [f"{key}: {old.get(key)} -> {new.get(key)}" for key in changed]


# ---- building ------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked_slot(
    request: Request, progress: Callable[[str], str] = lambda slot: ""
) -> Iterator[str]:
    """Make a request's slot, wait until this process alone has its lock, and yield its path.

    Meanwhile it shows `progress(slot)`, the state of another process's build. The kernel releases
    the lock when this process ends in any way. OSError: the cache cannot be written, or its file
    system has no locks.
    """
    slot = f"{folder()}/{request.slot}"
    if set("$:\n").intersection(slot):
        raise OSError(errno.EINVAL, "ninja cannot quote this path", slot)
    os.makedirs(slot, 0o755, exist_ok=True)
    if not os.path.isfile(f"{slot}/lock"):
        remove(f"{slot}/lock")
    lock = os.open(f"{slot}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:  # Ctrl-C may raise as soon as flock returns
        if not _locked(lock):
            title = f"waiting for another process, which builds {request.name}"
            with Progress(title, lambda: progress(slot)) as shown:
                while not _locked(lock):
                    time.sleep(_POLL_S)
                    shown.update()
        yield slot
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # a forked child may have the descriptor, too
        os.close(lock)


def _locked(lock: int) -> bool:
    """Lock an open file. Return False if another process has locked it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def publish(
    slot: str, product: str, request: Request, inputs: Inputs, registered: dict
) -> Generation:
    """Make a file that was built a generation of a locked slot.

    `registered` has what the loaded library registers (registration.described).
    """
    with open(product, "rb") as file:
        library_digest = digest_of_open(file.fileno())
    manifest = {
        "facts": request.facts,
        "asked": request.asked,
        "digest": library_digest,
        "inputs": vars(inputs),
        **registered,
    }
    contents = [library_digest, vars(inputs)]
    name = digest(json.dumps(contents, sort_keys=True).encode())[:16]
    path = f"{slot}/{name}"
    new = f"{os.path.dirname(product)}/new.{os.urandom(4).hex()}"
    os.mkdir(new, 0o755)
    os.chmod(product, 0o755)
    os.rename(product, f"{new}/{request.product}")
    write_record(f"{new}/manifest", manifest)
    if os.path.lexists(path):  # it is damaged
        os.rename(path, f"{new}.old")
    os.rename(new, path)
    remove(f"{new}.old")
    for old in generations(slot)[_KEPT:]:
        remove(old)  # a process that has loaded it keeps it
    library = f"{path}/{request.product}"
    return Generation(path=library, digest=name, manifest=manifest, inputs=inputs)


def write_record(path: str, record: dict) -> None:
    """Write a dictionary with the key "facts", and its digest."""
    text = json.dumps(record).encode()
    write_whole(path, digest(text).encode() + b"\n" + text)


def write_whole(path: str, data: bytes) -> None:
    """Write a file by one rename, so that nobody reads a part of it."""
    beside = f"{path}.{os.getpid()}.{os.urandom(4).hex()}"
    with open(beside, "wb") as file:
        os.fchmod(file.fileno(), 0o644)  # the umask may let a group write it
        file.write(data)
    os.replace(beside, path)


def remove(path: str) -> None:
    """Remove a file or a folder, if it exists and as far as possible."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            os.unlink(path)


# ---- the whole cache -----------------------------------------------------------------------------


def slots() -> list[str]:
    """Return the paths of all slots."""
    return sorted(glob.glob(f"{glob.escape(folder())}/*-{'[0-9a-f]' * 16}"))


def clean() -> dict[str, str]:
    """Empty every slot in which no process builds.

    Return {slot: "removed", "in use" or "not removable"} of the slots that were not empty.
    """
    outcomes = {}
    for slot in slots():
        if not os.path.lexists(f"{slot}/lock") or not _contents(slot):
            continue
        outcomes[slot] = "not removable"
        with contextlib.suppress(OSError), open(f"{slot}/lock", "r+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                outcomes[slot] = "in use"
                continue
            for path in _contents(slot):
                remove(path)
            if not _contents(slot):
                outcomes[slot] = "removed"
    return outcomes


def _contents(slot: str) -> list[str]:
    """Return the paths in a slot, but not the lock, for which a process may wait."""
    with contextlib.suppress(OSError):
        return [f"{slot}/{name}" for name in os.listdir(slot) if name != "lock"]
    return []
