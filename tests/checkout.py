"""Copies of the loader that a test may edit, and processes that import them.

The zygote, a process that has imported torch already, forks these processes. So none of them waits
for that import. Most libraries of these tests are C functions without torch headers, which compile
in a moment.
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
from importlib.metadata import version
from pathlib import Path

from programs import ROOT as HERE
from programs import run

CALL = "import calcops_jit, ctypes; print(ctypes.CDLL(calcops_jit.library_path()).answer())"
MAIN = "import runpy; runpy.run_module('calcops_jit', run_name='__main__', alter_sys=True)"
ANSWER = 'extern "C" __attribute__((visibility("default"))) int answer() {{ {} }}\n'
# Loads the library `mine` with options, and prints its answer.
LOAD = """
import calcops_jit, ctypes
options = {options!r}
library = calcops_jit.load("mine", options.pop("sources", ["mine.cpp"]), **options)
print(ctypes.CDLL(library.path).answer())
"""
# An operator as a contract. A library with a contract compiles in 0.2 s.
CONTRACT = """
#include <calcops/operator.h>
const calcops::Contract contract(R"(
{name}(Tensor x) -> Tensor y
x [N]; float64.
y [N]; like x.
)");
void {name}(calcops::View<const double, 1> x, calcops::View<double, 1> y) {{
  for (int64_t i = 0; i < x.shape[0]; ++i) y(i) = {factor} * x(i);
}}
const calcops::Kernel cpu("{name}", {name});
"""
# Makes a list `events` of the processes that the script starts and of the files that it writes.
AUDITED = """
import sys
sys.dont_write_bytecode = True
events = []
def audit(event, arguments):
    starts = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.mkdir")
    if event in starts or (event == "open" and set(str(arguments[1])) & set("wax+")):
        events.append((event, arguments))
sys.addaudithook(audit)
"""
# Makes a file have other contents for Python's open().
_REPLACED_FILE = """
import builtins, io
def open(path, mode="r", *arguments, real=builtins.open, **options):
    if path != {path!r}:
        return real(path, mode, *arguments, **options)
    return io.BytesIO({text!r}.encode()) if "b" in mode else io.StringIO({text!r})
builtins.open = io.open = open
"""
# Modules that a build imports and a warm import does not.
BUILDING = "import torch.utils.cpp_extension, setuptools, resource"
# The zygote reads jobs, one JSON object a line. It forks a child for a script and answers with its
# pid. It answers {"wait": pid} with the exit status of that child.
_ZYGOTE = """
import json, os, signal, sys, traceback
import torch
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
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
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
"""


class Zygote:
    def __init__(self, preamble: str):
        command = [sys.executable, "-c", f"{preamble}\n{_ZYGOTE}"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **job) -> int:
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


@functools.cache  # test modules share one per preamble; it ends when its standard input closes
def the_zygote(preamble: str = BUILDING) -> Zygote:
    return Zygote(preamble)


def _constant_file(name: str, text: str) -> Path:
    """Write a file that stays in .pytest_cache, unless it has this text already."""
    path = HERE / ".pytest_cache/loader" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        new = path.with_suffix(f".{os.getpid()}")
        new.write_text(text)
        new.chmod(0o755)
        new.rename(path)
    return path


def compiler(name: str = "c++") -> str:
    """Return the path of a compiler that keeps a log and runs what Checkout.hook() wrote.

    All tests share it, and thus the compiled runtime.
    """
    text = f"""#!/bin/sh
