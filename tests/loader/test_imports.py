"""What a user sees of `import calcops_jit`: quick, quiet, and possible in any process."""

import copy
import inspect
import os
import subprocess
import sys

import pytest
from checkout import ANSWER, AUDITED, CONTRACT, Checkout, is_message

import calcops_jit


@pytest.fixture
def plain_checkout(tmp_path):
    """Return a checkout whose processes have imported torch, and no module that a build needs."""
    return Checkout(tmp_path, preamble="")


def test_a_warm_import_starts_no_process_writes_nothing_and_prints_nothing(plain_checkout):
    checkout = plain_checkout
    assert checkout.answer() == 1
    script = """
import calcops_jit, threading, torch
calcops_jit.library_path()
unwanted = {'torch.utils.cpp_extension', 'setuptools', 'IPython'} & set(sys.modules)
print(events, unwanted, torch.cuda.is_initialized(), threading.active_count())
"""
    child = checkout.run(AUDITED + script)
    assert (child.code, child.out, child.err) == (0, "[] set() False 1\n", "")


def test_calcops_build_0_imports_without_building_and_an_operator_names_the_command(checkout):
    script = "import calcops_jit; print('imported'); calcops_jit.force"
    child = checkout.run(script, CALCOPS_BUILD="0")
    assert (child.code, child.out) == (1, "imported\n")
    assert "CALCOPS_BUILD=0" in child.err
    assert "python -m calcops_jit build" in child.err
    assert not checkout.cache.exists()


def test_after_a_failed_build_the_import_succeeds_and_load_works(checkout):
    """Every use of an operator raises the error of the build."""
    checkout.write("ops/tiny/tiny.cpp", "#error broken\n")
    checkout.put("mine.cpp", ANSWER.format("return 6;"))
    script = """
import calcops_jit, ctypes
try:
    calcops_jit.anything
except calcops_jit.BuildError as error:
    print(error)
print(ctypes.CDLL(calcops_jit.load('mine', 'mine.cpp').path).answer())
"""
    child = checkout.run(script, cwd=checkout.project)
    *error, last = child.out.splitlines()
    assert last == "6", child.err
    assert is_message("\n".join(error))
    assert "#error broken" in child.out
    assert "#error broken" in child.err


def test_an_operator_is_the_torch_ops_handle_documented_by_its_contract(tmp_path):
    checkout = Checkout(tmp_path, has_runtime=True)
    text = CONTRACT.format(name="twice", factor=2)
    text = text.replace("-> Tensor y\n", "-> Tensor y\n  Twice its argument.\n")
    private = CONTRACT.format(name="_hidden", factor=2).partition("operator.h>")[2]
    private = private.replace("cpu(", "hidden_cpu(").replace("contract(", "hidden_contract(")
    checkout.write("ops/tiny/tiny.cpp", text + private)
    script = """
import calcops_jit, torch, pydoc, inspect
x = torch.ones(2, dtype=torch.float64)
print(calcops_jit.twice is torch.ops.calcops.twice, calcops_jit.twice(x).tolist())
print([name for name in dir(calcops_jit) if not name.startswith('__')])
print(calcops_jit.twice.__doc__.splitlines()[0], inspect.signature(calcops_jit.twice))
assert 'Twice its argument.' in pydoc.render_doc(calcops_jit.twice)
assert 'twice' in pydoc.render_doc(calcops_jit)
calcops_jit.thrice
"""
    public = ["BuildError", "Library", "Tensor", "check", "library_path", "load", "reload"]
    public += ["test", "tests_of", "twice", "watch"]
    for _ in range(2):  # after the build, and from the cache
        child = checkout.run(script)
        assert child.out.splitlines() == [
            "True [2.0, 2.0]",
            str(public),
            "calcops::twice(Tensor x) -> Tensor y (x)",
        ], child.err
        error = child.err.partition("AttributeError: ")[2]
        assert "'thrice'" in error
        assert "twice" in error.partition("'thrice'")[2]


