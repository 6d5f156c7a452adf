"""`make wheel`: a wheel with the operators, built for several levels of x86-64.

    python -m _calcops_jit.ship.wheel [FOLDER [PYTHON ...]]     in a checkout; default: dist

It has libraries for the PyTorch of this environment and of the environments of the PYTHONs.
Otherwise it is the wheel of `pip wheel .`, with all sources. `prebuilt` finds the libraries in it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

from .. import cuda
from ..cache import store
from ..cache.closure import Closure, file_digest, merged, young
from ..errors import BuildError, report
from ..live import library
from ..progress import say
from ..request import MACHINE, Request
from . import prebuilt

_ROOT = os.path.dirname(os.path.dirname(prebuilt.FOLDER))  # of the checkout
# A stamp that no file has, so that contents are compared wherever the wheel is installed.
_NO_STAMP = young(bytes(32))


def write(folder: str, *pythons: str) -> str:
    """Write the wheel into a folder and return its path.

    Args:
        folder: where the wheel goes.
        pythons: paths of Pythons with other versions of PyTorch, and with setuptools and ninja.

    Raises:
        BuildError: the operators cannot be built.
    """
    flags = os.environ.get("CALCOPS_CFLAGS")
    if flags:
        evidence = f"CALCOPS_CFLAGS={flags}: the libraries would fit only where it is set, too"
        raise report("cannot make a wheel", [evidence], "unset CALCOPS_CFLAGS")
    if MACHINE != "x86_64":
        evidence = f"its libraries are for the levels of x86-64; this is {MACHINE}"
        raise report("cannot make a wheel", [evidence], "pip install .")
    if not os.path.exists(f"{_ROOT}/pyproject.toml"):
        raise report(
            "cannot make a wheel", [f"{_ROOT} has no pyproject.toml"], "make wheel in a checkout"
        )
    choice = _choice()
    requests = {level: prebuilt.request(level, choice) for level in prebuilt.LEVELS}
    oldest = next(iter(requests.values()))
    # Loading a library lists its operators. They are the same for every level, and any processor
    # can load the oldest one.
    library.obtain(oldest)
    operators = store.find(oldest).manifest.operators
    with tempfile.TemporaryDirectory() as temporary:
        built = f"{temporary}/built"
        for level, request in requests.items():
            _add(f"{built}/{prebuilt.label()}/{level}", request, prebuilt.facts(request), operators)
            _add_objects(f"{built}/{prebuilt.OBJECTS}/{level}", request)
        for python in pythons:
            command = [os.path.abspath(python), "-m", __spec__.name, "--beside", built]
            if subprocess.run(command, cwd=_ROOT).returncode:
                evidence = "it printed the cause above"
                raise report(f"cannot build the operators with {python}", [evidence], python)
        say(f"the libraries need {_oldest_system(built)}")
        return _pack(temporary, os.path.abspath(folder))


def _choice() -> cuda.Choice:
    """Return the choice for CUDA if there is nvcc and CALCOPS_CUDA is not 0, else that for CPUs.

    No GPU is needed. The environment variables are set for the Pythons that write() starts, too.
    """
    os.environ.setdefault("CALCOPS_CUDA", "1" if cuda.find_toolkit()[0] else "0")
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", cuda.DEFAULT_ARCHES)
    choice = cuda.choose()
    if choice.fatal:
        raise report("cannot make a wheel for CUDA", [choice.reason], choice.fix)
    if not choice.build:
        return prebuilt.NO_CUDA
    choice.arches = cuda.arch_list(choice)
    return choice


def add_beside(folder: str) -> None:
    """Add libraries for this PyTorch to a folder with objects and libraries for another PyTorch."""
    other = next(name for name in os.listdir(folder) if name != prebuilt.OBJECTS)
    for level in prebuilt.LEVELS:
        operators = store.read_manifest(f"{folder}/{other}/{level}").operators
        objects = f"{folder}/{prebuilt.OBJECTS}/{level}"
        request = prebuilt.of_objects(objects, _choice()).but(origin=prebuilt.ORIGIN)
        facts = prebuilt.facts(prebuilt.request(level, request.cuda))
        target = f"{folder}/{prebuilt.label()}/{level}"
        _add(target, request, facts, operators, store.read_manifest(objects).closure)


def _add(
    folder: str, request: Request, facts: dict, operators: dict[str, str], *closures: Closure
) -> None:
    """Make a folder with the library and its manifest.

    `closures` are those of objects with which the library is linked.
    """

    def publish(request: Request, slot: str, stage: str, built: str, closure: Closure) -> None:
        whole = merged([_portable(closure), *closures])
        _write(folder, request.output, built, request=facts, operators=operators, closure=whole)

    slot, _ = store.writable_slot(request)
    level = os.path.basename(folder)  # shown while the compilers run
    library.compile_and_publish(publish, request, slot, [level])


def _add_objects(folder: str, request: Request) -> None:
    """Make a folder with one object of all units that do not include PyTorch's headers."""
    units = {source: store.find(request.unit(source)) for source in request.sources}
    independent = {}
    for source, unit in units.items():
        read = unit.manifest.closure.entries()
        if not any(path.startswith(("@torch", "@python")) for path in read):
            independent[source] = unit
    closure = merged([_portable(unit.manifest.closure) for unit in independent.values()])
    with tempfile.TemporaryDirectory() as temporary:
        command = [*request.compiler, "-r", "-nostdlib", "-o", f"{temporary}/unit.o"]
        subprocess.run([*command, *(unit.path for unit in independent.values())], check=True)
        others = [request.fold(source) for source in request.sources if source not in independent]
        facts = prebuilt.facts(request)
        fields = {"request": facts, "asked": others, "operators": {}, "closure": closure}
        _write(folder, "unit.o", f"{temporary}/unit.o", **fields)


