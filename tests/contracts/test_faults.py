"""calcops_jit.test finds each fault of faults.cpp, and none in the same operators without it."""

import re
from pathlib import Path

import pytest

import calcops_jit

pytest.importorskip("hypothesis")

SOURCE = Path(__file__).with_name("faults.cpp")
# (operator, check) of each line of the table in the source
FAULTS = re.findall(r"^// (\w+)  +\S.*  +(\w+)$", SOURCE.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def faulty():
    flags = {"extra_cflags": "-fopenmp -DFAULTS", "extra_ldflags": "-fopenmp"}
    return calcops_jit.load("faulty", SOURCE, **flags)


@pytest.fixture(scope="module")
def right():
    return calcops_jit.load("right", SOURCE, extra_cflags="-fopenmp", extra_ldflags="-fopenmp")


@pytest.fixture(scope="module")
def tempting():
    return calcops_jit.load("tempting", SOURCE.with_name("tempting.cpp"))


@pytest.mark.parametrize(("operator", "check"), FAULTS)
def test_a_fault_is_found_and_printed_as_a_test_that_fails(operator, check, faulty, capsys):
    assert not calcops_jit.test(faulty, operator, only=check)
    title, _, listing = capsys.readouterr().out.partition("\n")
    assert title.startswith(f"FAILED faulty::{operator} {check} ")
    names = {}
    exec(listing.partition("\n\nfaulty::")[0], names)
    with pytest.raises(AssertionError, match=f"faulty::{operator} {check}: "):
        names[f"test_{operator}_{check}"]()


@pytest.mark.parametrize("operator", [operator for operator, _ in FAULTS])
def test_an_operator_without_fault_passes(operator, right):
    assert calcops_jit.test(right, operator, seconds=1)


def test_each_operator_has_a_line_in_the_table(right):
    assert list(right.operators) == sorted(operator for operator, _ in FAULTS)


@pytest.mark.parametrize("seed", [0, 1])
def test_rounding_ties_and_narrow_limits_are_no_faults(seed, tempting, capsys):
    passed = calcops_jit.test(tempting, seconds=1.5, seed=seed)
    printed = capsys.readouterr().out
    assert passed, printed
    calls = dict(re.findall(r"tempting::(\w+): (\d+) calls", printed))
    assert set(calls) == set(tempting.operators)
    assert min(map(int, calls.values())) > 10
