"""The project's own wheel: its operators compute, one wheel serves several PyTorches, and its import
takes what a warm import takes."""

import os
import shutil
import subprocess
import sys
import time
import zipfile

import pytest
from checkout import HERE, built_wheel, pip

from _calcops_jit.ship import prebuilt

MEASURED = """
import time, torch
start = time.perf_counter()
import calcops_jit
seconds = time.perf_counter() - start
list_neigh = torch.tensor([[[1, -1], [0, -1]]])
dE, Ri_d = torch.ones(1, 2, 2, 4, requires_grad=True), torch.arange(48.0).reshape(1, 2, 8, 3)
force = calcops_jit.force(list_neigh, dE, Ri_d)
force.square().sum().backward()
assert (force[0, 0, 0].item(), dE.grad[0, 0, 0, 3].item()) == (96.0, -11520.0)
print(calcops_jit.library_path(), seconds)
"""


@pytest.mark.long
def test_the_operators_compute_and_their_import_takes_what_a_warm_import_takes(
    environment, tmp_path
):
    wheel = built_wheel(HERE, tmp_path / "dist")
    pip("install", wheel, python=environment)
    variables = {
        k: v for k, v in os.environ.items() if not k.startswith(("CALCOPS_", "PYTHON", "CXX"))
    }
    # With a flag of its own it does not take what the wheel brings.
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

    def seconds(variables: dict[str, str], folder: str) -> float:
        command = [environment, "-c", MEASURED]
        child = subprocess.run(command, cwd="/", env=variables, capture_output=True, text=True)
        assert child.returncode == 0, child.stderr
        path, seconds = child.stdout.split()
        assert f"/{folder}/" in path
        return float(seconds)

    seconds(cached, "cache")  # builds
    time.sleep(3)
    seconds(cached, "cache")  # writes down stamps that are old enough to be trusted
    times = [(seconds(cached, "cache"), seconds(shipped, "built")) for _ in range(7)]
    warm, from_wheel = map(min, zip(*times))
    print(
        (
            f"import beyond torch: {warm * 1e3:.1f} ms from the cache, "
            f"{from_wheel * 1e3:.1f} ms from the wheel;"
        ),
        end=" ",
    )
    print(f"the wheel has {wheel.stat().st_size / 1e6:.1f} MB")
    assert from_wheel < 2 * warm


@pytest.mark.long
def test_one_wheel_serves_two_versions_of_pytorch(tmp_path):
    other = HERE / ".venv-oldest/bin/python"
    if not other.exists():
        pytest.skip("make test-oldest makes the other environment")
    wheel = built_wheel(HERE, tmp_path / "dist", str(other), CALCOPS_CUDA="0")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    cache = tmp_path / "cache"

    def loaded(python, **variables) -> str:
        variables |= {"PYTHONPATH": str(tmp_path / "site"), "CALCOPS_CACHE": str(cache)}
        command = [python, "-W", "ignore", "-c", MEASURED]
        child = subprocess.run(command, cwd="/", env=variables, capture_output=True, text=True)
        assert child.returncode == 0, child.stderr
        return child.stdout.split()[0]

    for python in sys.executable, other:
        assert "/site/_calcops_jit/built/" in loaded(python, PATH="/nowhere", HOME="/nowhere")
    (beside,) = {*(tmp_path / "site/_calcops_jit/built").iterdir()} - {
        tmp_path / "site/_calcops_jit/built" / name for name in ("objects", prebuilt.label())
    }
    shutil.rmtree(beside)
    assert str(cache) in loaded(other, PATH=os.environ["PATH"], CALCOPS_CUDA="0")
    slots = sorted(path.name.rpartition("-")[0] for path in cache.iterdir())
    assert slots == ["calcops", "unit-runtime.cpp"]
