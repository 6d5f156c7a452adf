"""The READMEs: their commands and programs run as printed, and their links and file names exist."""

import doctest
import graphlib
import re
import shutil
import sys

import pytest
from programs import ROOT, blocks, run

PAGES = [*ROOT.glob("*.md")]
FOLDERS = ("_calcops_jit", "bench", "calcops", "contracts", "docs", "examples", "ops", "tests")
for folder in FOLDERS:
    PAGES += ROOT.glob(f"{folder}/**/*.md")
TEXTS = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in sorted(PAGES)}


def without_code(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text):
    """Return the fragments that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ +(.+)$", without_code(text), re.MULTILINE)
    words = [re.sub(r"[^\w\- ]", "", heading.lower()).strip() for heading in headings]
    return {heading.replace(" ", "-") for heading in words}


@pytest.mark.parametrize("page", ["README.md", "ops/README.md"])
def test_examples_give_the_results_shown(page):
    result = doctest.testfile(str(ROOT / page), module_relative=False, encoding="utf-8")
    assert result.attempted >= 6
    assert result.failed == 0


@pytest.mark.parametrize("page", ["calcops/deepmd/README.md", "calcops/nep/README.md"])
def test_the_program_of_a_package_prints_what_is_shown(page, capsys, monkeypatch):
    for module in ("ase", "vesin"):
        pytest.importorskip(module)
    monkeypatch.chdir(ROOT)
    exec(blocks(page, "python")[0], {})
    assert capsys.readouterr().out == blocks(page, "text")[1]


@pytest.mark.parametrize("page", TEXTS)
def test_every_link_to_a_file_or_heading_has_its_target(page):
    links = re.findall(r"\]\(([^)\s]+)(?: \"[^\"]*\")?\)", without_code(TEXTS[page]))
    for link in links:
        if re.match(r"https?://", link):
            continue
        path, _, fragment = link.partition("#")
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        if fragment and target.is_dir():
            target = target / "README.md"
        assert target.exists(), f"{page} links to {link}"
        if fragment:
            assert fragment in anchors(target.read_text(encoding="utf-8")), (
                f"{page} links to {link}"
            )


@pytest.mark.skipif(shutil.which("pkg-config") is None, reason="no pkg-config")
def test_the_program_in_cpp_builds_as_shown_and_prints_what_is_shown(tmp_path):
    (program,) = blocks("examples/README.md", "cpp")
    (commands,) = (block for block in blocks("examples/README.md", "sh") if "host.cpp" in block)
    (tmp_path / "host.cpp").write_text(program)
    assert ".venv/bin/python" in commands
    commands = commands.replace(".venv/bin/python", sys.executable)
    printed = run("bash", "-euc", commands, cwd=tmp_path).stdout
    assert printed.splitlines()[-1] == re.search(r"host +# (.*)", commands)[1]


def test_the_front_page_has_at_most_600_words():
    assert len(TEXTS["README.md"].split()) <= 600


@pytest.mark.parametrize("page", TEXTS)
def test_files_in_backticks_exist(page):
    """Files that the README asks its reader to write need not exist."""
    readers_files = "mine|my_op|host|op|cell|own|nep|weighted_sum"
    for name in re.findall(r"`([\w./-]+\.(?:py|cpp|cu|h|md|sh|txt|ipynb|toml))`", TEXTS[page]):
        if re.match(rf"(?:.*/)?(?:{readers_files})[\w.]*$", name):
            continue
        exists = (ROOT / name).exists() or ((ROOT / page).parent / name).exists()
        in_folders = (ROOT / folder for folder in FOLDERS)
        exists = exists or any(list(folder.glob(f"**/{name}")) for folder in in_folders)
        assert exists, f"{page} names {name}"


@pytest.mark.parametrize(
    "name", sorted(set(re.findall(r"\bCALCOPS_[A-Z]+\b", "\n".join(TEXTS.values()))))
)
def test_the_code_reads_every_environment_variable_of_the_readmes(name):
    sources = [ROOT / "calcops_jit.py"]
    sources += (ROOT / "_calcops_jit").rglob("*.py")
    sources += (ROOT / "ops").rglob("*.*")
    sources += (ROOT / "contracts" / "runtime").iterdir()
    assert any(f'"{name}"' in path.read_text(encoding="utf-8") for path in sources)


def test_the_map_of_the_loader_names_every_module_and_what_it_imports():
    """A row begins with the module as `folder/name`, and ends with its imports without folders."""
    package = ROOT / "_calcops_jit"
    page = TEXTS["docs/how_it_hangs_together.md"]
    table = page.partition("## Modules")[2]
    rows = re.findall(r"^\| \[([\w/]+)\]\(\S+\) \| .+ \| ?(.*) \|$", table, re.MULTILINE)
    modules = {"calcops_jit": ROOT / "calcops_jit.py"}
    for path in [*package.glob("[!_]*.py"), *package.glob("[!_]*/[!_]*.py")]:
        modules[str(path.relative_to(package).with_suffix(""))] = path
    assert dict(rows).keys() == modules.keys()
    module_of = {module.rpartition("/")[2]: module for module in modules}
    assert len(module_of) == len(modules), "two modules have the same name"
    imports = {}
    for module, path in modules.items():
        # `from ..cache.closure import Changed`, or `from ..cache import closure, store`.
        statements = re.findall(
            r"^\s*from (?:_calcops_jit|\.)([\w.]*) import (\([^)]+\)|.+)$",
            path.read_text(),
            re.MULTILINE,
        )
        words = set()
        for package_or_module, names in statements:
            words |= {package_or_module.rpartition(".")[2], *re.findall(r"\w+", names)}
        imports[module] = sorted(words & module_of.keys() - {module.rpartition("/")[2]})
    assert dict(rows) == {module: ", ".join(names) for module, names in imports.items()}
    graph = {module: [module_of[name] for name in names] for module, names in imports.items()}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError for circular imports
