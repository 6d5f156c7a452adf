"""calcops.ase warns once of a structure that is unlike the frames its model was trained on."""

import copy
import pickle
import re
import warnings

import numpy as np
import pytest
import torch

for name in ("ase", "vesin"):
    pytest.importorskip(name)

from ase import Atoms  # noqa: E402
from calcops.ase.calculator import CalcOps  # noqa: E402
from calcops.deepmd.deep_potential import DeepPotential  # noqa: E402
from calcops.potentials import StillingerWeber  # noqa: E402
from calcops.potentials.package import load, save  # noqa: E402
from test_train import arrays  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
SHORTEST = [[1.5, 2.0], [2.0, 3.0]]  # the last one is the cutoff: no such pair


def model(sel=(9, 7), shortest=SHORTEST):
    more = {} if shortest is None else {"shortest": np.array(shortest)}
    return DeepPotential(arrays(sel) | more, ["Cu", "Au"]).requires_grad_(False)


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    """Return a function from sel to the model as a module and as an archive."""
    folder = tmp_path_factory.mktemp("models")

    def of(form, sel=(9, 7)):
        if form == "module":
            return model(sel)
        path = folder / f"{sel}.pt"
        if not path.exists():
            save(model(sel), path)
        return load(path)

    return of


def messages(calculator, *structures):
    """Return the warnings of a calculator while it computes structures."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for atoms in structures:
            atoms.calc = calculator
            atoms.get_forces()
    return [str(warning.message) for warning in caught if "CalcOps" in str(warning.message)]


def dimer(distance, symbols="Cu2"):
    return Atoms(symbols, [[0, 0, 0], [distance, 0, 0]])


def chain(count):
    """Return an atom with this number of neighbours Cu, all of them on a circle."""
    angles = 2 * np.pi * np.arange(count) / count
    circle = 2.9 * np.stack([np.cos(angles), np.sin(angles), 0 * angles], 1)
    return Atoms(f"AuCu{count}", [[0, 0, 0], *circle])


@pytest.mark.parametrize("form", ["module", "archive"])
def test_a_pair_shorter_than_any_in_training_is_warned_of_once(form, forms):
    calculator = CalcOps(forms(form))
    assert messages(calculator, dimer(1.6), dimer(2.1, "CuAu")) == []
    (message,) = messages(calculator, dimer(1.4), dimer(1.3))
    assert re.fullmatch(
        r"CalcOps: atoms 0 and 1 are 1.4 apart. In the model's training there was none below 1.5 "
        r"of such pairs \(Cu-Cu\), so its energy is extrapolated",
        message,
    )


@pytest.mark.parametrize("form", ["module", "archive"])
def test_the_shortest_pair_is_that_of_its_elements(form, forms):
    (message,) = messages(CalcOps(forms(form)), dimer(1.8, "CuAu"))
    assert "none below 2 of such pairs" in message
    (message,) = messages(CalcOps(forms(form)), dimer(2.9, "Au2"))  # which never met in training
    assert "there was none of such pairs (Au-Au)" in message
    assert messages(CalcOps(forms(form)), dimer(1.5), dimer(2.0, "CuAu")) == []


@pytest.mark.parametrize("form", ["module", "archive"])
def test_more_neighbours_than_sel_are_warned_of_once(form, forms):
    calculator = CalcOps(forms(form, (5, 2)))
    assert messages(calculator, chain(5)) == []
    (message,) = messages(calculator, chain(6), chain(7))
    assert message.startswith(
        "CalcOps: atom 0 has 6 neighbours Cu within 3, and the model's sel is 5. It takes the nearest"
    )


def test_neighbours_beyond_the_cutoff_or_of_another_element_do_not_count(forms):
    atoms = chain(6)
    atoms.symbols[1] = "Au"
    calculator = CalcOps(model((5, 2), shortest=None))
    assert messages(calculator, atoms) == []
    far = chain(7)
    far.positions[1:3] *= 3.2 / 2.9  # within the skin
    assert messages(calculator, far) == []


def test_a_batch_is_checked_and_names_the_atom_of_its_structure(forms):
    calculator = CalcOps(forms("module"))
    with pytest.warns(UserWarning, match="atoms 0 and 1 are 1.2 apart"):
        calculator.calculate_batch([dimer(1.7), dimer(1.2)])


def test_models_that_know_nothing_of_their_training_are_not_checked():
    calculator = CalcOps(StillingerWeber())
    assert messages(calculator, dimer(0.5, "Si2")) == []
    assert messages(CalcOps(model(shortest=None)), dimer(0.5)) == []


def test_copies_of_a_calculator_and_empty_structures_are_checked(forms):
    for calculator in (CalcOps(forms("archive")), copy.deepcopy(CalcOps(forms("module")))):
        again = pickle.loads(pickle.dumps(calculator))
        assert len(messages(again, dimer(1.4))) == 1
        again.calculate_batch([Atoms(), Atoms("Cu")])


def test_the_model_keeps_its_shortest_pairs_in_files(forms):
    archive = forms("archive", (5, 2))
    assert archive.sel == [5, 2]
    assert torch.equal(archive.shortest, torch.tensor(SHORTEST, dtype=torch.float64))
