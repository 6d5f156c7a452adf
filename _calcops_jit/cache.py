"""The cache: built libraries on disk.

    <cache>/<name>-<digest of the request's facts>/     an entry
        lock                     locked (flock) by the process that builds here
        build.<machine>.<root>/  where torch and ninja build (build.py)
        failed.<...>.log         the compilers' output in the last build there that failed
        asked.<digest>           arguments of load(), one file for each folder of sources
        <digest>/                a build, named by the digest of its contents
            <name>.so            the library
            manifest             its facts, digest, operators and inputs

A build appears by one rename, is never written to, and is loaded only after its bytes were
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
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING

from .inputs import Changed, Inputs, digest, digest_of_open
from .messages import Progress, report

if TYPE_CHECKING:
    from .request import Request

_POLL_S = 0.1  # between two looks at a lock
_KEPT = 8  # builds of an entry; the least recently used ones beyond these are removed
# The exceptions of a build that is stale, damaged or unreadable.
UNFIT = (Changed, OSError, ValueError, KeyError, TypeError)


class Build(SimpleNamespace):
    """A complete build whose bytes were verified."""

    path: str  # of the library
    digest: str  # the build's name
    manifest: dict
    inputs: Inputs


def folder() -> str:
    """Return the cache's folder.

    BuildError: the user has no home.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = "~/.cache"
    path = os.environ.get("CALCOPS_CACHE") or f"{base}/calcops"
    path = os.path.expanduser(path)
    if f"{path}/".startswith("~/"):  # "~nobody" is the name of a folder, as in a shell
        what = "cannot find a place for the cache: this user has no home folder"
        raise report(what, [], "export CALCOPS_CACHE=<a folder of your own>")
    return os.path.abspath(path)


# ---- finding -------------------------------------------------------------------------------------


def find(request: Request, reasons: list[str] | None = None) -> Build | None:
    """Return a build of the request whose inputs have not changed, or None.

    Why other builds do not fit is appended to `reasons`.
    """
    for i, path in enumerate(builds(f"{folder()}/{request.entry}")):
        try:
            build = checked(path, request)
        except UNFIT as problem:
            if reasons is not None:
                reasons.append(str(problem))
            continue
        if i > 0:
            with contextlib.suppress(OSError):  # somebody else's cache is only read
                os.utime(f"{path}/manifest")  # the time of last use, which sorts builds
        return build
    return None


def builds(entry: str) -> list[str]:
    """Return the folders of an entry's builds, the last used first."""
    manifests = glob.glob(f"{glob.escape(entry)}/*/manifest")
    return list(map(os.path.dirname, sorted(manifests, key=last_use, reverse=True)))


def last_use(path: str) -> float:
    """Return the time of a file or folder; 0 if another process has removed it."""
    with contextlib.suppress(OSError):
        return os.path.getmtime(path)
    return 0.0


def checked(path: str, request: Request) -> Build:
    """Return the build in a folder. UNFIT: it is stale, damaged or unreadable."""
    is_shipped = bool(request.portable)
    manifest = read_checked(f"{path}/manifest", is_shipped)
    inputs = Inputs(**manifest["inputs"])
    inputs.check(request)
    library = f"{path}/{request.product}"
    with _verified(library, is_shipped) as file:
        if digest_of_open(file.fileno()) != manifest["digest"]:
            raise ValueError(f"{library} is damaged")
    name = os.path.basename(path)
    return Build(path=library, digest=name, manifest=manifest, inputs=inputs)


def read_checked(path: str, is_shipped: bool = False) -> dict:
    """Return what write_checked() has written. UNFIT: it cannot be used."""
    with _verified(path, is_shipped) as file:
        checksum, _, text = file.read().partition(b"\n")
    if checksum.decode(errors="replace") != digest(text):
        raise ValueError(f"{path} is damaged")
    return json.loads(text)


