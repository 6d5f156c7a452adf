"""Copies of the loader that a test may edit, and processes that import them.

The zygote, a process that has imported torch already, forks these processes. So none of them waits
for that import. A copy's operators are C functions without torch headers, which compile in a
moment.
"""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
CALL = "import calcops_jit, ctypes; print(ctypes.CDLL(calcops_jit.library_path()).answer())"
# Script that sets `loaded` to the loaded library; its file may have been replaced since.
LOADED = "[live] = calcops_jit.library._loaded; loaded = live._generations[live.digest]._library"

# Script after which `events` collects the files that the process writes and the processes that it
# starts.
EVENTS = """
import sys
events = []
def audit(event, arguments):
    if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.mkdir"):
        events.append(event)
    if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        events.append(arguments)
sys.dont_write_bytecode = True
sys.addaudithook(audit)
"""
# Modules that a build imports and a warm import does not.
BUILDING = "import torch.utils.cpp_extension, setuptools, resource"
# The zygote reads jobs, one JSON object a line. It forks a child for a script and answers with its
# pid. It answers {"wait": pid} with the exit status of that child.
_ZYGOTE = """
import json, os, sys, traceback
import torch
for line in sys.stdin:
    job = json.loads(line)
    if "wait" in job:
        print(os.waitstatus_to_exitcode(os.waitpid(job["wait"], 0)[1]), flush=True)
        continue
    pid = os.fork()
    if pid:
        print(pid, flush=True)
        continue
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for fd, path in ((1, job["out"]), (2, job["err"])):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
        os.environ.clear()
        os.environ.update(job["env"])
        os.chdir(job["cwd"])
        sys.path.insert(0, job["tree"])
        sys.argv = ["script", *job["arguments"]]
        exec(compile(job["script"], "<script>", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
"""


class Zygote:
    def __init__(self, preamble: str = ""):
        command = [sys.executable, "-c", f"{preamble}\n{_ZYGOTE}"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **job) -> int:
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


class Child:
    """A process that runs a script in a checkout."""

    def __init__(
        self, zygote: Zygote, checkout: "Checkout", script: str, arguments=(), cwd=None, **env
    ):
        self.zygote = zygote
        stem = checkout.path.parent / f"child.{time.monotonic_ns()}"
        self._out, self._err = Path(f"{stem}.out"), Path(f"{stem}.err")
        self._out.touch()
        self._err.touch()
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("CALCOPS_", "TORCH_"))
        }
        environment |= {
            "CALCOPS_CACHE": str(checkout.cache),
            # If the cache cannot be written, the loader builds below TMPDIR. In /tmp, tests would
            # share that folder.
            "TMPDIR": str(checkout.path.parent),
            "MAX_JOBS": "2",
        }
        environment |= env
        self.pid = zygote.ask(
            script=script,
            tree=str(checkout.path),
            cwd=str(cwd or checkout.path.parent),
            env={name: str(value) for name, value in environment.items() if value is not None},
            out=str(self._out),
            err=str(self._err),
            arguments=arguments,
        )

    out = property(lambda self: self._out.read_text())
    err = property(lambda self: self._err.read_text())

    def wait(self) -> "Child":
        self.code = self.zygote.ask(wait=self.pid)
        return self

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


