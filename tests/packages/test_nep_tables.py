"""calcops/nep: the tables of radial functions are computed for pairs of types that meet."""

import copy
import pickle

import pytest
import torch
from programs import ROOT

for module in ("ase", "vesin"):
    pytest.importorskip(module, reason=f"needs {module}")

from calcops.nep import load  # noqa: E402
from structures import inputs_of  # noqa: E402

FILE = ROOT / "tests/packages/nep_models/nep4_types.txt"  # of Ag, Cu and Al
POSITIONS = [[0, 0, 0], [2.2, 0.3, 0], [0.4, 2.4, 0.2], [0.1, 0.2, 2.3]]
TYPES = {"Ag": [0] * 4, "Cu and Al": [1, 2, 2, 1], "all": [0, 1, 2, 0]}


def inputs(model, types):
    """Return the arguments of a call for four atoms."""
    return inputs_of({"types": types, "positions": POSITIONS, "cell": None}, model)


def whole_model():
    """Return a model that has all tables."""
    model = load(FILE)
    model.fill()
    assert model.has_all_tables
    return model


def assert_equal(results, expected):
    for result, other in zip(results, expected, strict=True):
        torch.testing.assert_close(result, other, rtol=1e-12, atol=1e-14)


def test_a_new_model_has_no_tables_and_a_call_computes_those_of_its_types():
    model = load(FILE)
    assert not model.has_table.any()
    whole = whole_model()
    pairs = 0
    for types, expected_pairs in (("Ag", 1), ("Cu and Al", 1 + 4), ("all", 9)):
        assert_equal(model(*inputs(model, TYPES[types])), whole(*inputs(model, TYPES[types])))
        assert model.has_table.sum() == expected_pairs > pairs
        pairs = expected_pairs
    assert model.has_all_tables


def test_a_table_is_computed_once():
    model = load(FILE)
    model(*inputs(model, TYPES["Ag"]))
    model.radial_c.data.mul_(2)  # is not seen before eval()
    before = model.radial_table[0].clone()
    model(*inputs(model, TYPES["all"]))
    assert torch.equal(model.radial_table[0], before)
    model.eval()
    model(*inputs(model, TYPES["all"]))
    torch.testing.assert_close(model.radial_table[0], 2 * before)


def test_ghosts_and_padding_count_as_types_that_meet():
    model = load(FILE)
    types, list_neigh, Rij = inputs(model, TYPES["all"])
    ghosts = list_neigh[:, :2], Rij[:, :2]
    results = model(types, *ghosts, 2)
    assert model.has_all_tables
    assert_equal(results, whole_model()(types, *ghosts, 2))
    model.eval()
    types = torch.tensor([-1, 1, 1, 1])
    assert_equal(model(types, list_neigh, Rij), whole_model()(types, list_neigh, Rij))
    assert model.has_table.sum() == 1


def test_descriptors_and_latent_space_compute_tables():
    arguments = inputs(load(FILE), TYPES["all"])
    for name in ("descriptors", "latent"):
        model = load(FILE)
        result = getattr(model, name)(*arguments)
        torch.testing.assert_close(result, getattr(whole_model(), name)(*arguments))


def test_the_environment_of_another_model_will_do():
    model = load(FILE)
    types, list_neigh, Rij = inputs(model, TYPES["all"])
    environment = whole_model().environment(types, list_neigh, Rij)
    assert_equal(
        model.evaluate(types, *environment, 0, False), whole_model()(types, list_neigh, Rij)
    )


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_compute_the_tables_that_they_lack(copied):
    model = load(FILE)
    model(*inputs(model, TYPES["Ag"]))
    copy_of_it = copied(model)
    arguments = inputs(model, TYPES["all"])
    assert_equal(copy_of_it(*arguments), whole_model()(*arguments))
    assert model.has_table.sum() == 1


def test_a_model_in_another_dtype_has_all_tables():
    model = load(FILE).to(torch.float32)
    assert model.has_all_tables
    torch.testing.assert_close(
        model.radial_table, whole_model().radial_table.float(), rtol=1e-12, atol=1e-14
    )


def test_a_model_on_a_gpu_has_all_tables(monkeypatch):
    """A call that looked which types it has would wait for the GPU."""
    model = load(FILE)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert model.eval().has_all_tables
    assert not model.train().has_all_tables


def test_tables_follow_a_state_that_is_loaded():
    trained = load(FILE)
    with torch.no_grad():
        trained.radial_c += 0.1
        trained.angular_c -= 0.1
    arguments = inputs(trained, TYPES["all"])
    model = load(FILE)
    model(*arguments)
    model.load_state_dict(trained.state_dict())
    assert_equal(model(*arguments), trained.eval()(*arguments))


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
def test_a_scripted_model_needs_all_tables():
    arguments = inputs(load(FILE), TYPES["all"])
    with pytest.raises(torch.jit.Error, match="fill"):
        torch.jit.script(load(FILE))(*arguments)
    assert_equal(torch.jit.script(whole_model())(*arguments), whole_model()(*arguments))


@pytest.mark.parametrize("name", ["radial_c", "angular_c", "w0", "b0", "w1", "bias", "scale"])
def test_a_model_in_use_follows_numbers_that_change_in_place(name):
    model = load(FILE)
    model(*inputs(model, TYPES["Ag"]))
    before = model(*inputs(model, TYPES["all"]))[0]
    with torch.no_grad():
        getattr(model, name).mul_(1.5)
    arguments = inputs(model, TYPES["all"])
    results = model(*arguments)
    assert abs(results[0] - before) > 1e-6
    assert_equal(results, copy.deepcopy(model).eval()(*arguments))
    assert_equal(results, [x.detach() for x in model(*arguments, create_graph=True)])


def test_types_that_meet_later_leave_the_graphs_of_earlier_calls_as_they_are():
    model = load(FILE)
    first = model(*inputs(model, TYPES["Ag"]), create_graph=True)
    second = model(*inputs(model, TYPES["all"]), create_graph=True)
    (first[2].square().sum() + second[2].square().sum()).backward()
    assert model.radial_c.grad.abs().sum() > 0


def test_energies_before_any_call_are_right():
    model = load(FILE)
    types, list_neigh, Rij = inputs(model, TYPES["all"])
    kind = model.kinds(types[None], list_neigh)[0]
    energies = model.atom_energies(types, kind, Rij[0])
    torch.testing.assert_close(energies, model(types, list_neigh, Rij)[1][0])


def test_a_type_that_the_model_lacks_is_an_error_without_neighbours_too():
    model = load(FILE)
    nobody = torch.full((1, 1, 1), -1), torch.zeros(1, 1, 1, 3, dtype=torch.float64)
    with pytest.raises((RuntimeError, IndexError, ValueError), match="net"):
        model(torch.tensor([3]), *nobody)