def _verified(path: str, is_shipped: bool = False):
    """Open a regular file that only this user and root can have written.

    A file that was shipped with a package has the owner and the mode of the package's code.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would block
    status = os.fstat(fd)
    is_ours = status.st_uid in (0, os.getuid()) and not status.st_mode & 0o022
    if not stat.S_ISREG(status.st_mode) or not (is_ours or is_shipped):
        os.close(fd)
        raise ValueError(f"{path} is not a file that only this user and root can write")
    return open(fd, "rb")


def newest(name: str) -> dict | None:
    """Return the manifest of the build of a name that was used last; None if there is none."""
    paths = [f"{path}/manifest" for entry in entries(name) for path in builds(entry)]
    for path in sorted(paths, key=last_use, reverse=True):
        with contextlib.suppress(*UNFIT):
            return read_checked(path)
    return None


def remember(request: Request) -> None:
    """Write down the arguments of load(), for commands that are given only a name."""
    text = json.dumps(request.asked).encode()
    path = f"{folder()}/{request.entry}/asked.{digest(text)[:16]}"
    if not os.path.exists(path):
        with contextlib.suppress(OSError):  # somebody else's cache is only read
            write_checked(path, request.asked)


def remembered(name: str) -> list[dict]:
    """Return the arguments of load() for a name, the newest first."""
    paths = [path for entry in entries(name) for path in glob.glob(f"{glob.escape(entry)}/asked.*")]
    asked = []
    for path in sorted(paths, key=last_use, reverse=True):
        with contextlib.suppress(*UNFIT):
            asked.append(read_checked(path))
    return asked


def differences(old: dict, new: dict) -> list[str]:
    """Return a line for each fact that differs, from a manifest's facts and a request's."""
    changed = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    return [f"{key}: {old.get(key)} -> {new.get(key)}" for key in changed]


# ---- building ------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked_entry(request: Request) -> Iterator[str]:
    """Make a request's entry, wait until this process alone has its lock, and yield its path.

    The kernel releases the lock when this process ends in any way. OSError: the cache cannot be
    written, or its file system has no locks.
    """
    entry = f"{folder()}/{request.entry}"
    if set("$:\n").intersection(entry):
        raise OSError(errno.EINVAL, "ninja cannot quote this path", entry)
    os.makedirs(entry, 0o755, exist_ok=True)
    if not os.path.isfile(f"{entry}/lock"):
        remove(f"{entry}/lock")
    lock = os.open(f"{entry}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:  # Ctrl-C may raise as soon as flock returns
        if not _locked(lock):
            what = f"which builds {request.name}"
            with Progress("waiting for another process,", lambda: what) as shown:
                while not _locked(lock):
                    time.sleep(_POLL_S)
                    shown.update()
        yield entry
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


def publish(entry: str, product: str, request: Request, inputs: Inputs, registered: dict) -> Build:
    """Move a file that was built to a locked entry, with its manifest.

    `registered` has what the loaded library registers (registration.described).
    """
    with open(product, "rb") as file:
        library_digest = digest_of_open(file.fileno())
    manifest = {
        "facts": request.facts,
        "digest": library_digest,
        "inputs": vars(inputs),
        **registered,
    }
    contents = [library_digest, vars(inputs)]
    name = digest(json.dumps(contents, sort_keys=True).encode())[:16]
    path = f"{entry}/{name}"
    new = f"{os.path.dirname(product)}/new.{os.urandom(4).hex()}"
    os.mkdir(new, 0o755)
    os.chmod(product, 0o755)
    os.rename(product, f"{new}/{request.product}")
    write_checked(f"{new}/manifest", manifest)
    while True:
        try:
            os.rename(new, path)
            break
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
        # It is damaged, or another machine, which does not see our lock, has built it meanwhile.
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, f"{new}.old")
        remove(f"{new}.old")
    for old in builds(entry)[_KEPT:]:
        remove(old)  # a process that has loaded it keeps it
    library = f"{path}/{request.product}"
    return Build(path=library, digest=name, manifest=manifest, inputs=inputs)


def write_checked(path: str, record: dict) -> None:
    """Write a dictionary, and its digest."""
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


def entries(name: str | None = None) -> list[str]:
    """Return the paths of the entries of a name, or of all."""
    paths = sorted(glob.glob(f"{glob.escape(folder())}/*-{'[0-9a-f]' * 16}"))
    return [path for path in paths if name in (None, os.path.basename(path)[:-17])]


def clean(name: str | None = None) -> tuple[int, int]:
    """Empty every entry of a name, or of all, in which no process builds.

    Return how many were emptied, and how many were not.
    """
    used = [path for path in entries(name) if os.path.lexists(f"{path}/lock") and _contents(path)]
    for entry in used:
        with contextlib.suppress(OSError), open(f"{entry}/lock", "r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in _contents(entry):
                remove(path)
    left = sum(bool(_contents(entry)) for entry in used)
    return len(used) - left, left


def _contents(entry: str) -> list[str]:
    """Return the paths in an entry, but not the lock, for which a process may wait."""
    with contextlib.suppress(OSError):
        return [f"{entry}/{name}" for name in os.listdir(entry) if name != "lock"]
    return []
