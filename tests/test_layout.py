"""The house stands: an operator is a folder under ops/ and a test, and every file holds what its
kind may hold."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OPERATORS = sorted(path.name for path in (ROOT / "ops").iterdir() if path.is_dir())
SOURCES = sorted(path for path in (ROOT / "ops").rglob("*") if path.suffix in (".h", ".cpp", ".cu"))
SHARED = {".clang-format", "float16.h", "memory.h", "numbers.h", "parallel.h", "README.md"}
PYTHON = sorted(
    path
    for folder in ("_calcops_jit", "examples", "tests")
    for path in [*(ROOT / folder).rglob("*.py"), ROOT / "calcops_jit.py"]
)
TORCH = re.compile(r"(torch|ATen|c10|caffe2)/")


def name(path):
    return str(path.relative_to(ROOT))


def kind(path):
    """The row of the table in ops/README.md that a file belongs to; "torch" is what torch's headers
    may be in."""
    if path.suffix == ".cpp":
        return "_cpu.cpp" if path.name.endswith("_cpu.cpp") else "torch"
    if path.suffix == ".h" and any(map(TORCH.match, includes(path))):
        return "torch"
    return path.suffix


def includes(path):
    return re.findall(r'^\s*#\s*include\s*[<"](.+?)[>"]', path.read_text(), re.MULTILINE)


def code(path):
    """The text without comments and with empty strings, on the same lines."""
    pattern = r'R"\(.*?\)"|//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"'
    return re.sub(
        pattern,
        lambda m: '""' if m[0][0] == '"' else "\n" * m[0].count("\n"),
        path.read_text(),
        flags=re.S,
    )


def lines_with(pattern, text):
    return [
        f"{i}: {line}" for i, line in enumerate(text.splitlines(), 1) if re.search(pattern, line)
    ]


@pytest.mark.parametrize("operator", OPERATORS)
def test_an_operator_is_a_folder_of_its_files_and_a_test(operator):
    files = {path.name for path in (ROOT / "ops" / operator).iterdir()}
    assert f"{operator}.cpp" in files
    assert not [
        file
        for file in files
        if not re.fullmatch(
            rf"{operator}(_(\w+_)?cpu)?\.cpp|{operator}\.cu|{operator}(_\w+)?\.h", file
        )
    ]
    assert f"{operator}.h" in files or files == {f"{operator}.cpp"}, "kernels have a contract"
    assert list((ROOT / "tests" / "operators").glob(f"test_{operator}*.py"))


def test_no_folder_of_tests_hides_a_package_that_a_test_looks_for():
    """A folder without __init__.py is found like a package, where its parent is on the path."""
    tests = ROOT / "tests"
    wanted = {
        name
        for path in tests.rglob("*.py")
        for name in re.findall(r'(?:find_spec|importorskip)\("(\w+)', path.read_text())
    }
    assert {"deepmd", "cv2"} <= wanted
    assert not wanted & {path.name for path in tests.rglob("*") if path.is_dir()}


def test_nothing_else_lies_in_ops():
    assert {path.name for path in (ROOT / "ops").iterdir() if path.is_file()} == SHARED
    assert all(path.parent.parent in (ROOT, ROOT / "ops") for path in SOURCES)


def test_no_file_is_named_after_nothing():
    nothing = {"util", "utils", "common", "helper", "helpers", "misc", "tools"}
    assert not [
        name(path) for path in [*SOURCES, *PYTHON] if nothing & set(re.split(r"[_.]", path.name))
    ]


def test_files_are_short_enough_to_read():
    def count(path):
        return len(path.read_text().splitlines())

    assert not {name(path): count(path) for path in SOURCES if count(path) > 700}
    assert not {name(path): count(path) for path in PYTHON if count(path) > 400}


def test_the_list_of_slow_tests_names_tests():
    texts = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    for line in (ROOT / "tests" / "slow.txt").read_text().splitlines():
        file, _, function = line.partition(" ")[2].partition("::")
        assert f"def {function}(" in texts[file], line


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_a_file_includes_only_what_its_kind_may(path):
    found = includes(path)
    operator = path.parent.name
    if path.name in (f"{operator}.h", f"{operator}_math.h") or kind(path) in (".cu", "_cpu.cpp"):
        assert not [i for i in found if TORCH.match(i)], (
            "kept out of torch's headers: 1 s to compile, not 6 to 20"
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
        assert not [i for i in found if i in heavy or i.startswith("pybind11")]
        assert not [i for i in found if i.endswith("_math.h")], (
            "editing a formula must not compile a torch unit"
        )


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_a_file_holds_nothing_that_must_not_exist(path):
    text = code(path)
    assert not lines_with(r"\b(printf|fprintf|puts|abort|exit|assert)\s*\(|std::c(out|err)\b", text)
    assert not lines_with(r"\bcuda(SetDevice|DeviceSynchronize|StreamSynchronize)\b", text)
    assert not lines_with(r"^\s*#\s*if\s+0\b", text)
    # A launch names its stream: <<<grid, block, shared, stream>>>.
    launches = re.findall(r"<<<(.*?)>>>", text, re.S)
    assert not [
        launch
        for launch in launches
        if re.sub(r"\([^()]*\)|\{[^{}]*\}", "", launch).count(",") != 3
    ]
    assert not re.findall(r"TODO(?!\(#?\w+\))", path.read_text())


def test_macros_are_at_most_three():
    used = {macro for path in SOURCES for macro in re.findall(r"\bCALCOPS_\w+", code(path))}
    shared = {"CALCOPS_HD", "CALCOPS_HD_INLINED"}
    assert used <= {"CALCOPS_NO_CUDA", *shared}
    for path in SOURCES:
        defined = set(re.findall(r"^\s*#\s*define\s+(\w+)", code(path), re.MULTILINE))
        undefined = set(re.findall(r"^\s*#\s*undef\s+(\w+)", code(path), re.MULTILINE))
        assert defined - undefined <= (shared if path.name == "numbers.h" else set())


@pytest.mark.parametrize(
    "path", [path for path in SOURCES if path.parent.name in OPERATORS], ids=name
)
def test_an_operators_code_has_a_namespace_of_its_own(path):
    """Functions of two operators may have one name: all meet in one library."""
    outermost = re.findall(r"^namespace [\w:]+", code(path), re.MULTILINE)
    assert outermost[:1] == [f"namespace calcops::ops::{path.parent.name}"]
    assert set(outermost[1:]) <= {"namespace warp_derivatives", "namespace opencv4"}


def types_of(header):
    """Qualified names of the types that a header defines outside of other types."""
    types, namespaces = [], []
    for line in code(header).splitlines():
        if opened := re.match(r"namespace ([\w:]*)\s*\{", line):
            namespaces.append(opened[1])
        elif re.match(r"\}  *$", line):
            namespaces.pop()
        elif named := re.match(
            r"(?:struct|class|union|enum(?: class)?|using) (\w+)[^;]*(?:\{|=)", line
        ):
            types.append("::".join([*namespaces, named[1]]))
    return set(types)


def test_a_type_has_one_header():
    """Headers of two operators meet in one program: two types of one name are undefined behaviour
    there."""
    homes = {}
    for header in (path for path in SOURCES if path.suffix == ".h"):
        for type_name in types_of(header):
            homes.setdefault(type_name, []).append(name(header))
    assert homes["calcops::ops::warp_perspective::WarpInputs"] == [
        "ops/warp_perspective/warp_perspective.h"
    ]
    assert not {type_name: headers for type_name, headers in homes.items() if len(headers) > 1}


def test_every_mutation_has_its_place_in_the_code(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests" / "bench")
    import mutation_check

    for mutation in mutation_check.mutations():
        assert mutation_check.file_of(ROOT, mutation), mutation.what


@pytest.mark.parametrize("path", [*PYTHON, ROOT / "Makefile"], ids=name)
def test_modules_that_are_run_exist(path):
    for module in re.findall(r"-m\W+(_calcops_jit[.\w]*)", path.read_text()):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module
