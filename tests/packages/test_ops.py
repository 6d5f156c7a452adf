"""calcops.ops: when the operators of the models are built and loaded, and what programs say that
lack an operator of a saved model."""

import shutil
import sys

import pytest
import torch
from calcops.potentials.lennard_jones import LennardJones
from calcops.potentials.package import load, metadata_in, quietly, save
from checkout import ANSWER, HERE
from programs import run

import calcops_jit

MOVED = "density", "environment_spline", "matrix_product", "tabulated_sum"
ANSWERS = """
import ctypes
print(ctypes.CDLL(calcops_jit.library_path()).answer())
print(ctypes.CDLL(calcops.ops.library.path).answer())
"""


@pytest.fixture
def two_libraries(checkout):
    """Return a checkout with a tiny operator in ops/ and one in calcops/ops/."""
    checkout.write("ops/tiny/tiny.cpp", ANSWER.format("return 1;"))
    checkout.write("calcops/ops/small/small.cpp", ANSWER.format("return 2;"))
    shutil.copy(HERE / "calcops/ops/__init__.py", checkout.path / "calcops/ops")
    return checkout


# ---- what is built and loaded --------------------------------------------------------------------


def test_import_calcops_jit_compiles_nothing_of_calcops(two_libraries):
    assert two_libraries.run("import calcops_jit").code == 0
    (command,) = two_libraries.commands()
    assert "ops/tiny/tiny.cpp" in command
    assert not two_libraries.libraries("calcops_models")

    child = two_libraries.run("import calcops_jit, calcops.ops" + ANSWERS)
    assert child.out.split() == ["1", "2"], child.err
    (command,) = two_libraries.commands()
    assert "calcops/ops/small/small.cpp" in command


def test_calcops_ops_can_be_imported_first(two_libraries):
    child = two_libraries.run("import calcops.ops, calcops_jit" + ANSWERS)
    assert child.out.split() == ["1", "2"], child.err


def test_a_failed_build_ends_the_import_with_the_compilers_error(two_libraries):
    two_libraries.write("calcops/ops/small/small.cpp", "#error broken\n")
    child = two_libraries.run("import calcops.ops")
    assert child.code != 0
    assert "BuildError" in child.err
    assert "#error broken" in child.err


def test_only_the_packages_that_call_the_operators_load_them():
    script = "import sys; import {}; print('calcops.ops' in sys.modules)"
    for module, expected in {
        "calcops.potentials": False,
        "calcops.nep": True,
        "calcops.deepmd.deep_potential": True,
    }.items():
        printed = run(sys.executable, "-c", script.format(module)).stdout
        assert printed == f"{expected}\n", module


ONLY_ITS_EXTRA = """
import importlib, importlib.metadata as metadata, os, sys, tomllib
import torch, calcops.ops
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

project = tomllib.load(open("pyproject.toml", "rb"))["project"]

def closure(name, extra, found):
    if (name, extra) in found:
        return found
    found.add((name, extra))
    own = project["dependencies"] + project["optional-dependencies"].get(extra, [])
    try:
        requirements = own if name == "calcops" else metadata.requires(name)
    except metadata.PackageNotFoundError:  # optional, or for another system
        return found
    for requirement in map(Requirement, requirements or ()):
        if not requirement.marker or requirement.marker.evaluate({"extra": extra}):
            for each in requirement.extras or [""]:
                closure(canonicalize_name(requirement.name), each, found)
    return found

class Missing:
    def find_spec(self, module, path=None, target=None):
        names = set(map(canonicalize_name, distributions.get(module, ())))
        if names and not names & brought:
            raise ModuleNotFoundError(f"{module} is in no extra of this package")

distributions = metadata.packages_distributions()
for module, extra in EXTRAS.items():
    if not os.fork():
        brought = {name for name, _ in closure("calcops", extra, set())}
        sys.meta_path.insert(0, Missing())
        importlib.import_module(module)
        print(module, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


def test_an_extra_brings_what_its_package_imports():
    extras = {"calcops.potentials": "no", "calcops.check": "ase"}
    for name in ("ase", "nep", "deepmd", "train"):
        extras[f"calcops.{name}"] = name
    script = ONLY_ITS_EXTRA.replace("EXTRAS", repr(extras))
    for line in run(sys.executable, "-c", script, cwd=HERE).stdout.split():
        extras.pop(line)
    assert not extras


def test_calcops_build_0_leaves_out_only_the_operators_of_calcops_jit(two_libraries):
    child = two_libraries.run("import calcops.ops; print(calcops.ops.library)", CALCOPS_BUILD="0")
    assert "calcops_models.so" in child.out, child.err
    assert not two_libraries.libraries()


@pytest.mark.parametrize("name", MOVED)
def test_calcops_jit_names_the_new_place_of_an_operator(name):
    with pytest.raises(AttributeError, match=f"calcops_models.{name} after `import calcops.ops`"):
        getattr(calcops_jit, name)


# ---- saved models --------------------------------------------------------------------------------


def save_another(path, new, operators):
    """Save the model of a file in a new file, whose metadata names other operators."""
    about = metadata_in(path) | {"operators": operators}
    with quietly():
        torch.jit.save(torch.jit.load(path), new, _extra_files=about)


def test_a_file_names_the_operators_that_it_calls(tmp_path):
    save(LennardJones(), tmp_path / "model.pt")
    assert metadata_in(tmp_path / "model.pt")["operators"] == "calcops::edge_force_virial"


def test_loading_a_file_loads_calcops_ops_if_it_calls_one_of_its_operators(tmp_path):
    save(LennardJones(), tmp_path / "plain.pt")
    save_another(tmp_path / "plain.pt", tmp_path / "with_density.pt", "calcops_models::density")
    script = """
import sys
from calcops.potentials import load
for name in ("plain.pt", "with_density.pt"):
    load(name)
    print("calcops.ops" in sys.modules)
"""
    printed = run(sys.executable, "-W", "ignore", "-c", script, cwd=tmp_path).stdout
    assert printed.split() == ["False", "True"]


def test_an_operator_that_is_not_loaded_is_named(tmp_path):
    save(LennardJones(), tmp_path / "model.pt")
    save_another(tmp_path / "model.pt", tmp_path / "other.pt", "my_ops::f")
    message = "expected the operator my_ops::f, which .*other.pt calls, to be loaded: load its lib"
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "other.pt")


# Saves an archive as versions did in which density was an operator of calcops_jit.
OLD = """
import sys, torch
torch.library.define("calcops::density", "(Tensor x) -> Tensor")
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.ops.calcops.density(x)
about = {"cutoff": "5", "units": "metal", "type_names": "Si", "dtype": "float64", "inputs": "x"}
torch.jit.save(torch.jit.script(Model()), "old.pt", _extra_files=about)
"""


def test_a_file_of_an_earlier_version_names_the_new_place_of_its_operator(tmp_path):
    (tmp_path / "save.py").write_text(OLD)
    run(sys.executable, "-W", "ignore", "save.py", cwd=tmp_path)
    message = "old.pt calls calcops::density, which has become calcops_models::density of calcops"
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "old.pt")