echo "$@" >> "$TEST_LOG"
case "$*" in
  *" -c "*/contracts/runtime/*.cpp*) ;;
  *" -c "*) while [ -e "$TEST_SLOW" ]; do sleep 0.05; done;;
esac
[ -z "$TEST_HOOK" ] || . "$TEST_HOOK"
exec {shutil.which(name) or shutil.which("c++")} "$@"
"""
    return str(_constant_file(f"logging-{name}", text))


def with_cpuinfo(text: str) -> str:
    """Return the begin of a script for which /proc/cpuinfo has a text."""
    return with_file("/proc/cpuinfo", text)


def with_file(path: str, text: str) -> str:
    """Return the begin of a script for which a file has a text."""
    return _REPLACED_FILE.format(path=path, text=text)


def replace_runtime(contracts: Path) -> None:
    """Replace the C++ runtime, which takes ten seconds to compile, by empty sources."""
    (contracts / "runtime/runtime.cpp").write_text("// compiles in a moment\n")


@functools.cache
def cache_with_runtime() -> Path:
    """Return a cache that has only the compiled C++ runtime of contracts.

    Every library that registers operators is linked with this runtime, which takes ten seconds to
    compile. So caches of tests with operators begin as copies of this one. It lies in
    .pytest_cache, and the loader builds it again if the runtime was edited.
    """
    source = _constant_file("seed.cpp", CONTRACT.format(name="seed", factor=1))
    cache = source.with_name("cache")
    script = f"import calcops_jit; calcops_jit.load('seed', {str(source)!r})"
    variables = {"CALCOPS_CACHE": str(cache), "CALCOPS_BUILD": "0", "CXX": compiler()}
    variables |= {"TEST_LOG": os.devnull, "TEST_SLOW": "", "PYTHONPATH": str(HERE)}
    subprocess.run([sys.executable, "-c", script], env=clean_environment() | variables, check=True)
    return cache


def clean_environment() -> dict[str, str]:
    """Return this process's environment without variables of the loader and of PyTorch."""
    prefixes = ("CALCOPS_", "TORCH_")
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}


class Child:
    """A process that runs a script in a checkout."""

    def __init__(self, checkout: "Checkout", script: str, arguments=(), cwd=None, **env):
        self.zygote = checkout.zygote
        stem = checkout.path.parent / f"child.{time.monotonic_ns()}"
        self._out, self._err = Path(f"{stem}.out"), Path(f"{stem}.err")
        self._out.touch()
        self._err.touch()
        environment = clean_environment() | {"CALCOPS_CACHE": str(checkout.cache), "MAX_JOBS": "1"}
        environment |= env
        self.pid = self.zygote.ask(
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
    """A copy of the loader with its own operators, its own cache and a project beside it.

    Without `has_runtime`, its libraries cannot register operators, and it builds its first one
    in half a second. The compiler keeps a log, and waits before it compiles a unit of a project as
    long as the file `slow` exists.
    """

    def __init__(self, folder: Path, preamble: str = BUILDING, has_runtime: bool = False):
        self.zygote = the_zygote(preamble)
        self.path = folder / "checkout"
        self.cache = folder / "cache"
        self.project = folder / "project"
        self.project.mkdir()
        self.slow = folder / "slow"
        self.log = folder / "compiler.log"
        skipped = shutil.ignore_patterns("ops", "__pycache__")
        shutil.copytree(HERE / "_calcops_jit", self.path / "_calcops_jit", ignore=skipped)
        shutil.copytree(HERE / "contracts", self.path / "contracts")
        shutil.copy(HERE / "calcops_jit.py", self.path)
        if has_runtime:
            shutil.copytree(cache_with_runtime(), self.cache)
        else:
            replace_runtime(self.path / "contracts")
        self.write("ops/tiny/tiny.h", "#define ANSWER 1\n")
        self.write(
            "ops/tiny/tiny.cpp", '#include "tiny/tiny.h"\n' + ANSWER.format("return ANSWER;")
        )

    def write(self, name: str, text: str) -> Path:
        """Write a file of the checkout."""
        return _write(self.path / name, text)

    def put(self, name: str, text: str) -> Path:
        """Write a file of the project, which is a user's folder."""
        return _write(self.project / name, text)

    def archive(self, value: int, name: str = "libvalue.a") -> Path:
        """Write a static library of the project. Its function value() returns `value`."""
        source = self.put("value.cpp", f"int value() {{ return {value}; }}\n")
        path = self.put(name, "")  # makes the folder
        path.unlink()
        command = f"c++ -fPIC -c {source} -o {source}.o && ar rc '{path}' {source}.o"
        assert os.system(command) == 0
        return path

    def hook(self, text: str) -> dict[str, Path]:
        """Return a variable with which the compiler first runs these lines of a shell script."""
        return {"TEST_HOOK": _write(self.path.parent / "hook", f"{text}\n")}

    def start(self, script: str = CALL, **options) -> Child:
        """Start a process that runs a script. Options in capitals are environment variables."""
        variables = {"CXX": compiler(), "TEST_LOG": self.log, "TEST_SLOW": self.slow}
        return Child(self, script, **(variables | options))

    def run(self, script: str = CALL, **options) -> Child:
        return self.start(script, **options).wait()

    def main(self, *arguments: str, **options) -> Child:
        """Run `python -m calcops_jit`."""
        return self.run(MAIN, arguments=arguments, **options)

    def answer(self, **options) -> int:
        """Return the answer of the checkout's own library."""
        child = self.run(**options)
        assert child.code == 0, child.err
        return int(child.out)

    def load(self, **options) -> Child:
        """Run a process that loads the library `mine` of the project. Its options in small letters
        are those of calcops_jit.load."""
        variables = {name: options.pop(name) for name in list(options) if name.isupper()}
        variables = {"CALCOPS_BUILD": "0"} | variables
        return self.run(LOAD.format(options=options), cwd=self.project, **variables)

    def loaded(self, **options) -> int:
        """Return the answer of the library `mine`."""
        child = self.load(**options)
        assert child.code == 0, child.err
        return int(child.out)

    def commands(self) -> list[str]:
        """Return the compilers' commands since the last call that compile units of a project."""
        commands = self._commands()
        self.log.unlink(missing_ok=True)
        return commands

    def _commands(self) -> list[str]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        own = re.compile(r"/contracts/runtime/\S*\.cpp")  # the loader's own units
        return [line for line in lines if " -c " in line and not own.search(line)]

    def compiled(self) -> int:
        """Return how many units of a project were compiled since the last call."""
        return len(self.commands())

    def is_compiling(self) -> bool:
        return bool(self._commands())

    def libraries(self, name: str = "calcops") -> list[Path]:
        return sorted(self.cache.glob(f"{name}-*/*/{name}.so"))

    def files(self) -> list[Path]:
        """Return the files in the cache."""
        return sorted(path for path in self.cache.rglob("*") if path.is_file())


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def spoil(path: Path, damage: str) -> None:
    """Damage or replace a file. With an unknown `damage`, only remove it."""
    content = path.read_bytes() or b"empty"
    middle = len(content) // 2
    path.unlink()
    if damage == "truncated":
        path.write_bytes(content[:middle])
    elif damage == "empty":
        path.touch()
    elif damage == "one byte":
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    elif damage == "folder":
        path.mkdir()
    elif damage == "fifo":
        os.mkfifo(path)
    elif damage == "loop":
        path.symlink_to(path)
    elif damage == "foreign":
        path.write_bytes(Path("/bin/sh").read_bytes())


