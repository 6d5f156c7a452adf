"""density_net: accuracy of its tanh, and rows that are no atoms."""

import math

import calcops.ops  # noqa: F401 - brings torch.ops.calcops_models
import pytest
import torch

density_net = torch.ops.calcops_models.density_net


def inputs(n=7, R=3, H=9, F=4, P=5, M=12, N=2, K=10, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape):
        return 0.4 * torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    def integers(low, high, *shape, dtype=torch.int32):
        return torch.randint(low, high, shape, generator=generator, dtype=dtype)

    return dict(
        radial=numbers(n, R),
        A=numbers(H, n, F),
        net=integers(-1, N, n, dtype=torch.int64),
        factors=integers(-1, H, M, 4),
        invariant=integers(0, P, M),
        coefficient=numbers(M),
        w_radial=numbers(N, R, K),
        w_angular=numbers(N, P, F, K),
        b0=numbers(N, K),
        w1=numbers(N, K),
        bias=numbers(N),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_neuron_is_the_tanh_within_two_roundings(dtype):
    x = torch.cat([torch.logspace(-30, 2.5, 4001, dtype=torch.float64), torch.tensor([0.0, 1e300])])
    x = torch.cat([-x, x, torch.tensor([math.inf, -math.inf, math.nan])]).to(dtype)
    n = len(x)
    zeros = torch.zeros(n, 1, dtype=dtype)
    ones = torch.ones(1, dtype=dtype)
    energy, grad, _ = density_net(
        x.view(n, 1),
        zeros[:0].view(0, n, 0),
        torch.zeros(n, dtype=torch.int64),
        torch.zeros(0, 4, dtype=torch.int32),
        torch.zeros(0, dtype=torch.int32),
        ones[:0],
        ones.view(1, 1, 1),
        ones[:0].view(1, 0, 0, 1),
        zeros[:1],
        ones.view(1, 1),
        0 * ones,
    )
    expected = torch.tanh(x.double())
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(energy.double(), expected, rtol=2 * rounding, atol=0, equal_nan=True)
    slope = 1 - expected.square()
    torch.testing.assert_close(
        grad[:, 0].double(), slope, rtol=0, atol=2 * rounding, equal_nan=True
    )


def test_rows_that_are_no_atoms_change_no_bit_of_the_others():
    arguments = inputs(n=60)
    energy, grad_radial, grad_A = density_net(**arguments)
    is_atom = arguments["net"] >= 0
    assert 0 < is_atom.sum() < 60
    few = arguments | {
        "radial": arguments["radial"][is_atom],
        "A": arguments["A"][:, is_atom],
        "net": arguments["net"][is_atom],
    }
    expected = density_net(**few)
    results = energy[is_atom], grad_radial[is_atom], grad_A[:, is_atom]
    for result, of_few in zip(results, expected, strict=True):
        torch.testing.assert_close(result, of_few, rtol=1e-14, atol=1e-15)
    assert not grad_A[:, ~is_atom].any()
