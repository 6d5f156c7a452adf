"""Random projects and random edits: a library is never stale.

A seed determines a small project of sources, headers and flags, and a sequence of edits.
After each edit, a new process loads the project with the kept cache. Its answer must be that of a
library which the plain compiler's command builds. If that command fails, the load must fail, too. A
load without an edit must start no compiler.

Test one project:
    CALCOPS_FUZZ_SEED=7 python -m pytest tests/loader/test_fuzz.py -m long
Test many projects for 30 minutes, and print the first seed:
    python -m pytest tests/loader/test_fuzz.py -m long -s
"""

import os
import shutil
import subprocess
import sys
import time

import pytest
from checkout import LOAD, Checkout, compiler
from random_project import Project

PLAIN_ANSWER = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).answer())"


class Comparison:
    """Compares the answer of the loader for a project with that of the compiler's command."""

    def __init__(self, folder: Checkout, seed: int, compilers: list[str]):
        self.folder = folder
        self.path = folder.project
        self.project = Project(self.path, seed, compilers)
        self.is_built = True
        self.error = ""

    def loaded(self, **environment) -> str:
        """Return the answer of a new process that loads the project, or "" if the build fails."""
        options, variables = self.project.options()
        script = LOAD.format(options=options)
        environment = variables | environment
        child = self.folder.run(script, cwd=self.path, CALCOPS_BUILD="0", **environment)
        self.error = f"code {child.code}: {child.err}"
        return child.out.strip()

    def plain(self) -> str:
        """Return the answer of a library that the compiler's command makes, or "" if it fails."""
        options, variables = self.project.options()
        build = self.path.parent / "plain"
        shutil.rmtree(build, ignore_errors=True)
        build.mkdir()
        cxx = variables["CXX"]
        variables |= {"TEST_LOG": os.devnull, "TEST_SLOW": "", "TEST_HOOK": ""}
        # The loader searches these folders, too.
        folders = [self.folder.path / "_calcops_jit/shadow", *options["extra_include_paths"]]
        paths = "".join(f"-I{os.path.realpath(path)} " for path in folders)
        cflags = " ".join(options["extra_cflags"])
        lines = [f"{cxx} {paths} -fPIC {cflags} -c {source}" for source in options["sources"]]
        lines.append(f"{cxx} mine.o other.o -shared -Wl,--as-needed -o mine.so")
        lines.append(f"'{sys.executable}' -I -S -c '{PLAIN_ANSWER}' ./mine.so")
        result = subprocess.run(
            " && ".join(lines),
            shell=True,
            cwd=build,
            env=os.environ | variables,
            capture_output=True,
            text=True,
        )
        return result.stdout.strip()

    def check(self) -> str:
        """Return a description of the difference between loader and compiler, or ""."""
        expected = self.plain()
        answer = self.loaded()
        self.is_built = bool(expected)
        if answer != expected:
            error = self.error
            clean = self.loaded(CALCOPS_CACHE=self.path.parent / "clean")
            shutil.rmtree(self.path.parent / "clean", ignore_errors=True)
            return self.report(
                f"the compiler gives {expected!r}, the kept cache {answer!r}, a clean "
                f"one {clean!r}: {error}"
            )
        self.folder.log.unlink(missing_ok=True)
        if answer and self.project.draw.random() < 0.3:
            answer = self.loaded()
            if answer != expected or self.folder.log.exists():
                return self.report(
                    f"without an edit: {expected!r}, then {answer!r}, and a compiler ran"
                )
        return ""

    def report(self, difference: str) -> str:
        """Return the difference with everything that it takes to reproduce it."""
        seed, history = self.project.seed, self.project.history
        lines = [
            difference,
            f"seed {seed}, step {len(history)}",
            *(f"{i}: {name}" for i, name in enumerate(history, 1)),
            *map(str, self.project.options()),
            f"CALCOPS_FUZZ_SEED={seed} python -m pytest {__file__} -m long",
        ]
        return "\n".join(lines)


def check_project(folder: Checkout, seed: int, steps: int, compilers: list[str]) -> str:
    """Make the project of a seed and edit it. Return a description of the first fault, or ""."""
    shutil.rmtree(folder.project)
    folder.project.mkdir()
    for slot in folder.cache.glob("*mine*"):
        shutil.rmtree(slot)
    comparison = Comparison(folder, seed, compilers)
    for _ in range(steps):
        if fault := comparison.check():
            return fault
        comparison.project.step(comparison.is_built)
    return comparison.check()


@pytest.fixture
def folder(tmp_path):
    return Checkout(tmp_path)


def test_a_random_project_is_rebuilt_after_each_edit(folder):
    fault = check_project(folder, 0, 5, [compiler(), compiler("clang++")])
    assert not fault, fault


@pytest.mark.long
def test_random_projects_are_rebuilt_after_each_edit_for_30_minutes(folder):
    first = int(os.environ.get("CALCOPS_FUZZ_SEED", time.time()))
    minutes = 0 if "CALCOPS_FUZZ_SEED" in os.environ else 30
    end = time.monotonic() + 60 * minutes
    print(f"CALCOPS_FUZZ_SEED={first}")
    seed = first
    while seed == first or time.monotonic() < end:
        fault = check_project(folder, seed, 15, [compiler(), compiler("clang++")])
        assert not fault, fault
        seed += 1
