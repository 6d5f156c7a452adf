"""The cache on disk.

    <cache>/<name>-<slot>/               everything that one Request, a library or a unit, was ever built into
        lock                             held (flock) while one process builds; says who
        <library digest>/<name>.so       a generation: published by one rename of a complete folder, then never
        <library digest>/manifest        written to, except that the manifest may get fresher stats
        stage.<host>.<pid>.<start>.<x>/  the private folder of one build; its owner's death makes it garbage
        failed.log                       the compiler's output of the last build that failed

A flock is free the moment its holder dies. Where a file system does not honour it, two processes build the same
thing and the second rename finds the first's folder: no harm.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

from . import inputs
from .diagnosis import report

DAY_S = 24 * 3600.0
_KEEP = 8  # generations of a slot


def folders() -> list[str]:
    """Where libraries are looked for, and built where it can be written: the first choice, then a private fallback."""
    found = []
    if os.environ.get("CALCOPS_CACHE"):
        found.append(os.path.abspath(os.environ["CALCOPS_CACHE"]))
    else:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        if os.path.isabs(base):  # without HOME and a passwd entry "~" stays what it is
            found.append(os.path.join(base, "calcops"))
    # tempfile.gettempdir would write a file to find out whether it can.
    private = os.path.join(os.path.abspath(os.environ.get("TMPDIR") or "/tmp"), f"calcops-{os.getuid()}")
    if not os.path.lexists(private) or _is_ours(os.lstat(private)):  # everybody may write to /tmp
        found.append(private)
    return found


def shared_folders() -> list[str]:
    """Read-only caches, such as an administrator's for all users; looked into after our own."""
    return [os.path.abspath(f) for f in os.environ.get("CALCOPS_CACHE_READONLY", "").split(":") if f]


def _is_ours(status: os.stat_result) -> bool:
    """Whether nobody else but root can have written what is there."""
    return status.st_uid in (0, os.getuid()) and not status.st_mode & 0o022


class Manifest(SimpleNamespace):
    """What is known about a published library. The file: its own digest, a line of JSON, the closure's stamps."""

    request: dict  # its facts
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
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", path)
    if ours and not _is_ours(status):
        os.close(fd)
        raise OSError(errno.EPERM, "somebody else may have written it", path)
    return fd


def read_manifest(generation: str, ours: bool = False) -> Manifest:
    with open(open_regular(f"{generation}/manifest", ours), "rb") as file:
        return Manifest.parse(file.read())


def find(request: inputs.Request, reasons: list[str] | None = None) -> Generation | None:
    """The published library that fits the request and whose inputs are still what they were."""
    own = folders()
    for folder in [*own, *shared_folders()]:
        for i, (used, path) in enumerate(_generations(slot_path(folder, request))):
            try:
                manifest = read_manifest(path, ours=folder in own)
                fresher = manifest.closure.check(request)
                found = _verified(f"{path}/{request.output}", manifest, ours=folder in own)
            except (inputs.Changed, OSError, ValueError, KeyError, TypeError) as problem:
                if reasons is not None:
                    reasons.append(str(problem))
                continue
            if folder in own:
                with contextlib.suppress(OSError):
                    if fresher:
                        write_whole(f"{path}/manifest", manifest.dump())
                    if i > 0 or time.time() - used > DAY_S:  # when it was last used, to the day
                        os.utime(path)
            return found
    return None


def _verified(path: str, manifest: Manifest, ours: bool) -> Generation:
    fd = open_regular(path, ours)
    if os.fstat(fd).st_size != manifest.size or inputs.file_digest(fd) != manifest.digest:
        os.close(fd)
        raise ValueError(f"{path} is damaged")
    return Generation(path=path, manifest=manifest, fd=fd)


def other_facts(request: inputs.Request) -> list[str]:
    """What distinguishes the request from the one that was last built, or used, under its name."""
    named = (slot for f in folders() for slot in slots(f) if os.path.basename(slot)[:-17] == request.name)
    for _, path in sorted((g for slot in named for g in _generations(slot)), reverse=True):
        with contextlib.suppress(OSError, ValueError):
            old, new = read_manifest(path).request, json.loads(json.dumps(request.facts))
            changed = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
            return [f"{key}: {_difference(old.get(key, []), new.get(key, []))}" for key in changed]
    return []


def _difference(old, new) -> str:
    if isinstance(old, dict) or isinstance(new, dict):
        old, new = ([f"{k}={v}" for k, v in dict(d).items()] for d in (old, new))
    if isinstance(old, list) and isinstance(new, list) and set(old) != set(new):
        return " ".join([*(f"-[{w}]" for w in old if w not in new), *(f"+[{w}]" for w in new if w not in old)])
    return f"{old} -> {new}"


def _generations(slot: str) -> list[tuple[float, str]]:
    """(when it was last used, folder); first the last, which mostly fits."""
    try:
        with os.scandir(slot) as scanned:
            entries = list(scanned)
        found = [(e.stat().st_mtime, e.path) for e in entries if "." not in e.name and e.is_dir()]
        if any(e.name.startswith("stage.") for e in entries):
            sweep(slot)  # of a builder that was killed when all but this was done
    except OSError:
        return []
    return sorted(found, reverse=True)