def _write(folder: str, name: str, file: str, **fields) -> None:
    """Put a file and its manifest, which has these fields, into a new folder."""
    os.makedirs(folder)
    target = shutil.copy(file, f"{folder}/{name}")
    manifest = store.Manifest(size=os.path.getsize(target), digest=file_digest(target), **fields)
    store.write_whole(f"{folder}/manifest", manifest.dump())


def _portable(closure: Closure) -> Closure:
    """Return the part of a closure that every machine can compare: the wheel's own files."""
    roots = ("@root", "@loader")
    entries = {}
    for path, (_, content) in closure.entries().items():
        if path.startswith(roots):
            entries[path] = _NO_STAMP, content
    absent = {}
    for folder, (_, names) in closure.absent.items():
        if folder.startswith(roots):
            absent[folder] = ["", names]  # no folder has the stamp "", so that names are compared
    return Closure.of(entries, [], absent, 0)


def _oldest_system(folder: str) -> str:
    """Return the versions of glibc and libstdc++ that the operators need."""
    data = b"".join(path.read_bytes() for path in Path(folder).glob("*/*/*.so"))
    needed = []
    for name in ("GLIBC", "GLIBCXX"):
        versions = re.findall(rf"\0{name}_([\d.]+)(?=\0)".encode(), data)
        numbers = [tuple(map(int, version.split(b"."))) for version in versions]
        if numbers:
            needed.append(f"{name} {'.'.join(map(str, max(numbers)))}")
    return " and ".join(needed) + ", or later"


def _pack(temporary: str, folder: str) -> str:
    """Pack the project and the libraries into a wheel in `folder`, and return its path.

    The wheel's version has the versions of PyTorch.
    """

    class WithLibraries(build_py):
        def run(self) -> None:
            super().run()
            self.copy_tree(f"{temporary}/built", f"{self.build_lib}/_calcops_jit/built")

    class ForThisPlatform(bdist_wheel):
        def get_tag(self) -> tuple[str, str, str]:
            # The libraries do not call Python, so they fit any Python 3.
            return "py3", "none", "linux_x86_64"

    label = ".".join(sorted(set(os.listdir(f"{temporary}/built")) - {prebuilt.OBJECTS}))
    # Nothing may stay in the project's build/, because a later `pip wheel .` would pack it.
    commands = ["egg_info", "--egg-base", temporary, "--tag-build", f"+torch{label}"]
    commands += ["build", "--build-base", f"{temporary}/b"]
    commands += ["bdist_wheel", "--bdist-dir", f"{temporary}/d", "--dist-dir", folder]
    os.chdir(_ROOT)
    # setuptools warns users not to call setup() directly. A developer's command may do it.
    with warnings.catch_warnings(action="ignore"):
        distribution = setup(
            script_args=["--quiet", *commands],
            cmdclass={"build_py": WithLibraries, "bdist_wheel": ForThisPlatform},
            has_ext_modules=lambda: True,  # the wheel is for one platform
        )
    return distribution.dist_files[-1][2]


if __name__ == "__main__":
    try:
        if sys.argv[1:2] == ["--beside"]:
            add_beside(sys.argv[2])
        else:
            print(write(*(sys.argv[1:] or ["dist"])))
    except BuildError as error:
        sys.exit(str(error))
