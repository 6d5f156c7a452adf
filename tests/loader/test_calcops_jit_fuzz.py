"""Random projects and random edits: a library is never stale.

From a seed comes a small project of sources, headers, flags and libraries, and then a sequence of
edits. After each edit a new process loads the project with the kept cache. Its answer, or the fact
that the build fails, must be what the plain compiler's command gives. A load without an edit must
start no compiler.

One project: CALCOPS_FUZZ_SEED=7 python -m pytest tests/loader/test_calcops_jit_fuzz.py -m long Many, for
30 minutes from a seed that is printed: python -m pytest tests/loader/test_calcops_jit_fuzz.py -m long -s
"""

import os
import shutil
import subprocess
import sys
import time

import pytest
from random_project import Project
from test_calcops_jit_inputs import LOAD, Folder

# Stamps settle after this time instead of two seconds, so that edits also meet stamps that the
# loader trusts.
SHORT_TICK = "import _calcops_jit.cache.closure\n_calcops_jit.cache.closure._TICK_NS = 20_000_000\n"
PLAIN_ANSWER = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).answer())"


class Comparison:
    """What the loader gives for a project, and what the compiler gives."""

    def __init__(self, folder: Folder, seed: int):
        self.folder, self.project, self.project = (
            folder,
            folder.project,
            Project(folder.project, seed),
        )
        self.built, self.error = True, ""

    def loaded(self, **environment) -> str:
        """Returns the answer of a new process that loads the project; "" if it cannot be built."""
        options, variables = self.project.options()
        script = SHORT_TICK * self.project.settles + LOAD.format(options=options)
        child = self.folder.run(
            script, cwd=self.project, CALCOPS_BUILD="0", **variables | environment
        )
        self.error = f"code {child.code}: {child.err}"
        return child.out.strip()

    def plain(self) -> str:
        """Returns the answer of a library that the compiler's command makes; "" if that fails."""
        options, variables = self.project.options()
        build = self.project.parent / "plain"
        shutil.rmtree(build, ignore_errors=True)
        build.mkdir()
        compiler, log = variables["CXX"], self.folder.log
        # As the loader has them.
        folders = [self.folder.path / "_calcops_jit/shadow", *options["extra_include_paths"]]
        paths = "".join(f"-I{os.path.realpath(path)} " for path in folders)
        cflags, ldflags = " ".join(options["extra_cflags"]), " ".join(options["extra_ldflags"])
        lines = [f"{compiler} {paths} -fPIC {cflags} -c {source}" for source in options["sources"]]
        lines.append(f"{compiler} mine.o other.o -shared -Wl,--as-needed {ldflags} -o mine.so")
        lines.append(f"'{sys.executable}' -I -S -c '{PLAIN_ANSWER}' ./mine.so")
        run = {"cwd": build, "env": os.environ | variables, "capture_output": True, "text": True}
        result = subprocess.run(" && ".join(lines), shell=True, **run)
        log.unlink(missing_ok=True)
        return result.stdout.strip()

    def check(self) -> str:
        """Compares the loader with the compiler: a description of the difference, or ""."""
        expected, answer = self.plain(), self.loaded()
        self.built = bool(expected)
        if answer != expected:
            error = self.error
            clean = self.loaded(CALCOPS_CACHE=self.project.parent / "clean")
            shutil.rmtree(self.project.parent / "clean", ignore_errors=True)
            what = (
                f"the compiler gives {expected!r}, the kept cache {answer!r}, a clean "
                f"one {clean!r}: {error}"
            )
            return self.report(what)
        self.folder.log.unlink(missing_ok=True)
        if answer and self.project.draw.random() < 0.3:
            answer = self.loaded()
            if answer != expected or self.folder.log.exists():
                return self.report(
                    f"without an edit: {expected!r}, then {answer!r}, and a compiler ran"
                )
        return ""

    def report(self, what: str) -> str:
        listed = []
        for path in sorted(self.project.rglob("*")):
            if path.is_symlink():
                listed.append(f"{path} -> {os.readlink(path)}")
            elif (
                path.is_file()
                and path.suffix in (".h", ".cpp", ".rsp", ".so")
                and path.stat().st_size < 3000
            ):
                listed.append(f"{path}:\n{path.read_text(errors='replace')}")
            else:
                listed.append(str(path))
        steps = [f"{i}: {name}" for i, name in enumerate(self.project.done, 1)]
        again = (
            f"CALCOPS_FUZZ_SEED={self.project.seed} python -m pytest "
            "tests/loader/test_calcops_jit_fuzz.py -m long"
        )
        lines = [
            what,
            f"seed {self.project.seed}, step {len(self.project.done)}",
            *steps,
            *listed,
            *map(str, self.project.options()),
            again,
        ]
        return "\n".join(lines)


def check_project(folder: Folder, seed: int, steps: int) -> str:
    """Makes the project of a seed and edits it: a description of the first fault, or ""."""
    shutil.rmtree(folder.project)
    shutil.rmtree(folder.cache, ignore_errors=True)
    folder.project.mkdir()
    for name in ("g++", "clang++"):
        wrapper = folder.project.parent / name
        wrapper.write_text(
            f'#!/bin/sh\necho "$@" >> {folder.log}\nexec {shutil.which(name) or "c++"} "$@"\n'
        )
        wrapper.chmod(0o755)
    comparison = Comparison(folder, seed)
    for _ in range(steps):
        if fault := comparison.check():
            return fault
        comparison.project.step(comparison.built)
    return comparison.check()


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


@pytest.mark.parametrize("seed", range(3))
def test_a_random_project_is_never_stale(folder, seed):
    assert not (fault := check_project(folder, seed, 5)), fault


@pytest.mark.long
def test_no_random_project_is_stale(folder):
    first = int(os.environ.get("CALCOPS_FUZZ_SEED", time.time()))
    minutes = 0 if "CALCOPS_FUZZ_SEED" in os.environ else 30
    end = time.monotonic() + 60 * minutes
    print(f"CALCOPS_FUZZ_SEED={first}")
    seed = first
    while seed == first or time.monotonic() < end:
        assert not (fault := check_project(folder, seed, 15)), fault
        seed += 1
