"""The examples as a whole: a README that begins alike in every folder, a table of all, one name for
each module."""

import collections
import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FOLDERS = sorted(path for path in EXAMPLES.iterdir() if path.is_dir() and any(path.glob("*.py")))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_readme_says_what_is_shown_how_it_is_built_and_run_and_what_is_printed(folder):
    lines = (folder / "README.md").read_text().splitlines()
    assert (
        lines[0].startswith("# ")
        and lines[1] == ""
        and lines[2][:1].isalnum()
        or lines[2].startswith("`")
    )
    places = [
        next((n for n, line in enumerate(lines) if re.match(rf"\*\*({word})", line)), None)
        for word in ("Build", "Run|Build and run", "Expected output")
    ]
    assert None not in places and places == sorted(places), places
    assert places[0] <= 10, "the first lines"


def test_every_example_is_in_the_table_and_each_module_has_a_name_of_its_own():
    table = (EXAMPLES / "README.md").read_text()
    for path in [*FOLDERS, *EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")]:
        assert f"({path.name}" in table, path
    others = {"setup", "__init__", "__main__"}  # names that setuptools and Python ask for
    names = collections.Counter(
        path.stem for path in EXAMPLES.rglob("*.py") if path.stem not in others
    )
    assert not [name for name, count in names.items() if count > 1]
