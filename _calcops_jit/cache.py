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
from dataclasses import dataclass
from typing import NamedTuple

from . import inputs
from .diagnosis import report

_STALE_S = 24 * 3600.0
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
    private = os.path.join(tempfile.gettempdir(), f"calcops-{os.getuid()}")
    if not os.path.lexists(private) or _is_private(private):
        found.append(private)
    return found


def shared_folders() -> list[str]:
    """Read-only caches, such as an administrator's for all users; looked into after our own."""
    return [os.path.abspath(f) for f in os.environ.get("CALCOPS_CACHE_READONLY", "").split(":") if f]


def _is_private(folder: str) -> bool:
    """Everybody may write to /tmp: a folder there is only trusted when nobody else can have put anything into it."""
    status = os.lstat(folder)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


@dataclass(eq=False, repr=False)
class Manifest:
    """What is known about a published library. The file is a line with its own digest, then JSON."""

    request: dict
    size: int
    digest: str
    operators: dict[str, str]
    closure: inputs.Closure

    def dump(self) -> bytes:
        body = json.dumps(self.__dict__, default=vars, separators=(",", ":")).encode()
        return inputs.digest(body).encode() + b"\n" + body

    @staticmethod
    def parse(data: bytes) -> Manifest:
        checksum, _, body = data.partition(b"\n")
        if checksum.decode(errors="replace") != inputs.digest(body):
            raise ValueError("manifest is damaged")
        fields = json.loads(body)
        try:
            return Manifest(**{**fields, "closure": inputs.Closure(**fields["closure"])})
        except (TypeError, KeyError) as error:
            raise ValueError(f"manifest of another version: {error}") from None


class Generation(NamedTuple):
    """A library whose bytes were verified through `fd`, which stays open: what is loaded is what was verified."""

    path: str
    manifest: Manifest
    fd: int


