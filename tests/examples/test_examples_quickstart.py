"""examples/quickstart.py has at most 100 lines and prints the published properties of silicon."""

import re
import sys

import pytest
from programs import ROOT, assert_shows_something, run

QUICKSTART = ROOT / "examples" / "quickstart.py"
for package in ("ase", "vesin", "matplotlib"):
    pytest.importorskip(package)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Run the example as `make demo` does, but in an empty folder."""
    return run(sys.executable, QUICKSTART, cwd=tmp_path_factory.mktemp("quickstart"))


def number(ran, pattern):
    return float(re.search(pattern, ran.stdout)[1])


def test_the_crystal_has_its_published_energy_and_bulk_modulus(ran):
    """The elastic constants of E. R. Cowley, Phys. Rev. Lett. 60, 2379 (1988) give a bulk modulus
    (C11 + 2 C12) / 3 of 101.4 GPa."""
    assert number(ran, r"cohesive energy +(\S+) eV/atom") == pytest.approx(-4.3366, abs=1e-5)
    assert number(ran, r"bulk modulus +(\S+) GPa") == pytest.approx(101.4, abs=0.1)


def test_forces_and_pressure_are_derivatives_of_the_energy(ran):
    assert number(ran, r"forces .* by (\S+) of") <= 1e-13
    assert number(ran, r"of up to (\S+) eV/A") > 1
    assert number(ran, r"pressure .* by (\S+) of") <= 1e-12


def test_its_docstring_shows_its_output(ran):
    shown = re.findall(
        r"^(?:cohesive|forces|pressure|bulk).*", QUICKSTART.read_text(), re.MULTILINE
    )
    assert len(shown) == 4
    printed = ran.stdout.splitlines()
    # Rounding errors, such as 2e-15, differ between machines.
    for expected, line in zip(shown, printed, strict=False):
        assert re.sub(r"\de-\d\d", "", line) == re.sub(r"\de-\d\d", "", expected)


def test_it_draws_one_picture_and_prints_nothing_else(ran):
    *rows, path = ran.stdout.splitlines()
    assert len(rows) == 4
    assert_shows_something(path, 500, 800)
    noise = [line for line in ran.stderr.splitlines() if not line.startswith("calcops_jit: ")]
    assert noise == []


def test_it_is_a_tutorial_of_at_most_100_lines():
    assert len(QUICKSTART.read_text().splitlines()) <= 100
