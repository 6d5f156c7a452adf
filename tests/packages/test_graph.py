"""calcops/graph: forces from edges are those of autograd through positions and strain,
also for SevenNet if it is installed."""

import re

import pytest
import torch
from calcops.__main__ import main  # noqa: E402
from calcops.graph import __main__ as graph_command
from calcops.graph import edge_forces
from programs import ROOT, run

PYTHON = ROOT / "build" / "graph_potential" / "bin" / "python"


class Potential(torch.nn.Module):
    """An energy with two rounds of messages, which depend on other edges of an edge's atoms."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(3, 8).double()
        self.second = torch.nn.Linear(8, 1).double()

    def forward(self, edge_index, edge_vec, natoms):
        envelope = torch.exp(-edge_vec.square().sum(1, keepdim=True))
        message = torch.tanh(self.first(edge_vec)) * envelope
        for _ in range(2):
            atoms = message.new_zeros(natoms, 8).index_add(0, edge_index[1], message)
            message = message * atoms[edge_index[0]].cos()
        return self.second(atoms).sum(1)


def structures(count, natoms=5):
    """Return positions [count * natoms, 3], edges of complete graphs, and each atom's structure."""
    batch = torch.arange(count).repeat_interleave(natoms)
    near = (batch[:, None] == batch) & ~torch.eye(len(batch), dtype=torch.bool)
    return torch.randn(len(batch), 3, dtype=torch.float64), near.nonzero().T.contiguous(), batch


def test_forces_and_virials_of_a_batch_are_those_of_autograd_through_positions_and_strain():
    model = Potential()
    positions, edge_index, batch = structures(3)
    strain = torch.zeros(3, 3, 3, dtype=torch.float64, requires_grad=True)
    positions.requires_grad_()
    r = positions + torch.einsum("na,nab->nb", positions, strain[batch])
    energy = model(edge_index, r[edge_index[1]] - r[edge_index[0]], 15)
    dE_dr, dE_dstrain = torch.autograd.grad(energy.sum(), (positions, strain))

    edge_vec = (positions[edge_index[1]] - positions[edge_index[0]]).detach().requires_grad_()
    energy = model(edge_index, edge_vec, 15)
    force, virial, atom_virial = edge_forces(energy, edge_index, edge_vec, 15, batch, 3)
    torch.testing.assert_close(force, -dE_dr)
    torch.testing.assert_close(virial.mT, -dE_dstrain)
    torch.testing.assert_close(torch.zeros_like(virial).index_add(0, batch, atom_virial), virial)


def test_a_loss_of_forces_has_the_gradients_of_autograd():
    model = Potential()
    positions, edge_index, _ = structures(1)
    positions.requires_grad_()
    edge_vec = positions[edge_index[1]] - positions[edge_index[0]]
    energy = model(edge_index, edge_vec, 5)
    force = edge_forces(energy, edge_index, edge_vec, 5, create_graph=True)[0]
    expected = -torch.autograd.grad(energy.sum(), positions, create_graph=True)[0]
    weights = list(model.first.parameters())
    gradients, expected_gradients = (
        torch.autograd.grad(x.square().sum(), weights, retain_graph=True) for x in (force, expected)
    )
    for gradient, expected_gradient in zip(gradients, expected_gradients):
        torch.testing.assert_close(gradient, expected_gradient)


def test_atoms_without_edges_have_no_force():
    edge_index = torch.empty(2, 0, dtype=torch.long)
    edge_vec = torch.empty(0, 3, dtype=torch.double, requires_grad=True)
    energy = Potential()(edge_index, edge_vec, 2)
    force, virial, _ = edge_forces(energy, edge_index, edge_vec, 2)
    assert force.count_nonzero() == 0
    assert virial.count_nonzero() == 0


@pytest.mark.skipif(not PYTHON.exists(), reason="SevenNet is not installed: make graph-potential")
def test_sevennet_gives_its_own_results_through_the_operator():
    script = ROOT / "examples/sevennet/compare.py"
    words = "-W", "ignore", script, "--steps", "5", "--seconds", "0.1"
    printed = run(PYTHON, *words, OMP_NUM_THREADS="1").stdout
    pattern = r"^  (?:forces|stress|virials),.* (\S+) +(\S+) +(\S+)$"
    rows = re.findall(pattern, printed, re.MULTILINE)
    assert len(rows) == 3, printed
    for row in rows:
        largest, difference, difference_of_moved = map(float, row)
        assert difference < 1e-6 * largest, printed
        assert difference_of_moved < 3e-6 * largest, printed
    assert float(re.search(r"weights: (\S+)", printed)[1]) < 1e-5
    assert float(re.search(r"ends are (\S+) A", printed)[1]) < 1e-6


def test_a_file_that_a_foreign_reader_fails_on_is_one_line(monkeypatch):
    """SevenNet's reader of checkpoints fails on SevenNet's TorchScript by an error of its own."""

    def fails(name, head):
        raise TypeError(f"no model in {name}\nand a second line")

    monkeypatch.setattr(graph_command, "load_sevennet", fails)
    monkeypatch.setattr("sys.argv", [])
    with pytest.raises(SystemExit) as stop:
        main(["graph", "sevennet", "deployed.pt", "out.pt"])
    message = r"^calcops graph: expected a model .*sevennet wrote, got deployed.pt, .*deployed.pt$"
    assert re.match(message, stop.value.code)
