"""All CPU results of the force operators against the library of deepmd-kit (test extra `peers`)."""

import ctypes
import importlib.util
import pathlib
import sys

import pytest
import torch
from reference import pairs

from calcops_jit import force, force_virial

if importlib.util.find_spec("deepmd") is None:
    pytest.skip("deepmd-kit (test extra `peers`) is not installed", allow_module_level=True)
sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "bench"))
from bench_force import DeepMD  # noqa: E402

# (frames, natoms, nghost, neighbors, seed)
CASES = [(1, 5 + 3 * seed, seed % 3, 1 + 7 * seed, seed) for seed in range(20)] + [(3, 17, 0, 9, 1)]


@pytest.fixture(scope="module")
def library():
    return DeepMD().library


def call(library, symbol, outputs, *arguments):
    function = library[symbol]
    function.restype = None
    arguments = [*outputs, *arguments]
    function(*(ctypes.c_void_p(x.data_ptr()) if torch.is_tensor(x) else x for x in arguments))


def inputs_of(frames, natoms, nghost, neighbors, seed):
    list_neigh, dE, Ri_d, Rij = pairs(frames, natoms, nghost, neighbors, seed=seed)
    for x in (dE, Ri_d.view(*list_neigh.shape, 4, 3), Rij):
        x[list_neigh < 0] = 0  # deepmd-kit reads the values of empty slots
    return list_neigh, dE, Ri_d, Rij


def assert_close(result, expected):
    expected = expected.view_as(result)
    largest = expected.abs().max()
    assert largest > 0
    assert (result - expected).abs().max() <= 1e-12 * largest


@pytest.mark.parametrize("case", CASES, ids=str)
def test_force_and_virials_are_those_of_deepmd_kit(library, case):
    list_neigh, dE, Ri_d, Rij = inputs_of(*case)
    frames, natoms, nghost, neighbors, _ = case
    rows = natoms + nghost
    expected_F = torch.empty(frames, rows, 3, dtype=torch.float64)
    symbol = "_ZN6deepmd16prod_force_a_cpuIdEEvPT_PKS1_S4_PKiiiii"
    call(library, symbol, [expected_F], dE, Ri_d, list_neigh, natoms, rows, neighbors, frames)
    F, W, atom_W = force_virial(list_neigh, dE, Ri_d, Rij, nghost)
    assert_close(F, expected_F)
    assert_close(force(list_neigh, dE, Ri_d, nghost), expected_F)
    symbol = "_ZN6deepmd17prod_virial_a_cpuIdEEvPT_S2_PKS1_S4_S4_PKiiii"
    for b in range(frames):  # deepmd-kit takes one frame a call
        expected_W = torch.empty(9, dtype=torch.float64)
        expected_atom_W = torch.empty(rows, 9, dtype=torch.float64)
        inputs = dE[b], Ri_d[b], Rij[b], list_neigh[b]
        outputs = [expected_W, expected_atom_W]
        call(library, symbol, outputs, *inputs, natoms, rows, neighbors)
        assert_close(W[b], expected_W)
        assert_close(atom_W[b], expected_atom_W)


# Without ghosts: deepmd-kit replaces a ghost j by the atom j % n, which need not be its original.
@pytest.mark.parametrize("case", [case for case in CASES if case[2] == 0], ids=str)
def test_gradients_of_force_and_virial_are_those_of_deepmd_kit(library, case):
    list_neigh, dE, Ri_d, Rij = inputs_of(*case)
    frames, natoms, _, neighbors, _ = case
    dE.requires_grad_()
    F, W, _ = force_virial(list_neigh, dE, Ri_d, Rij)
    gF, gW = torch.randn_like(F), torch.randn_like(W)
    expected = torch.empty_like(dE)
    symbol = "_ZN6deepmd21prod_force_grad_a_cpuIdEEvPT_PKS1_S4_PKiiii"
    call(library, symbol, [expected], gF, Ri_d, list_neigh, natoms, neighbors, frames)
    assert_close(torch.autograd.grad(F, dE, gF, retain_graph=True)[0], expected)
    (gradient,) = torch.autograd.grad(W, dE, gW)
    symbol = "_ZN6deepmd22prod_virial_grad_a_cpuIdEEvPT_PKS1_S4_S4_PKiii"
    for b in range(frames):
        expected = torch.empty(natoms, neighbors, 4, dtype=torch.float64)
        call(library, symbol, [expected], gW[b], Ri_d[b], Rij[b], list_neigh[b], natoms, neighbors)
        assert_close(gradient[b], expected)
