"""The cache on disk.

    <cache>/<name>-<slot>/               everything that one Request, a library or a unit, was ever built into
        lock                             held (flock) while one process builds; says who
        <library digest>/<name>.so       a generation: put here by one rename, loaded from here, then never written to
        <library digest>/manifest        makes it complete, so that it is found; may get fresher stats
        stage.<host>.<pid>.<start>.<x>/  the private folder of one build
        failed.log                       the compiler's output of the last build that failed

A library that a process has is locked (flock, shared) for as long; what is removed is locked (exclusively) meanwhile.
A flock is free the moment its holder dies. Where a file system does not honour it, two processes build the same
thing and the second rename finds the first's folder: no harm.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

from . import inputs, places, private
from .diagnosis import report

_KEEP = 8  # generations of a slot
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)  # which says nothing about the cache
_LEFTOVERS = {"lock", "failed.log"}


class Manifest(SimpleNamespace):
    """What is known about a published library. The file: its own digest, a line of JSON, the closure's stamps."""

    request: dict  # its facts
    asked: list = []  # the arguments of recipes.foreign
    size: int
    digest: str
    operators: dict[str, str]
    closure: inputs.Closure

    def dump(self) -> bytes:
        closure = vars(self.closure) | {"stamps": None}
        text = json.dumps(vars(self) | {"closure": closure}, separators=(",", ":"))
        body = text.encode() + b"\n" + self.closure.stamps
        return inputs.digest(body).encode() + b"\n" + body

    @staticmethod
    def parse(data: bytes) -> Manifest:
        checksum, _, body = data.partition(b"\n")
        if checksum.decode(errors="replace") != inputs.digest(body):
            raise ValueError("manifest is damaged")
        text, _, stamps = body.partition(b"\n")
        fields = json.loads(text)
        if fields.get("request", {}).get("format") != inputs.FORMAT:
            raise ValueError("manifest of another version")
        closure = inputs.Closure(**fields["closure"] | {"stamps": stamps})
        return Manifest(**fields | {"closure": closure})


class Generation(SimpleNamespace):
    """A library whose bytes were verified through `fd`, which stays open: what is loaded is what was verified."""

    path: str
    manifest: Manifest
    fd: int


