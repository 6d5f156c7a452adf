"""CalcOps' own wheel: its operators compute, one wheel serves several versions of PyTorch, and its
import is as quick as one from the cache."""

import os
import subprocess
import sys
import time
import zipfile

import pytest
from checkout import HERE, built_wheel, copy, pip

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


def import_seconds(python, folder: str, variables: dict[str, str]) -> float:
    """Return the time of an import. Its library must lie in this folder."""
    command = [python, "-W", "ignore", "-c", TIMED_IMPORT]
    child = subprocess.run(command, cwd="/", env=variables, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    path, seconds = child.stdout.split()
    assert f"/{folder}/" in path
    return float(seconds)


@pytest.mark.long
def test_operators_of_a_wheel_compute_and_import_as_quickly_as_from_the_cache(
    environment, tmp_path
):
    wheel = built_wheel(copy(tmp_path / "source"), tmp_path / "dist")
    pip("install", wheel, python=environment)
    prefixes = ("CALCOPS_", "PYTHON", "CXX")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    # With the additional flag, the loader does not use the library of the wheel.
    cached = {
        "CALCOPS_CACHE": str(tmp_path / "cache"),
        "CALCOPS_CFLAGS": "-DWARM",
        "CALCOPS_CUDA": "0",
    }
    shipped = {
        "CALCOPS_CACHE": str(tmp_path / "empty"),
        "PATH": "/nowhere",
        "CUDA_VISIBLE_DEVICES": "",
    }
    import_seconds(environment, "cache", variables | cached)  # builds
    time.sleep(3)
    import_seconds(environment, "cache", variables | cached)
    times = {"cache": [], "prebuilt": []}
    for _ in range(7):
        times["cache"].append(import_seconds(environment, "cache", variables | cached))
        times["prebuilt"].append(import_seconds(environment, "prebuilt", variables | shipped))
    from_cache, from_wheel = min(times["cache"]), min(times["prebuilt"])
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
    source = copy(tmp_path / "source")
    wheel = built_wheel(source, tmp_path / "dist", str(other), CALCOPS_CUDA="0")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    for python in sys.executable, other:
        variables = {"PYTHONPATH": str(tmp_path / "site"), "PATH": "/nowhere", "HOME": "/nowhere"}
        variables |= {"CALCOPS_CACHE": str(tmp_path / "cache")}
        import_seconds(python, "prebuilt", os.environ | variables)
