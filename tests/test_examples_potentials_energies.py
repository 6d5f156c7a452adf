"""examples/potentials: a module that gives energies only becomes a potential, from a list or from a graph."""

import sys
from pathlib import Path

import pytest
import torch
from reference import assert_equal_lists

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples" / "potentials"))
from energies import potential_of  # noqa: E402
from package import load, save  # noqa: E402
from potential import Potential  # noqa: E402

ABOUT = {"cutoff": 3.0, "units": "metal", "type_names": ["A", "B"]}


def pair_energy(r, depth):
    """Goes to zero at the cutoff with its derivative."""
    return depth * torch.where(r < 3.0, (3.0 - r).square() * (1 + torch.sin(r)), 0.0)


class Expected(Potential):
    """What the modules below are, each with an energy of its own that a lone atom has, too."""

    def __init__(self):
        super().__init__(**ABOUT)
        self.register_buffer("depth", torch.tensor([1.0, 0.6], dtype=torch.float64))
        self.register_buffer("own", torch.tensor([-3.0, 2.0], dtype=torch.float64))

    def atom_energies(self, types, list_neigh, Ri):
        depth = self.depth[self.neighbour_types(types, list_neigh)]
        rows = types.expand(list_neigh.shape[0], types.shape[-1])[:, : list_neigh.shape[1]]
        return pair_energy(Ri[..., 0], depth).sum(-1).tanh() + self.own[rows]


class OfList(torch.nn.Module):
    def __init__(self):
        super().__init__()
        expected = Expected()
        self.own, self.depth = torch.nn.Parameter(expected.own), torch.nn.Parameter(expected.depth)

    def forward(self, types, list_neigh, Rij, nghost: int):
        types = types.expand(list_neigh.shape[0], types.shape[-1])
        neighbours = types.gather(1, list_neigh.clamp(min=0).flatten(1)).view_as(list_neigh)
        pairs = pair_energy(torch.linalg.vector_norm(Rij, dim=-1), self.depth[neighbours])
        return pairs.sum(-1).tanh() + self.own[types[:, : list_neigh.shape[1]]]


class TotalOfList(OfList):
    def forward(self, types, list_neigh, Rij, nghost: int):
        return super().forward(types, list_neigh, Rij, nghost).sum(-1)


class OfGraph(OfList):
    def forward(self, types, edge_index, edge_vec, natoms: int):
        pairs = pair_energy(torch.linalg.vector_norm(edge_vec, dim=-1), self.depth[types[edge_index[1]]])
        return pairs.new_zeros(natoms).index_add(0, edge_index[0], pairs).tanh() + self.own[types]


class ColumnOfGraph(OfGraph):
    def forward(self, types, edge_index, edge_vec, natoms: int):
        return super().forward(types, edge_index, edge_vec, natoms).unsqueeze(-1)


class TotalOfGraph(OfGraph):
    def forward(self, types, edge_index, edge_vec, natoms: int):
        return super().forward(types, edge_index, edge_vec, natoms).sum()


MODULES = [OfList, TotalOfList, OfGraph, ColumnOfGraph, TotalOfGraph]


def frames(B, n, K, nghost):
    generator = torch.Generator().manual_seed(n)
    types = torch.randint(2, (n + nghost,), generator=generator)
    list_neigh = torch.randint(-1, n + nghost, (B, n, K), generator=generator)
    Rij = torch.randn(B, n, K, 3, generator=generator, dtype=torch.float64)
    Rij[list_neigh < 0] = torch.nan
    return types, list_neigh, Rij


@pytest.mark.parametrize("module", MODULES)
def test_forces_and_virials_are_those_of_the_energy(module):
    ours = potential_of(module(), **ABOUT)
    for B, n, K, nghost in [(1, 20, 9, 11), (1, 6, 4, 0), (3, 5, 4, 2)]:
        if module is TotalOfGraph and B > 1:
            with pytest.raises(ValueError, match="expected energies of atoms from a graph of several frames"):
                ours(*frames(B, n, K, nghost), nghost)
            continue
        found, expected = (list(model(*frames(B, n, K, nghost), nghost)) for model in (ours, Expected()))
        if "Total" in module.__name__:
            torch.testing.assert_close(found[1].sum(-1), expected[1].sum(-1), rtol=1e-12, atol=1e-12)
            found[1] = expected[1]
        assert_equal_lists(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("module, ending", [(OfList, "pt"), (OfGraph, "pt"), (OfGraph, "pt2")])
def test_one_line_packages_a_module(module, ending, tmp_path):
    trained = module()
    save(trained, tmp_path / f"own.{ending}", **ABOUT)
    package = load(tmp_path / f"own.{ending}")
    assert (package.cutoff, package.units, package.type_names) == (3.0, "metal", ["A", "B"])
    for B, n, K, nghost in [(1, 20, 9, 11), (2, 7, 3, 0)]:
        inputs = frames(B, n, K, nghost)
        assert_equal_lists(package(*inputs, nghost), Expected()(*inputs, nghost), rtol=1e-12, atol=1e-12)
    assert trained.own.requires_grad, "the caller's module stays as it is"
