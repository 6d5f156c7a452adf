"""The command `python -m calcops_jit test`, and what calcops_jit.test and tests_of do with it."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import calcops_jit

pytest.importorskip("hypothesis")
HERE = Path(__file__).resolve().parents[2]
SOURCE = """
#include <calcops/operator.h>
using calcops::Value;
void check_size(Value* arguments, Value*) {
  if (!arguments[0].size(0).expect_equal(99))
    calcops::refuse("mine::picky", "x", "of 99 numbers", arguments[0].size(0));
}
const calcops::Check checks[] = {{"picky", check_size}};
const calcops::Contract contract(R"(
twice(Tensor x, float factor=2.0) -> Tensor y
picky(Tensor x) -> Tensor y
x       [N]; float32 or float64.
factor  > 0; <= 8.
y       [N]; like x.
)",
                                 checks);
template <class Real>
void twice(calcops::View<const Real, 1> x, double factor, calcops::View<Real, 1> y) {
  for (int64_t i = 0; i < x.shape[0]; ++i) y(i) = i < MOST ? Real(factor * x(i)) : 0;
}
const calcops::Kernel cpu("twice", twice<float>, twice<double>);
template <class Real>
void picky(calcops::View<const Real, 1> x, calcops::View<Real, 1> y) {
  for (int64_t i = 0; i < x.shape[0]; ++i) y(i) = x(i);
}
const calcops::Kernel picky_cpu("picky", picky<float>, picky<double>);
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("testing") / "mine.cpp"
    path.write_text(SOURCE)
    return path


@pytest.fixture(scope="module")
def mine(source):
    return calcops_jit.load("mine", source, extra_cflags="-DMOST=100000")


def run(*arguments, **variables):
    environment = os.environ | {"CALCOPS_BUILD": "0", "PYTHONPATH": str(HERE)} | variables
    command = [sys.executable, "-m", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_command_prints_the_smallest_call_and_fails(source, tmp_path):
    cases = tmp_path / "cases.py"
    cases.write_text("reference = {'twice': lambda x, factor: factor * x}\n")
    options = "--operators", "twice", "--only", "reference", "--cases", cases, "--cflags=-DMOST=3"
    result = run("calcops_jit", "test", source, *options)
    assert result.returncode == 1, result.stderr
    assert "FAILED mine::twice reference after " in result.stdout
    assert '"x": calcops_jit.Tensor([4], torch.float32, [1.0, 2.0, 3.0, 4.0])' in result.stdout
    assert "extra_cflags=['-DMOST=3']" in result.stdout


def test_the_command_succeeds_where_nothing_is_wrong(source):
    options = "--seconds", "1", "--operators", "tw*"
    result = run("calcops_jit", "test", source, "--cflags=-DMOST=100000", *options)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.match(r"mine::twice: \d+ calls, \d+ checks; ", result.stdout)
    assert "not threads: the library is built without -fopenmp" in result.stdout


def test_without_hypothesis_the_command_says_how_to_get_it(source, tmp_path):
    (tmp_path / "hypothesis.py").write_text("raise ImportError")
    paths = f"{tmp_path}{os.pathsep}{HERE}"
    result = run("calcops_jit", "test", source, PYTHONPATH=paths)
    assert result.returncode == 1
    assert result.stderr.endswith("pip install hypothesis\n")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only": "speed"}, "expected a check among .*, got 'speed'"),
        ({"operators": "twice,thrice"}, "expected `operators` among twice, picky, got 'thrice'"),
    ],
)
def test_a_wrong_option_is_an_error_that_names_what_exists(options, message, mine):
    with pytest.raises(ValueError, match=message):
        calcops_jit.test(mine, **options)


def test_an_operator_that_refuses_each_call_fails(mine, capsys):
    assert not calcops_jit.test(mine, "picky", seconds=0.5)
    assert "no call was valid, so `adjust` has to make valid ones: " in capsys.readouterr().out


def test_adjust_makes_the_calls_of_an_operator_with_a_check_valid(mine, capsys):
    def adjust(arguments, choose):
        arguments["x"] = calcops_jit.Tensor([99], arguments["x"].dtype)

    assert calcops_jit.test(mine, "picky", seconds=0.5, only="call", adjust={"picky": adjust})
    assert "discarded" not in capsys.readouterr().out


def test_an_error_in_adjust_is_told(mine, capsys):
    def adjust(arguments, choose):
        raise KeyError("nothing")

    assert not calcops_jit.test(mine, "twice", seconds=0.5, adjust={"twice": adjust})
    assert "KeyError: 'nothing'" in capsys.readouterr().out


def test_a_seed_repeats_the_smallest_call(source, capsys):
    options = {"only": "reference", "reference": {"twice": lambda x, factor: 0 * x}, "seed": 5}
    printed = []
    for _ in range(2):
        calcops_jit.test(source, "twice", extra_cflags="-DMOST=100000", name="seeds", **options)
        printed.append(capsys.readouterr().out.split("arguments = ")[1].split("}")[0])
    assert printed[0] == printed[1]


def test_tests_of_has_a_case_for_each_operator_and_check(source, tmp_path):
    text = f"""
        import calcops_jit
        test_mine = calcops_jit.tests_of(
            {str(source)!r}, "twice", seconds=1, only="call,broken,memory", extra_cflags="-DMOST=100000"
        )
        test_wrong = calcops_jit.tests_of(
            {str(source)!r}, "twice", seconds=1, only="reference", name="wrong",
            extra_cflags="-DMOST=1", reference={{"twice": lambda x, factor: factor * x}},
        )
    """
    file = tmp_path / "test_mine.py"
    file.write_text(textwrap.dedent(text))
    result = run("pytest", "-v", "-p", "no:cacheprovider", file)
    for check in ("call", "broken", "memory"):
        assert f"test_mine[mine::twice-{check}] PASSED" in result.stdout, result.stdout
    assert "test_wrong[wrong::twice-reference] FAILED" in result.stdout
    assert "def test_twice_reference():" in result.stdout


def test_each_process_of_xdist_reports_what_it_finds(source, tmp_path):
    """The case of the check that fails in one process belongs to the other, in which it passes."""
    text = f"""
        import os, calcops_jit
        factor = 0 if os.environ["PYTEST_XDIST_WORKER"] == "gw0" else 2
        test_mine = calcops_jit.tests_of(
            {str(source)!r}, "twice", seconds=0.3, only="reference", extra_cflags="-DMOST=100000",
            reference={{"twice": lambda x, **others: x * factor * others["factor"] / 2}},
        )
    """
    file = tmp_path / "test_mine.py"
    file.write_text(textwrap.dedent(text))
    result = run("pytest", "-v", "-n", "2", "-p", "no:cacheprovider", file)
    assert re.search(r"PASSED \S*test_mine\[mine::twice-reference\]", result.stdout), result.stdout
    assert re.search(r"FAILED \S*test_mine\[mine::twice-call\]", result.stdout), result.stdout


def test_it_runs_after_kernels_in_threads_and_backward_passes(mine):
    program = f"""
        import torch, calcops_jit
        torch.set_num_threads(2)
        x = torch.randn(500, 500, requires_grad=True)
        (x @ x).exp().sum().backward()
        assert calcops_jit.test({os.fspath(mine._request.sources[0])!r}, "twice", seconds=1, extra_cflags="-DMOST=100000")
    """
    environment = os.environ | {"CALCOPS_BUILD": "0", "PYTHONPATH": str(HERE)}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    subprocess.run(command, env=environment, check=True, timeout=300)