def open_regular(path: str, ours: bool = False) -> int:
    """A descriptor of a regular file; OSError for everything else, and it never blocks."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if fd <= 2:  # of a standard stream that was closed, as in a daemon: others would take it for that
        low, fd = fd, fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
        os.close(low)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", path)
    if ours and not places.is_ours(status):
        os.close(fd)
        raise OSError(errno.EPERM, "somebody else may have written it", path)
    return fd


def read_manifest(generation: str, ours: bool = False) -> Manifest:
    with open(open_regular(f"{generation}/manifest", ours), "rb") as file:
        return Manifest.parse(file.read())


def find(request: inputs.Request, reasons: list[str] | None = None) -> Generation | None:
    """The published library that fits the request and whose inputs are still what they were."""
    own = places.folders()
    for folder in [*own, *places.shared_folders()]:
        slot = slot_path(folder, request)
        for i, (used, path) in enumerate(_generations(slot, ours=folder in own)):
            try:
                manifest = read_manifest(path, ours=folder in own)
                fresher = manifest.closure.check(request)
                found = _verified(f"{path}/{request.output}", manifest, ours=folder in own)
            except (inputs.Changed, OSError, ValueError, KeyError, TypeError) as problem:
                if getattr(problem, "errno", 0) in _NO_DESCRIPTOR:
                    raise
                if reasons is not None:
                    reasons.append(str(problem))
                continue
            if folder in own:
                with contextlib.suppress(OSError):
                    if fresher:
                        write_whole(f"{path}/manifest", manifest.dump())
                    if i > 0 or time.time() - used > private.DAY_S:  # when it was last used, to the day
                        os.utime(path)
            return found
    return None


def _verified(path: str, manifest: Manifest, ours: bool) -> Generation:
    fd = open_regular(path, ours)
    _share(fd)
    status = os.fstat(fd)
    if status.st_nlink == 0 or status.st_size != manifest.size or inputs.file_digest(fd) != manifest.digest:
        os.close(fd)
        raise ValueError(f"{path} {'is damaged' if status.st_nlink else 'was just removed'}")
    return Generation(path=path, manifest=manifest, fd=fd)


def _share(fd: int) -> None:
    """Says that a library is in use. Whoever removes it, or asks, has the lock for an instant only."""
    for _ in range(100):
        try:
            return fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.01)
        except OSError:  # there are no locks
            return


def other_facts(request: inputs.Request) -> list[str]:
    """What distinguishes the request from the one that was last built, or used, under its name."""
    for manifest in newest(request.name):
        old, new = manifest.request, json.loads(json.dumps(request.facts))
        changed = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
        return [f"{key}: {_difference(old.get(key, []), new.get(key, []))}" for key in changed]
    return []


def newest(name: str) -> Iterator[Manifest]:
    """What is published under a name, first what was last built or used."""
    named = (slot for f in places.folders() for slot in places.slots(f) if os.path.basename(slot)[:-17] == name)
    for _, path in sorted((g for slot in named for g in _generations(slot)), reverse=True):
        with contextlib.suppress(OSError, ValueError):
            yield read_manifest(path, ours=True)


def _difference(old, new) -> str:
    if isinstance(old, dict) or isinstance(new, dict):
        old, new = ([f"{k}={v}" for k, v in dict(d).items()] for d in (old, new))
    if isinstance(old, list) and isinstance(new, list) and set(old) != set(new):
        return " ".join([*(f"-[{w}]" for w in old if w not in new), *(f"+[{w}]" for w in new if w not in old)])
    return f"{old} -> {new}"


def _generations(slot: str, ours: bool = False) -> list[tuple[float, str]]:
    """(when it was last used, folder); first the last, which mostly fits."""
    try:
        with os.scandir(slot) as scanned:
            entries = list(scanned)
        found = [(e.stat().st_mtime, e.path) for e in entries if "." not in e.name and e.is_dir()]
        if ours and any(e.name.startswith("stage.") for e in entries):
            private.sweep(slot, "stage")  # of a builder that was killed when all but this was done
    except OSError as problem:
        if problem.errno in _NO_DESCRIPTOR:
            raise
        return []
    return sorted(found, reverse=True)


def slot_path(folder: str, request: inputs.Request) -> str:
    return os.path.join(folder, f"{request.name}-{request.slot}")


def write_whole(path: str, data: bytes) -> None:
    """Replaces a file by one rename."""
    beside = f"{path}.{os.getpid()}.{os.urandom(4).hex()}"
    try:
        with open(beside, "wb") as file:
            os.fchmod(file.fileno(), 0o644)  # whatever the umask is: find() refuses what a group may write
            file.write(data)
        os.replace(beside, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(beside)


def writable_slot(request: inputs.Request) -> tuple[str, str]:
    """(a slot folder which can be written, why not the first choice or "")."""
    problem = ""
    for folder in places.folders():
        slot = slot_path(folder, request)
        try:
            os.makedirs(folder, 0o700 if folder == places.fallback() else 0o755, exist_ok=True)
            for last in (False, False, True):
                os.makedirs(slot, 0o755, exist_ok=True)  # of these, others see what the umask lets them
                try:
                    probe = tempfile.TemporaryFile(dir=slot)
                    break
                except FileNotFoundError:  # another process tidied the empty slot away
                    if last:
                        raise
            with probe:
                os.posix_fallocate(probe.fileno(), 0, 4 << 20)  # a build of anything needs that
                if not places.is_ours(os.fstat(probe.fileno())):  # it would be refused by find()
                    raise OSError(errno.EPERM, "files there belong to others")
        except OSError as error:
            problem = problem or f"{folder}: {error.strerror}"
            continue
        return slot, problem
    slot = slot_path(places.last_resort(), request)
    os.mkdir(slot)
    return slot, problem


@contextlib.contextmanager
def locked(slot: str, waiting: Callable[..., contextlib.AbstractContextManager]) -> Iterator[None]:
    """Holds the slot's lock; while another process has it, `waiting(holder)` is entered, holder() as in _holder."""
    fd = _open_lock(slot)
    try:
        with contextlib.ExitStack() as stack:
            told = False
            while not (locked := _try_lock(fd)) or not _is_there(fd, slot):
                if locked:
                    _close_lock(fd)
                    fd = _open_lock(slot)
                    continue
                if not told:
                    stack.enter_context(waiting(lambda: _holder(slot)))
                    told = True
                time.sleep(0.05)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} {socket.gethostname()} {time.time():.0f}".encode(), 0)
        yield
    finally:
        _close_lock(fd)


def tidy(slot: str, everything: bool = False) -> bool:
    """Removes what dead builders left in a slot, with `everything` the generations that no process has, and the slot
    when nothing is left in it. Whether it is gone; where somebody builds, nothing happens."""
    with contextlib.suppress(OSError):
        private.sweep(slot, "stage")
        if not (everything or set(os.listdir(slot)) <= _LEFTOVERS):
            return False
        fd = _open_lock(slot)
        try:
            if not _try_lock(fd) or any(private.is_alive(entry.path, "stage") for entry in os.scandir(slot)):
                return False
            for _, generation in _generations(slot) if everything else ():
                if any(map(os.path.lexists, (f"{generation}/manifest", output(generation)))):  # or it is not ours
                    discard(generation)
            if set(os.listdir(slot)) <= _LEFTOVERS:
                shutil.rmtree(slot)
        finally:
            _close_lock(fd)
    return not os.path.exists(slot)


