"""Where the programs that need a GPU write their results, and on which machine these were measured.

python bench/gpu_results.py          prints the description of this machine as JSON
"""

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def folder():
    """Return $OUT, or build/gpu_check in this repository."""
    path = Path(os.environ.get("OUT") or ROOT / "build" / "gpu_check")
    path.mkdir(parents=True, exist_ok=True)
    return path


def write_json(path, value):
    """Replace a file at once, so that a killed program leaves the old file or the new one."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(value, indent=1) + "\n")
    new.replace(path)


def printed(*command):
    """Return what a program prints; "" if there is no such program or it fails."""
    try:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


def commit():
    """Return the git commit of this checkout, and whether files differ from it."""
    if not (ROOT / ".git").exists():
        return "unknown: this copy has no .git"
    name = printed("git", "rev-parse", "HEAD")
    if not name:
        return "unknown: git does not read .git"
    return f"{name}, edited" if printed("git", "status", "--porcelain") else name


def describe():
    """Return the date, the commit, the GPU and the programs on which the results depend."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    query = "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "gpu": gpu,
        "driver": printed(*query) or "unknown: nvidia-smi does not name it",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "architectures": os.environ.get("TORCH_CUDA_ARCH_LIST", ""),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "processors": os.cpu_count(),
        "compiler": printed(os.environ.get("CXX", "c++"), "--version").partition("\n")[0],
    }


if __name__ == "__main__":
    print(json.dumps(describe(), indent=1))
