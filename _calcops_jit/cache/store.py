"""The cache on disk.

    <cache>/<name>-<digest of the facts>/   a slot: what was built for one Request
        <digest of all contents>/           a generation: one complete build, put here by one rename
            <name>.so, or unit.o            loaded from here, never written to again
            manifest                        written last; only its stamps are renewed later
        stage.<host>.<pid>.<start>.<x>/     the private folder of one build
        lock                                locked (flock) by the process that builds; has its pid
        failed.log                          the compilers' output in the last build that failed

A process holds a shared flock on every library that it has loaded, so that no other removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

from ..errors import NO_DESCRIPTOR, report
from ..request import FORMAT, Request
from . import folders
from .closure import Changed, Closure, digest, file_digest

_KEEP = 8  # generations in a slot
# The exceptions of a generation that is stale, damaged or unreadable.
UNFIT = (Changed, OSError, ValueError, KeyError, TypeError)
_LEFTOVERS = {"lock", "failed.log"}
_USED_S = 24 * 3600.0  # the time of last use is renewed if it is older than this


class Manifest(SimpleNamespace):
    """The record of a generation.

    Its file has a line with the digest of the rest, a line of JSON, and the closure's stamps.
    """

    request: dict  # the facts of its Request
    # The arguments of requests.foreign. For a wheel's objects: the sources that are not in them.
    asked: list = []
    size: int  # of the library, in bytes
    digest: str  # of the library
    operators: dict[str, str]  # {operator: schemas and documentation}
    closure: Closure

    def dump(self) -> bytes:
        """Return the content of the manifest's file."""
        closure = vars(self.closure) | {"stamps": None}
        text = json.dumps(vars(self) | {"closure": closure}, separators=(",", ":"))
        body = text.encode() + b"\n" + self.closure.stamps
        return digest(body).encode() + b"\n" + body

    @staticmethod
    def parse(data: bytes) -> Manifest:
        """Return the manifest of a file's content. ValueError: it is damaged or outdated."""
        checksum, _, body = data.partition(b"\n")
        if checksum.decode(errors="replace") != digest(body):
            raise ValueError("manifest is damaged")
        text, _, stamps = body.partition(b"\n")
        fields = json.loads(text)
        if fields.get("request", {}).get("format") != FORMAT:
            raise ValueError("manifest of another version")
        closure = Closure(**fields["closure"] | {"stamps": stamps})
        return Manifest(**fields | {"closure": closure})


class Generation(SimpleNamespace):
    """A library whose bytes were verified. It is loaded from the same descriptor, `fd`."""

    path: str
    manifest: Manifest
    fd: int


def open_regular(path: str, is_own: bool = False) -> int:
    """Open a regular file and return its descriptor, which is never that of a standard stream.

    OSError: the file is a FIFO or the like, or `is_own` is set and others may have written it.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if fd <= 2:  # a daemon closed its standard streams, but other code may still write to them
        standard = fd
        fd = fcntl.fcntl(standard, fcntl.F_DUPFD_CLOEXEC, 3)
        os.close(standard)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", path)
    if is_own and not folders.is_ours(status):
        os.close(fd)
        raise OSError(errno.EPERM, "somebody else may have written it", path)
    return fd


def read_manifest(generation: str, is_own: bool = False) -> Manifest:
    """Return the manifest in the folder of a generation. `is_own` is that of open_regular()."""
    with open(open_regular(f"{generation}/manifest", is_own), "rb") as file:
        return Manifest.parse(file.read())


def find(request: Request, reasons: list[str] | None = None) -> Generation | None:
    """Return a complete build of the request whose inputs have not changed, or None.

    Args:
        request: what to find.
        reasons: a list to which find() appends why other builds do not fit.
    """
    own = folders.own()
    for folder in [*own, *folders.shared()]:
        is_own = folder in own
        slot = slot_path(folder, request)
        for i, (used, path) in enumerate(_generations(slot, is_own)):
            try:
                manifest = read_manifest(path, is_own)
                fresher = manifest.closure.check(request)
                generation = verified(f"{path}/{request.output}", manifest, is_own)
            except UNFIT as problem:
                if getattr(problem, "errno", 0) in NO_DESCRIPTOR:
                    raise
                if reasons is not None:
                    reasons.append(str(problem))
                continue
            if is_own:
                with contextlib.suppress(OSError):
                    if fresher:
                        write_whole(f"{path}/manifest", manifest.dump())
                    if i > 0 or time.time() - used > _USED_S:
                        os.utime(path)  # the time of last use, by which generations are sorted
            return generation
    return None


def verified(path: str, manifest: Manifest, is_own: bool = False) -> Generation:
    """Return the opened library or object of a manifest.

    ValueError: its bytes are not those that were built.
    """
    fd = open_regular(path, is_own)
    _share(fd)
    status = os.fstat(fd)
    problem = ""
    if status.st_nlink == 0:
        problem = "was just removed"
    elif status.st_size != manifest.size or file_digest(fd) != manifest.digest:
        problem = "is damaged"
    if problem:
        os.close(fd)
        raise ValueError(f"{path} {problem}")
    return Generation(path=path, manifest=manifest, fd=fd)


def _share(fd: int) -> None:
    """Take a shared lock, which marks a library as in use."""
    # A process that removes the library has an exclusive lock for a moment.
    for _ in range(100):
        try:
            return fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.01)
        except OSError:  # this file system has no locks
            return


def other_facts(request: Request) -> list[str]:
    """Return a line for each fact in which a request differs from the last build of its name."""
    last = next(newest(request.name), None)
    return differences(last.request, request.facts) if last else []


def differences(old: dict, facts: dict) -> list[str]:
    """Return a line for each fact that is not the same in a manifest's facts, `old`."""
    new = json.loads(json.dumps(facts))  # tuples become lists, as in a manifest
    changed = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    return [f"{key}: {_difference(old.get(key, []), new.get(key, []))}" for key in changed]


