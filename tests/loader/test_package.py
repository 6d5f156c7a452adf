"""What pip installs: an sdist and a wheel with the sources. The installed sources build where only
the cache can be written."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from checkout import (
    ANSWER,
    HERE,
    cache_with_runtime,
    clean_environment,
    compiler,
    contents,
    copy,
    pip,
    wheel_of,
)
from programs import run

CALL = (
    "import calcops_jit, ctypes; print(calcops_jit.__file__, "
    "ctypes.CDLL(calcops_jit.library_path()).answer())"
)

pytest.importorskip("setuptools", minversion="77", reason="the build backend")
pytest.importorskip("pip", reason="it installs")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    source = copy(tmp_path_factory.mktemp("source") / "calcops")
    return wheel_of(source, tmp_path_factory.mktemp("wheel"))


def replace_operators(ops: Path, answer: int = 1) -> None:
    """Replace the operators by a function that compiles in a moment."""
    shutil.rmtree(ops, ignore_errors=True)
    (ops / "tiny").mkdir(parents=True)
    (ops / "tiny/tiny.cpp").write_text(ANSWER.format(f"return {answer};"))


def without_python(variables: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables without those of Python, which may name this checkout."""
    return {name: value for name, value in variables.items() if not name.startswith("PYTHON")}


