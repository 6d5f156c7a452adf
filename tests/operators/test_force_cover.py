"""opcheck and gradients of every force operator over dtype x index x requires_grad x layout x size.

A pairwise cover in every run, the full product in `make test-long`; and sizes beyond 32 bits.
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
    (torch.float64, torch.float32),
    (torch.int32, torch.int64),
    tuple(itertools.product([False, True], repeat=3)),
    ("contiguous", "strided", "expanded"),
    ((2, 3, 1, 0), (1, 1, 0, 1), (3, 5, 2, 7)),
)
PRODUCT = list(itertools.product(*AXES))


def pairs_of(case):
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
    return x[:1].expand_as(x) if layout == "expanded" else x


def calls(case, device):
    """Every operator that ops/force registers, with arguments, positional and keyword."""
    dtype, index, needs, layout, sizes = case
    nghost = sizes[2]
    list_neigh, *leaves = (laid_out(x, layout) for x in pairs(*sizes, dtype, index, device))
    for leaf, flag in zip(leaves, needs, strict=True):
        leaf.requires_grad_(flag)
    yield neighbor_index, (list_neigh, nghost), {}
    reuse = {"neighbor_index": laid_out(neighbor_index(list_neigh, nghost), layout)}
    for keywords in {}, reuse:
        yield force, (list_neigh, *leaves[:2], nghost), keywords
        yield force_virial, (list_neigh, *leaves, nghost), keywords
        yield (
            torch.ops.calcops._force_virial,
            (list_neigh, *leaves[:2], None, nghost, False),
            keywords,
        )
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


def test_no_operator_is_left_out():
    source = pathlib.Path(__file__).resolve().parents[2] / "ops" / "force" / "force.cpp"
    defined = re.findall(r"^(\w+)\(Tensor", source.read_text(), re.MULTILINE)
    assert {op._qualified_op_name for op, *_ in calls(PRODUCT[0], "cpu")} == {
        f"calcops::{x}" for x in defined
    }


def name(case):
    dtype, index, needs, layout, sizes = case
    flags = "".join("ny"[flag] for flag in needs)
    return f"{dtype}-{index}-{flags}-{layout}-{sizes}".replace("torch.", "")


@pytest.mark.parametrize("case", list(pairwise_cover()), ids=name)
@pytest.mark.parametrize("device", DEVICES)
def test_opcheck_over_a_pairwise_cover(case, device):
    check_case(case, device)


def test_the_cover_is_pairwise_and_small():
    cover = list(pairwise_cover())
    assert set().union(*map(pairs_of, cover)) == set().union(*map(pairs_of, PRODUCT))
    assert len(cover) <= 40


@pytest.mark.long
@pytest.mark.parametrize("case", PRODUCT, ids=name)
@pytest.mark.parametrize("device", DEVICES)
def test_opcheck_over_the_full_product(case, device):
    check_case(case, device)


@pytest.mark.long
def test_offsets_beyond_31_bits():
    # Ri_d has 2.17e9 elements; the list repeats every `period` atoms, so a small run says what
    # comes out.
    period, repeats, neighbors = 1000, 3840, 47
    natoms = period * repeats
    meminfo = pathlib.Path("/proc/meminfo").read_text()
    free = 1024 * int(re.search(r"MemAvailable:\s*(\d+)", meminfo)[1])
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
    for ours, expected in ((F, expected_F), (atom_W, expected_atom_W)):
        ours = ours.view(repeats, *expected.shape[1:])
        torch.testing.assert_close(ours, expected.expand_as(ours), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(W, expected_W * repeats, rtol=1e-4, atol=1e-2)