def read_regular(path: str) -> tuple[int, bytes]:
    """An open descriptor and the bytes of a regular file; OSError for everything else, and it never blocks."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        with os.fdopen(os.dup(fd), "rb") as file:
            return fd, file.read()
    except BaseException:
        os.close(fd)
        raise


def find(request: inputs.Request, reasons: list[str] | None = None) -> Generation | None:
    """The published library that fits the request and whose inputs are still what they were."""
    for folder in [*folders(), *shared_folders()]:
        slot = slot_path(folder, request)
        for i, generation in enumerate(_generations(slot)):
            try:
                found = _open(request, generation)
            except (inputs.Changed, OSError, ValueError, KeyError, TypeError) as problem:
                if reasons is not None:
                    reasons.append(str(problem))
                continue
            if i > 0:
                with contextlib.suppress(OSError):
                    os.utime(generation)  # it is the first to be looked at from now on
            return found
    return None


def other_facts(request: inputs.Request) -> list[str]:
    """What distinguishes the request from the one that was last built under its name."""
    manifests = []
    for slot in (s for f in folders() if os.path.isdir(f) for s in slots(f)):
        if os.path.basename(slot).rpartition("-")[0] == request.name:
            for path in (f"{generation}/manifest" for generation in _generations(slot)[:1]):
                with contextlib.suppress(OSError, ValueError), open(path, "rb") as file:
                    manifests.append((os.stat(path).st_mtime_ns, Manifest.parse(file.read()).request))
    if not manifests:
        return []
    old, new = max(manifests, key=lambda m: m[0])[1], json.loads(json.dumps(request.facts))
    changed = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    return [f"{key}: {_difference(old.get(key, []), new.get(key, []))}" for key in changed]


def _difference(old, new) -> str:
    if isinstance(old, dict) or isinstance(new, dict):
        old, new = ([f"{k}={v}" for k, v in dict(d).items()] for d in (old, new))
    if isinstance(old, list) and isinstance(new, list) and set(old) != set(new):
        return " ".join(
            [*(f"-[{w}]" for w in old if w not in new), *(f"+[{w}]" for w in new if w not in old)]
        )
    return f"{old} -> {new}"


def _open(request: inputs.Request, generation: str) -> Generation:
    fd, data = read_regular(f"{generation}/manifest")
    os.close(fd)
    manifest = Manifest.parse(data)
    restamped = manifest.closure.check(request)
    path = f"{generation}/{request.file or request.name + '.so'}"
    fd, library = read_regular(path)
    if len(library) != manifest.size or inputs.digest(library) != manifest.digest:
        os.close(fd)
        raise ValueError(f"{path} is damaged")
    if restamped:
        with contextlib.suppress(OSError):
            write_whole(f"{generation}/manifest", manifest.dump())
    return Generation(path, manifest, fd)


def _generations(slot: str) -> list[str]:
    """Newest first: mostly the one that fits."""
    try:
        with os.scandir(slot) as entries:
            found = [(e.stat().st_mtime_ns, e.path) for e in entries if "." not in e.name and e.is_dir()]
    except OSError:
        return []
    return [path for _, path in sorted(found, reverse=True)]


def slots(folder: str) -> list[str]:
    """The slots in a cache folder: nothing else there is ours to remove."""
    return [e.path for e in os.scandir(folder) if e.is_dir() and re.search("-[0-9a-f]{16}$", e.name)]


def slot_path(folder: str, request: inputs.Request) -> str:
    return os.path.join(folder, f"{request.name}-{request.slot}")


def write_whole(path: str, data: bytes) -> None:
    """Replaces a file by one rename."""
    beside = f"{path}.{os.getpid()}.{os.urandom(4).hex()}"
    try:
        with open(beside, "wb") as file:
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
            for make, path in ((os.makedirs, os.path.dirname(folder)), (os.mkdir, folder), (os.mkdir, slot)):
                with contextlib.suppress(FileExistsError):
                    make(path, 0o700)
            descriptor, probe = tempfile.mkstemp(prefix="probe.", dir=slot)
            os.close(descriptor)
            os.unlink(probe)
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
            announced = False
            while not _try_lock(fd):
                if not announced:
                    stack.enter_context(waiting(lambda: _holder(fd)))
                    announced = True
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
        if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            return True  # no locks here: a double build is harmless
        raise
    return True


def hold(fd: int, *earlier: int) -> None:
    """Says that this process has a library, and no longer an earlier one: in_use() is the question."""
    with contextlib.suppress(OSError):  # no locks here: see in_use()
        for other in earlier:
            fcntl.flock(other, fcntl.LOCK_UN)
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)


def in_use(library: str) -> bool:
    """Whether a process may have it; where locks are not to be had, anybody may."""
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
    path = (
        f"{slot}/stage.{socket.gethostname()}.{os.getpid()}.{_start_time(os.getpid())}.{os.urandom(4).hex()}"
    )
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
    host, pid, start, _ = os.path.basename(path).removeprefix("stage.").rsplit(".", 3)
    if host == socket.gethostname():
        return _start_time(int(pid)) != start
    with contextlib.suppress(OSError):
        return time.time() - os.stat(path).st_mtime > _STALE_S
    return False


def _start_time(pid: int) -> str:
    """When a process started, in ticks since boot; "" if it is dead or a zombie. With the pid it names it for good."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _remove(path: str) -> None:
    """Removes a staging folder. Compilers whose builder was killed still work in it: their working folder tells."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/cwd") == os.path.realpath(path) and int(pid) != os.getpid():
                os.kill(int(pid), signal.SIGKILL)
    shutil.rmtree(path, ignore_errors=True)


def publish(
    slot: str,
    staging: str,
    file: str,
    request: inputs.Request,
    about: dict[str, str],
    closure: inputs.Closure,
) -> Generation:
    """Makes `file` a generation of the slot, by one rename; a damaged one of this name makes room."""
    name = request.file or f"{request.name}.so"
    complete = f"{staging}/complete.{os.urandom(4).hex()}"
    os.mkdir(complete)
    os.rename(file, f"{complete}/{name}")
    fd, data = read_regular(f"{complete}/{name}")
    manifest = Manifest(request.facts, len(data), inputs.digest(data), about, closure)
    write_whole(f"{complete}/manifest", manifest.dump())
    target = f"{slot}/{inputs.digest(''.join([*closure.contents, manifest.digest]).encode())[:16]}"
    for _ in range(3):
        try:
            os.rename(complete, target)
            break
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
            with contextlib.suppress(OSError):
                os.rename(target, f"{complete}.old")  # goes with the staging folder
    else:
        raise report(f"cannot publish {target}", ["something puts it there again and again"], f"rm -r {slot}")
    for old in _generations(slot)[_KEEP:]:
        if not in_use(f"{old}/{name}"):
            shutil.rmtree(old, ignore_errors=True)
    return Generation(f"{target}/{name}", manifest, fd)