def call(python: Path, folder: Path) -> list[str]:
    """Return the path of the imported module, and the answer of its operator."""
    variables = without_python(clean_environment())
    variables |= {"CALCOPS_CACHE": str(folder / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    variables |= {"CXX": compiler(), "TEST_LOG": str(folder / "log"), "TEST_SLOW": ""}
    result = subprocess.run(
        [python, "-c", CALL], cwd="/", env=variables, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def test_a_wheel_holds_the_sources_and_installs_no_other_names(wheel):
    names = contents(wheel).keys()
    top = {re.sub(r"-[\d.]+\.dist-info$", ".dist-info", name.partition("/")[0]) for name in names}
    modules = {"calcops", "calcops_jit.py", "_calcops_jit", "calcops_jit-stubs"}
    assert top == modules | {"calcops.dist-info"}

    packages = {str(path.relative_to(HERE)) for path in (HERE / "calcops").glob("*.py")}
    for package in ("ase", "deepmd", "graph", "nep", "ops", "potentials", "train"):
        for path in (HERE / "calcops" / package).rglob("*.*"):
            if path.suffix in (".py", ".sw", ".h", ".cpp", ".cu"):
                packages.add(str(path.relative_to(HERE)))
    assert {name for name in names if name.startswith("calcops/")} == packages

    sources = {
        f"_calcops_jit/{path.relative_to(HERE)}"
        for path in (HERE / "ops").rglob("*")
        if path.suffix in (".h", ".cpp", ".cu")
    }
    assert {name for name in names if name.startswith("_calcops_jit/ops/")} == sources

    expected = set()
    for path in (HERE / "_calcops_jit").rglob("*"):
        is_installed = path.suffix != ".md" and path.parent.name != "stubs"
        if path.is_file() and "__pycache__" not in path.parts and is_installed:
            expected.add(str(path.relative_to(HERE)))
    for path in (HERE / "contracts").rglob("*"):
        if path.suffix in (".h", ".cpp"):
            expected.add(f"_calcops_jit/{path.relative_to(HERE)}")
    assert expected <= names
    assert "_calcops_jit/py.typed" in expected


@pytest.mark.parametrize("part", [".", "calcops/lammps"])
def test_an_sdist_has_every_file_and_builds_the_wheel_of_the_checkout(part, tmp_path):
    source = copy(tmp_path / "source") / part
    files = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    build = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build, tmp_path, cwd=source)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    missing = {name for name in files if not (unpacked / name).exists()}
    # It is a distribution of its own.
    assert not [name for name in missing if not name.startswith("calcops/lammps/")]

    wheels = wheel_of(unpacked, tmp_path / "from_sdist"), wheel_of(source, tmp_path / "from_source")
    assert contents(wheels[0]) == contents(wheels[1])


PACKAGES = """
import os
os.environ["CALCOPS_BUILD"] = "0"
from calcops.potentials import LennardJones, Potential, StillingerWeber, load, save
from calcops.train.weights import initial
print(Potential.__module__, load.__code__.co_filename, StillingerWeber().cutoff)
"""


def lines_of_command(python: Path, *words: str) -> list[str]:
    """Return what the installed command `calcops` prints in a foreign folder."""
    command = [python.parent / "calcops", *words]
    variables = without_python(os.environ)
    done = subprocess.run(command, cwd="/", env=variables, capture_output=True, text=True)
    return (done.stdout + done.stderr).splitlines()


def test_the_installed_module_builds_from_any_folder_and_writes_only_into_the_cache(
    wheel, environment, tmp_path
):
    """Its runtime is the one that is compiled for all tests: the installed headers are the same."""
    pip("install", wheel, python=environment)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    variables = without_python(os.environ)
    printed = subprocess.check_output(
        [environment, "-c", PACKAGES], cwd="/", env=variables, text=True
    )
    module, path, _ = printed.split()
    assert module == "calcops.potentials.potential"
    assert path == f"{site}/calcops/potentials/package.py"
    assert lines_of_command(environment)[0] == "usage: calcops COMMAND ..."
    (line,) = lines_of_command(environment, "lammps", "build")
    assert "expected the module calcops.lammps, got none: pip install ./calcops/lammps" in line
    replace_operators(site / "_calcops_jit/ops")
    shutil.copytree(cache_with_runtime(), tmp_path / "cache")
    before = {path: path.stat().st_mtime_ns for path in site.rglob("*")}
    for path in before:
        path.chmod(path.stat().st_mode & ~0o222)
    assert call(environment, tmp_path) == [f"{site}/calcops_jit.py", "1"]
    assert "contracts/runtime" not in (tmp_path / "log").read_text()
    assert {path: path.stat().st_mtime_ns for path in site.rglob("*")} == before
    for path in before:
        path.chmod(path.stat().st_mode | 0o200)


@pytest.mark.long
def test_an_editable_installation_follows_edits_of_the_checkout(environment, tmp_path):
    source = copy(tmp_path / "calcops")
    pip("install", "--no-build-isolation", "-e", source, python=environment)
    assert lines_of_command(environment)[0] == "usage: calcops COMMAND ..."
    replace_operators(source / "ops")
    assert call(environment, tmp_path) == [f"{source}/calcops_jit.py", "1"]
    replace_operators(source / "ops", 2)
    assert call(environment, tmp_path) == [f"{source}/calcops_jit.py", "2"]


@pytest.mark.long
def test_mypy_knows_the_operators_and_the_functions_of_the_module(wheel, environment, tmp_path):
    pytest.importorskip("mypy", reason="the type checker")
    pip("install", wheel, python=environment)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    # mypy takes a minute to read PyTorch's annotations. This test needs only the name Tensor.
    (site / "torch.pth").unlink()
    (site / "torch").mkdir()
    (site / "torch/__init__.pyi").write_text("class Tensor: ...\n")
    (site / "torch/py.typed").touch()
    (tmp_path / "user.py").write_text(
        """\
import calcops_jit
reveal_type(calcops_jit.force)
reveal_type(calcops_jit.load)
reveal_type(calcops_jit.__version__)
calcops_jit.force('list')
calcops_jit.no_operator
"""
    )
    options = [
        "--python-executable",
        environment,
        "--cache-dir",
        os.devnull,
        "--follow-imports",
        "silent",
    ]
    command = [sys.executable, "-m", "mypy", *options, "user.py"]
    output = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    tensors = "list_neigh: torch.Tensor, dE: torch.Tensor, Ri_d: torch.Tensor"
    force = f"({tensors}, nghost: int =, *, neighbor_index: torch.Tensor | None =) -> torch.Tensor"
    assert re.search(rf'user.py:2: note: Revealed type is "def {re.escape(force)}"', output), output
    load = r'user.py:3: note: .*name: .*str.*sources: .*-> _calcops_jit.library.Library"'
    assert re.search(load, output), output
    assert re.search(r'user.py:4: note: Revealed type is ".*str"', output), output
    assert "user.py:5: error: Missing positional arguments" in output
    assert 'user.py:6: error: Module has no attribute "no_operator"' in output


def test_the_stub_declares_every_public_name(wheel):
    """The public names are those of dir(calcops_jit) without the operators."""
    declared = set()
    for node in ast.parse(contents(wheel)["calcops_jit-stubs/__init__.pyi"]).body:
        if isinstance(node, ast.FunctionDef):
            declared.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            declared |= {alias.asname for alias in node.names}

    assignments = [
        node
        for node in ast.parse((HERE / "calcops_jit.py").read_text()).body
        if isinstance(node, ast.Assign)
    ]
    (public,) = [node.value for node in assignments if node.targets[0].id == "__all__"]
    assert set(ast.literal_eval(public)) <= declared
