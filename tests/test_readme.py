"""The READMEs: what they show is run as a new user would type it, and their links lead
somewhere."""

import doctest
import graphlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(
            p
            for f in ("_calcops_jit", "ops", "examples", "tests")
            for p in ROOT.glob(f"{f}/**/*.md")
        ),
    ]
)
TEXTS = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXTS[page], re.MULTILINE | re.DOTALL)


def anchors(text):
    """The fragments under which GitHub shows a page's headings."""
    headings = re.findall(
        r"^#+ +(.+)$",
        re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL),
        re.MULTILINE,
    )
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


def test_the_front_page_is_read_in_a_minute():
    assert len(TEXTS["README.md"].splitlines()) <= 110


def test_the_lines_of_use_give_what_is_shown():
    result = doctest.testfile(str(ROOT / "README.md"), module_relative=False, encoding="utf-8")
    assert result.attempted >= 6 and result.failed == 0


@pytest.mark.parametrize("page", TEXTS)
def test_every_link_leads_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", TEXTS[page], flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    for link in (link for link in links if not re.match(r"https?://", link)):
        path, _, fragment = link.partition("#")
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        target = target / "README.md" if fragment and target.is_dir() else target
        assert target.exists(), f"{page} links to {link}"
        assert not fragment or fragment in anchors(target.read_text(encoding="utf-8")), (
            f"{page} links to {link}"
        )


@pytest.mark.skipif(shutil.which("pkg-config") is None, reason="no pkg-config")
def test_the_program_in_cpp_builds_as_shown_and_prints_what_is_shown(tmp_path):
    (program,) = blocks("examples/README.md", "cpp")
    (commands,) = (block for block in blocks("examples/README.md", "sh") if "host.cpp" in block)
    (tmp_path / "host.cpp").write_text(program)
    assert ".venv/bin/python" in commands
    commands = commands.replace(".venv/bin/python", sys.executable)
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    environment["PYTHONPATH"] = str(ROOT)
    run = subprocess.run(
        ["bash", "-euc", commands],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == re.search(r"host +# (.*)", commands)[1]


def test_the_headline_ratios_are_those_of_the_table():
    header, _, *rows = [
        line for line in TEXTS["tests/bench/results/force.md"].splitlines() if line.startswith("|")
    ]
    names = [name.strip() for name in header.split("|")]
    patterns = {
        "torch": r"is \[(\d+) to (\d+) times\]",
        "torch.compile": r"and (\d+) to (\d+) times as fast as `torch",
    }
    for name, pattern in patterns.items():
        ratios = [int(row.split("|")[names.index(name)].strip(" x")) for row in rows]
        assert re.search(pattern, TEXTS["README.md"]).groups() == (
            str(min(ratios)),
            str(max(ratios)),
        )


@pytest.mark.parametrize("page", TEXTS)
def test_files_in_backticks_exist(page):
    """Names with a known ending, unless a reader makes the file."""
    written = "mine|my_op|host|op|cell|own|weighted_sum"
    for name in re.findall(r"`([\w./-]+\.(?:py|cpp|cu|h|md|sh|txt|ipynb|toml))`", TEXTS[page]):
        if re.match(rf"(?:.*/)?(?:{written})[\w.]*$", name):
            continue
        exists = (ROOT / name).exists() or ((ROOT / page).parent / name).exists()
        assert exists or list(ROOT.glob(f"[!.b]*/**/{name}")), f"{page} names {name}"


@pytest.mark.parametrize(
    "name",
    sorted({name for text in TEXTS.values() for name in re.findall(r"\bCALCOPS_[A-Z]+\b", text)}),
)
def test_every_variable_is_one_that_the_code_reads(name):
    sources = [
        ROOT / "calcops_jit.py",
        *(ROOT / "_calcops_jit").rglob("*.py"),
        *(ROOT / "ops").rglob("*.*"),
    ]
    sources += (ROOT / "_calcops_jit" / "runtime").iterdir()
    assert any(f'"{name}"' in path.read_text(encoding="utf-8") for path in sources)


def test_the_map_of_the_loader_names_every_module_and_what_it_imports():
    """A row for each module, `folder/name`; the names of modules in a row are without folders."""
    package = ROOT / "_calcops_jit"
    rows = re.findall(
        r"^\| \[([\w/]+)\]\(\S+\) \| .+ \| ?(.*) \|$", TEXTS["_calcops_jit/README.md"], re.MULTILINE
    )
    modules = {"calcops_jit": ROOT / "calcops_jit.py"}
    for path in [*package.glob("[!_]*.py"), *package.glob("[!_]*/[!_]*.py")]:
        modules[str(path.relative_to(package).with_suffix(""))] = path
    assert dict(rows).keys() == modules.keys()
    imported = {}
    for module, path in modules.items():
        # `from ..cache.closure import Changed`, or `from ..cache import closure, store`.
        found = re.findall(
            r"^\s*from (?:_calcops_jit|\.)([\w.]*) import (\([^)]+\)|.+)$",
            path.read_text(),
            re.MULTILINE,
        )
        names = set()
        for place, several in found:
            names |= {place.rpartition(".")[2], *re.findall(r"\w+", several)}
        short = {other.rpartition("/")[2]: other for other in modules}
        assert len(short) == len(modules), "each module has a name of its own"
        imported[module] = sorted(names & short.keys() - {module.rpartition("/")[2]})
    assert dict(rows) == {module: ", ".join(names) for module, names in imported.items()}
    imported = {module: [short[name] for name in names] for module, names in imported.items()}
    list(graphlib.TopologicalSorter(imported).static_order())  # CycleError
