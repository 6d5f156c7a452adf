"""screened_repulsion: both sides of its cutoffs."""

import calcops.ops  # noqa: F401 - brings torch.ops.calcops_models
import torch

screened_repulsion = torch.ops.calcops_models.screened_repulsion
ROW = [0.7, 1.4, 10.0, 3.0, 5.0, 1.0, 3.0, 0.4, 1.0, 0.2]


def pairs_at(*distances, dtype=torch.float64):
    """Return d and kind of an atom whose neighbours have these distances, and the table."""
    d = torch.tensor([[[0.0, 0.6 * r, -0.8 * r] for r in distances]], dtype=dtype)
    kind = torch.zeros(1, len(distances), dtype=torch.int64)
    return d, kind, torch.tensor([ROW], dtype=dtype)


def test_energy_and_slope_are_continuous_at_both_cutoffs():
    for cutoff in (0.7, 1.4):
        below = screened_repulsion(*pairs_at(cutoff - 1e-9))
        beyond = screened_repulsion(*pairs_at(cutoff + 1e-9))
        for one, other in zip(below, beyond, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-6)
    energy, grad = screened_repulsion(*pairs_at(1.4, 2.0))
    assert energy.item() == 0
    assert not grad.any()


def test_two_atoms_in_one_place_are_not_finite():
    energy, grad = screened_repulsion(*pairs_at(0.0))
    assert not energy.isfinite().item()
    assert grad.isnan().all()
