"""The installed PyTorch has every internal that docs/pytorch_internals.md lists, and our sources
use no other.

Nothing is imported or compiled: PyTorch's headers and Python files are read.
"""

import ast
import functools
import os
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
TORCH = Path(torch.__file__).parent
PAGE = "docs/pytorch_internals.md"
FOLDERS = ("_calcops_jit", "calcops", "contracts", "examples", "ops")
RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))


def rows(title):
    """Yield the cells of the rows of the page's table below a heading."""
    text = (ROOT / PAGE).read_text()
    section = re.search(rf"^## {title}$(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)[1]
    _, _, *lines = [line for line in section.splitlines() if line.startswith("|")]
    for line in lines:
        yield [cell.strip() for cell in line.strip("|").split(" | ")]


def names(cell, separator):
    """Return the names in a cell. One without a qualifier has that of the name before it."""
    found = []
    qualifier = ""
    for name in re.findall(r"`(.+?)`", cell):
        if separator in name:
            qualifier = name.rpartition(separator)[0] + separator
            found.append(name)
        else:
            found.append(qualifier + name)
    return found


def is_of_this_release(cell):
    """Return False if a cell says "to 2.12" or "from 2.13" of another PyTorch."""
    for word, version in re.findall(r"\((to|from) ([\d.]+)\)", cell):
        limit = tuple(map(int, version.split(".")))
        if (limit < RELEASE) if word == "to" else (limit > RELEASE):
            return False
    return True


CXX = [
    (name, cells[1])
    for cells in rows(r"C\+\+")
    for name in names(cells[0], "::")
    if is_of_this_release(cells[0])
]
PYTHON = [
    name
    for cells in rows("Python")
    for name in names(cells[0], ".")
    if is_of_this_release(cells[0])
]
TEXTS = {}  # {file: texts}
for cells in rows("Files and texts"):
    if is_of_this_release(cells[0]):
        TEXTS.setdefault(cells[1], []).extend(re.findall("`(.+?)`", cells[0]))


@functools.cache
def code(path):
    """Return a C++ file without comments and strings."""
    pattern = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"'
    return re.sub(pattern, "", path.read_text(), flags=re.DOTALL)


def classes(name, text):
    """Yield the texts between the braces of the classes of a name."""
    head = rf"\b(?:class|struct)\s+(?:[A-Z\d_]+\s+)?{name}\b[^;{{}}]*{{"  # perhaps with TORCH_API
    for match in re.finditer(head, text):
        depth = 1
        for brace in re.finditer("[{}]", text[match.end() :]):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                yield text[match.end() :][: brace.start()]
                break


@pytest.mark.parametrize(("name", "headers"), CXX)
def test_pytorchs_header_declares_the_name(name, headers):
    qualifier, _, member = name.rpartition("::")
    owner = qualifier.rpartition("::")[2]
    files = [TORCH / "include" / header for header in headers.split(" or ")]
    texts = [code(file) for file in files if file.is_file()]
    if owner:
        of_class = [body for text in texts for body in classes(owner, text)]
        texts = of_class or [text for text in texts if re.search(rf"namespace .*\b{owner}\b", text)]
    assert any(re.search(rf"\b{member}\b", text) for text in texts), (
        f"PyTorch {torch.__version__} has no {name} in {headers}: see {PAGE}"
    )


def is_defined(path, text):
    """Return whether a Python file defines a name, or a member of a class for a path such as A.b."""
    name, _, member = path.partition(".")
    if member:
        # From the class to the next statement that is not indented.
        match = re.search(rf"^( *)class {name}\b.*?(?=^\1[\w@]|\Z)", text, re.DOTALL | re.MULTILINE)
        return match is not None and is_defined(member, match[0].partition("\n")[2])
    pattern = rf"^\s*(?:(?:def|class) {name}\b|(?:self\.)?{name}\s*[:=])"
    return re.search(pattern, text, re.MULTILINE) is not None


@pytest.mark.parametrize("name", PYTHON)
def test_pytorch_defines_the_name(name):
    message = f"PyTorch {torch.__version__} has no {name}: see {PAGE}"
    if name.startswith("torch._C."):
        assert hasattr(torch._C, name.removeprefix("torch._C.")), message
        return
    if name.startswith("torch.Tensor."):  # most of its members are C++
        assert hasattr(torch.Tensor, name.removeprefix("torch.Tensor.")), message
        return
    file = TORCH
    _, *parts = name.split(".")
    while parts and (file / parts[0]).is_dir():
        file /= parts.pop(0)
    if parts and (file / f"{parts[0]}.py").is_file():
        file /= f"{parts.pop(0)}.py"
    else:
        file /= "__init__.py"
    assert file.is_file(), message
    assert not parts or is_defined(".".join(parts), file.read_text()), message


@pytest.mark.parametrize("file", TEXTS)
def test_pytorchs_file_has_the_texts(file):
    if "cuda" in file and torch.version.cuda is None:
        pytest.skip("PyTorch without CUDA")
    assert (TORCH / file).is_file(), f"PyTorch {torch.__version__} has no {file}: see {PAGE}"
    missing = set(TEXTS[file])
    with open(TORCH / file, "rb") as opened:
        while missing and (piece := opened.read(1 << 24)):
            missing -= {text for text in missing if text.encode() in piece}
            if len(piece) == 1 << 24:
                opened.seek(-100, os.SEEK_CUR)  # a text may begin in this piece
    assert not missing, f"PyTorch {torch.__version__} has no {missing} in {file}: see {PAGE}"


def sources(*endings):
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    return sorted(path for path in paths if path.suffix in endings)


def listed(title, separator):
    return {name for cells in rows(title) for name in names(cells[0], separator)}


def check_use(path, name, is_listed):
    assert is_listed, f"{path.relative_to(ROOT)} uses {name}: add it to {PAGE}"


def test_the_page_lists_the_internals_that_cxx_uses():
    spellings = [
        r"\b((?:torch::(?:autograd|dynamo|inductor|jit)|at::functorch|at::cpu|c10::impl)::[\w:]+)",
        r"\b(c10::\w*(?:Dispatch|Kernel|Operator|Registration|Schema|Sym|Warning)[\w:]*)",
        r"(?:\.|->|::)(_[a-z]\w+)",
    ]
    known = [f"::{name}::" for name in listed(r"C\+\+", "::")]
    headers = {header for cells in rows(r"C\+\+") for header in cells[1].split(" or ")}
    of_internals = r"#include <(torch/csrc/.+|ATen/(?:core/dispatch|functorch)/.+)>"
    for path in sources(".h", ".cpp", ".cc", ".cu"):
        text = code(path)
        for name in re.findall("|".join(spellings), text):
            name = f"::{''.join(name)}::"
            check_use(path, name, any(name in each or name.startswith(each) for each in known))
        for header in re.findall(of_internals, text):
            check_use(path, header, header in headers)


def dotted(node):
    """Return an attribute with its object, such as "torch.ops.aten"; "" for what is no name."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def names_of(tree):
    """Return (internals that a file may read, names that it defines).

    An internal is a path that begins with torch, or an attribute of an object.
    """
    paths = set()
    modules = set()
    own = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            paths.add(dotted(node))
            if isinstance(node.ctx, ast.Store) and dotted(node.value) == "self":
                own.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            paths |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and re.fullmatch(r"torch(\.\w+)+", str(node.value)):
            paths.add(node.value)  # a key of sys.modules
    # torch.ops.calcops is ours.
    of_torch = {path for path in paths if re.match(r"torch\.(?!ops\.calcops)", path)}
    of_objects = {path for path in paths if path.partition(".")[0] not in {*modules, "torch"}}
    internals = {path for path in of_torch if re.search(r"\._[^_]|\.experimental\.", path)}
    internals |= {path.rpartition(".")[2] for path in of_objects if re.search(r"\._[^_]\w*$", path)}
    return internals, own


def test_the_page_lists_the_internals_that_python_uses():
    of_python = {"_at_fork_reinit", "_handle"}  # of threading.RLock and ctypes.CDLL
    paths = [ROOT / "calcops_jit.py", *sources(".py")]
    found = {path: names_of(ast.parse(path.read_text())) for path in paths}
    own = {name for _, names in found.values() for name in names}
    known = listed("Python", ".")
    members = {name.rpartition(".")[2] for name in known}
    for path, (internals, _) in found.items():
        for name in internals - own - of_python - members:
            is_listed = any(
                f"{each}.".startswith(f"{name}.") or name.startswith(f"{each}.") for each in known
            )
            check_use(path, name, is_listed)


def test_a_file_of_each_row_uses_its_names():
    # The code depends on what these do, and does not name them.
    unnamed = {
        "torch._ops._OpNamespace.__getattr__",
        "torch.utils.cpp_extension.JIT_EXTENSION_VERSIONER",
    }
    texts = {str(path): path.read_text() for path in sources(".h", ".cpp", ".cc", ".py", ".map")}
    for title, separator, column in ((r"C\+\+", "::", 2), ("Python", ".", 1)):
        for cells in rows(title):
            files = tuple(f"/{file}" for file in re.findall("`(.+?)`", cells[column]))
            text = "".join(texts[path] for path in texts if path.endswith(files))
            for name in names(cells[0], separator):
                word = name.rpartition(separator)[2]
                is_used = name in unnamed or re.search(rf"\b{word}\b", text)
                assert is_used, f"none of {files} uses {name}: correct its row in {PAGE}"
