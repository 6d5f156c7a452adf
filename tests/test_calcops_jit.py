"""The loader as a user meets it: import, rebuild, cache, errors. Every import is a process of its own, forked from one
that has imported torch already; operators are C functions without torch headers, which compile in a moment."""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent.parent
CALL = "import calcops_jit, ctypes; print(ctypes.CDLL(calcops_jit.library_path()).answer())"

BUILDING = "import torch.utils.cpp_extension, setuptools"  # what a build imports and a warm import does not
# Reads jobs, forks a child for each, answers with its pid; "wait" answers with its exit status.
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
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, **job) -> int:
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


class Child:
    """A process that runs a script in a checkout."""

    def __init__(self, zygote: Zygote, checkout: "Checkout", script: str, arguments=(), cwd=None, **env):
        self.zygote = zygote
        stem = checkout.path.parent / f"child.{time.monotonic_ns()}"
        self._out, self._err = Path(f"{stem}.out"), Path(f"{stem}.err")
        self._out.touch(), self._err.touch()
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("CALCOPS_", "TORCH_"))}
        environment |= {"CALCOPS_CACHE": str(checkout.cache), "MAX_JOBS": "2"} | env
        self.pid = zygote.ask(
            script=script,
            tree=str(checkout.path),
            cwd=str(cwd or checkout.path.parent),
            env={k: str(v) for k, v in environment.items() if v is not None},
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
    """A copy of the loader with operators of its own, a cache of its own and a compiler that keeps a log."""

    def __init__(self, zygote: Zygote, folder: Path):
        self.zygote, self.path, self.cache = zygote, folder / "checkout", folder / "cache"
        shutil.copytree(HERE / "_calcops_jit", self.path / "_calcops_jit", ignore=shutil.ignore_patterns("ops"))
        shutil.copy(HERE / "calcops_jit.py", self.path)
        self.write("ops/tiny/tiny.h", "#define ANSWER 1\n")
        self.write(
            "ops/tiny/tiny.cpp",
            '#include "tiny/tiny.h"\n'
            'extern "C" __attribute__((visibility("default"))) int answer() { return ANSWER; }\n',
        )
        self.slow, self.log = folder / "slow", folder / "compiler.log"
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
        """Units compiled since the last time this was asked."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return sum(" -c " in line for line in lines)

    def libraries(self) -> list[Path]:
        return sorted(self.cache.glob("*/*/*.so"))


@functools.cache  # one of a kind for all the modules that import the fixture; it ends with its standard input
def the_zygote(preamble: str = "") -> Zygote:
    return Zygote(preamble)


@pytest.fixture
def checkout(tmp_path):
    return Checkout(the_zygote(), tmp_path)


def wait_for(condition, seconds: float = 30.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


# ---- import -----------------------------------------------------------------------------------------------------


def test_the_second_import_starts_no_process_prints_nothing_and_leaves_cuda_alone(checkout):
    assert checkout.answer() == 1
    child = checkout.run(
        "import sys, threading\n"
        "started = []\n"
        "names = ('subprocess.Popen', 'os.system', 'os.exec', 'os.posix_spawn', 'os.fork')\n"
        "sys.addaudithook(lambda event, _: started.append(event) if event in names else None)\n"
        "import calcops_jit, torch\n"
        "calcops_jit.library_path()\n"
        "unwanted = {'torch.utils.cpp_extension', 'setuptools'} & set(sys.modules)\n"
        "print(started, unwanted, torch.cuda.is_initialized(), threading.active_count())\n"
    )
    assert (child.code, child.out, child.err) == (0, "[] set() False 1\n", "")


def test_the_first_import_prints_progress_within_a_second_and_says_when_it_is_done(checkout):
    checkout.slow.touch()
    child = checkout.start()
    wait_for(lambda: "building calcops [0/" in child.err, 1.0)
    checkout.slow.unlink()
    child.wait()
    assert re.fullmatch(
        r"calcops_jit: building calcops \[0/\?\] 0 s\ncalcops_jit: built calcops in [\d.]+ s\n", child.err
    )


def test_calcops_build_0_imports_without_building_and_the_operators_say_so(checkout):
    child = checkout.run("import calcops_jit; print('imported'); calcops_jit.force", CALCOPS_BUILD="0")
    assert child.code == 1 and child.out == "imported\n"
    assert "CALCOPS_BUILD=0; python -m calcops_jit build" in child.err
    assert not checkout.cache.exists()


def test_as_main_it_builds_only_when_asked(checkout):
    main = "import runpy; runpy.run_module('calcops_jit', run_name='__main__', alter_sys=True)"
    where = checkout.run(main, arguments=["where"])
    assert where.code == 0 and "not built yet" in where.out and str(checkout.cache) in where.out
    assert not checkout.cache.exists()
    assert checkout.run(main).code == 2
    assert not checkout.cache.exists()
    build = checkout.run(main, arguments=["build"])
    assert build.out.strip() == str(checkout.libraries()[0])
    assert checkout.run(main, arguments=["clean"]).code == 0
    assert checkout.libraries() == []


def test_the_key_for_ci_changes_with_a_header_and_not_with_a_place(checkout, tmp_path):
    main = "import runpy; runpy.run_module('calcops_jit', run_name='__main__', alter_sys=True)"
    key = lambda: checkout.run(main, arguments=["where", "--key"]).out  # noqa: E731
    first = key()
    assert re.fullmatch(r"calcops-[0-9a-f]{20}\n", first)
    checkout.path = checkout.path.rename(tmp_path / "moved")
    assert key() == first
    checkout.write("ops/tiny/tiny.h", "#define ANSWER 2\n")
    assert key() != first


def test_another_system_is_refused_in_one_line(checkout):
    child = checkout.run("import sys; sys.platform = 'darwin'\nimport calcops_jit")
    assert child.err.splitlines()[-1] == ("ImportError: calcops_jit: expected Linux on x86-64, got darwin on x86_64")


# ---- rebuild or not ---------------------------------------------------------------------------------------------


def test_a_changed_header_rebuilds_and_going_back_does_not(checkout):
    assert (checkout.answer(), checkout.compiled()) == (1, 1)
    header = checkout.write("ops/tiny/tiny.h", "#define ANSWER 2\n")
    os.utime(header, (0, 0))  # an older time is a change too
    assert (checkout.answer(), checkout.compiled()) == (2, 1)
    checkout.write("ops/tiny/tiny.h", "#define ANSWER 1\n")
    assert (checkout.answer(), checkout.compiled()) == (1, 0)


def test_a_header_that_newly_matches_has_include_rebuilds(checkout):
    checkout.write(
        "ops/tiny/tiny.h",
        '#if __has_include("tiny/special.h")\n#include "tiny/special.h"\n#else\n#define ANSWER 1\n#endif\n',
    )
    assert (checkout.answer(), checkout.compiled()) == (1, 1)
    checkout.write("ops/tiny/special.h", "#define ANSWER 3\n")
    assert (checkout.answer(), checkout.compiled()) == (3, 1)


def test_a_new_header_that_is_found_first_rebuilds(checkout):
    assert (checkout.answer(), checkout.compiled()) == (1, 1)
    checkout.write("ops/tiny/tiny/tiny.h", "#define ANSWER 4\n")  # beside the source comes before -I
    assert (checkout.answer(), checkout.compiled()) == (4, 1)


def test_a_new_operator_folder_is_found(checkout):
    assert (checkout.answer(), checkout.compiled()) == (1, 1)
    checkout.write("ops/second/second.cpp", "int second() { return 2; }\n")
    assert (checkout.answer(), checkout.compiled()) == (1, 1)


def test_only_what_changed_is_compiled_also_after_a_failed_build(checkout):
    checkout.write("ops/second/second.cpp", "int second() { return 2; }\n")
    assert (checkout.answer(), checkout.compiled()) == (1, 2)
    checkout.write("ops/tiny/tiny.h", "#define ANSWER 2\n")
    assert (checkout.answer(), checkout.compiled()) == (2, 1)
    checkout.write("ops/a/a.cpp", "int a() { return 0; }\n")
    checkout.write("ops/second/second.cpp", "int second() { return }\n")
    assert "cannot build" in checkout.run(MAX_JOBS="1").err
    checkout.compiled()
    checkout.write("ops/second/second.cpp", "int second() { return 3; }\n")
    assert (checkout.answer(), checkout.compiled()) == (2, 1)


def test_touch_and_move_and_another_folder_compile_nothing(checkout, tmp_path):
    assert (checkout.answer(), checkout.compiled()) == (1, 1)
    for file in (checkout.path / "ops").rglob("*.*"):
        file.touch()
    assert (checkout.answer(), checkout.compiled()) == (1, 0)
    checkout.path = checkout.path.rename(tmp_path / "moved elsewhere")
    assert (checkout.answer(), checkout.compiled()) == (1, 0)
    link = tmp_path / "link"
    link.symlink_to(checkout.path)
    checkout.path = link
    assert (checkout.answer(cwd="/", LC_ALL="C", HOME=tmp_path, MAX_JOBS="1"), checkout.compiled()) == (1, 0)
    checkout.cache = checkout.cache.rename(tmp_path / "moved cache")
    assert (checkout.answer(), checkout.compiled()) == (1, 0)


def test_other_flags_in_the_environment_and_another_compiler_rebuild(checkout):
    assert (checkout.answer(), checkout.compiled()) == (1, 1)
    assert (checkout.answer(CPATH="/nowhere"), checkout.compiled()) == (1, 1)
    with open(checkout.compiler, "a") as script:
        script.write("# a new release\n")
    assert (checkout.answer(), checkout.compiled()) == (1, 1)
    assert (checkout.answer(), checkout.compiled()) == (1, 0)


def test_without_a_compiler_a_cached_library_is_used(checkout):
    assert checkout.answer() == 1
    assert checkout.answer(CXX="g++-that-was-removed") == 1


def test_a_source_saved_during_its_compile_is_compiled_again(checkout):
    checkout.slow.touch()
    child = checkout.start()
    wait_for(lambda: checkout.log.exists() and " -c " in checkout.log.read_text())
    checkout.write("ops/tiny/tiny.h", "#define ANSWER 5\n")
    checkout.slow.unlink()
    child.wait()
    assert (child.code, child.out) == (0, "5\n")
    assert checkout.answer() == 5


def in_cache(checkout, whose: str = "") -> list[int]:
    """Processes that work in a staging folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            folder = os.readlink(process / "cwd")
            if folder.startswith(str(checkout.cache)) and whose in folder:
                found.append(int(process.name))
        except OSError:
            pass
    return found


# ---- many processes, and dead ones --------------------------------------------------------------------------------


def test_eight_processes_at_once_compile_once(checkout):
    children = [checkout.start() for _ in range(8)]
    assert [(child.wait().code, child.out) for child in children] == [(0, "1\n")] * 8
    assert checkout.compiled() == 1
    assert sum("built calcops" in child.err for child in children) == 1


def test_a_killed_builder_leaves_nothing_that_the_next_import_waits_for(checkout):
    checkout.slow.touch()
    builder = checkout.start()
    wait_for(lambda: checkout.log.exists() and " -c " in checkout.log.read_text())
    builder.kill()
    assert len(in_cache(checkout)) >= 2  # ninja and the compiler outlive it
    after = checkout.start()  # before the dead one is reaped: a zombie is as dead
    wait_for(lambda: len(list(checkout.cache.glob("*/stage.*"))) == 1 and f".{after.pid}." in str(staging(checkout)))
    assert "waiting" not in after.err
    wait_for(lambda: set(in_cache(checkout)) == set(in_cache(checkout, f".{after.pid}.")))  # the others are killed
    builder.wait()
    checkout.slow.unlink()
    assert after.wait().out == "1\n"
    assert staging(checkout) == []


def staging(checkout) -> list[Path]:
    return list(checkout.cache.glob("*/stage.*"))


def test_a_waiter_says_whom_it_waits_for_and_takes_over_within_a_second(checkout):
    checkout.slow.touch()
    builder = checkout.start()
    wait_for(lambda: checkout.log.exists() and " -c " in checkout.log.read_text())
    waiter = checkout.start()
    wait_for(lambda: "waiting" in waiter.err)
    assert re.fullmatch(
        rf"calcops_jit: waiting for pid {builder.pid} on {os.uname().nodename}, which builds calcops \(\d+ s\)\n",
        waiter.err,
    )
    builder.kill()
    wait_for(lambda: "building calcops [0/?]" in waiter.err, 1.0)
    checkout.slow.unlink()
    builder.wait()
    assert waiter.wait().out == "1\n"
