"""Rules for files: where an operator's files lie, and what each kind of file may include."""

import ast
import graphlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# {a library's folder: its files beside the folders of operators}
LIBRARIES = {
    ROOT / "ops": {"float16.h", "force_terms.h", "README.md"},
    ROOT / "calcops" / "ops": {
        "b_splines.h",
        "directions.h",
        "duals.h",
        "find_pairs.h",
        "pairs.h",
        "simd.h",
        "__init__.py",
        "README.md",
    },
}
FOLDERS = {path for library in LIBRARIES for path in library.iterdir() if path.is_dir()}
OPERATORS = sorted(path for path in FOLDERS if path.name not in ("__pycache__", "prebuilt"))
SOURCES = sorted(
    path
    for library in LIBRARIES
    for path in library.rglob("*")
    if path.suffix in (".h", ".cpp", ".cu")
)
PYTHON = [ROOT / "calcops_jit.py"]
for folder in ("_calcops_jit", "bench", "calcops", "examples", "tests"):
    PYTHON += sorted((ROOT / folder).rglob("*.py"))
TORCH = re.compile(r"(torch|ATen|c10|caffe2)/")


def name(path):
    return str(path.relative_to(ROOT))


def kind(path):
    """Return a file's kind: its ending, or "torch" for files that may include torch's headers.

    ops/README.md has a row for each kind.
    """
    if path.suffix == ".cpp":
        return "_cpu.cpp" if path.name.endswith("_cpu.cpp") else "torch"
    if path.suffix == ".h" and any(map(TORCH.match, includes(path))):
        return "torch"
    return path.suffix


def includes(path):
    return re.findall(r'^\s*#\s*include\s*[<"](.+?)[>"]', path.read_text(), re.MULTILINE)


def code(path):
    """Return the text without comments and with empty strings. Line numbers stay the same."""
    pattern = r'R"\(.*?\)"|//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"'

    def emptied(match):
        if match[0].startswith('"'):
            return '""'
        return "\n" * match[0].count("\n")

    return re.sub(pattern, emptied, path.read_text(), flags=re.DOTALL)


def lines_with(pattern, text):
    lines = enumerate(text.splitlines(), 1)
    return [f"{number}: {line}" for number, line in lines if re.search(pattern, line)]


@pytest.mark.parametrize("folder", OPERATORS, ids=name)
def test_an_operator_is_a_folder_of_its_files_and_a_test(folder):
    operator = folder.name
    files = {path.name for path in folder.iterdir()}
    own = rf"{operator}(_(\w+_)?cpu)?\.cpp|{operator}\.cu|{operator}(_\w+)?\.h"
    assert f"{operator}.cpp" in files
    assert not [file for file in files if not re.fullmatch(own, file)]
    assert list((ROOT / "tests" / "operators").glob(f"test_{operator}*.py"))


def test_no_folder_of_tests_hides_a_package_that_a_test_looks_for():
    """Python imports a folder without __init__.py as a package if its parent is on sys.path."""
    tests = ROOT / "tests"
    wanted = set()
    for path in tests.rglob("*.py"):
        wanted |= set(re.findall(r'(?:find_spec|importorskip)\("(\w+)', path.read_text()))
    assert "cv2" in wanted
    assert not wanted & {path.name for path in tests.rglob("*") if path.is_dir()}


def test_a_librarys_folder_holds_only_operators_and_the_shared_files():
    for library, shared in LIBRARIES.items():
        assert {path.name for path in library.iterdir() if path.is_file()} == shared
    assert all({path.parent, path.parent.parent} & LIBRARIES.keys() for path in SOURCES)


def test_every_file_name_says_what_the_file_holds():
    empty_words = {"util", "utils", "common", "helper", "helpers", "misc", "tools"}
    for path in [*SOURCES, *PYTHON]:
        assert not empty_words & set(re.split(r"[_.]", path.name)), name(path)


def test_the_list_of_slow_tests_names_tests():
    texts = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    for line in (ROOT / "tests" / "slow.txt").read_text().splitlines():
        file, _, function = line.partition(" ")[2].partition("::")
        # A test by contracts is assigned.
        assert re.search(rf"^( *def {function}\(|{function} = )", texts[file], re.MULTILINE), line


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_a_file_includes_only_what_its_kind_may(path):
    headers = includes(path)
    operator = path.parent.name
    if path.name in (f"{operator}.h", f"{operator}_math.h") or kind(path) in (".cu", "_cpu.cpp"):
        assert not [header for header in headers if TORCH.match(header)], (
            "without torch's headers a unit compiles in 1 s, with them in 6 to 20 s"
        )
    if kind(path) == "torch":
        heavy = {
            "torch/extension.h",
            "torch/torch.h",
            "torch/all.h",
            "torch/script.h",
            "torch/python.h",
            "ATen/ATen.h",
        }
        heavy |= {"ATen/Functions.h", "ATen/NativeFunctions.h", "ATen/Operators.h", "Python.h"}
        assert not heavy & set(headers)
        assert not [header for header in headers if header.startswith("pybind11")]
        assert not [header for header in headers if header.endswith("_math.h")], (
            "an edited formula must not recompile a unit with torch's headers"
        )


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_a_file_neither_prints_nor_aborts_nor_sets_or_blocks_the_device(path):
    text = code(path)
    assert not lines_with(r"\b(printf|fprintf|puts|abort|exit|assert)\s*\(|std::c(out|err)\b", text)
    assert not lines_with(r"\bcuda(SetDevice|DeviceSynchronize|StreamSynchronize)\b", text)
    assert not lines_with(r"^\s*#\s*if\s+0\b", text)
    # A launch names its stream: <<<grid, block, shared, stream>>>.
    for launch in re.findall(r"<<<(.*?)>>>", text, re.DOTALL):
        without_brackets = re.sub(r"\([^()]*\)|\{[^{}]*\}", "", launch)
        assert without_brackets.count(",") == 3, launch
    assert not re.findall(r"TODO(?!\(#?\w+\))", path.read_text())


