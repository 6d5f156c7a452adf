"""`make wheel`: a wheel with the operators, built for several levels of x86-64; and its use.

    python -m _calcops_jit.wheel [FOLDER [PYTHON ...]]     in a checkout; default: dist

The wheel is that of `pip wheel .`, with all sources, and with a cache that is only read: the folder
built/ in this package. It has libraries for the PyTorch of this environment and of the environments
of the PYTHONs, one for each level.

A library fits if all flags, the build of PyTorch, and the bytes of the operators' and the loader's
sources are the same. Compilers and the system's headers are not compared, because the machine may
have none.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings

from . import cache, cuda, request
from .cache import Generation
from .messages import BuildError, report
from .processor import LEVELS, MACHINE, levels
from .request import LOADER, Request

_BUILT = "lib/_calcops_jit/built"  # in a temporary folder, from which setuptools packs lib/
_NO_CUDA = cuda.Choice(
    reason="the wheel is for CPUs", fix="CALCOPS_CUDA=1 python -m calcops_jit build"
)


def find(wanted: Request, reasons: list[str]) -> Generation | None:
    """Return the wheel's library for this machine, or None.

    Why none fits is appended to `reasons`.
    """
    for level in levels():
        for path in sorted(glob.glob(f"{glob.escape(LOADER)}/built/*/*")):
            try:
                facts = cache.read_record(f"{path}/manifest")["facts"]
                if facts["level"] == level:
                    return _checked(path, facts, wanted.cuda)
            except cache.UNFIT as problem:
                reasons.append(str(problem))
    if not reasons:
        reasons.append(f"this processor has none of {' '.join(LEVELS)}")
    return None


def _checked(path: str, facts: dict, wanted: cuda.Choice) -> Generation:
    """Return the generation in a folder of the wheel. UNFIT: it does not fit this machine."""
    choice = _NO_CUDA
    if "CUDA" in facts:
        version, arches = facts["CUDA"]
        choice = cuda.Choice(build=True, version=version, arches=arches)
    flags = os.environ.get("CALCOPS_CFLAGS")
    problem = f"CALCOPS_CFLAGS={flags}" if flags else _other_cuda(wanted, choice)
    if problem:
        raise ValueError(problem)
    brought = request.own(choice=choice, level=facts["level"])
    for difference in cache.differences(facts, brought.facts):
        raise ValueError(difference)
    return cache.checked(path, brought)


def _other_cuda(wanted: cuda.Choice, built: cuda.Choice) -> str:
    """Return why a library with the choice `built` does not fit the choice `wanted`; "" if it does.

    A library for CUDA fits a machine without nvcc or without a GPU, too.
    """
    if built.build and os.environ.get("CALCOPS_CUDA") == "0":
        return wanted.reason
    if built.build and wanted.build and wanted.arches not in ("", built.arches):
        return f"its GPU architectures are {built.arches}, not {wanted.arches}"
    if not built.build and (wanted.build or wanted.fatal):
        return f"it is for CPUs, and {'CUDA was asked for' if wanted.fatal else 'nvcc is here'}"
    return ""


# ---- make wheel ----------------------------------------------------------------------------------


def write(folder: str, *pythons: str) -> str:
    """Write the wheel into a folder and return its path.

    Args:
        folder: where the wheel goes.
        pythons: paths of Pythons with other versions of PyTorch.

    Raises:
        BuildError: the operators cannot be built.
    """
    flags = os.environ.get("CALCOPS_CFLAGS")
    for is_wrong, evidence, fix in (
        (flags, f"CALCOPS_CFLAGS={flags}: it would have to be set there, too", "unset it"),
        (MACHINE != "x86_64", f"its levels are of x86-64; this is {MACHINE}", "pip install ."),
        (not os.path.exists(f"{LOADER}/../pyproject.toml"), "no pyproject.toml", "use a checkout"),
    ):
        if is_wrong:
            raise report("cannot make a wheel", [evidence], fix)
    # No GPU is needed. The variables are set for the other Pythons, too.
    os.environ.setdefault("CALCOPS_CUDA", "1" if cuda.find_toolkit()[0] else "0")
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", cuda.DEFAULT_ARCHES)
    with tempfile.TemporaryDirectory() as temporary:
        built = f"{temporary}/{_BUILT}"
        add(built)
        for python in pythons:
            command = [os.path.abspath(python), "-m", __spec__.name, "--add", built]
            if subprocess.run(command, cwd=f"{LOADER}/..").returncode:
                evidence = "it printed the cause above"
                raise report(f"cannot build the operators with {python}", [evidence], python)
        return _pack(temporary, os.path.abspath(folder))


def add(folder: str) -> None:
    """Add libraries for this PyTorch to a folder, one for each level."""
    from .build import built

    choice = cuda.choose()
    if not choice.build and not choice.fatal:
        choice = _NO_CUDA
    for level in LEVELS:
        wanted = request.own(choice=choice, level=level)
        found = cache.find(wanted) or built(wanted, [level])
        target = f"{folder}/{wanted.slot}/{found.digest}"
        shutil.copytree(os.path.dirname(found.path), target)
        # Every machine can compare the wheel's own files.
        inputs = vars(found.inputs)
        files = {path: state for path, state in inputs["files"].items() if path[0] == "@"}
        absent = {path: names for path, names in inputs["absent"].items() if path[0] == "@"}
        portable = inputs | {"files": files, "absent": absent}
        cache.write_record(f"{target}/manifest", found.manifest | {"inputs": portable})


def _pack(temporary: str, folder: str) -> str:
    """Pack the project and the libraries into a wheel in `folder`, and return its path.

    The wheel's version has the versions of PyTorch.
    """
    from setuptools import setup
    from setuptools.command.bdist_wheel import bdist_wheel

    class ForThisPlatform(bdist_wheel):
        def get_tag(self) -> tuple[str, str, str]:
            # The libraries do not call Python, so they fit any Python 3.
            return "py3", "none", "linux_x86_64"

    manifests = map(cache.read_record, glob.glob(f"{temporary}/{_BUILT}/*/*/manifest"))
    versions = {manifest["facts"]["PyTorch"][0] for manifest in manifests}
    label = ".".join(sorted(re.sub(r"[^0-9A-Za-z]+", ".", version) for version in versions))
    # Nothing may stay in the project's build/, because a later `pip wheel .` would pack it.
    commands = ["egg_info", "--egg-base", temporary, "--tag-build", f"+torch{label}"]
    commands += ["build", "--build-lib", f"{temporary}/lib"]
    commands += ["bdist_wheel", "--bdist-dir", f"{temporary}/d", "--dist-dir", folder]
    os.chdir(f"{LOADER}/..")
    # setuptools warns users not to call setup() directly. A developer's command may do it.
    with warnings.catch_warnings(action="ignore"):
        distribution = setup(
            script_args=["--quiet", *commands],
            cmdclass={"bdist_wheel": ForThisPlatform},
            has_ext_modules=lambda: True,  # the wheel is for one platform
        )
    return distribution.dist_files[-1][2]


if __name__ == "__main__":
    try:
        if sys.argv[1:2] == ["--add"]:
            add(sys.argv[2])
        else:
            print(write(*(sys.argv[1:] or ["dist"])))
    except BuildError as error:
        sys.exit(str(error))