def test_inspect_shows_the_names_and_defaults_of_the_schema():
    def signature(operator):
        return str(inspect.signature(operator))

    expected = "(list_neigh, dE, Ri_d, nghost=0, *, neighbor_index=None)"
    assert signature(calcops_jit.force) == expected
    assert signature(copy.copy(calcops_jit.force)) == expected
    assert signature(calcops_jit.calculateForce) == "(list_neigh, dE, Ri_d, F, nghost=None)"


# ---- unusual processes ---------------------------------------------------------------------------


def test_an_unsupported_system_or_processor_is_refused_in_one_line(checkout):
    for system, machine in (("darwin", "arm64"), ("linux", "riscv64")):
        script = f"""
import platform, sys
sys.platform = {system!r}
platform.machine = lambda: {machine!r}
import calcops_jit
"""
        line = checkout.run(script).err.splitlines()[-1]
        assert line.startswith("ImportError: calcops_jit: expected Linux on x86-64 or aarch64")
        assert f"{system} on {machine}" in line


@pytest.mark.parametrize(
    "preamble",
    [
        "sys.stderr = sys.stdout = None",
        "sys.stderr.close(); sys.stdout.close()",
        "os.close(0); os.close(1); os.close(2)",
    ],
    ids=["none", "closed", "descriptors"],
)
def test_a_build_works_with_closed_standard_streams(checkout, preamble):
    """A daemon closes its standard streams, and their descriptors may then belong to other files:
    the build must not write to them."""
    checkout.put("mine.cpp", ANSWER.format("return 2;"))
    checkout.put("wrong.cpp", "int f() {\n")
    script = f"""
import os, sys
{preamble}
import calcops_jit, ctypes
library = calcops_jit.load("mine", "mine.cpp")
open("answer", "w").write(str(ctypes.CDLL(library.path).answer()))
try:
    calcops_jit.load("wrong", "wrong.cpp")
except calcops_jit.BuildError as error:
    open("error", "w").write(str(error))
"""
    checkout.run(script, cwd=checkout.project, CALCOPS_BUILD="0")
    assert (checkout.project / "answer").read_text() == "2"
    assert (checkout.project / "error").read_text().startswith("cannot build wrong: error at ")
    child = checkout.load()
    assert (child.out, child.err) == ("2\n", "")


def test_a_build_works_in_the_locale_c_with_any_letters(checkout):
    """This needs a new interpreter. A forked child would keep the locale of its parent."""
    folder = checkout.project.rename(checkout.project.with_name("größe"))
    (folder / "mine.cpp").write_text(ANSWER.format("return 2;"))
    # The comment is Latin-1. g++ quotes these bytes unchanged in its message.
    script = """
import calcops_jit, ctypes
print(ctypes.CDLL(calcops_jit.load("mine", "mine.cpp").path).answer())
open("mine.cpp", "wb").write(b"int x = ; // gr\\xf6\\xdfe")
try:
    calcops_jit.reload()
except calcops_jit.BuildError as error:
    print(error)
"""
    (folder / "script.py").write_text(script, "utf-8")
    prefixes = ("LC_", "LANG", "PYTHON", "CALCOPS_")
    variables = {k: v for k, v in os.environ.items() if not k.startswith(prefixes)}
    variables |= {"LC_ALL": "C", "PYTHONIOENCODING": "utf-8:surrogateescape", "CALCOPS_BUILD": "0"}
    variables |= {"CALCOPS_CACHE": str(checkout.cache), "PYTHONPATH": str(checkout.path)}
    result = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env=variables,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    assert "Traceback" not in result.stderr, result.stderr
    first, error, evidence = result.stdout.splitlines()[:3]
    assert first == "2"
    assert error == f"cannot build mine: error at {folder}/mine.cpp:1:9"
    assert "expected primary-expression" in evidence
