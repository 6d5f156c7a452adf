"""calcops/nep/README.md: models that are refused are refused by the sentences of its table."""

import re
import runpy

import pytest
from programs import ROOT

pytest.importorskip("ase", reason="needs ase")
pytest.importorskip("vesin", reason="needs vesin")

from calcops.nep import load  # noqa: E402
from calcops.train.first_model import read_nep  # noqa: E402

PAGE = (ROOT / "calcops/nep/README.md").read_text()
ROWS = re.findall(r"^\| (.+?) \| `(\w+)`[^|]* \| (.+?) \| (.+?) \|$", PAGE, re.MULTILINE)
REFUSED = {word: (sentence.strip("`"), training) for _, word, sentence, training in ROWS[4:]}


def command(path):
    """Run the command that makes packages for LAMMPS and C++ programs."""
    try:
        runpy.run_module("calcops.nep", run_name="__main__")
    except SystemExit as stop:
        raise ValueError(str(stop.code).partition(": ")[2]) from None


@pytest.mark.parametrize("word", REFUSED)
@pytest.mark.parametrize("host", [load, command, read_nep])
def test_every_host_refuses_a_model_by_the_sentence_of_the_page(word, host, monkeypatch, tmp_path):
    sentence, training = REFUSED[word]
    assert training == "the same"
    path = tmp_path / "nep.txt"
    path.write_text(f"{word} 1 Si\ncutoff 5 4 99 99\n")
    monkeypatch.setattr("sys.argv", ["calcops.nep", str(path), str(tmp_path / "si.pt")])
    with pytest.raises(ValueError) as error:
        host(path)
    assert str(error.value) == f"{path}, line 1: {sentence}"


def test_the_table_names_all_kinds_of_models():
    assert [row[2] for row in ROWS[:4]] == ["supported"] * 4
    assert len(REFUSED) == 8
