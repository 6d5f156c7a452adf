"""The command `calcops`: it finds the modules of its commands, and errors are one sentence."""

import sys
from types import SimpleNamespace

import pytest
from calcops import __main__ as command
from programs import ROOT, run

kNames = list(command.kCommands)


@pytest.fixture
def call(monkeypatch, capsys):
    """Return a function that runs the command, and returns its status, stdout and stderr."""
    monkeypatch.setattr(sys, "argv", [])

    def run(*words):
        status = 0
        try:
            command.main(list(words))
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    return run


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_the_commands_are_listed_a_line_each_without_an_import_of_torch_or_numpy(words):
    check = "import sys; from calcops.__main__ import main; sys.argv = ['calcops', *sys.argv[1:]]"
    check += "\ntry: main()\nfinally: assert not {'torch', 'numpy', 'ase'} & sys.modules.keys()"
    out = run(sys.executable, "-c", check, *words, PYTHONPATH=str(ROOT)).stdout
    assert out == run(sys.executable, "-m", "calcops", *words, cwd=ROOT).stdout
    for name, (_, summary, _) in command.kCommands.items():
        assert f"\n  {name:8}{summary}\n" in out


def test_an_unknown_command_is_refused(call):
    status, _, err = call("nap", "nep.txt")
    assert status == 2
    assert "calcops: error: argument COMMAND: invalid choice: 'nap' (choose from " in err


@pytest.mark.parametrize("name", kNames)
def test_the_help_of_a_command_names_its_spelling(name, call):
    for module in {"train": ["ase", "vesin"], "check": ["ase"]}.get(name, []):
        pytest.importorskip(module)
    status, out, _ = call(name, "--help")
    assert status == 0
    assert out.startswith(f"usage: calcops {name} ")


@pytest.mark.parametrize("error", [OSError, ValueError, ImportError])
@pytest.mark.parametrize("name", kNames)
def test_an_error_is_a_sentence(name, error, call, monkeypatch):
    def fails():
        raise error("expected another file")

    module, _, _ = command.kCommands[name]
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(main=fails))
    assert call(name) == (f"calcops {name}: expected another file", "", "")


@pytest.mark.parametrize("name", kNames)
def test_a_missing_package_is_a_sentence_with_its_installation(name, call, monkeypatch):
    module, _, installation = command.kCommands[name]
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, module.rpartition(".")[0], None)
    monkeypatch.setitem(sys.modules, module, None)
    status, out, err = call(name)
    assert out == ""
    text = f"calcops {name}: expected the module {module}, got none: {installation}"
    assert (status, err) == (2, f"{text}\n")
    assert "pip install" in installation


@pytest.mark.parametrize(
    "words",
    [
        ("-m", "calcops.nep"),
        pytest.param(("-m", "calcops.graph"), marks=pytest.mark.long),
        pytest.param(("-m", "calcops.train"), marks=pytest.mark.long),
        pytest.param((ROOT / "calcops/deepmd/import_deepmd.py",), marks=pytest.mark.long),
    ],
)
def test_an_old_spelling_prints_the_new_one_and_goes_on(words):
    (name,) = [name for name in kNames if name in str(words[-1])]
    if name == "train":
        for module in ("ase", "vesin"):
            pytest.importorskip(module)
    done = run(sys.executable, *words, "--help", cwd=ROOT)
    assert done.stdout.startswith(f"usage: calcops {name} ")
    assert done.stderr == f"`calcops {name}` is the new spelling of this command\n"
