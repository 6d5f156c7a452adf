"""make wheel: a wheel with the operators, built for several kinds of processor and for the PyTorch
that is here.

    python -m _calcops_jit.wheel [FOLDER]     in a checkout; default: dist

It holds the sources, too, and is otherwise what `pip wheel .` makes. `prebuilt` finds the libraries
in it.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

from . import cache, cuda, library, prebuilt
from .closure import Closure, file_digest, young
from .errors import BuildError, report
from .progress import say
from .request import MACHINE, Request

_ROOT = os.path.dirname(os.path.dirname(prebuilt.FOLDER))  # of the checkout
# No file has it, so contents are compared wherever the wheel is installed.
_NO_STAMP = young(bytes(32))


def write(folder: str) -> str:
    """Write the wheel into a folder and return its path.

    Raises BuildError if the operators cannot be built."""
    if flags := os.environ.get("CALCOPS_CFLAGS"):
        evidence = f"CALCOPS_CFLAGS={flags}: what is built with it fits only where it is set, too"
        raise report("cannot make a wheel", [evidence], "unset CALCOPS_CFLAGS")
    if MACHINE != "x86_64":
        evidence = f"its libraries are for the levels of x86-64; this is {MACHINE}"
        raise report("cannot make a wheel", [evidence], "python -m calcops_jit export <folder>")
    if not os.path.exists(f"{_ROOT}/pyproject.toml"):
        raise report(
            "cannot make a wheel", [f"{_ROOT} has no pyproject.toml"], "make wheel in a checkout"
        )
    choice = _choice()
    requests = {level: prebuilt.request(level, choice) for level in prebuilt.LEVELS}
    oldest = next(iter(requests.values()))
    # Tells the operators of all: this processor need not be able to load the others.
    library.obtain(oldest)
    operators = cache.find(oldest).manifest.operators
    with tempfile.TemporaryDirectory() as made:
        for level, request in requests.items():
            _add(f"{made}/built/{level}", request, operators)
        say(f"the libraries need {_oldest_system(f'{made}/built')}")
        return _pack(made, os.path.abspath(folder))


def _choice() -> cuda.Choice:
    """Choose CUDA if it can be built, also without a GPU, unless CALCOPS_CUDA forbids it."""
    os.environ.setdefault("CALCOPS_CUDA", "1" if cuda.find_toolkit()[0] else "0")
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", cuda.DEFAULT_ARCHES)
    choice = cuda.choose()
    if choice.fatal:
        raise report("cannot make a wheel for CUDA", [choice.reason], choice.fix)
    if not choice.build:
        return prebuilt.NO_CUDA
    choice.arches = cuda.arch_list(choice)
    return choice


def _add(folder: str, request: Request, operators: dict[str, str]) -> None:
    """Makes a folder with the library and its manifest."""

    def publish(request: Request, slot: str, stage: str, built: str, closure: Closure) -> None:
        os.makedirs(folder)
        target = shutil.copy(built, f"{folder}/{request.output}")
        about = {
            "request": prebuilt.facts(request),
            "operators": operators,
            "closure": _portable(closure),
        }
        manifest = cache.Manifest(size=os.path.getsize(target), digest=file_digest(target), **about)
        cache.write_whole(f"{folder}/manifest", manifest.dump())

    library.compile_and(
        publish, request, cache.writable_slot(request)[0], [os.path.basename(folder)]
    )


def _portable(closure: Closure) -> Closure:
    """What can be compared on another machine: the wheel's own files, by their contents."""
    ours = ("@root", "@loader")
    entries = {
        path: (_NO_STAMP, content)
        for path, (_, content) in closure.entries().items()
        if path.startswith(ours)
    }
    absent = {
        folder: ["", names]
        for folder, (_, names) in closure.absent.items()
        if folder.startswith(ours)
    }
    return Closure.of(entries, [], absent, 0)


def _oldest_system(folder: str) -> str:
    """The newest versions of the system's libraries that the operators ask for."""
    data = b"".join(path.read_bytes() for path in Path(folder).glob("*/*.so"))
    found = []
    for name in ("GLIBC", "GLIBCXX"):
        versions = re.findall(rf"\0{name}_([\d.]+)(?=\0)".encode(), data)
        newest = max(
            versions, key=lambda version: tuple(map(int, version.split(b"."))), default=b""
        )
        found += [f"{name} {newest.decode()}"] * bool(newest)
    return " and ".join(found) + ", or later"


def _pack(made: str, folder: str) -> str:
    """Packs the project and the libraries into a wheel, whose version names PyTorch's."""

    class WithLibraries(build_py):
        def run(self) -> None:
            super().run()
            self.copy_tree(f"{made}/built", f"{self.build_lib}/_calcops_jit/built")

    class ForThisPlatform(bdist_wheel):
        def get_tag(self) -> tuple[str, str, str]:  # any Python 3: the libraries do not call it
            return "py3", "none", "linux_x86_64"

    label = re.sub(r"[^0-9A-Za-z]+", ".", torch.__version__)
    # Nothing is left in build/, from which a later `pip wheel .` would take it.
    commands = [
        "egg_info",
        "--egg-base",
        made,
        "--tag-build",
        f"+torch{label}",
        "build",
        "--build-base",
        f"{made}/b",
    ]
    commands += ["bdist_wheel", "--bdist-dir", f"{made}/d", "--dist-dir", folder]
    os.chdir(_ROOT)
    # A direct call of setup() is fine for a developer's command.
    with warnings.catch_warnings(action="ignore"):
        done = setup(
            script_args=["--quiet", *commands],
            cmdclass={"build_py": WithLibraries, "bdist_wheel": ForThisPlatform},
            has_ext_modules=lambda: True,
        )
    return done.dist_files[-1][2]


if __name__ == "__main__":
    try:
        print(write(*(sys.argv[1:] or ["dist"])))
    except BuildError as error:
        sys.exit(str(error))
