"""The examples as a whole: READMEs of one form, a table of all, unique names of modules."""

import collections
import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FOLDERS = sorted(path for path in EXAMPLES.iterdir() if path.is_dir() and any(path.glob("*.py")))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_readme_begins_with_its_subject_then_build_run_and_expected_output(folder):
    lines = (folder / "README.md").read_text().splitlines()
    assert lines[0].startswith("# ")
    assert lines[1] == ""
    assert lines[2][:1].isalnum() or lines[2].startswith("`")
    places = []
    for words in ("Build", "Run|Build and run", "Expected output"):
        numbers = [n for n, line in enumerate(lines) if re.match(rf"\*\*({words})", line)]
        assert numbers, f"no line begins with **{words}"
        places.append(numbers[0])
    assert places == sorted(places)
    assert places[0] <= 10


def test_every_example_is_in_the_table_and_module_names_are_unique():
    table = (EXAMPLES / "README.md").read_text()
    for path in [*FOLDERS, *EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")]:
        assert f"({path.name}" in table, path
    fixed = {"setup", "__init__", "__main__"}  # names that setuptools and Python prescribe
    names = collections.Counter(path.stem for path in EXAMPLES.rglob("*.py"))
    for name in fixed:
        names.pop(name, None)
    assert not [name for name, count in names.items() if count > 1]
