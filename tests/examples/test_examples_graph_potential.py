"""examples/graph_potential: forces from edges against autograd through positions and strain;
SevenNet where it is."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "graph_potential"
PYTHON = ROOT / "build" / "graph_potential" / "bin" / "python"

sys.path.insert(0, str(FOLDER))
from edge_forces import edge_forces  # noqa: E402


class Potential(torch.nn.Module):
    """Two rounds of messages along the edges: what an edge gives depends on its atoms' other
    edges."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(3, 8).double(), torch.nn.Linear(8, 1).double()

    def forward(self, edge_index, edge_vec, natoms):
        message = torch.tanh(self.first(edge_vec)) * torch.exp(
            -edge_vec.square().sum(1, keepdim=True)
        )
        for _ in range(2):
            atoms = message.new_zeros(natoms, 8).index_add(0, edge_index[1], message)
            message = message * atoms[edge_index[0]].cos()
        return self.second(atoms).sum(1)


def structures(count, natoms=5):
    """Positions [count * natoms, 3], complete graphs of each structure, and which atom is of
    which."""
    batch = torch.arange(count).repeat_interleave(natoms)
    near = (batch[:, None] == batch) & ~torch.eye(len(batch), dtype=torch.bool)
    return torch.randn(len(batch), 3, dtype=torch.float64), near.nonzero().T.contiguous(), batch


def test_forces_and_virials_of_a_batch_are_those_of_autograd_through_positions_and_strain():
    model, (positions, edge_index, batch) = Potential(), structures(3)
    strain = torch.zeros(3, 3, 3, dtype=torch.float64, requires_grad=True)
    positions.requires_grad_()
    r = positions + torch.einsum("na,nab->nb", positions, strain[batch])
    energy = model(edge_index, r[edge_index[1]] - r[edge_index[0]], 15)
    gradients = torch.autograd.grad(energy.sum(), (positions, strain))

    edge_vec = (positions[edge_index[1]] - positions[edge_index[0]]).detach().requires_grad_()
    force, virial, atom_virial = edge_forces(
        model(edge_index, edge_vec, 15), edge_index, edge_vec, 15, batch, 3
    )
    torch.testing.assert_close(force, -gradients[0])
    torch.testing.assert_close(virial.mT, -gradients[1])
    torch.testing.assert_close(torch.zeros_like(virial).index_add(0, batch, atom_virial), virial)


def test_a_loss_of_forces_has_the_gradients_of_autograd():
    model, (positions, edge_index, _) = Potential(), structures(1)
    positions.requires_grad_()
    edge_vec = positions[edge_index[1]] - positions[edge_index[0]]
    energy = model(edge_index, edge_vec, 5)
    force = edge_forces(energy, edge_index, edge_vec, 5, create_graph=True)[0]
    expected = -torch.autograd.grad(energy.sum(), positions, create_graph=True)[0]
    weights = list(model.first.parameters())
    ours, theirs = (
        torch.autograd.grad(x.square().sum(), weights, retain_graph=True) for x in (force, expected)
    )
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b)


def test_atoms_without_edges_have_no_force():
    edge_index, edge_vec = (
        torch.empty(2, 0, dtype=torch.long),
        torch.empty(0, 3, dtype=torch.double, requires_grad=True),
    )
    force, virial, _ = edge_forces(Potential()(edge_index, edge_vec, 2), edge_index, edge_vec, 2)
    assert force.count_nonzero() == virial.count_nonzero() == 0


@pytest.mark.skipif(not PYTHON.exists(), reason="SevenNet is not installed: make graph-potential")
def test_sevennet_gives_its_own_numbers_through_the_operator():
    command = [PYTHON, "-W", "ignore", FOLDER / "compare.py", "--steps", "5", "--seconds", "0.1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert found.returncode == 0, found.stderr
    values = re.findall(r"^  (?:forces|stress|virials),.* (\S+) +(\S+) +(\S+)$", found.stdout, re.M)
    assert len(values) == 3, found.stdout
    for largest, apart, moved in values:
        assert float(apart) < 1e-6 * float(largest) and float(moved) < 3e-6 * float(largest), (
            found.stdout
        )
    assert float(re.search(r"weights: (\S+)", found.stdout)[1]) < 1e-5
    assert float(re.search(r"ends are (\S+) A", found.stdout)[1]) < 1e-6