def newest(name: str) -> Iterator[Manifest]:
    """Yield the manifests of a name's builds, the last used first."""
    generations: list[tuple[float, str]] = []
    for folder in folders.own():
        for slot in folders.slots(folder):
            if os.path.basename(slot)[:-17] == name:  # without - and 16 digits
                generations += _generations(slot)
    for _, path in sorted(generations, reverse=True):
        with contextlib.suppress(OSError, ValueError):
            yield read_manifest(path, is_own=True)


def _difference(old, new) -> str:
    if isinstance(old, dict) or isinstance(new, dict):
        old = [f"{key}={value}" for key, value in dict(old).items()]
        new = [f"{key}={value}" for key, value in dict(new).items()]
    if isinstance(old, list) and isinstance(new, list) and set(old) != set(new):
        removed = [f"-[{word}]" for word in old if word not in new]
        added = [f"+[{word}]" for word in new if word not in old]
        return " ".join(removed + added)
    return f"{old} -> {new}"


def _generations(slot: str, is_own: bool = False) -> list[tuple[float, str]]:
    """Return (time of last use, folder) of each generation, the last used first."""
    try:
        with os.scandir(slot) as scanned:
            entries = list(scanned)
        subfolders = [entry for entry in entries if "." not in entry.name and entry.is_dir()]
        generations = [(entry.stat().st_mtime, entry.path) for entry in subfolders]
        if is_own and any(entry.name.startswith("stage.") for entry in entries):
            from . import locks

            # A build that was killed after it published its library left its private folder. No
            # later build in this slot would remove the folder.
            locks.sweep(slot, "stage")
    except OSError as problem:
        if problem.errno in NO_DESCRIPTOR:
            raise
        return []
    return sorted(generations, reverse=True)


def slot_path(folder: str, request: Request) -> str:
    return os.path.join(folder, f"{request.name}-{request.slot}")


