"""calcops/train: processes of torchrun share a batch, with the results of one process that has the
whole batch."""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "examples" / "train_potential"))
for name in ("ase", "vesin", "matplotlib", "tqdm"):
    pytest.importorskip(name)
if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

from ase.io import read, write  # noqa: E402
from calcops.ase import CalcOps  # noqa: E402
from calcops.deepmd.deep_potential import load_npz  # noqa: E402
from calcops.potentials import load  # noqa: E402
from calcops.train import __main__ as command  # noqa: E402
from calcops.train import loop  # noqa: E402
from make_frames import generate  # noqa: E402

OPTIONS = "--cutoff", 4.2, "--batch", 32, "--every", 20, "--held-out", 0.2, "--tabulated"
ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
}
# The command without the package, which takes ten seconds.
WITHOUT_PACKAGE = """
import sys
from calcops.train import __main__, loop
loop.save = lambda model, path: None
__main__.main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def frames(tmp_path_factory):
    path = tmp_path_factory.mktemp("frames") / "frames.extxyz"
    write(path, generate("gallium-nitride", 5, 3, seed=0, copies=1))
    return path


def start(frames, folder, steps, program=("-m", "calcops", "train")):
    """Start a training by two processes of torchrun, and return torchrun's process.

    torchrun starts all processes again if one dies. One may die because Gloo aborts a process whose
    peer ends at the wrong moment (https://github.com/pytorch/gloo/issues/514).
    """
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launcher += ["--max-restarts", "1", *program, frames, "--folder", folder]
    words = [sys.executable, "-m", *launcher, *OPTIONS, "--steps", steps]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*map(str, words)], env=ENVIRONMENT, start_new_session=True, **pipes)


def finish(process):
    """Wait for a process, and return its output. Warn if torchrun had to start processes again."""
    out, err = process.communicate(timeout=300)
    first, last = err[:8000], err[-2000:]
    assert process.returncode == 0, f"{first}\n[...]\n{last}"
    if "exitcode" in err:
        warnings.warn(f"torchrun started the processes again:\n{first}", stacklevel=2)
    return out


@pytest.fixture(scope="module")
def trained(frames, tmp_path_factory):
    """Return the folders of two trainings of 60 steps: by this process, and by two of torchrun."""
    folders = {n: tmp_path_factory.mktemp(f"by_{n}") for n in (1, 2)}
    words = [frames, "--folder", folders[1], *OPTIONS, "--steps", 60]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "save", lambda model, path: None)
        command.main([str(word) for word in words])
    program = tmp_path_factory.mktemp("program") / "train.py"
    program.write_text(WITHOUT_PACKAGE)
    printed = finish(start(frames, folders[2], 60, [program]))
    steps = [int(step) for step in re.findall(r"^step +(\d+)", printed, re.MULTILINE)]
    assert steps == [20, 40, 60], "each line is printed once"
    return folders


def test_two_processes_have_the_losses_of_one_with_the_whole_batch(trained):
    one, two = (np.array(torch.load(trained[n] / "checkpoint.pt")["history"]) for n in (1, 2))
    assert one.shape == (60, 4)
    assert (one[0] != one[-1]).all()
    # Sums in another order differ by rounding errors, which grow from step to step.
    np.testing.assert_allclose(two, one, rtol=1e-12)


@pytest.mark.long
def test_two_processes_that_are_killed_and_started_again_end_as_if_they_had_not_been(
    frames, tmp_path
):
    """The processes are ended at step 20. The other steps take some two seconds, so that the
    processes are still at work."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    finish(start(frames, whole, 240))
    first = start(frames, stopped, 240)
    assert "12 frames to train on, 3 held out" in first.stdout.readline()
    assert "weights of the loss" in first.stdout.readline()
    assert "step     20" in first.stdout.readline()
    first.terminate()  # which torchrun passes on
    first.communicate()
    assert len(torch.load(stopped / "checkpoint.pt")["history"]) < 240
    finish(start(frames, stopped, 240))
    ours, expected = (torch.load(folder / "checkpoint.pt") for folder in (stopped, whole))
    assert ours["history"] == expected["history"]
    for key, value in expected["parameters"].items():
        assert torch.equal(ours["parameters"][key], value), key
    atoms = read(frames)
    atoms.calc = CalcOps(load(whole / "model.pt2"))
    packaged = atoms.get_forces()
    atoms.calc = CalcOps(load_npz(whole / "model.npz"))
    np.testing.assert_allclose(packaged, atoms.get_forces(), atol=1e-8)


def test_one_of_two_processes_writes_the_files(trained):
    names = {"checkpoint.pt", "log.csv", "model.npz", "loss.png", "parity.png"}
    assert {path.name for path in trained[2].iterdir()} == names