def test_only_three_calcops_macros_are_used_and_other_macros_are_undefined_again():
    used = set()
    for path in SOURCES:
        used |= set(re.findall(r"\bCALCOPS_\w+", code(path)))
    shared = {"CALCOPS_HD", "CALCOPS_HD_INLINED"}
    assert used <= {"CALCOPS_NO_CUDA", *shared}
    for path in SOURCES:
        defined = set(re.findall(r"^\s*#\s*define\s+(\w+)", code(path), re.MULTILINE))
        undefined = set(re.findall(r"^\s*#\s*undef\s+(\w+)", code(path), re.MULTILINE))
        assert defined <= undefined


@pytest.mark.parametrize("path", [path for path in SOURCES if path.parent in OPERATORS], ids=name)
def test_an_operators_code_has_a_namespace_of_its_own(path):
    """A library holds several operators: functions of one name need different namespaces."""
    outermost = re.findall(r"^namespace [\w:]+", code(path), re.MULTILINE)
    assert outermost[:1] == [f"namespace calcops::ops::{path.parent.name}"]
    assert set(outermost[1:]) <= {"namespace warp_derivatives"}


def test_every_mutation_names_one_place_in_the_code(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    import mutation_check

    for mutation in mutation_check.mutations():
        assert mutation_check.file_of(ROOT, mutation), mutation.what


@pytest.mark.parametrize("path", [*PYTHON, ROOT / "Makefile"], ids=name)
def test_modules_that_are_run_exist(path):
    for module in re.findall(r"-m\W+(_calcops_jit[.\w]*)", path.read_text()):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module


def imported(path):
    """Return the top-level names of the modules that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def test_the_core_imports_nothing_but_torch_and_python():
    own = {"calcops_jit", "_calcops_jit", "torch"}
    found = {}
    for path in [ROOT / "calcops_jit.py", *(ROOT / "_calcops_jit").glob("*.py")]:
        for module in imported(path) - own - sys.stdlib_module_names:
            found.setdefault(module, set()).add(path.name)
    assert found.pop("IPython") == {"messages.py", "notebook.py"}, "only in a notebook"
    assert not found


def packages_used(path):
    """Return the packages calcops.* that a file of one imports, without `calcops.`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        level = getattr(node, "level", 0)  # a package may import its own modules by `from .`
        assert level < 2, f"{name(path)} imports another package by a relative name"
    found = {name.split(".")[1] for name in names if name.startswith("calcops.")}
    own = path.relative_to(ROOT / "calcops").parts[0].removesuffix(".py")
    return found - {own, "__main__"}


def test_a_package_uses_those_that_the_table_of_layers_names():
    table = (ROOT / "docs" / "how_it_hangs_together.md").read_text()
    rows = re.findall(r"^\| `calcops\.(\w+)` \| .+ \| (.+) \|$", table, re.MULTILINE)
    uses = {package: set(names.split(", ")) for package, names in rows}
    list(graphlib.TopologicalSorter(uses).static_order())  # raises CycleError
    for package, names in uses.items():
        folder = ROOT / "calcops" / package
        files = list(folder.rglob("*.py")) or [folder.with_suffix(".py")]
        assert set().union(*map(packages_used, files)) == names, package
    packages = {path.name for path in (ROOT / "calcops").iterdir() if path.is_dir()}
    modules = {path.stem for path in (ROOT / "calcops").glob("[!_]*.py")}
    assert uses.keys() == (packages | modules) - {"__pycache__", "ops"}


def test_the_packages_import_nothing_from_examples():
    examples = {path.stem for path in (ROOT / "examples").rglob("*.py")} - {"__init__", "setup"}
    for path in (ROOT / "calcops").rglob("*.py"):
        assert not imported(path) & (examples | {"examples"}), name(path)


@pytest.mark.skipif(not (ROOT / ".ci").is_dir(), reason="no part of an sdist")
def test_ci_runs_the_commands_of_the_workflow():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    commands = re.findall(r"^ *- run: (.+)$", workflow, re.MULTILINE)
    assert len(commands) == 3
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert set(commands) <= set(lines)
