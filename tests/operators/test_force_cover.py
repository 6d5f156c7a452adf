"""opcheck of every force operator for combinations of dtype, index, requires_grad, layout and size.

`make test` checks the first combinations of a pairwise cover. `make
test-all` checks the whole cover, which holds each pair of values, and sizes beyond 31 bits.
"""

import itertools
import pathlib
import re

import pytest
import torch
from reference import DEVICES, opcheck, pairs

from calcops_jit import force, force_virial, neighbor_index

backward = torch.ops.calcops._force_virial_backward

AXES = (
    (torch.float64, torch.float32),  # dtype
    (torch.int32, torch.int64),  # dtype of the list
    tuple(itertools.product([False, True], repeat=3)),  # whether dE, Ri_d, Rij require a gradient
    ("contiguous", "strided", "expanded"),
    ((2, 3, 1, 0), (1, 1, 0, 1), (3, 5, 2, 7)),  # frames, natoms, nghost, neighbors
)
PRODUCT = list(itertools.product(*AXES))


def pairs_of(case):
    """Return the pairs of (axis, value) in a combination."""
    return set(itertools.combinations(enumerate(case), 2))


def pairwise_cover():
    missing = set().union(*map(pairs_of, PRODUCT))
    while missing:
        best = max(PRODUCT, key=lambda case: len(pairs_of(case) & missing))
        missing -= pairs_of(best)
        yield best


def laid_out(x, layout):
    if layout == "strided":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "expanded":
        return x[:1].expand_as(x)
    return x


def calls(case, device):
    """Yield calls of every operator that ops/force registers, with their arguments."""
    dtype, index, needs, layout, sizes = case
    nghost = sizes[2]
    list_neigh, *leaves = (laid_out(x, layout) for x in pairs(*sizes, dtype, index, device))
    for leaf, flag in zip(leaves, needs, strict=True):
        leaf.requires_grad_(flag)
    yield neighbor_index, (list_neigh, nghost), {}
    with_index = {"neighbor_index": laid_out(neighbor_index(list_neigh, nghost), layout)}
    without_center = (list_neigh, *leaves[:2], None, nghost, False, [True, False, False])
    for keywords in {}, with_index:
        yield force, (list_neigh, *leaves[:2], nghost), keywords
        yield force_virial, (list_neigh, *leaves, nghost), keywords
        yield torch.ops.calcops._force_virial, without_center, keywords
    outputs = force_virial(list_neigh, *(x.detach() for x in leaves), nghost)
    upstream = [
        laid_out(torch.randn_like(x), layout).requires_grad_(flag)
        for x, flag in zip(outputs, needs)
    ]
    yield backward, (*upstream, list_neigh, *leaves, nghost, True, [True] * 3), {}
    yield backward, (*upstream, list_neigh, *leaves, nghost, False, list(needs)), {}


def check_case(case, device):
    for op, arguments, keywords in calls(case, device):
        opcheck(op, arguments, keywords)


def test_the_calls_have_every_operator_of_ops_force():
    source = pathlib.Path(__file__).resolve().parents[2] / "ops" / "force" / "force.cpp"
    defined = re.findall(r"^(\w+)\(Tensor", source.read_text(), re.MULTILINE)
    called = {op._qualified_op_name for op, *_ in calls(PRODUCT[0], "cpu")}
    assert called == {f"calcops::{name}" for name in defined}


def name(case):
    dtype, index, needs, layout, sizes = case
    flags = "".join("ny"[flag] for flag in needs)
    return f"{dtype}-{index}-{flags}-{layout}-{sizes}".replace("torch.", "")


COVER = list(pairwise_cover())
BEGINNING = 3  # combinations


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.long] if number >= BEGINNING else [])
        for number, case in enumerate(COVER)
    ],
    ids=name,
)
@pytest.mark.parametrize("device", DEVICES)
def test_opcheck_passes_for_a_pairwise_cover(case, device):
    check_case(case, device)


@pytest.mark.long
def test_inputs_of_more_than_2_to_the_31_elements_are_right():
    # Ri_d has 2.17e9 elements. The list repeats every `period` atoms, so the results repeat those
    # of a small list.
    period, repeats, neighbors = 1000, 3840, 47
    natoms = period * repeats
    meminfo = pathlib.Path("/proc/meminfo").read_text()
    free = 1024 * int(re.search(r"MemAvailable:\s*(\d+)", meminfo)[1])
    # A slot has an int32 and 19 float32. An atom has 12 results, in three arrays of 8 bytes.
    needed = 1.1 * natoms * (neighbors * (4 + 19 * 4) + 12 * 8 * 3)
    if free < needed:
        pytest.skip(f"needs {needed / 1e9:.0f} GB of memory, {free / 1e9:.0f} are free")
    small = pairs(1, period, 0, neighbors, torch.float32)
    blocks = [x.expand(repeats, *x.shape[1:]).reshape(1, natoms, *x.shape[2:]) for x in small]
    offsets = (
        torch.arange(repeats, dtype=torch.int32).repeat_interleave(period)[None, :, None] * period
    )
    blocks[0] = torch.where(blocks[0] >= 0, blocks[0] + offsets, -1)
    assert blocks[2].numel() > 2**31
    F, W, atom_W = force_virial(*blocks)
    expected_F, expected_W, expected_atom_W = force_virial(*small)
    for result, expected in ((F, expected_F), (atom_W, expected_atom_W)):
        result = result.view(repeats, *expected.shape[1:])
        torch.testing.assert_close(result, expected.expand_as(result), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(W, expected_W * repeats, rtol=1e-4, atol=1e-2)
