"""The README's lines, run as a new user would type them."""

import doctest
import os
import re
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


def test_the_program_in_cpp_builds_as_shown_and_prints_what_is_shown(tmp_path):
    (program,) = blocks("cpp")
    (commands,) = (block for block in blocks("sh") if "host.cpp" in block)
    (tmp_path / "host.cpp").write_text(program)
    for ours, here in (
        (".venv/bin/python", sys.executable),
        ("host.cpp", str(tmp_path / "host.cpp")),
        ("-o host", f"-o {tmp_path / 'host'}"),
        ("./host", str(tmp_path / "host")),
    ):
        assert ours in commands
        commands = commands.replace(ours, here)
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    run = subprocess.run(
        ["bash", "-euc", commands], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == re.search(r"host +# (.*)", commands)[1]


@pytest.mark.parametrize("name", sorted(set(re.findall(r"\bCALCOPS_[A-Z]+\b", TEXT))))
def test_every_variable_is_one_that_the_code_reads(name):
    sources = [
        ROOT / "calcops_jit.py",
        *(ROOT / "_calcops_jit").rglob("*.py"),
        *(ROOT / "ops").rglob("*.cpp"),
    ]
    assert any(f'"{name}"' in path.read_text() for path in sources)
