"""python -m calcops.lammps build: it builds the plugin for a LAMMPS, or says what is missing."""

import shutil
import sys

import pytest
from checkout import contents, wheel_of
from programs import ROOT, run

FOLDER = ROOT / "calcops" / "lammps"


def build(*options, **variables):
    return run(sys.executable, FOLDER, "build", *options, **variables)


def test_the_distribution_has_the_sources_of_the_plugin_and_their_licence(tmp_path):
    copy = shutil.copytree(FOLDER, tmp_path / "lammps")
    names = contents(wheel_of(copy, tmp_path)).keys()
    for name in ("__init__.py", "__main__.py", "Makefile", "plugin.cpp", "pair_calcops.h"):
        assert f"calcops/lammps/{name}" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_without_lammps_an_error_says_what_to_install(tmp_path):
    built = build(PATH=str(tmp_path), fails=True)
    assert built.stdout == ""
    assert built.stderr == (
        "calcops.lammps: expected lmp on PATH or --lammps PREFIX: pip install 'lammps[mpi]'\n"
    )


def test_a_lammps_without_headers_is_refused(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/lmp").touch(0o755)
    message = "expected an environment with PyPI's LAMMPS, which has its headers, got "
    of_path = build(PATH=str(tmp_path / "bin"), fails=True)
    for built in of_path, build("--lammps", tmp_path, fails=True):
        assert built.stdout == ""
        assert message in built.stderr
        assert str(tmp_path) in built.stderr
        assert built.stderr.count("\n") == 1


@pytest.mark.long
def test_the_plugin_is_built_once_and_lammps_loads_it(tmp_path):
    from lammps_plugin import HOME  # skips the test if there is no LAMMPS

    for _ in range(2):
        built = build("--lammps", HOME, "--output", tmp_path)
        assert built.stdout == f"{tmp_path}/calcopsplugin.so\n"
    assert "Nothing to be done" in built.stderr
    (tmp_path / "in.plugin").write_text(f"plugin load {tmp_path}/calcopsplugin.so\nplugin list\n")
    loaded = run(HOME / "bin/lmp", "-log", "none", "-in", tmp_path / "in.plugin")
    assert "pair style plugin calcops" in loaded.stdout, loaded.stdout
