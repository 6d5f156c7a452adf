"""CalcOps' own wheel: its operators compute, one wheel serves several versions of PyTorch, and its
import is as quick as one from the cache."""

import os
import shutil
import subprocess
import sys
import time
import zipfile

import pytest
from checkout import HERE, built_wheel, pip

from _calcops_jit.ship import prebuilt

# Prints the path of the library and the seconds of its import.
TIMED_IMPORT = """
import time, torch
start = time.perf_counter()
import calcops_jit
seconds = time.perf_counter() - start
list_neigh = torch.tensor([[[1, -1], [0, -1]]])
dE = torch.ones(1, 2, 2, 4, requires_grad=True)
Ri_d = torch.arange(48.0).reshape(1, 2, 8, 3)
force = calcops_jit.force(list_neigh, dE, Ri_d)
force.square().sum().backward()
assert (force[0, 0, 0].item(), dE.grad[0, 0, 0, 3].item()) == (96.0, -11520.0)
print(calcops_jit.library_path(), seconds)
"""


@pytest.mark.long
def test_operators_of_a_wheel_compute_and_import_as_quickly_as_from_the_cache(
    environment, tmp_path
):
    wheel = built_wheel(HERE, tmp_path / "dist")
    pip("install", wheel, python=environment)
    prefixes = ("CALCOPS_", "PYTHON", "CXX")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    # With the additional flag, the loader does not use the library of the wheel.
    cached = variables | {
        "CALCOPS_CACHE": str(tmp_path / "cache"),
        "CALCOPS_CFLAGS": "-DWARM",
        "CALCOPS_CUDA": "0",
    }
    shipped = variables | {
        "CALCOPS_CACHE": str(tmp_path / "empty"),
        "PATH": "/nowhere",
        "CUDA_VISIBLE_DEVICES": "",
    }

    def import_seconds(variables: dict[str, str], folder: str) -> float:
        command = [environment, "-c", TIMED_IMPORT]
        child = subprocess.run(command, cwd="/", env=variables, capture_output=True, text=True)
        assert child.returncode == 0, child.stderr
        path, seconds = child.stdout.split()
        assert f"/{folder}/" in path
        return float(seconds)

    import_seconds(cached, "cache")  # builds
    time.sleep(3)
    # The times of the files are old enough now, and the loader records them.
    import_seconds(cached, "cache")
    times_from_cache = []
    times_from_wheel = []
    for _ in range(7):
        times_from_cache.append(import_seconds(cached, "cache"))
        times_from_wheel.append(import_seconds(shipped, "built"))
    from_cache = min(times_from_cache)
    from_wheel = min(times_from_wheel)
    print(
        f"import beyond torch: {from_cache * 1e3:.1f} ms from the cache, "
        f"{from_wheel * 1e3:.1f} ms from the wheel; "
        f"the wheel has {wheel.stat().st_size / 1e6:.1f} MB"
    )
    assert from_wheel < 2 * from_cache


@pytest.mark.long
def test_one_wheel_serves_two_versions_of_pytorch(tmp_path):
    other = HERE / ".venv-oldest/bin/python"
    if not other.exists():
        pytest.skip("make test-oldest makes the other environment")
    wheel = built_wheel(HERE, tmp_path / "dist", str(other), CALCOPS_CUDA="0")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    cache = tmp_path / "cache"

    def library(python, **variables) -> str:
        """Return the path of the library that an interpreter loads."""
        variables |= {"PYTHONPATH": str(tmp_path / "site"), "CALCOPS_CACHE": str(cache)}
        command = [python, "-W", "ignore", "-c", TIMED_IMPORT]
        child = subprocess.run(command, cwd="/", env=variables, capture_output=True, text=True)
        assert child.returncode == 0, child.stderr
        return child.stdout.split()[0]

    for python in sys.executable, other:
        assert "/site/_calcops_jit/built/" in library(python, PATH="/nowhere", HOME="/nowhere")

    # If its library is missing, the other PyTorch links a new one from the wheel's objects.
    folders = (tmp_path / "site/_calcops_jit/built").iterdir()
    (other_folder,) = [path for path in folders if path.name not in ("objects", prebuilt.label())]
    shutil.rmtree(other_folder)
    assert str(cache) in library(other, PATH=os.environ["PATH"], CALCOPS_CUDA="0")
    slots = sorted(path.name.rpartition("-")[0] for path in cache.iterdir())
    assert slots == ["calcops", "unit-runtime.cpp"]
