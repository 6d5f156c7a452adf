"""calcops/potentials: a package gives the results of its model for arguments of every size, and
refuses what it cannot read."""

import pytest
import torch
from calcops.potentials.lennard_jones import LennardJones
from calcops.potentials.package import load, save
from reference import DEVICES, assert_equal_lists
from test_potentials import SIZES, frames


@pytest.mark.parametrize("device", DEVICES)
def test_a_package_gives_the_results_of_the_model_for_every_size(device, tmp_path):
    """This package has the input edge_order. test_ase.py has packages without it."""
    model = LennardJones([1.0, 0.5], [1.0, 1.3], 2.7, "linear", type_names="AB").to(device)
    save(model, tmp_path / "model.pt2", device=device, edge_order=True)
    package = load(tmp_path / "model.pt2")
    metadata = torch._inductor.aoti_load_package(str(tmp_path / "model.pt2")).loader.get_metadata()
    assert metadata["inputs"] == "types list_neigh Rij edge_order"
    assert float(metadata["cutoff"]) == model.cutoff
    assert metadata["units"] == model.units
    assert metadata["dtype"] == "float64"
    assert package.type_names == model.type_names
    for size in SIZES:
        nghost = size[3]
        inputs = frames(*size, len(model.type_names), device)
        expected = model(*inputs, nghost)
        assert_equal_lists(package(*inputs, nghost), expected, rtol=1e-12, atol=1e-12)

    # A package reads memory as if it held contiguous numbers of its own dtypes.
    types, list_neigh, Rij = frames(3, 20, 9, 11, 2, device)
    expected = model(types, list_neigh, Rij, 11)
    strided = types.int(), list_neigh.int().mT.contiguous().mT, Rij.mT.contiguous().mT
    assert_equal_lists(package(*strided, 11), expected, rtol=1e-12, atol=1e-12)
    of_frames = torch.stack([types, 1 - types, types])
    expected = model(of_frames, list_neigh, Rij, 11)
    assert_equal_lists(package(of_frames, list_neigh, Rij, 11), expected, rtol=1e-12, atol=1e-12)
    wrong = {
        "expected Rij of torch.float64, as the file is, got torch.float32": (
            types,
            list_neigh,
            Rij.float(),
        ),
        r"expected types of 20 atoms and nghost=11 ghosts, .* got \[30\]": (
            types[:30],
            list_neigh,
            Rij,
        ),
        r"expected list_neigh .* got \[3, 20, 9\] and \[3, 20, 8, 3\]": (
            types,
            list_neigh,
            Rij[:, :, 1:],
        ),
    }
    if device == "cpu":
        wrong["expected types from 0 to 1, got 2 to 3"] = types % 2 + 2, list_neigh, Rij
        entry = list_neigh.clone()
        entry[1, 2, 3] = 31
        message = (
            "expected entries of list_neigh from -1 to 30, got 31 in slot 3 of atom 2 in frame 1"
        )
        wrong[message] = types, entry, Rij
    for message, arguments in wrong.items():
        with pytest.raises(ValueError, match=message):
            package(*arguments, 11)
