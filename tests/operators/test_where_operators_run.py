"""docs/what_runs_where.md: operators and potentials run where the tables say.

A call of each operator is drawn from its contract. TorchScript runs it in an archive, and so does a
C++ program without Python.
"""

import functools
import io
import re
from pathlib import Path

import calcops.ops
import contract_cases
import pytest
import torch
from programs import LIBRARIES, ROOT, assert_needs_no_python, run

import calcops_jit

hypothesis = pytest.importorskip("hypothesis", reason="needs hypothesis")

from _calcops_jit.testing import CHECKS  # noqa: E402
from _calcops_jit.testing.checks import Call, Refused  # noqa: E402
from _calcops_jit.testing.contract import operators_of  # noqa: E402
from _calcops_jit.testing.draws import calls, made  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit:FutureWarning", "ignore:.*torch.jit:DeprecationWarning"
)

TEXT = (ROOT / "docs/what_runs_where.md").read_text(encoding="utf-8")
(TABLE,) = re.findall(r"^\| operator \|.*?^$", TEXT, re.MULTILINE | re.DOTALL)


def cells(line):
    return [cell.strip(" `") for cell in line.strip("|").split("|")]


HEAD, _, *ROWS = map(cells, TABLE.splitlines())
OPERATORS = {}
for library in (calcops_jit._own, calcops.ops.library):
    OPERATORS |= {op.short: op for op in operators_of(library) if not op.short.startswith("_")}
every_operator = pytest.mark.parametrize("name", OPERATORS)


def word(name, column):
    """Return what the table says."""
    (row,) = [row for row in ROWS if row[0] == name]
    return row[HEAD.index(column)]


def folder_of(name):
    """Return the folder of the operator's contract."""
    contract = re.compile(rf"^(\w+::)?{name}\(Tensor", re.MULTILINE)
    for folder in LIBRARIES:
        for source in folder.glob("*/*.cpp"):
            if source.stem == source.parent.name and contract.search(source.read_text()):
                return source.parent
    raise LookupError(name)


