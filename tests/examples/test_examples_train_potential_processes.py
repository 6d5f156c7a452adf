"""examples/train_potential: processes of torchrun share a batch, and do what a single one does with
the whole of it."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
for name in ("ase", "vesin", "matplotlib", "tqdm"):
    pytest.importorskip(name)
if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

from calcops.train.frames import generate  # noqa: E402
from calcops.train.systems import kSystems  # noqa: E402

# Some two seconds pass from the line of step 20, at which a test kills the processes, to the last.
OPTIONS = "--steps", 240, "--batch", 4, "--every", 20


@pytest.fixture(scope="module")
def frames():
    few = dict(samples=3, cells_each_way=1, settle=20, every=10)
    sets = [
        generate(kSystems["gallium-nitride"], n, seed=seed, **few)
        for seed, n in enumerate((4, 1, 1))
    ]
    return {"system": "gallium-nitride", "sets": sets}


def start(folder, processes, *options):
    """torchrun, which starts all processes again if one dies. Gloo aborts a process whose peer is
    gone at the wrong moment (https://github.com/pytorch/gloo/issues/514)."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    launcher += ["--max-restarts", "1"]
    command = [
        sys.executable,
        "-m",
        *launcher,
        str(ROOT / "examples" / "train_potential" / "train.py"),
        str(folder),
    ]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command += ["--system", "gallium-nitride", *map(str, options)]
    return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)


def finish(process):
    """What it printed; a warning tells of a process that died and was started again."""
    out, err = process.communicate(timeout=300)
    first, last = err[:8000], err[-2000:]
    assert process.returncode == 0, f"{first}\n[...]\n{last}"
    if "exitcode" in err:
        warnings.warn(f"torchrun started the processes again:\n{first}", stacklevel=2)
    return out


@pytest.fixture(scope="module")
def trained(frames, tmp_path_factory):
    """Folders of 60 steps on batches of four frames: by one process, and by two."""
    folders = {}
    for processes in (1, 2):
        folders[processes] = tmp_path_factory.mktemp(f"by_{processes}")
        torch.save(frames, folders[processes] / "frames.pt")
        printed = finish(start(folders[processes], processes, *OPTIONS))
        steps = [int(line.split()[1][:-1]) for line in printed.splitlines() if "held out" in line]
        assert steps == [*range(20, 241, 20)], "once each"
    return folders


def test_two_processes_have_the_losses_of_one_with_the_whole_batch(trained):
    one, two = (np.array(torch.load(trained[n] / "checkpoint.pt")["history"]) for n in (1, 2))
    assert one.shape == (240, 3) and (one[0] != one[-1]).all()
    # Sums in another order differ by rounding, which grows from step to step.
    np.testing.assert_allclose(two[:60], one[:60], rtol=1e-12)


def test_two_processes_that_are_killed_and_started_again_end_as_if_they_had_not_been(
    trained, frames, tmp_path
):
    torch.save(frames, tmp_path / "frames.pt")
    first = start(tmp_path, 2, *OPTIONS)
    assert "step     20" in first.stdout.readline()
    first.terminate()  # which torchrun passes on
    first.communicate()
    assert len(torch.load(tmp_path / "checkpoint.pt")["history"]) < 240
    finish(start(tmp_path, 2, *OPTIONS))
    ours, expected = (torch.load(folder / "checkpoint.pt") for folder in (tmp_path, trained[2]))
    assert ours["history"] == expected["history"]
    for key, value in expected["model"].items():
        assert torch.equal(ours["model"][key], value), key


def test_the_first_process_makes_the_frames_for_all(tmp_path):
    printed = finish(start(tmp_path, 2, "--steps", 1, "--batch", 2, "--trajectories", 1, 1, 1))
    assert printed.count("test frames, looked at only here") == 1
    assert {path.name for path in tmp_path.iterdir()} == {
        *("frames.pt", "checkpoint.pt", "model.npz", "loss.png", "parity.png")
    }


def test_a_batch_that_the_processes_cannot_share_is_refused(tmp_path):
    process = start(tmp_path / "new", 2, "--batch", 3)
    _, err = process.communicate(timeout=300)
    assert (
        process.returncode != 0 and "--batch: expected a multiple of the 2 processes, got 3" in err
    )
    assert not (tmp_path / "new").exists()