def write_whole(path: str, data: bytes) -> None:
    """Write a file beside `path` and rename it to `path`."""
    beside = f"{path}.{os.getpid()}.{os.urandom(4).hex()}"
    try:
        with open(beside, "wb") as file:
            # The umask may let a group write the file, which find() would refuse then.
            os.fchmod(file.fileno(), 0o644)
            file.write(data)
        os.replace(beside, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(beside)


def writable_slot(request: Request) -> tuple[str, str]:
    """Return (a slot that can be written, why the first cache folder cannot or "")."""
    problem = ""
    for folder in folders.own():
        slot = slot_path(folder, request)
        try:
            os.makedirs(folder, 0o700 if folder == folders.fallback() else 0o755, exist_ok=True)
            with _temporary_file(slot) as probe:
                os.posix_fallocate(probe.fileno(), 0, 4 << 20)  # any build needs that much
                # find() would refuse a new file that belongs to another user.
                if not folders.is_ours(os.fstat(probe.fileno())):
                    raise OSError(errno.EPERM, "files there belong to others")
        except OSError as error:
            problem = problem or f"{folder}: {error.strerror}"
            continue
        return slot, problem
    slot = slot_path(folders.last_resort(), request)
    os.mkdir(slot)
    return slot, problem


def _temporary_file(slot: str):
    """Make a slot and return an open temporary file in it."""
    for _ in range(2):  # another process may remove the empty slot: see tidy()
        os.makedirs(slot, 0o755, exist_ok=True)  # readable by others if the umask permits
        with contextlib.suppress(FileNotFoundError):
            return tempfile.TemporaryFile(dir=slot)
    os.makedirs(slot, 0o755, exist_ok=True)
    return tempfile.TemporaryFile(dir=slot)


def tidy(slot: str, everything: bool = False) -> bool:
    """Remove the folders of ended builds from a slot, and the slot if nothing else is in it.

    While a process builds in the slot, the slot stays, and so do its generations.

    Args:
        slot: its folder.
        everything: remove generations, too, except those in use.

    Returns:
        True if the slot is gone.
    """
    from . import locks

    with contextlib.suppress(OSError):
        locks.sweep(slot, "stage")
        if not (everything or set(os.listdir(slot)) <= _LEFTOVERS):
            return False
        with locks.locked_if_free(slot) as free:
            if not free:
                return False
            generations = _generations(slot) if everything else []
            for _, generation in generations:
                files = (f"{generation}/manifest", output(generation))
                if any(map(os.path.lexists, files)):  # a folder without them is the user's
                    discard(generation)
            if set(os.listdir(slot)) <= _LEFTOVERS:
                shutil.rmtree(slot)
    return not os.path.exists(slot)


def output(generation: str) -> str:
    """Return the path of the library, or the object, in a generation's folder."""
    name = os.path.basename(os.path.dirname(generation)).rpartition("-")[0]
    return f"{generation}/unit.o" if name.startswith("unit-") else f"{generation}/{name}.so"


def in_use(generation: str) -> bool:
    """Return True if a process has loaded the library, or if the file system has no locks."""
    return not _unless_in_use(generation, lambda: None)


def discard(generation: str) -> bool:
    """Remove a generation unless it is in use. Return True if it was removed."""
    return _unless_in_use(generation, lambda: shutil.rmtree(generation, ignore_errors=True))


def _unless_in_use(generation: str, act: Callable[[], None]) -> bool:
    """Call `act` unless a generation is in use. Return True if it was called."""
    try:
        with open(output(generation), "rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            act()  # while the lock is held, find() waits
    except (FileNotFoundError, IsADirectoryError):
        act()
    except OSError:
        return False
    return True


def publish(slot: str, folder: str, file: str, request: Request, closure: Closure) -> None:
    """Make `file`, which is in the private `folder` of a build, a generation of the slot."""
    generation = place(slot, folder, file, request, closure)
    complete(generation, {})
    os.close(generation.fd)


def place(slot: str, folder: str, file: str, request: Request, closure: Closure) -> Generation:
    """Put `file` into its final place by one rename. find() returns it only after complete().

    A generation of the same name is replaced: a damaged one or, without locks, another process's.
    """
    new = f"{folder}/complete.{os.urandom(4).hex()}"
    os.mkdir(new, 0o755)
    os.chmod(file, 0o755)
    os.rename(file, f"{new}/{request.output}")
    fd = open_regular(f"{new}/{request.output}")
    _share(fd)
    manifest = Manifest(
        request=request.facts,
        asked=request.asked,
        size=os.fstat(fd).st_size,
        digest=file_digest(fd),
        operators={},
        closure=closure,
    )
    # The generation's name depends on contents only, not on times and the paths of tools.
    contents = sorted(content for _, content in closure.entries().values())
    target = f"{slot}/{digest(f'{manifest.digest} {contents}'.encode())[:16]}"
    for attempt in range(20):
        os.makedirs(slot, 0o755, exist_ok=True)  # tidy() may remove the empty slot of a unit
        try:
            os.rename(new, target)
            break
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
            with contextlib.suppress(OSError):
                # The old generation goes into the private folder, each time under another name.
                os.rename(target, f"{new}.old{attempt}")
    else:
        evidence = "something makes it again and again"
        raise report(f"cannot publish {target}", [evidence], f"rm -r {slot}")
    for _, old in _generations(slot)[_KEEP:]:
        discard(old)
    return Generation(path=f"{target}/{request.output}", manifest=manifest, fd=fd)


def complete(generation: Generation, operators: dict[str, str]) -> None:
    """Write the manifest of a generation, so that find() finds it.

    `operators` is {operator: schemas and documentation}.
    """
    generation.manifest.operators = operators
    path = f"{os.path.dirname(generation.path)}/manifest"
    # On a file system without locks, another process may be replacing the generation's folder.
    for _ in range(100):
        with contextlib.suppress(FileNotFoundError):
            return write_whole(path, generation.manifest.dump())
        time.sleep(0.01)
    write_whole(path, generation.manifest.dump())
