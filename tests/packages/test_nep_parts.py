"""calcops/nep: invariants of third order, repulsion of nuclei, descriptors and latent space.

Results of NEP_CPU for these parts are in nep_models/numbers.json: see test_nep.py.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from programs import ROOT

for module in ("ase", "vesin"):
    pytest.importorskip(module, reason=f"needs {module}")

from calcops.nep import Nep, load  # noqa: E402
from calcops.nep.invariants import TripleInvariant, wigner_symbols  # noqa: E402
from calcops.nep.nep_file import kTriples, read, write  # noqa: E402
from structures import inputs_of  # noqa: E402

FILES = ROOT / "tests/packages/nep_models"
NUMBERS = json.loads((FILES / "numbers.json").read_text())


def edited(name, old, new, tmp_path):
    text = (FILES / f"{name}.txt").read_text()
    assert old in text
    (tmp_path / "nep.txt").write_text(text.replace(old, new, 1))
    return tmp_path / "nep.txt"


# ---- invariants ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, of_zeros",
    {"112": 2 / 15, "123": -3 / 35, "222": -2 / 35, "233": 4 / 105, "134": 4 / 63}.items(),
)
def test_symbols_are_those_of_wigner(name, of_zeros):
    l, other, third = map(int, name)  # noqa: E741
    symbols = wigner_symbols(l, other, third)
    expected = np.sign(of_zeros) * abs(of_zeros) ** 0.5
    assert symbols[l, other, third].item() == pytest.approx(expected, abs=1e-14)
    # Symbols with one m fixed are vectors of equal length, normal to one another.
    rows = symbols.flatten(1)
    torch.testing.assert_close(rows @ rows.mT, torch.eye(2 * l + 1).double() / (2 * l + 1))


@pytest.mark.parametrize("name", kTriples)
def test_an_invariant_does_not_change_under_rotation(name):
    generator = torch.Generator().manual_seed(0)
    d = torch.randn(1, 9, 3, dtype=torch.float64, generator=generator)
    rotation = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64, generator=generator))[0]
    rotation = rotation * torch.det(rotation)
    kind = torch.zeros(1, 9, dtype=torch.int64)
    table = torch.randn(1, 12, 2, dtype=torch.float64, generator=generator)
    grid = torch.tensor([[0.0, 9.0]], dtype=torch.float64)
    before, after, mirrored = (
        TripleInvariant(name)(
            torch.ops.calcops_models.density(x, kind, table, grid, 25).split([1, 3, 5, 7, 9])
        )
        for x in (d, d @ rotation, -d)
    )
    assert before.abs().max() > 1e-2
    torch.testing.assert_close(after, before, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(mirrored, before, rtol=1e-11, atol=1e-11)


def test_gpumd_and_nep_cpu_write_the_flag_of_q_222_as_2_and_as_1(tmp_path):
    expected = read(FILES / "nep4_triples.txt")
    assert expected.triples == kTriples and expected.has_q222
    again = read(edited("nep4_triples", "l_max 4 1 1 1", "l_max 4 2 1 1", tmp_path))
    assert again.triples == kTriples and again.has_q222
    # NEP_CPU reads no flags after a 2.
    write(again, tmp_path / "own.txt")
    assert "\nl_max 4 1 1 1 1 1 1\n" in (tmp_path / "own.txt").read_text()


@pytest.mark.parametrize("numbers", ["4 0 0 1", "4 0 0 1 0", "4 0 0 1 0 0 0"])
def test_flags_that_are_left_out_are_0(numbers, tmp_path):
    file = read(FILES / "nep4_two_triples.txt")
    file = replace(file, triples=("112",), w0=file.w0[..., :12], scale=file.scale[:12])
    write(file, tmp_path / "nep.txt")
    text = (tmp_path / "nep.txt").read_text()
    assert "l_max 4 0 0 1 0 0 0\n" in text
    (tmp_path / "nep.txt").write_text(text.replace("4 0 0 1 0 0 0", numbers))
    assert read(tmp_path / "nep.txt").triples == ("112",)


def test_gradients_for_weights_pass_through_the_invariants():
    frame = NUMBERS["nep4_triples"][0]
    model = load(FILES / "nep4_triples.txt").train()
    arguments = inputs_of(frame, model)

    def loss():
        _, energy, force, _, _ = model(*arguments, create_graph=True)
        return energy.square().sum() + force.square().sum()

    (gradient,) = torch.autograd.grad(loss(), [model.angular_c])
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(gradient.shape, dtype=torch.float64, generator=generator)
    values = []
    for step in (1e-5, -2e-5):
        model.angular_c.data += step * direction
        values.append(loss().item())
    expected = (values[0] - values[1]) / 2e-5
    assert (gradient * direction).sum().item() == pytest.approx(expected, rel=1e-6)


# ---- repulsion of nuclei ------------------------------------------------------------------------


def repulsion(model, types, r):
    """Return the ZBL energy of two atoms at a distance r."""
    T = len(model.type_names)
    d = torch.tensor([[[r, 0, 0]], [[-r, 0, 0]]], dtype=torch.float64)
    kind = torch.tensor([[types[0] * T + types[1]], [types[1] * T + types[0]]])
    return model.energies_of_zbl(d, kind).sum().item()


def zbl(Z, other, r, inner, outer, terms):
    """Return a repulsion by the formula."""
    x = r * (Z**0.23 + other**0.23) * 2.134563
    phi = sum(a * np.exp(-b * x) for a, b in terms)
    switch = 0.5 + 0.5 * np.cos(np.pi * np.clip((r - inner) / (outer - inner), 0, 1))
    return 14.399645 * Z * other / r * phi * switch


UNIVERSAL = (0.18175, 3.1998), (0.50986, 0.94229), (0.28022, 0.4029), (0.02817, 0.20162)
ATOMS = (6, 1.0), (14, 1.38667), (79, 1.50667)  # number and radius, 4/3 of DFT-D3's, in A


@pytest.mark.parametrize("types", [(0, 0), (0, 1), (1, 2), (2, 2)])
def test_a_typewise_zbl_ends_at_the_sum_of_radii_times_the_factor(types):
    model = load(FILES / "nep4_typewise_zbl.txt")  # zbl 0.5 2.6 0.9
    (Z, radius), (other, other_radius) = (ATOMS[t] for t in types)
    outer = min(2.6, 0.9 * (radius + other_radius))
    for r in (0.3, 1.1, outer - 0.01):
        expected = zbl(Z, other, r, 0, outer, UNIVERSAL)
        assert repulsion(model, types, r) == pytest.approx(expected, rel=1e-12)
    assert repulsion(model, types, outer) == 0


@pytest.mark.parametrize("types", [(0, 0), (0, 1), (2, 1)])
def test_a_flexible_zbl_has_parameters_for_each_two_types(types):
    model = load(FILES / "nep4_flexible_zbl.txt")
    numbers = (FILES / "nep4_flexible_zbl.txt").read_text().split()[-60:]
    row = {(0, 0): 0, (0, 1): 1, (2, 1): 4}[types]  # 00 01 02 11 12 22
    inner, outer, *terms = map(float, numbers[10 * row : 10 * row + 10])
    (Z, _), (other, _) = (ATOMS[t] for t in types)
    for r in (inner / 2, (inner + outer) / 2, outer - 0.1):
        expected = zbl(Z, other, r, inner, outer, [*zip(terms[::2], terms[1::2])])
        assert repulsion(model, types, r) == pytest.approx(expected, rel=1e-12)
        assert repulsion(model, types[::-1], r) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["nep4_typewise_zbl", "nep4_flexible_zbl"])
def test_a_model_of_some_types_keeps_their_repulsion(name):
    whole = load(FILES / f"{name}.txt")
    part = load(FILES / f"{name}.txt", ["Au", "C"])
    for types, own in (((2, 2), (0, 0)), ((2, 0), (0, 1)), ((0, 0), (1, 1))):
        assert repulsion(part, own, 0.9) == repulsion(whole, types, 0.9) > 0


def test_a_wrong_flexible_zbl_is_an_error_that_names_the_line(tmp_path):
    text = (FILES / "nep4_flexible_zbl.txt").read_text()
    lines = text.splitlines()
    for row, number, new in ((0, 1, "0.1"), (4, 0, "-1"), (5, 1, "3.7"), (2, 0, "2.5")):
        line = len(lines) - 60 + 10 * row
        changed = [*lines]
        changed[line + number] = new
        (tmp_path / "nep.txt").write_text("\n".join(changed))
        message = rf"nep.txt, line {line + 1}: expected 0 <= inner < outer <= .* of 3.6 in the flex"
        with pytest.raises(ValueError, match=message):
            read(tmp_path / "nep.txt")


def test_the_repulsion_of_a_gpu_is_that_of_a_cpu(monkeypatch):
    model = load(FILES / "nep4_typewise_zbl.txt")
    types, list_neigh, Rij = inputs_of(NUMBERS["nep4_typewise_zbl"][1], model)
    _, Rij, kind = model.environment(types, list_neigh, Rij)
    arguments = Rij.flatten(0, 1), kind.flatten(0, 1)
    expected = model.energies_of_zbl(*arguments)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    torch.testing.assert_close(model.energies_of_zbl(*arguments), expected, rtol=1e-13, atol=0)


# ---- descriptors and latent space ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["nep4_triples", "nep4_typewise_zbl"])
def test_descriptors_and_latent_space_are_those_of_nep_cpu(name):
    model = load(FILES / f"{name}.txt")
    for frame in NUMBERS[name]:
        arguments = inputs_of(frame, model)
        expected = torch.tensor(frame["descriptors"], dtype=torch.float64)
        result = model.descriptors(*arguments)
        torch.testing.assert_close(result, expected, rtol=1e-11, atol=1e-11)
        assert not result.requires_grad
        expected = torch.tensor(frame["latent"], dtype=torch.float64)
        torch.testing.assert_close(model.latent(*arguments), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["nep3", "nep4", "nep4_types"])
def test_the_latent_space_adds_up_to_the_energies(name):
    model = Nep(replace(read(FILES / f"{name}.txt"), zbl=None)).eval()
    types, list_neigh, Rij = inputs_of(NUMBERS[name][0], model)
    _, energy, *_ = model(types, list_neigh, Rij)
    bias = model.bias[types] if len(model.bias) > 1 else model.bias
    latent = model.latent(types, list_neigh, Rij)
    assert latent.shape == (len(types), model.w0.shape[2])
    torch.testing.assert_close(latent.sum(1) - bias, energy[0], rtol=1e-12, atol=1e-12)


def test_descriptors_of_several_frames_follow_one_another():
    model = load(FILES / "nep4_types.txt")
    types, list_neigh, Rij = inputs_of(NUMBERS["nep4_types"][0], model)
    two = types.expand(2, -1), list_neigh.expand(2, -1, -1), Rij.expand(2, -1, -1, -1)
    for method in (model.descriptors, model.latent):
        torch.testing.assert_close(method(*two), method(types, list_neigh, Rij).repeat(2, 1))
