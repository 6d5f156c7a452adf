"""The plugin of LAMMPS is found without PyTorch and built once, or a sentence says what is missing."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
from importlib.util import find_spec, module_from_spec
from pathlib import Path

import calcops.lammps as package
import numpy as np
import pytest
from calcops.lammps import __main__ as command
from calcops.potentials import StillingerWeber, save
from checkout import contents, pip, wheel_of
from programs import ROOT, run

FOLDER = ROOT / "calcops" / "lammps"


def build(*options, **variables):
    code = "from calcops.lammps.__main__ import main; main()"
    return run(sys.executable, "-c", code, "build", *options, **variables)


def write(path, text=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def prefix(tmp_path, monkeypatch):
    """Return an environment with the headers of LAMMPS and MPI, in which this process imports."""
    prefix = tmp_path / "environment"
    packages = prefix / "lib/python3.11/site-packages"
    write(prefix / "include/mpi.h")
    write(packages / "lammps/__init__.py")
    write(packages / "lammps/include/lammps/pair.h")
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setenv("CALCOPS_CACHE", str(tmp_path / "cache"))
    return prefix


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Replace make by a script, and return a function that writes it."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    operators = module_from_spec(find_spec("calcops.ops"))  # which are not built then
    monkeypatch.setitem(sys.modules, "calcops.ops", operators)

    def make(script):
        path = tmp_path / "bin/make"
        write(
            path,
            f"#!/bin/sh\nfor word do case $word in BUILD=*) eval $word;; esac; done\n{script}\n",
        )
        path.chmod(0o755)

    return make


def test_the_distribution_has_the_sources_of_the_plugin_and_what_lammps_calls(tmp_path):
    copy = shutil.copytree(FOLDER, tmp_path / "lammps")
    files = contents(wheel_of(copy, tmp_path))
    for name in ("__init__.py", "__main__.py", "Makefile", "plugin.cpp", "pair_calcops.h"):
        assert f"calcops/lammps/{name}" in files
    assert any(name.endswith("licenses/LICENSE") for name in files)
    (points,) = [text for name, text in files.items() if name.endswith("/entry_points.txt")]
    assert points.split() == b"[lammps.plugins] calcops = calcops.lammps:plugin_folder".split()


def test_a_start_of_lammps_imports_no_pytorch(prefix):
    code = "import sys, calcops.lammps as c; c.is_complete = lambda plugin: True; "
    code += f"sys.path.insert(0, {str(prefix / 'lib/python3.11/site-packages')!r}); "
    printed = run(sys.executable, "-c", code + "print(c.plugin_folder(), 'torch' in sys.modules)")
    folder, has_torch = printed.stdout.split()
    assert folder == str(package.plugin_path(package.pypi_variables(prefix)).parent)
    assert has_torch == "False"


def test_the_first_start_of_lammps_builds_the_plugin_of_its_environment(prefix, monkeypatch):
    commands = []
    monkeypatch.setattr(subprocess, "run", lambda words, **options: commands.append(words))
    folder = Path(package.plugin_folder())
    assert [words[4:] for words in commands] == [["build", "--lammps", prefix]]
    assert commands[0][:2] == [sys.executable, "-P"]
    assert folder.parents[1] == Path(os.environ["CALCOPS_CACHE"])

    write(folder / "libraries", f"{__file__}\n")
    assert package.plugin_folder() == str(folder)
    assert len(commands) == 1
    write(
        folder / "libraries", f"{__file__} {folder}/calcops.so\n"
    )  # `calcops_jit clean` removed it
    assert package.plugin_folder() == str(folder)
    assert len(commands) == 2


def test_the_plugin_of_other_headers_flags_or_sources_is_another_one(prefix, monkeypatch, tmp_path):
    variables = package.pypi_variables(prefix)
    sources = shutil.copytree(FOLDER, tmp_path / "sources")
    monkeypatch.setattr(package, "HERE", sources)
    paths = [package.plugin_path(variables)]
    assert package.plugin_path(variables) == paths[0]
    write(Path(variables["HEADERS"]) / "pair.h", "class Pair {};\n")
    paths.append(package.plugin_path(variables))
    write(sources / "Makefile", "all:\n")
    paths.append(package.plugin_path(variables))
    os.utime(sources / "model.cpp", (1, 1))
    paths.append(package.plugin_path(variables))
    monkeypatch.setenv("CALCOPS_CFLAGS", "-march=x86-64-v2")
    paths.append(package.plugin_path(variables))
    monkeypatch.setattr(package, "features", lambda: ["avx"])
    paths.append(package.plugin_path(variables))
    assert len(set(paths)) == 6


def test_without_headers_lammps_starts_and_a_line_says_what_to_install(prefix, capfd):
    (prefix / "include/mpi.h").unlink()
    assert package.plugin_folder() == ""
    assert capfd.readouterr().err == (
        "calcops lammps: expected an environment with PyPI's LAMMPS and MPI, which have headers, "
        f"got {prefix}: pip install 'lammps[mpi]'\n"
    )


def test_a_cache_that_may_not_be_read_is_a_line_and_lammps_starts(prefix, monkeypatch, capfd):
    def refuse(plugin):
        raise PermissionError(13, "Permission denied", str(plugin))

    monkeypatch.setattr(package, "is_complete", refuse)
    assert package.plugin_folder() == ""
    assert "calcops lammps: [Errno 13] Permission denied" in capfd.readouterr().err


def test_the_build_takes_calcops_from_where_it_is_in_the_starting_process(prefix, monkeypatch):
    environments = []
    monkeypatch.setattr(subprocess, "run", lambda *_, env, **__: environments.append(env))
    package.plugin_folder()
    folders = environments[0]["PYTHONPATH"].split(os.pathsep)
    assert str(Path(package.__file__).parents[2]) in folders


def test_processes_that_start_at_once_build_one_plugin(prefix, make, tmp_path):
    make(f"echo built >> {tmp_path}/log; sleep 0.3; touch $BUILD/libraries")
    variables = package.pypi_variables(prefix)
    threads = [threading.Thread(target=command.build, args=[variables]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "log").read_text() == "built\n"
    assert package.is_complete(package.plugin_path(variables))


def test_a_failed_build_is_a_sentence_with_the_path_of_its_log(prefix, make, monkeypatch, capfd):
    make("echo pair.h is too old; exit 2")
    monkeypatch.setattr(sys, "argv", ["calcops lammps", "build", "--lammps", str(prefix)])
    with pytest.raises(SystemExit, match="1"):
        command.main()
    said = capfd.readouterr()
    assert said.out == ""
    what, log = said.err.splitlines()[-1].split(": less ")
    assert what == "calcops lammps: cannot build the plugin of LAMMPS"
    assert Path(log).read_text() == "pair.h is too old\n"

    make("touch $BUILD/libraries")  # a later build begins anew
    command.main()
    assert capfd.readouterr().out == f"{package.plugin_path(package.pypi_variables(prefix))}\n"


def test_a_build_without_make_is_refused(prefix, monkeypatch):
    monkeypatch.setenv("PATH", str(prefix))
    with pytest.raises(ValueError, match="expected make on PATH, got none"):
        command.build(package.pypi_variables(prefix))


def test_headers_of_another_lammps_are_compiled_by_its_mpicxx(prefix, make, tmp_path):
    make('for word do echo "$word" >> $BUILD/words; done; touch $BUILD/libraries')
    with pytest.raises(ValueError, match="expected --headers with pair.h, as in LAMMPS's src, got"):
        command.variables_for(None, tmp_path)
    headers = prefix / "lib/python3.11/site-packages/lammps/include/lammps"
    write(tmp_path / "bin/mpicxx")
    (tmp_path / "bin/mpicxx").chmod(0o755)
    words = (command.build(command.variables_for(None, headers)).parent / "words").read_text()
    assert {"LAMMPS=", f"HEADERS={headers}", f"CXX={tmp_path}/bin/mpicxx"} <= set(words.split("\n"))


def test_without_lammps_an_error_says_what_to_install(tmp_path):
    built = build(PATH=str(tmp_path), fails=True)
    assert built.stdout == ""
    assert built.stderr == (
        "calcops lammps: expected lmp on PATH or --lammps PREFIX: pip install 'lammps[mpi]'\n"
    )


def test_a_lammps_without_headers_is_refused(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/lmp").touch(0o755)
    message = "expected an environment with PyPI's LAMMPS and MPI, which have headers, got "
    of_path = build(PATH=str(tmp_path / "bin"), fails=True)
    for built in of_path, build("--lammps", tmp_path, fails=True):
        assert built.stdout == ""
        assert message in built.stderr
        assert str(tmp_path) in built.stderr
        assert built.stderr.count("\n") == 1


def fresh_environment(folder, home):
    """Make an environment with this one's packages and the LAMMPS of another. Return its Python."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    here = sysconfig.get_path("purelib")
    there = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (there / "project.pth").write_text(f"import site; site.addsitedir({here!r})\n{ROOT}\n")
    patterns = "bin/mpiexec*", "bin/hydra_*", "include/mpi*", "lib/*mpi*"
    packages = f"{there.relative_to(folder)}/lammps*", f"{there.relative_to(folder)}/mpich*"
    for path in (path for pattern in (*patterns, *packages) for path in home.glob(pattern)):
        target = folder / path.relative_to(home)
        target.parent.mkdir(exist_ok=True)
        target.symlink_to(path)
    program = (home / "bin/lmp").read_text().partition("\n")[2]
    (folder / "bin/lmp").write_text(f"#!{folder}/bin/python\n{program}")
    (folder / "bin/lmp").chmod(0o755)
    return folder / "bin/python"