def slots(folder: str) -> list[str]:
    """The slots in a cache folder: nothing else there is ours to remove."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return [e.path for e in entries if e.is_dir() and re.search("-[0-9a-f]{16}$", e.name)]
    return []


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
    for folder in folders():
        slot = slot_path(folder, request)
        try:
            for path in (folder, slot):
                os.makedirs(path, 0o700, exist_ok=True)
            with tempfile.TemporaryFile(dir=slot) as probe:
                os.posix_fallocate(probe.fileno(), 0, 4 << 20)  # a build of anything needs that
                if not _is_ours(os.fstat(probe.fileno())):  # it would be refused by find()
                    raise OSError(errno.EPERM, "files there belong to others")
        except OSError as error:
            problem = problem or f"{folder}: {error.strerror}"
            continue
        return slot, problem
    slot = tempfile.mkdtemp(prefix="calcops-")  # raises FileNotFoundError where nothing at all can be written
    return slot, problem


@contextlib.contextmanager
def locked(slot: str, waiting: Callable[..., contextlib.AbstractContextManager]) -> Iterator[None]:
    """Holds the slot's lock; while another process has it, `waiting(holder)` is entered, holder() as in _holder."""
    fd = os.open(f"{slot}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    _held.add(fd)
    try:
        with contextlib.ExitStack() as stack:
            if not _try_lock(fd):
                stack.enter_context(waiting(lambda: _holder(fd)))
                while not _try_lock(fd):
                    time.sleep(0.05)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} {socket.gethostname()} {time.time():.0f}".encode(), 0)
        yield
    finally:
        _held.discard(fd)
        os.close(fd)


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


def in_use(library: str) -> bool:
    """Whether a process may have it, which link_in() says by a lock; where these are not to be had, anybody may."""
    try:
        with open(library, "rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, (FileNotFoundError, IsADirectoryError))
    return False


def _holder(fd: int) -> tuple[str, float]:
    """Who builds, and for how many seconds."""
    words = os.pread(fd, 256, 0).decode(errors="replace").split()
    if len(words) != 3:
        return "another process", 0.0
    return f"pid {words[0]} on {words[1]}", max(0.0, time.time() - float(words[2]))


@contextlib.contextmanager
def staging(slot: str) -> Iterator[str]:
    """A private folder for one build, removed at the end together with what still runs in it."""
    sweep(slot)
    path = f"{slot}/stage.{socket.gethostname()}.{os.getpid()}.{_start_time(os.getpid())}.{os.urandom(4).hex()}"
    os.mkdir(path, 0o700)
    try:
        yield path
    finally:
        _remove(path)


def sweep(slot: str) -> list[str]:
    """Removes the staging folders of builders that died, and ends the compilers that these left running."""
    swept = []
    for entry in os.listdir(slot):
        if entry.startswith("stage.") and _is_orphan(f"{slot}/{entry}"):
            _remove(f"{slot}/{entry}")
            swept.append(entry)
    return swept


def _is_orphan(path: str) -> bool:
    with contextlib.suppress(OSError, ValueError):  # a name that is none of ours
        host, pid, start, _ = os.path.basename(path).removeprefix("stage.").rsplit(".", 3)
        if host == socket.gethostname():
            return _start_time(int(pid)) != start
        return time.time() - os.stat(path).st_mtime > DAY_S
    return False


def _start_time(pid: int) -> str:
    """When a process started, in ticks since boot; "" if it is dead or a zombie. With the pid it names it for good."""
    fields = inputs.text_of(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if fields and fields[0] not in "ZX" else ""


def _remove(path: str) -> None:
    """Removes a staging folder. Compilers whose builder was killed still work in it: their working folder tells."""
    real, own = os.path.realpath(path), str(os.getpid())
    for _ in range(100):
        running = [p for p in os.listdir("/proc") if p.isdigit() and p != own and _works_in(p, real)]
        for pid in running:
            with contextlib.suppress(OSError):
                os.kill(int(pid), signal.SIGKILL)
        if not running:
            break
        time.sleep(0.01)  # and look again: it may just have started another
    shutil.rmtree(path, ignore_errors=True)


def _works_in(pid: str, folder: str) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/cwd") == folder
    except OSError:
        return False


def publish(slot: str, staging: str, file: str, request: inputs.Request, closure: inputs.Closure) -> None:
    """Makes `file` a generation of the slot."""
    generation = place(slot, staging, file, request, closure)
    complete(generation, {})
    os.close(generation.fd)


def place(slot: str, staging: str, file: str, request: inputs.Request, closure: inputs.Closure) -> Generation:
    """Puts `file` where it will stay, by one rename; a damaged one of this name makes room. Nobody finds it yet."""
    folder = f"{staging}/complete.{os.urandom(4).hex()}"
    os.mkdir(folder)
    os.chmod(file, 0o755)
    os.rename(file, f"{folder}/{request.output}")
    fd = open_regular(f"{folder}/{request.output}")
    said = {"request": request.facts, "operators": {}, "closure": closure}
    manifest = Manifest(size=os.fstat(fd).st_size, digest=inputs.file_digest(fd), **said)
    # Named by what it is made of, without times and tools' places.
    made_of = sorted(digest for _, digest in closure.entries().values())
    target = f"{slot}/{inputs.digest(f'{manifest.digest} {made_of}'.encode())[:16]}"
    for _ in range(3):
        try:
            os.rename(folder, target)
            break
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
            with contextlib.suppress(OSError):
                os.rename(target, f"{folder}.old")  # goes with the staging folder
    else:
        raise report(f"cannot publish {target}", ["something puts it there again and again"], f"rm -r {slot}")
    for _, old in _generations(slot)[_KEEP:]:
        if not in_use(f"{old}/{request.output}"):
            shutil.rmtree(old, ignore_errors=True)
    return Generation(path=f"{target}/{request.output}", manifest=manifest, fd=fd)


def complete(generation: Generation, about: dict[str, str]) -> None:
    """From now on it is found; `about` says which operators it has."""
    generation.manifest.operators = about
    write_whole(f"{os.path.dirname(generation.path)}/manifest", generation.manifest.dump())