def _open_lock(slot: str) -> int:
    os.makedirs(slot, 0o755, exist_ok=True)
    fd = os.open(f"{slot}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    _held.add(fd)
    return fd


def _close_lock(fd: int) -> None:
    _held.discard(fd)
    os.close(fd)


def _is_there(fd: int, slot: str) -> bool:
    """Whether the open file still is the slot's lock: tidy() removes the slots that are empty."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(fd), os.stat(f"{slot}/lock"))
    return False


# A child that is forked during a build would keep the lock alive after the builder died.
_held: set[int] = set()
os.register_at_fork(after_in_child=lambda: [os.close(fd) for fd in _held] and _held.clear())


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    return True  # also where there are no locks: a double build is harmless


def output(generation: str) -> str:
    """The library, or object, in a generation's folder."""
    name = os.path.basename(os.path.dirname(generation)).rpartition("-")[0]
    return f"{generation}/unit.o" if name.startswith("unit-") else f"{generation}/{name}.so"


def in_use(generation: str) -> bool:
    """Whether a process has it, which find() says by a lock; where these are not to be had, anybody may."""
    return not _unless_in_use(generation, lambda: None)


def discard(generation: str) -> bool:
    """Removes a generation that no process has; gives whether it did."""
    return _unless_in_use(generation, lambda: shutil.rmtree(generation, ignore_errors=True))


def _unless_in_use(generation: str, act: Callable[[], None]) -> bool:
    try:
        with open(output(generation), "rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            act()  # under the lock, so that find() does not take it meanwhile
    except (FileNotFoundError, IsADirectoryError):
        act()
    except OSError:
        return False
    return True


def _holder(slot: str) -> tuple[str, float]:
    """Who builds, and for how many seconds."""
    words = inputs.text_of(f"{slot}/lock").split()
    if len(words) != 3:
        return "another process", 0.0
    return f"pid {words[0]} on {words[1]}", max(0.0, time.time() - float(words[2]))


@contextlib.contextmanager
def staging(slot: str) -> Iterator[str]:
    """A private folder for one build, removed at the end together with what still runs in it."""
    path = private.make(slot, "stage")
    try:
        yield path
    finally:
        private.remove(path)


def publish(slot: str, staging: str, file: str, request: inputs.Request, closure: inputs.Closure) -> None:
    """Makes `file` a generation of the slot."""
    generation = place(slot, staging, file, request, closure)
    complete(generation, {})
    os.close(generation.fd)


def place(slot: str, staging: str, file: str, request: inputs.Request, closure: inputs.Closure) -> Generation:
    """Puts `file` where it will stay, by one rename; a damaged one of this name makes room. Nobody finds it yet."""
    folder = f"{staging}/complete.{os.urandom(4).hex()}"
    os.mkdir(folder, 0o755)
    os.chmod(file, 0o755)
    os.rename(file, f"{folder}/{request.output}")
    fd = open_regular(f"{folder}/{request.output}")
    _share(fd)
    said = {"request": request.facts, "asked": request.asked, "operators": {}, "closure": closure}
    manifest = Manifest(size=os.fstat(fd).st_size, digest=inputs.file_digest(fd), **said)
    # Named by what it is made of, without times and tools' places.
    made_of = sorted(digest for _, digest in closure.entries().values())
    target = f"{slot}/{inputs.digest(f'{manifest.digest} {made_of}'.encode())[:16]}"
    for _ in range(3):
        os.makedirs(slot, 0o755, exist_ok=True)  # a unit's is made here, and may be tidied away
        try:
            os.rename(folder, target)
            break
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
            with contextlib.suppress(OSError):
                os.rename(target, f"{folder}.old")  # goes with the staging folder
    else:
        raise report(f"cannot publish {target}", ["something puts it there again and again"], f"rm -r {slot}")
    for _, old in _generations(slot)[_KEEP:]:
        discard(old)
    return Generation(path=f"{target}/{request.output}", manifest=manifest, fd=fd)


def complete(generation: Generation, about: dict[str, str]) -> None:
    """From now on it is found; `about` says which operators it has."""
    generation.manifest.operators = about
    write_whole(f"{os.path.dirname(generation.path)}/manifest", generation.manifest.dump())