@functools.cache
def call_of(name):
    """Return a valid call whose tensors and results all have numbers."""
    op = OPERATORS[name]
    adjust = contract_cases.adjust.get(name)
    reference = contract_cases.reference.get(name)

    def is_usable(arguments):
        call = Call(op, made(arguments), reference)
        try:
            tensors = [*call.tensors.values(), *call.results.values()]
        except Refused:
            return False
        return all(x.numel() for x in tensors)

    settings = hypothesis.settings(
        max_examples=2000,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    drawn = hypothesis.find(calls(op, adjust), is_usable, settings=settings)
    return Call(op, made(drawn), reference)


@functools.cache
def archive_of(name):
    """Return the bytes of a TorchScript archive whose module runs the call."""
    call = call_of(name)
    tensors = torch.nn.Module()
    arguments = []
    for key, schema in call.op.schema.items():
        value = call.arguments.get(key, schema.default_value)
        if torch.is_tensor(value):
            tensors.register_buffer(key, value.detach())
            arguments.append(f"{key}=self.{key}")
        else:
            arguments.append(f"{key}=torch.jit.annotate({schema.type}, {value!r})")
    module = torch.jit.script(tensors)
    operator = f"torch.ops.{call.op.namespace}.{name}"
    module.define(f"def forward(self):\n  return {operator}({', '.join(arguments)})\n")
    return module.save_to_buffer()


def assert_same(got, name):
    got = [got] if torch.is_tensor(got) else got
    expected = call_of(name).results.values()
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


def test_the_table_has_a_row_for_each_public_operator():
    assert sorted(row[0] for row in ROWS) == sorted(OPERATORS)
    assert {cell for row in ROWS for cell in row[3:-1]} <= {"tested", "emulated", "composed"}
    assert {tuple(row[1:3]) for row in ROWS} == {("tested", "by hand")}


@every_operator
def test_a_derivative_exists_where_the_table_says(name):
    orders = word(name, "derivatives")
    assert orders in ("any order", "3 orders", "none")
    is_differentiable = OPERATORS[name].has_derivatives and bool(call_of(name).floats)
    assert (orders != "none") == is_differentiable
    source = (folder_of(name) / f"{folder_of(name).name}.cpp").read_text()
    assert (orders == "3 orders") == ("up to third order" in source)


@every_operator
def test_an_eager_call_gives_the_result_of_the_reference(name):
    assert word(name, "eager") == "tested"
    CHECKS["reference"](call_of(name))


@every_operator
@pytest.mark.parametrize("way", ["compile", "export"])
def test_a_compiled_and_an_exported_call_give_the_results_of_the_eager_one(name, way):
    assert word(name, f"torch.{way}") == "tested"
    CHECKS[way](call_of(name))


@every_operator
def test_torchscript_gives_the_results_of_the_eager_call(name):
    assert word(name, "TorchScript") == "tested"
    assert_same(torch.jit.load(io.BytesIO(archive_of(name)))(), name)


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """Return a C++ program: host ARCHIVE RESULTS LIBRARY ..."""
    folder = tmp_path_factory.mktemp("host")
    (folder / "host.cpp").write_text("""
        #include <dlfcn.h>
        #include <torch/csrc/jit/api/module.h>
        #include <torch/csrc/jit/serialization/import.h>
        #include <torch/csrc/jit/serialization/pickle.h>

        #include <fstream>
        #include <iostream>

        int main(int argc, char** argv) {
          for (int k = 3; k < argc; ++k)
            if (!dlopen(argv[k], RTLD_NOW)) return std::cerr << dlerror(), 1;
          const auto results = torch::jit::load(argv[1]).forward({});
          const auto bytes = torch::jit::pickle_save(results);
          std::ofstream(argv[2], std::ios::binary).write(bytes.data(), bytes.size());
        }""")
    torch_folder = Path(torch.__file__).parent
    run(
        *("g++", "-std=c++20", "-O0", "host.cpp", "-o", "host"),
        *("-isystem", f"{torch_folder}/include"),
        *("-isystem", f"{torch_folder}/include/torch/csrc/api/include"),
        *(f"-L{torch_folder}/lib", f"-Wl,-rpath,{torch_folder}/lib"),
        *("-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl"),
        cwd=folder,
    )
    assert_needs_no_python(folder / "host")
    return folder / "host"


@every_operator
def test_a_cpp_program_gives_the_results_of_the_eager_call(name, host, tmp_path):
    assert word(name, "C++") == "tested"
    (tmp_path / "call.pt").write_bytes(archive_of(name))
    libraries = [calcops_jit.library_path(), calcops.ops.library.path]
    run(host, tmp_path / "call.pt", tmp_path / "results.pt", *libraries)
    assert_same(torch.load(tmp_path / "results.pt", weights_only=False), name)


@every_operator
def test_emulated_kernels_have_tests_in_the_emulation(name):
    folder = folder_of(name)
    has_kernel = not OPERATORS[name].is_composition and list(folder.glob("*.cu"))
    expected = "emulated" if has_kernel else "composed"
    assert word(name, "ARM") == word(name, "CUDA") == expected
    if has_kernel:
        tests = ROOT / "tests" / "operators"
        assert (tests / "arm" / f"{folder.name}.cpp").is_file()
        assert (tests / f"test_{folder.name}_cuda_kernels.py").is_file()


# ---- potentials ---------------------------------------------------------------------------------

CELL = re.compile(r'\[(.+?)\]\(\.\./(\S+) "(test_\w+)"\)')
BY_HAND = r'^pytestmark = .*\blong\b|importorskip\("(torch_sim|metatomic)|not PYTHON\.exists\(\)'


def test_each_cell_of_a_potential_is_a_word_or_a_link_to_a_test_of_its_host():
    (table,) = re.findall(r"^\| potential \|.*?^$", TEXT, re.MULTILINE | re.DOTALL)
    head, _, *rows = map(cells, table.splitlines())
    files = {
        "ASE": "packages/test_",
        "LAMMPS": "lammps",
        "torch-sim": "test_torch_sim.py",
        "C++": "test_examples_aot_inductor_force.py",
        "metatomic": "test_metatomic.py",
    }
    for row in rows:
        for host, cell in zip(head[1:], row[1:], strict=True):
            is_link = re.fullmatch(CELL, cell) and files[host] in cell
            assert is_link or cell == "untested", f"{row[0]} in {host}: {cell}"


@pytest.mark.parametrize("said, file, test", sorted(set(CELL.findall(TEXT))))
def test_a_cell_of_a_potential_says_whether_ci_runs_its_test(said, file, test):
    text = (ROOT / file).read_text()
    decorated = re.search(rf"((?:^[@ )\]].*\n)*)^def {test}\(", text, re.MULTILINE)
    is_long = "mark.long" in decorated[1] or re.search(BY_HAND, text, re.MULTILINE)
    if said == "refused":
        assert "pytest.raises" in text.partition(f"def {test}(")[2].partition("\ndef ")[0]
    else:
        assert said == ("by hand" if is_long else "tested")
