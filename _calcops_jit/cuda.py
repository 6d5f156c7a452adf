"""Choose whether to build for CUDA, with which toolkit and for which GPUs.

Nothing here initialises CUDA.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
import subprocess
from types import SimpleNamespace

# The architectures if no GPU is known: code for A100 and H100, and PTX for newer GPUs.
DEFAULT_ARCHES = "8.0;9.0+PTX"
# Stands for the GPUs of a container in which no file names them.
UNNAMED = "an NVIDIA GPU"
# NVIDIA's name for this kind of machine, in the paths of a toolkit.
TARGET = {"aarch64": "sbsa-linux"}.get(os.uname().machine, "x86_64-linux")


class Choice(SimpleNamespace):
    """Whether and how to build for CUDA."""

    build: bool = False
    reason: str = ""  # why CUDA is not built
    fix: str = ""  # the command that changes this
    fatal: bool = False  # CUDA is required, but cannot be built
    home: str = ""  # the toolkit's folder
    version: str = ""  # the toolkit's version
    arches: str = ""  # as in TORCH_CUDA_ARCH_LIST; empty: those of `gpus`
    gpus: tuple[str, ...] = ()  # the names of the visible GPUs


def choose(needed: bool = False) -> Choice:
    """Return whether and how to build for CUDA.

    CALCOPS_CUDA decides. If it is not set, CUDA is built if a GPU is visible or
    TORCH_CUDA_ARCH_LIST is set. With `needed`, CUDA is required, as for a .cu source of `load`.
    """
    import torch

    switch = os.environ.get("CALCOPS_CUDA", "")
    if switch not in ("", "0", "1"):
        raise ValueError(f"calcops_jit: expected CALCOPS_CUDA 0 or 1, got {switch!r}")
    required = needed or switch == "1"
    if switch == "0" and not needed:
        return Choice(reason="CALCOPS_CUDA=0 was set", fix="unset CALCOPS_CUDA")
    if torch.version.cuda is None:
        reason = "this PyTorch is not for CUDA"
        fix = "install a PyTorch for CUDA"
        return Choice(reason=reason, fix=fix, fatal=required)
    # "native" stands for the visible GPUs, and so does an empty list.
    arches = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace("native", "")
    gpus = visible_gpus()
    if not (required or gpus or arches):
        return Choice(reason="no GPU was visible", fix="CALCOPS_CUDA=1 python -m calcops_jit build")
    home, version = find_toolkit()
    if not home:
        reason = "no nvcc was found"
        if version:
            reason = f"nvcc is CUDA {version}, torch is CUDA {torch.version.cuda}"
        fix = f"pip install 'cuda-toolkit[nvcc]=={torch.version.cuda}.*'"
        return Choice(reason=reason, fix=fix, fatal=required, gpus=gpus)
    if not arches and gpus in ((), (UNNAMED,)):  # the names of GPUs belong to the key of a build
        arches = DEFAULT_ARCHES
    return Choice(build=True, home=home, version=version, arches=arches, gpus=gpus)


def find_toolkit() -> tuple[str, str]:
    """Return (folder, version) of the first toolkit with the major version of PyTorch's CUDA.

    A toolkit without a known version fits, too; its version is "". If no toolkit fits, return ("",
    the version of the first other one or "").
    """
    import torch

    if torch.version.cuda is None:
        return "", ""
    nvcc = shutil.which("nvcc")
    site = os.path.dirname(os.path.dirname(torch.__file__))
    wheels = glob.glob(os.path.join(site, "nvidia", "*", "bin", "nvcc"))
    candidates = [
        os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"),
        nvcc and os.path.dirname(os.path.dirname(os.path.realpath(nvcc))),
        "/usr/local/cuda",
        *(os.path.dirname(os.path.dirname(path)) for path in sorted(wheels, reverse=True)),
    ]
    other_version = ""
    for home in filter(None, candidates):
        if os.access(os.path.join(home, "bin", "nvcc"), os.X_OK):
            version = _toolkit_version(home)
            if not version or version.split(".")[0] == torch.version.cuda.split(".")[0]:
                return home, version
            other_version = other_version or version
    return "", other_version


def headers(home: str) -> str:
    """Return the folder of a toolkit's headers.

    In NVIDIA's packages, include/ is a link to targets/<TARGET>/include/. In conda's packages, only
    the latter has the headers.
    """
    of_target = os.path.join(home, "targets", TARGET, "include")
    plain = os.path.join(home, "include")
    if os.path.exists(f"{plain}/cuda_runtime_api.h") or not os.path.isdir(of_target):
        return plain
    return of_target


def _toolkit_version(home: str) -> str:
    """Return the version of a toolkit's headers; "" if there are none."""
    for header in ("cuda_runtime_api.h", "cuda.h"):
        path = os.path.join(headers(home), header)
        with contextlib.suppress(OSError), open(path, encoding="latin-1") as file:
            match = re.search(r"#define CUDA(?:RT)?_VERSION\s+(\d+)", file.read(32768))
            if match:
                number = int(match[1])  # 12040 for 12.4
                return f"{number // 1000}.{number % 1000 // 10}"
    return ""


def visible_gpus() -> tuple[str, ...]:
    """Return the names of this machine's GPUs, or (UNNAMED,).

    Return () if there are none, or if CUDA_VISIBLE_DEVICES hides them all.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return ()
    names = set()
    for file in glob.glob("/proc/driver/nvidia/gpus/*/information"):
        with contextlib.suppress(OSError), open(file, encoding="latin-1") as f:
            names.update(re.findall(r"^Model:\s*(.+?)\s*$", f.read(), re.MULTILINE))
    if not names and os.path.exists("/dev/dxg"):  # WSL, which has no /proc/driver/nvidia
        return ("GPU",)
    if not names and glob.glob("/dev/nvidia[0-9]*"):
        return (UNNAMED,)
    return tuple(sorted(names))


def arch_list(choice: Choice) -> str:
    """Return TORCH_CUDA_ARCH_LIST for the build.

    This is the choice's list. If that is empty, it is all architectures of this machine's GPUs,
    with PTX for the newest. If nvidia-smi names none, it is DEFAULT_ARCHES.
    """
    if choice.arches:
        return choice.arches
    capabilities: set[str] = set()
    with contextlib.suppress(OSError):
        command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        output = subprocess.run(command, capture_output=True, text=True).stdout
        capabilities.update(re.findall(r"^\d+\.\d$", output, re.MULTILINE))
    if not capabilities:
        return DEFAULT_ARCHES
    return ";".join(sorted(capabilities, key=float)) + "+PTX"


def loaded_runtime() -> str:
    """Return the path of the CUDA runtime that PyTorch has loaded; "" if it has none."""
    with open("/proc/self/maps") as file:
        match = re.search(r"(/\S.*/libcudart\.so[.\d]*)$", file.read(), re.MULTILINE)
    return match[1] if match else ""