class Checkout:
    """A copy of the loader with its own operators, its own cache and a compiler that keeps a log.

    The compiler waits before it compiles a unit as long as the file `slow` exists.
    """

    def __init__(self, zygote: Zygote, folder: Path):
        self.zygote = zygote
        self.path = folder / "checkout"
        self.cache = folder / "cache"
        shutil.copytree(
            HERE / "_calcops_jit", self.path / "_calcops_jit", ignore=shutil.ignore_patterns("ops")
        )
        shutil.copy(HERE / "calcops_jit.py", self.path)
        self.write("ops/tiny/tiny.h", "#define ANSWER 1\n")
        self.write(
            "ops/tiny/tiny.cpp",
            '#include "tiny/tiny.h"\n'
            'extern "C" __attribute__((visibility("default"))) int answer() { return ANSWER; }\n',
        )
        self.slow = folder / "slow"
        self.log = folder / "compiler.log"
        self.compiler = folder / "logging-g++"
        self.compiler.write_text(
            f'#!/bin/sh\necho "$@" >> {self.log}\n'
            f'case "$*" in *" -c "*) while [ -e {self.slow} ]; do sleep 0.05; done;; esac\n'
            f'exec {shutil.which("c++")} "$@"\n'
        )
        self.compiler.chmod(0o755)

    def write(self, name: str, text: str) -> Path:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def start(self, script: str = CALL, **options) -> Child:
        options.setdefault("CXX", str(self.compiler))
        return Child(self.zygote, self, script, **options)

    def run(self, script: str = CALL, **options) -> Child:
        return self.start(script, **options).wait()

    def answer(self, **options) -> int:
        child = self.run(**options)
        assert child.code == 0, child.err
        return int(child.out)

    def compiled(self) -> int:
        """Return how many units of the project were compiled since the last call.

        The loader's own units, registry.cpp and runtime.cpp, do not count.
        """
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return sum(
            " -c " in line and not re.search(r"/(?:registry|runtime)\.cpp", line) for line in lines
        )

    def libraries(self) -> list[Path]:
        return sorted(self.cache.glob("*/*/*.so"))


def spoil(library: Path, damage: str) -> None:
    """Damage or replace a file. With an unknown `damage`, only remove it."""
    content = library.read_bytes()
    library.unlink()
    if damage == "truncated":
        library.write_bytes(content[: len(content) // 2])
    elif damage == "empty":
        library.touch()
    elif damage == "one byte":
        library.write_bytes(content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])
    elif damage == "folder":
        library.mkdir()
    elif damage == "fifo":
        os.mkfifo(library)
    elif damage == "loop":
        library.symlink_to(library)
    elif damage == "foreign":
        library.write_bytes(Path("/bin/sh").read_bytes())


@functools.cache  # test modules share one per preamble; it ends when its standard input closes
def the_zygote(preamble: str = "") -> Zygote:
    return Zygote(preamble)


def in_cache(checkout: Checkout, whose: str = "") -> list[int]:
    """Return the pids of processes whose working folder is in the cache. Its path has `whose`."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            folder = os.readlink(process / "cwd")
            if folder.startswith(str(checkout.cache)) and whose in folder:
                pids.append(int(process.name))
        except OSError:
            pass  # the process has ended, or belongs to another user
    return pids


def stages(checkout: Checkout) -> list[Path]:
    return list(checkout.cache.glob("*/stage.*"))


def wait_for(condition, seconds: float = 30.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


# ---- packages ------------------------------------------------------------------------------------

PARTS = [
    "LICENSE",
    "MANIFEST.in",
    "Makefile",
    "README.md",
    "CHANGELOG.md",
    ".clang-format",
    "pyproject.toml",
]
PARTS += ["calcops_jit.py", "_calcops_jit", "ops", "tests", "examples"]


def copy(folder: Path) -> Path:
    """Copy the files of an sdist into a new folder."""
    folder.mkdir()
    for part in PARTS:
        if (HERE / part).is_dir():
            shutil.copytree(
                HERE / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", ".*")
            )
        else:
            shutil.copy(HERE / part, folder)
    return folder


def pip(*arguments, python: Path | str = sys.executable) -> None:
    """Run pip for an interpreter, without downloads."""
    options = ["--disable-pip-version-check", "--no-input", "--python", python]
    command = [sys.executable, "-m", "pip", *options, *arguments, "--no-deps", "--no-index"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def wheel_of(source: Path, folder: Path) -> Path:
    pip("wheel", "--no-build-isolation", "-w", folder, source)
    (wheel,) = folder.glob("*.whl")
    return wheel


def built_wheel(source: Path, folder: Path, *pythons: str, **variables) -> Path:
    """Build a wheel of a checkout as `make wheel` does, and return its path."""
    variables["PYTHONPATH"] = str(source)
    command = [sys.executable, "-m", "_calcops_jit.ship.wheel", folder, *pythons]
    done = subprocess.run(
        command, cwd=source, env=os.environ | variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}
