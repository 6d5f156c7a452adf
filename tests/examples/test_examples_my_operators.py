"""examples/my_operators: a package that compiles at import, and its wheel that needs no compiler."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from checkout import cache_with_runtime, clean_environment, compiler, pip
from programs import ROOT, run

if os.uname().machine != "x86_64":
    pytest.skip("there are wheels for x86-64 only", allow_module_level=True)
pytest.importorskip("setuptools", minversion="77", reason="the build backend")

README = (ROOT / "examples/my_operators/README.md").read_text()
CALL = re.search(r'python -c "(import torch, my_operators; .*)"`', README)[1]
RESULT = re.search(r"\*\*Expected output\*\*: `(.*)`", README)[1]


@pytest.fixture
def package(tmp_path):
    """Return a copy of the package, and environment variables of a new cache with the runtime."""
    skipped = shutil.ignore_patterns("__pycache__", "build", "prebuilt", "*.egg-info")
    shutil.copytree(ROOT / "examples/my_operators", tmp_path / "package", ignore=skipped)
    shutil.copytree(cache_with_runtime(), tmp_path / "cache")
    variables = {"CALCOPS_CACHE": str(tmp_path / "cache"), "CALCOPS_BUILD": "0", "CXX": compiler()}
    variables |= {"TEST_LOG": os.devnull, "TEST_SLOW": "", "PYTHONPATH": str(ROOT)}
    return tmp_path / "package", variables


def test_the_wheel_of_a_package_needs_no_compiler_and_builds_where_its_library_does_not_fit(
    package, environment, tmp_path
):
    folder, variables = package
    assert run(sys.executable, "-c", CALL, cwd=folder, **variables).stdout.strip() == RESULT
    prebuild = re.search(r"python (-m calcops_jit prebuild \S+)", README)[1].split()
    run(sys.executable, *prebuild, cwd=folder, **variables)
    options = re.search(r"pip wheel \. --no-deps (.*)", README)[1].split()
    pip("wheel", "--no-build-isolation", "-w", tmp_path, folder, *options)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == "my_operators-0.1-py3-none-linux_x86_64.whl"
    pip("install", wheel, python=environment)

    program = f"{CALL}; print(my_operators._library.path)"
    bare = {"PATH": "/nowhere", "HOME": "/nowhere", "CALCOPS_CACHE": str(tmp_path / "empty")}
    bare |= {"PYTHONPATH": str(ROOT), "CALCOPS_BUILD": "0"}
    command = [environment, "-c", program]
    child = subprocess.run(command, cwd="/", env=bare, capture_output=True, text=True)
    assert child.stderr == ""
    result, path = child.stdout.splitlines()
    assert result == RESULT
    assert "/my_operators/ops/prebuilt/" in path
    assert not (tmp_path / "empty").exists()

    flags = {"CALCOPS_CFLAGS": "-DX"}
    env = clean_environment() | variables | flags
    child = subprocess.run(command, cwd="/", env=env, capture_output=True, text=True)
    assert child.stdout.splitlines()[0] == RESULT
    assert str(tmp_path / "cache") in child.stdout
    assert "the prebuilt my_operators does not fit: CALCOPS_CFLAGS=-DX" in child.stderr


def test_the_library_of_a_package_is_known_by_name_to_the_commands(package):
    folder, variables = package
    run(sys.executable, "-c", CALL, cwd=folder, **variables)

    def command(*words) -> str:
        words = [sys.executable, "-m", "calcops_jit", *words]
        env = clean_environment() | variables
        return subprocess.run(words, cwd="/", env=env, capture_output=True, text=True)

    path = command("build", "my_operators").stdout.strip()
    assert path.endswith("/my_operators.so")
    assert f"library  {path}" in command("where", "my_operators").stdout
    assert command("why", "my_operators").stdout == f"nothing changed: {path}\n"
    source = folder / "my_operators/ops/weighted_sum.cpp"
    source.write_text(source.read_text() + "\n")
    assert "weighted_sum.cpp changed" in command("why", "my_operators").stdout
    assert "1 removed" in command("clean", "my_operators").stderr
    missing = command("where", "my_operators")
    assert (missing.returncode, "no library `my_operators`" in missing.stderr) == (1, True)
    assert list((folder.parent / "cache").glob("runtime-*/*/*.a"))
