"""Whether to build for CUDA, with which toolkit, for which GPUs, without initialising CUDA."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
import subprocess
from types import SimpleNamespace

import torch

# If nobody says for which GPU: code for A100 and H100, and PTX for anything newer.
DEFAULT_ARCHES = "8.0;9.0+PTX"
# NVIDIA's name for this kind of machine.
TARGET = {"aarch64": "sbsa-linux"}.get(os.uname().machine, "x86_64-linux")


class Choice(SimpleNamespace):
    """Whether to build for CUDA. If not, `reason` says why, and `fix` is the command that changes
    it.
    """

    build: bool = False
    reason: str = ""
    fix: str = ""
    fatal: bool = False  # CUDA was asked for, and cannot be built
    home: str = ""  # the toolkit's folder
    version: str = ""  # the toolkit's
    arches: str = ""  # as in TORCH_CUDA_ARCH_LIST; empty: those of `gpus`
    gpus: tuple[str, ...] = ()


def choose(needed: bool = False) -> Choice:
    """Obeys CALCOPS_CUDA; if that is not set, a visible GPU or an explicit TORCH_CUDA_ARCH_LIST
    asks for CUDA.

    needed   there are .cu sources that cannot be left out
    """
    switch = os.environ.get("CALCOPS_CUDA", "")
    if switch not in ("", "0", "1"):
        raise ValueError(f"calcops_jit: expected CALCOPS_CUDA 0 or 1, got {switch!r}")
    asked = needed or switch == "1"
    if switch == "0" and not needed:
        return Choice(reason="CALCOPS_CUDA=0 was set", fix="unset CALCOPS_CUDA")
    if torch.version.cuda is None:
        return Choice(
            reason="this PyTorch is a CPU build",
            fix="pip install --force-reinstall torch",
            fatal=asked,
        )
    arches = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace("native", "")
    gpus = visible_gpus()
    if not (asked or gpus or arches):
        return Choice(reason="no GPU was visible", fix="CALCOPS_CUDA=1 python -m calcops_jit build")
    home, version = find_toolkit()
    if not home:
        have = (
            f"nvcc is CUDA {version}, torch is CUDA {torch.version.cuda}"
            if version
            else "no nvcc was found"
        )
        checkout = os.path.exists(os.path.join(os.path.dirname(__file__), "..", "Makefile"))
        fix = (
            "make cuda" if checkout else f"pip install 'cuda-toolkit[nvcc]=={torch.version.cuda}.*'"
        )
        return Choice(reason=have, fix=fix, fatal=asked, gpus=gpus)
    if not (arches or gpus):
        arches = DEFAULT_ARCHES
    return Choice(build=True, home=home, version=version, arches=arches, gpus=gpus)


def find_toolkit() -> tuple[str, str]:
    """Finds the first toolkit of torch's major version: (folder, version); if there is none, ("",
    another version or "").
    """
    if torch.version.cuda is None:
        return "", ""
    nvcc = shutil.which("nvcc")
    wheels = os.path.join(
        os.path.dirname(os.path.dirname(torch.__file__)), "nvidia", "*", "bin", "nvcc"
    )
    candidates = [
        os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"),
        nvcc and os.path.dirname(os.path.dirname(os.path.realpath(nvcc))),
        "/usr/local/cuda",
        *(os.path.dirname(os.path.dirname(w)) for w in sorted(glob.glob(wheels), reverse=True)),
    ]
    other = ""
    for home in filter(None, candidates):
        if os.access(os.path.join(home, "bin", "nvcc"), os.X_OK):
            version = _toolkit_version(home)
            if not version or version.split(".")[0] == torch.version.cuda.split(".")[0]:
                return home, version
            other = other or version
    return "", other


def headers(home: str) -> str:
    """The folder of a toolkit's headers: include, which NVIDIA's packages link to that of the
    target; conda's have the target's alone.
    """
    of_target = os.path.join(home, "targets", TARGET, "include")
    plain = os.path.join(home, "include")
    return (
        of_target
        if os.path.isdir(of_target) and not os.path.exists(f"{plain}/cuda_runtime_api.h")
        else plain
    )


def _toolkit_version(home: str) -> str:
    for header in ("cuda_runtime_api.h", "cuda.h"):
        with (
            contextlib.suppress(OSError),
            open(os.path.join(headers(home), header), encoding="latin-1") as file,
        ):
            if found := re.search(r"#define CUDA(?:RT)?_VERSION\s+(\d+)", file.read(32768)):
                return f"{int(found[1]) // 1000}.{int(found[1]) % 1000 // 10}"
    return ""


def visible_gpus() -> tuple[str, ...]:
    """Names of the kinds of GPU in this machine; none if CUDA_VISIBLE_DEVICES hides them all."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return ()
    names = set()
    for file in glob.glob("/proc/driver/nvidia/gpus/*/information"):
        with contextlib.suppress(OSError), open(file, encoding="latin-1") as f:
            names.update(re.findall(r"^Model:\s*(.+?)\s*$", f.read(), re.MULTILINE))
    # WSL has no /proc/driver/nvidia.
    return tuple(sorted(names)) or ("GPU",) * os.path.exists("/dev/dxg")


def gpu_capabilities() -> list[str]:
    """Asks the driver, in a process of its own, for compute capabilities such as ["8.0", "9.0"]."""
    with contextlib.suppress(OSError):
        asked = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        said = subprocess.run(asked, capture_output=True, text=True).stdout
        return sorted(set(re.findall(r"^\d+\.\d$", said, re.MULTILINE)), key=float)
    return []


def arch_list(choice: Choice) -> str:
    """Return TORCH_CUDA_ARCH_LIST for the build: the given one, else every GPU here, the newest
    also as PTX.
    """
    here = "" if choice.arches else ";".join(gpu_capabilities())
    return choice.arches or (here + "+PTX" if here else DEFAULT_ARCHES)
