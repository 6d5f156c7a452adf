"""The README's lines, run as a new user would type them."""

import doctest
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_the_lines_of_use_give_what_is_shown():
    result = doctest.testfile(str(ROOT / "README.md"), module_relative=False)
    assert result.attempted >= 6 and result.failed == 0


@pytest.mark.skipif(shutil.which("pkg-config") is None, reason="no pkg-config")
def test_the_program_in_cpp_builds_as_shown_and_prints_what_is_shown(tmp_path):
    (program,) = blocks("cpp")
    (commands,) = (block for block in blocks("sh") if "host.cpp" in block)
    (tmp_path / "host.cpp").write_text(program)
    assert ".venv/bin/python" in commands
    commands = commands.replace(".venv/bin/python", sys.executable)
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    environment["PYTHONPATH"] = str(ROOT)
    run = subprocess.run(
        ["bash", "-euc", commands], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == re.search(r"host +# (.*)", commands)[1]


@pytest.mark.parametrize("name", sorted(set(re.findall(r"\bCALCOPS_[A-Z]+\b", TEXT))))
def test_every_variable_is_one_that_the_code_reads(name):
    sources = [ROOT / "calcops_jit.py", *(ROOT / "_calcops_jit").rglob("*.py"), *(ROOT / "ops").rglob("*.cpp")]
    assert any(f'"{name}"' in path.read_text() for path in sources)