def processes_in(folder: Path) -> list[int]:
    """Return the pids of processes whose working folder is in a folder."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if Path(os.readlink(process / "cwd")).is_relative_to(folder):
                pids.append(int(process.name))
        except OSError:
            pass  # the process has ended, or belongs to another user
    return pids


def wait_for(condition, seconds: float = 60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


def is_message(text: str) -> bool:
    """Return True if a text is a message of a BuildError: short, with a command that helps."""
    return 2 <= len(text.splitlines()) <= 12 and "\n  fix: " in text


# ---- packages ------------------------------------------------------------------------------------

PARTS = [
    "LICENSE",
    "MANIFEST.in",
    "Makefile",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "Containerfile",
    ".clang-format",
    "pyproject.toml",
]
PARTS += ["calcops_jit.py", "_calcops_jit", "contracts", "ops", "calcops"]
PARTS += ["bench", "docs", "tests", "examples"]


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
    words = *options, *arguments, "--no-deps", "--no-index"
    run(sys.executable, "-m", "pip", *words, PYTHONPATH="")


def wheel_of(source: Path, folder: Path) -> Path:
    pip("wheel", "--no-build-isolation", "-w", folder, source)
    (wheel,) = folder.glob("*.whl")
    return wheel


def built_wheel(source: Path, folder: Path, *pythons: str, **variables) -> Path:
    """Build a wheel of a checkout as `make wheel` does, without calcops_models; return its path."""
    variables["PYTHONPATH"] = str(source)
    for python in sys.executable, *pythons:
        run(python, "-m", "calcops_jit", "prebuild", cwd=source, **variables)
    rule = (HERE / "Makefile").read_text().partition("\nwheel: ")[2].partition("\n\n")[0]
    label = re.sub(r"\W+", ".", version("torch"))
    settings = [
        option.replace("$(setup)", "--config-settings=--global-option=").replace(
            "$$label", f".{label}"
        )
        for option in re.findall(r"(?:\$\(setup\)|--config-settings=)\S+", rule)
    ]
    pip("wheel", "--no-build-isolation", "-w", folder, source, *settings)
    (wheel,) = folder.glob("*.whl")
    return wheel


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}
