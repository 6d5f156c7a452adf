"""What pip installs: an sdist and a wheel with the sources, which build where nothing but the cache
can be written."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from checkout import HERE, contents, copy, pip, wheel_of

CALL = (
    "import calcops_jit, ctypes; print(calcops_jit.__file__, "
    "ctypes.CDLL(calcops_jit.library_path()).answer())"
)

pytest.importorskip("setuptools", minversion="77", reason="the build backend")
pytest.importorskip("pip", reason="it installs")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return wheel_of(
        copy(tmp_path_factory.mktemp("source") / "calcops"), tmp_path_factory.mktemp("wheel")
    )


def tiny(ops: Path, answer: int = 1) -> None:
    """Replaces the operators by one that compiles in a moment."""
    shutil.rmtree(ops, ignore_errors=True)
    (ops / "tiny").mkdir(parents=True)
    (ops / "tiny/tiny.cpp").write_text(
        f'extern "C" __attribute__((visibility("default"))) int answer() {{ return {answer}; }}\n'
    )


def answer(python: Path, folder: Path) -> list[str]:
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("CALCOPS_", "PYTHON"))}
    variables |= {"CALCOPS_CACHE": str(folder / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(
        [python, "-c", CALL], cwd="/", env=variables, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def test_a_wheel_carries_the_sources_and_puts_nothing_else_beside_the_module(wheel):
    names = contents(wheel).keys()
    top = {re.sub(r"-[\d.]+\.dist-info$", ".dist-info", name.partition("/")[0]) for name in names}
    assert top == {"calcops", "calcops_jit.py", "_calcops_jit", "calcops_jit-stubs"} | {
        "calcops.dist-info"
    }
    folders = {"ase": "ase_calculator", "train": "train_potential"}
    assert {name for name in names if name.startswith("calcops/")} == {
        f"calcops/{package}/{path.name}"
        for package in ("ase", "deepmd", "potentials", "train")
        for path in (HERE / "examples" / folders.get(package, package)).iterdir()
        if path.suffix in (".py", ".sw")
    }
    sources = {
        str(p.relative_to(HERE))
        for p in (HERE / "ops").rglob("*")
        if p.suffix in (".h", ".cpp", ".cu")
    }
    assert {name for name in names if "/ops/" in name} == {
        f"_calcops_jit/{source}" for source in sources
    }
    package = [
        p
        for p in (HERE / "_calcops_jit").rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    ]
    expected = {
        str(path.relative_to(HERE))
        for path in package
        if path.parent.name != "stubs" and path.suffix != ".md"
    }
    assert expected <= names
    assert "_calcops_jit/py.typed" in expected


def test_the_sdists_wheel_is_the_checkouts_and_it_has_the_tests(wheel, tmp_path):
    source = copy(tmp_path / "calcops")
    build = (
        "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", build, tmp_path], cwd=source, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    assert (unpacked / "tests/reference.py").exists()
    assert (unpacked / "Makefile").exists()
    assert contents(wheel_of(unpacked, tmp_path)) == contents(wheel)


def test_the_installed_module_builds_from_any_folder_and_writes_only_into_the_cache(
    wheel, environment, tmp_path
):
    pip("install", wheel, python=environment)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    tiny(site / "_calcops_jit/ops")
    before = {path: path.stat().st_mtime_ns for path in site.rglob("*")}
    for path in before:
        path.chmod(path.stat().st_mode & ~0o222)
    assert answer(environment, tmp_path) == [f"{site}/calcops_jit.py", "1"]
    assert {path: path.stat().st_mtime_ns for path in site.rglob("*")} == before
    for path in before:
        path.chmod(path.stat().st_mode | 0o200)


def test_an_editable_installation_follows_the_checkout(environment, tmp_path):
    source = copy(tmp_path / "calcops")
    pip("install", "--no-build-isolation", "-e", source, python=environment)
    tiny(source / "ops")
    assert answer(environment, tmp_path) == [f"{source}/calcops_jit.py", "1"]
    tiny(source / "ops", 2)
    assert answer(environment, tmp_path) == [f"{source}/calcops_jit.py", "2"]


def test_the_potentials_and_their_hosts_are_installed(wheel, environment, tmp_path):
    pip("install", wheel, python=environment)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    script = """
import os
os.environ["CALCOPS_BUILD"] = "0"
from calcops.potentials import LennardJones, Potential, StillingerWeber, load, save
from calcops.train.weights import initial
print(Potential.__module__, load.__code__.co_filename, StillingerWeber().cutoff)
"""
    result = subprocess.run(
        [environment, "-c", script], cwd="/", capture_output=True, text=True, check=True
    )
    assert result.stdout.split()[:2] == [
        "calcops.potentials.potential",
        f"{site}/calcops/potentials/package.py",
    ]


def test_type_checkers_know_the_handles_and_the_modules_own_functions(wheel, environment, tmp_path):
    pytest.importorskip("mypy", reason="the type checker")
    pip("install", wheel, python=environment)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    # PyTorch's own annotations take a minute to read; a tensor's name will do.
    (site / "torch.pth").unlink()
    for name, text in {"__init__.pyi": "class Tensor: ...\n", "py.typed": ""}.items():
        (site / "torch").mkdir(exist_ok=True)
        (site / "torch" / name).write_text(text)
    (tmp_path / "user.py").write_text(
        """
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
    says = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    tensors = "list_neigh: torch.Tensor, dE: torch.Tensor, Ri_d: torch.Tensor"
    force = f"({tensors}, nghost: int =, *, neighbor_index: torch.Tensor | None =) -> torch.Tensor"
    assert re.search(rf'user.py:2: note: Revealed type is "def {re.escape(force)}"', says), says
    assert re.search(
        r'user.py:3: note: .*name: .*str.*sources: .*-> _calcops_jit.live.library.Library"', says
    ), says
    assert re.search(r'user.py:4: note: Revealed type is ".*str"', says), says
    assert "user.py:5: error: Missing positional arguments" in says
    assert 'user.py:6: error: Module has no attribute "no_operator"' in says


def test_the_stub_names_everything_public(wheel):
    """What dir(calcops_jit) shows besides the operators, the stub declares."""
    stub = contents(wheel)["calcops_jit-stubs/__init__.pyi"].decode()
    declared = {n.name for n in ast.parse(stub).body if isinstance(n, ast.FunctionDef)}
    declared |= {
        a.asname for n in ast.parse(stub).body if isinstance(n, ast.ImportFrom) for a in n.names
    }
    tree = ast.parse((HERE / "calcops_jit.py").read_text())
    (public,) = (
        n.value for n in tree.body if isinstance(n, ast.Assign) and n.targets[0].id == "__all__"
    )
    assert set(ast.literal_eval(public)) <= declared
