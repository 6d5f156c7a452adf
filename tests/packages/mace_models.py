"""Small MACE models with random weights, made and packaged in the environment of `make mace`."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / "build" / "mace" / "bin" / "python"
if not PYTHON.exists():
    pytest.skip("MACE is not installed: make mace", allow_module_level=True)

# Writes my.model, as MACE's training does, and two_heads.model.
MAKE_MODELS = """
import mace.modules, numpy, torch
from e3nn import o3

def model(heads, pair_repulsion):
    torch.manual_seed(0)
    kinds = mace.modules.interaction_classes
    return mace.modules.ScaleShiftMACE(
        r_max=4.0, num_bessel=6, num_polynomial_cutoff=5, max_ell=2, num_interactions=2,
        interaction_cls=kinds["RealAgnosticResidualInteractionBlock"],
        interaction_cls_first=kinds["RealAgnosticDensityInteractionBlock"],
        num_elements=2, atomic_numbers=[13, 29], hidden_irreps=o3.Irreps("4x0e + 4x1o"),
        MLP_irreps=o3.Irreps("8x0e"), gate=torch.nn.functional.silu, correlation=3,
        atomic_energies=numpy.array([[-1.0, -3.0], [-2.0, -5.0]])[:len(heads)],
        avg_num_neighbors=8.0, atomic_inter_scale=[1.5, 0.5][:len(heads)],
        atomic_inter_shift=[0.1, -0.2][:len(heads)], heads=heads, pair_repulsion=pair_repulsion)

torch.set_default_dtype(torch.float64)
torch.save(model(["Default"], True), "my.model")
torch.set_default_dtype(torch.float32)
torch.save(model(["pt_head", "Default"], False), "two_heads.model")
"""


def python(folder, *arguments, fails=False):
    """Run Python with MACE in a folder, and return what it prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [PYTHON, "-W", "ignore", *arguments]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert bool(run.returncode) == fails, run.stdout + run.stderr
    return run.stdout + run.stderr


def make_models(folder):
    """Write my.model and two_heads.model, and package the former in mace.pt."""
    python(folder, "-c", MAKE_MODELS)
    python(folder, "-m", "calcops.graph", "mace", "my.model", "mace.pt")
