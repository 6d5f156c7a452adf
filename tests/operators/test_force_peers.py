"""Every CPU number of the force operators against deepmd-kit's own library (test extra `peers`)."""

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
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "bench"))
from bench_force import DeepMD  # noqa: E402

CASES = [(1, 5 + 3 * seed, seed % 3, 1 + 7 * seed, seed) for seed in range(20)] + [(3, 17, 0, 9, 1)]


@pytest.fixture(scope="module")
def library():
    return DeepMD().library


def call(library, symbol, outputs, *arguments):
    function = library[symbol]
    function.restype = None
    function(
        *(
            ctypes.c_void_p(x.data_ptr()) if torch.is_tensor(x) else x
            for x in (*outputs, *arguments)
        )
    )
    return outputs


def inputs_of(frames, natoms, nghost, neighbors, seed):
    list_neigh, dE, Ri_d, Rij = pairs(frames, natoms, nghost, neighbors, seed=seed)
    for x in (dE, Ri_d.view(*list_neigh.shape, 4, 3), Rij):
        x[list_neigh < 0] = 0  # it reads them
    return list_neigh, dE, Ri_d, Rij


def assert_close(ours, theirs):
    theirs = theirs.view_as(ours)
    assert theirs.abs().max() > 0 and (ours - theirs).abs().max() <= 1e-12 * theirs.abs().max()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_force_and_virials(library, case):
    list_neigh, dE, Ri_d, Rij = inputs_of(*case)
    frames, natoms, nghost, neighbors, _ = case
    rows = natoms + nghost
    theirs = torch.empty(frames, rows, 3, dtype=torch.float64)
    symbol = "_ZN6deepmd16prod_force_a_cpuIdEEvPT_PKS1_S4_PKiiiii"
    call(library, symbol, [theirs], dE, Ri_d, list_neigh, natoms, rows, neighbors, frames)
    F, W, atom_W = force_virial(list_neigh, dE, Ri_d, Rij, nghost)
    assert_close(F, theirs)
    assert_close(force(list_neigh, dE, Ri_d, nghost), theirs)
    symbol = "_ZN6deepmd17prod_virial_a_cpuIdEEvPT_S2_PKS1_S4_S4_PKiiii"
    for b in range(frames):  # one frame a call
        theirs = torch.empty(9, dtype=torch.float64), torch.empty(rows, 9, dtype=torch.float64)
        call(
            library, symbol, theirs, dE[b], Ri_d[b], Rij[b], list_neigh[b], natoms, rows, neighbors
        )
        assert_close(W[b], theirs[0])
        assert_close(atom_W[b], theirs[1])


# It folds ghosts by j % n.
@pytest.mark.parametrize("case", [case for case in CASES if case[2] == 0], ids=str)
def test_gradients_of_force_and_virial(library, case):
    list_neigh, dE, Ri_d, Rij = inputs_of(*case)
    frames, natoms, _, neighbors, _ = case
    dE.requires_grad_()
    F, W, _ = force_virial(list_neigh, dE, Ri_d, Rij)
    gF, gW = torch.randn_like(F), torch.randn_like(W)
    theirs = torch.empty_like(dE)
    symbol = "_ZN6deepmd21prod_force_grad_a_cpuIdEEvPT_PKS1_S4_PKiiii"
    call(library, symbol, [theirs], gF, Ri_d, list_neigh, natoms, neighbors, frames)
    assert_close(torch.autograd.grad(F, dE, gF, retain_graph=True)[0], theirs)
    (ours,) = torch.autograd.grad(W, dE, gW)
    symbol = "_ZN6deepmd22prod_virial_grad_a_cpuIdEEvPT_PKS1_S4_S4_PKiii"
    for b in range(frames):
        theirs = torch.empty(natoms, neighbors, 4, dtype=torch.float64)
        call(library, symbol, [theirs], gW[b], Ri_d[b], Rij[b], list_neigh[b], natoms, neighbors)
        assert_close(ours[b], theirs)