@pytest.mark.long
def test_after_one_installation_every_start_of_lammps_has_the_pair_style(tmp_path):
    from lammps_plugin import HOME, SILICON, tables  # skips the test if there is no LAMMPS

    python = fresh_environment(tmp_path / "environment", HOME)
    sources = shutil.copytree(FOLDER, tmp_path / "sources")
    pip("install", "--no-build-isolation", sources, python=python)
    save(StillingerWeber(), tmp_path / "silicon.pt")
    script = SILICON + "pair_style calcops silicon.pt\npair_coeff * * Si\nrun 10\n"
    lmp = [python.with_name("lmp"), "-log", "none", "-in", tmp_path / "in.silicon"]
    here = {"cwd": tmp_path, "PYTHONPATH": ""}

    write(tmp_path / "in.silicon", script)
    first = run(python.with_name("mpiexec"), "-n", "2", *lmp, **here)
    assert first.stderr.count("building the plugin of LAMMPS") == 1, first.stderr
    second = run(*lmp, **here)
    assert second.stderr == ""
    expected = tables(second.stdout)
    np.testing.assert_allclose(tables(first.stdout), expected, rtol=1e-6)

    folder = Path(re.search("Loaded 1 plugins from (.*)", second.stdout)[1])
    write(tmp_path / "in.silicon", f"plugin load {folder}/calcopsplugin.so\n{script}")
    np.testing.assert_array_equal(tables(run(*lmp, **here).stdout), expected)

    mpi = python.parents[1] / "lib/libmpi.so.12"
    library = f"import ctypes; ctypes.CDLL({str(mpi)!r}); from lammps import lammps; "
    library += "lammps(cmdargs=['-log', 'none']).file('in.silicon')"
    write(tmp_path / "in.silicon", script)
    np.testing.assert_array_equal(tables(run(python, "-c", library, **here).stdout), expected)

    # PyTorch is opened when a script uses the style, and a failure ends this script alone.
    (folder / "libpair_calcops.so").unlink()
    failed = run(*lmp, **here, fails=True)
    assert re.search("ERROR.*Pair style calcops: libpair_calcops.so: cannot open", failed.stdout)
    write(tmp_path / "in.silicon", "print started\n")
    assert "started" in run(*lmp, **here).stdout
    shutil.rmtree(folder.parent)
