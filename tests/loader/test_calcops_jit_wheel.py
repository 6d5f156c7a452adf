"""A wheel with built libraries. It needs no compiler, loads the library that suits the processor,
and never an outdated one."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from checkout import (
    CALL,
    EVENTS,
    HERE,
    Child,
    built_wheel,
    contents,
    copy,
    pip,
    spoil,
    the_zygote,
    wheel_of,
)

from _calcops_jit import request
from _calcops_jit.cache import store
from _calcops_jit.cache.closure import file_digest
from _calcops_jit.ship import prebuilt

NO_COMPILER = {"PATH": "/nowhere", "HOME": "/nowhere", "CXX": None}
# The answer is the level of x86-64 for which the source was compiled: 2, 3 or 4.
LEVEL = """
#include "tiny/tiny.h"
extern "C" __attribute__((visibility("default"))) int answer() {
#if defined(__AVX512F__)
  return ANSWER * 4;
#elif defined(__AVX2__)
  return ANSWER * 3;
#else
  return ANSWER * 2;
#endif
}
"""
# The flags of processors that can run x86-64-v2, up to v3, and up to v4.
V2, V3, V4 = (" ".join(list(prebuilt.LEVELS.values())[:count]) for count in (1, 2, 3))
PROCESSOR = "from _calcops_jit import request\nrequest.isa = lambda: {!r}\n"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Return a checkout with one operator, which returns the level that it was compiled for."""
    source = copy(tmp_path_factory.mktemp("source") / "calcops")
    shutil.rmtree(source / "ops")
    (source / "ops/tiny").mkdir(parents=True)
    (source / "ops/tiny/tiny.h").write_text("#define ANSWER 1\n")
    (source / "ops/tiny/tiny.cpp").write_text(LEVEL)
    return source


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    return built_wheel(
        source,
        tmp_path_factory.mktemp("wheel"),
        CALCOPS_CUDA="0",
        CALCOPS_CACHE=str(tmp_path_factory.mktemp("cache")),
    )


class Installed:
    """The folder in which a wheel is installed. Child needs its path and its cache."""

    def __init__(self, path: Path, cache: Path):
        self.path = path
        self.cache = cache

    def run(self, script: str = CALL, **variables) -> Child:
        return Child(the_zygote(), self, script, **variables).wait()

    def refusal(self, script: str = CALL, **variables) -> str:
        """Return why the library of the wheel is not loaded. Without a compiler the import then
        fails."""
        child = self.run(script, **(NO_COMPILER | variables))
        assert child.code == 1, child.out
        assert "calcops_jit: cannot build calcops: no C++ compiler\n" in child.err
        pattern = "^calcops_jit: .* what the wheel brings does not fit: (.*)$"
        reasons = re.findall(pattern, child.err, re.MULTILINE)
        assert len(reasons) == 1, child.err
        return reasons[0]


@pytest.fixture
def installed(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    return Installed(tmp_path / "site", tmp_path / "cache")


def test_a_built_wheel_is_a_plain_wheel_with_a_library_for_each_level(source, wheel, tmp_path):
    label = prebuilt.label()
    name = rf"calcops-[\d.]+\+torch{re.escape(label)}-py3-none-linux_x86_64\.whl"
    assert re.fullmatch(name, wheel.name)

    files = contents(wheel)
    expected = set()
    for level in prebuilt.LEVELS:
        for file in (f"{label}/{level}/calcops.so", f"objects/{level}/unit.o"):
            expected |= {file, str(Path(file).with_name("manifest"))}
    built_files = {name for name in files if "/built/" in name}
    assert built_files == {f"_calcops_jit/built/{file}" for file in expected}

    def without(files, unwanted):
        return {name: data for name, data in files.items() if unwanted not in name}

    plain_files = contents(wheel_of(source, tmp_path))
    assert without(without(files, "/built/"), ".dist-info/") == without(plain_files, ".dist-info/")
    (about,) = [data.decode() for name, data in files.items() if name.endswith(".dist-info/WHEEL")]
    assert "Root-Is-Purelib: false\n" in about


def test_libraries_of_a_wheel_find_pytorch_beside_themselves_and_need_no_libpython(wheel):
    libraries = [data for name, data in contents(wheel).items() if name.endswith(".so")]
    assert libraries
    assert all(b"\0$ORIGIN/../../../../torch/lib\0" in data for data in libraries)
    assert not [data for data in libraries if b"libpython" in data or b"libtorch_python" in data]


@pytest.mark.parametrize("level", prebuilt.LEVELS)
def test_the_compiler_uses_only_instructions_of_the_flags_of_a_level(level):
    levels = list(prebuilt.LEVELS)
    flags = {"fxsr", "mmx", "sse", "sse2"}  # every x86-64 processor has these
    for lower_level in levels[: levels.index(level) + 1]:
        flags |= set(prebuilt.LEVELS[lower_level].split())
    command = [*request.compiler_words(), f"-march={level}", "-dM", "-E", "-x", "c++", os.devnull]
    macros = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # SSE3, which Linux names "pni", comes with SSSE3 or AVX.
    extensions = (
        r"#define __((?:SSE(?!3)|SSSE|AVX|FMA|BMI|F16C|LZCNT|MOVBE|POPCNT)\w*?)(?<!_MATH)__ 1"
    )
    names_in_linux = {"bmi": "bmi1", "lzcnt": "abm"}
    used = {name.lower() for name in re.findall(extensions, macros)}
    assert used
    assert {names_in_linux.get(name, name) for name in used} <= flags


def test_an_installed_wheel_needs_no_compiler_writes_nothing_and_starts_no_process(
    wheel, environment, tmp_path
):
    pip("install", wheel, python=environment)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    before = set(site.rglob("*"))
    script = f"import torch\n{EVENTS}\n{CALL}\nprint(calcops_jit.library_path(), events)"
    variables = {"PATH": "/nowhere", "CALCOPS_CACHE": str(tmp_path / "cache"), "HOME": "/nowhere"}
    command = [environment, "-c", script]
    child = subprocess.run(command, cwd="/", env=variables, capture_output=True, text=True)
    number = 1
    for words in prebuilt.LEVELS.values():
        if not set(words.split()) <= set(request.isa().split()):
            break
        number += 1
    path = f"{site}/_calcops_jit/built/{prebuilt.label()}/x86-64-v{number}/calcops.so"
    assert (child.stdout, child.stderr) == (f"{number}\n{path} []\n", "")
    assert set(site.rglob("*")) == before
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "flags, level",
    [
        (V2, 2),
        (V3, 3),
        (V4, 4),
        (V4.replace("avx512vl", ""), 3),
        (V4.replace("fma", ""), 2),
        (V2 + " avx512f", 2),
    ],
)
def test_a_wheel_loads_the_best_library_that_the_processor_can_run(installed, flags, level):
    child = installed.run(PROCESSOR.format(flags) + CALL, **NO_COMPILER)
    assert (child.out, child.err) == (f"{level}\n", "")


# Changes each manifest of the wheel by the statement in {}.
REWRITE = """
from _calcops_jit import cuda
from _calcops_jit.cache import closure, store
from _calcops_jit.ship import prebuilt
for level in prebuilt.LEVELS:
    folder = f"{{prebuilt.FOLDER}}/{{prebuilt.label()}}/{{level}}"
    manifest = store.read_manifest(folder)
    {}
    store.write_whole(f"{{folder}}/manifest", manifest.dump())
"""
WITH_CUDA = """
    choice = cuda.Choice(build=True, version="13.2", arches="8.0;9.0+PTX")
    manifest.request = prebuilt.facts(prebuilt.request(level, choice))
"""
UNLOADABLE = """
    store.write_whole(f"{folder}/calcops.so", b"of a newer system")
    manifest.size = 17
    manifest.digest = closure.file_digest(f"{folder}/calcops.so")
"""


@pytest.mark.parametrize(
    "change, choice, reason",
    [
        ("pass", {"reason": "no nvcc was found", "gpus": ["H100"]}, ""),
        ("pass", {"build": True, "gpus": ["H100"]}, "it is for CPUs, and nvcc is here"),
        (
            "pass",
            {"fatal": True, "reason": "no nvcc was found"},
            "it is for CPUs, and CUDA was asked for",
        ),
        (WITH_CUDA, {"reason": "no nvcc was found", "gpus": ["H100"]}, ""),
        (WITH_CUDA, {"reason": "no nvcc was found", "fatal": True}, ""),
        (WITH_CUDA, {"build": True, "gpus": ["H100"]}, ""),
        (WITH_CUDA, {"build": True, "arches": "8.0;9.0+PTX"}, ""),
        (
            WITH_CUDA,
            {"build": True, "arches": "7.5"},
            "its GPU architectures are 8.0;9.0+PTX, not 7.5",
        ),
        (WITH_CUDA, {"reason": "CALCOPS_CUDA=0 was set"}, "CALCOPS_CUDA=0 was set"),
    ],
)
def test_a_library_of_a_wheel_is_refused_if_its_cuda_support_does_not_suit(
    installed, change, choice, reason
):
    script = REWRITE.format(change.strip())
    script += f"cuda.choose = lambda: cuda.Choice(**{choice})\n{CALL}"
    switch = "0" if "was set" in reason else None
    child = installed.run(script, **NO_COMPILER, CALCOPS_CUDA=switch)
    if reason:
        assert f"what the wheel brings does not fit: {reason}\n" in child.err
    else:
        assert (child.code, child.err) == (0, "")


def test_a_library_of_a_wheel_that_cannot_be_loaded_is_reported(installed):
    script = REWRITE.format(UNLOADABLE.strip()) + CALL
    assert installed.refusal(script).startswith("cannot load calcops.so ")


def test_a_library_of_a_wheel_is_found_without_building_and_by_the_commands(installed):
    assert installed.run(**NO_COMPILER, CALCOPS_BUILD="0").err == ""
    main = "import runpy; runpy.run_module('calcops_jit', run_name='__main__', alter_sys=True)"
    where = installed.run(main, **NO_COMPILER, arguments=["where"]).out
    library = "^library  .*/site/_calcops_jit/built/[^/]+/x86-64-v./calcops.so$"
    assert re.search(library, where, re.MULTILINE)
    assert installed.run(main, **NO_COMPILER, arguments=["why"]).out.startswith("nothing changed: ")
    (installed.path / "_calcops_jit/ops/tiny/tiny.h").unlink()
    assert installed.run(main, **NO_COMPILER, arguments=["why"]).out.endswith(
        "/ops/tiny/tiny.h is gone\n"
    )


def test_an_unsuitable_library_of_a_wheel_is_rebuilt_once_and_follows_edits(installed):
    script = f"""
{CALL}
from pathlib import Path
Path({str(installed.path / "_calcops_jit/ops/tiny/tiny.h")!r}).write_text("#define ANSWER 100")
print(calcops_jit.reload(), "/built/" in calcops_jit.library_path())
"""
    child = installed.run(script, CALCOPS_CUDA="0")
    assert child.out.splitlines()[1:] == ["['calcops'] False"], child.err
    message = "what the wheel brings does not fit: "
    (line,) = [line for line in child.err.splitlines() if message in line]
    assert line.endswith("/ops/tiny/tiny.h changed")

    again = installed.run(CALCOPS_CUDA="0")  # from the cache
    assert int(again.out) >= 200
    assert again.err == ""


@pytest.mark.parametrize(
    "change, reason",
    [
        ("torch.__version__ = '2.14.0'", "it is for PyTorch {label}, not 2.14.0"),
        ("torch.version.git_version = 'abc'", "PyTorch: -[commit={commit}] +[commit=abc]"),
        (
            "torch.compiled_with_cxx11_abi = lambda: None",
            "PyTorch: -[C++11 ABI=True] +[C++11 ABI=None]",
        ),
        ("torch.__config__._cxx_flags = lambda: '-O0'", "PyTorch: -[flags="),
        (
            PROCESSOR.format("sse4_1 popcnt"),
            "this processor has no cx16 lahf_lm sse4_2 ssse3, which x86-64-v2 asks",
        ),
        (
            "import os; os.environ['CALCOPS_CFLAGS'] = '-march=x86-64-v3'",
            "CALCOPS_CFLAGS=-march=x86-64-v3",
        ),
    ],
)
def test_a_library_of_a_wheel_is_refused_for_another_pytorch_processor_or_flag(
    installed, change, reason
):
    reason = reason.format(label=prebuilt.label(), commit=torch.version.git_version)
    assert installed.refusal(f"import torch\n{change}\n{CALL}").startswith(reason)


def test_another_pytorch_compiles_only_the_runtime_and_links_the_wheels_objects(installed):
    other = f"import torch\ntorch.__version__ = '2.14.0'\n{CALL}"
    child = installed.run(other, CALCOPS_CUDA="0")
    assert int(child.out) in (2, 3, 4), child.err
    assert "does not fit" not in child.err, child.err
    slots = sorted(path.name.rpartition("-")[0] for path in installed.cache.iterdir())
    assert slots == ["calcops", "unit-runtime.cpp"]
    again = installed.run(other, CALCOPS_CUDA="0")  # from the cache
    assert (again.out, again.err) == (child.out, "")


def test_objects_of_a_wheel_that_cannot_be_linked_are_compiled_again(installed):
    """The operators are then built from their sources."""
    for objects in installed.path.glob("_calcops_jit/built/objects/*"):
        manifest = store.read_manifest(str(objects))
        (objects / "unit.o").write_bytes(b"of another kind")
        manifest.size = 15
        manifest.digest = file_digest(str(objects / "unit.o"))
        store.write_whole(f"{objects}/manifest", manifest.dump())
    other = f"import torch\ntorch.__version__ = '2.14.0'\n{CALL}"
    child = installed.run(other, CALCOPS_CUDA="0")
    assert child.code == 0
    assert "does not fit: it is for PyTorch" in child.err


@pytest.mark.parametrize(
    "file, text, reason",
    [
        ("ops/tiny/tiny.cpp", "int answer;\n", "{ops}/tiny/tiny.cpp changed"),
        ("ops/tiny/tiny.h", "#define ANSWER 5\n", "{ops}/tiny/tiny.h changed"),
        ("ops/tiny/tiny.h", None, "{ops}/tiny/tiny.h is gone"),
        ("ops/tiny/more.cpp", "", "sources: +[@root/tiny/more.cpp]"),
        # A quoted include searches the folder of the source first.
        ("ops/tiny/tiny/tiny.h", "", "{ops}/tiny/tiny is new"),
        ("shadow/hidden.map", "", "{package}/shadow/hidden.map changed"),
        ("built/{label}/x86-64-v{level}/manifest", "{{", "manifest is damaged"),
        ("built/{label}/x86-64-v{level}/manifest", None, "[Errno 2] No such file or directory: "),
    ],
)
def test_a_wheel_with_an_edited_file_is_refused_with_its_name(installed, file, text, reason):
    package = installed.path / "_calcops_jit"
    child = installed.run(**NO_COMPILER)
    path = package / file.format(level=int(child.out), label=prebuilt.label())
    if text is None:
        path.unlink()
    else:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    reason = reason.format(ops=package / "ops", package=package)
    assert installed.refusal().startswith(reason)


@pytest.mark.parametrize("damage", ["truncated", "empty", "one byte", "folder", "fifo"])
def test_a_damaged_library_of_a_wheel_is_reported_and_never_loaded(installed, damage):
    for library in installed.path.glob("_calcops_jit/built/*/*/calcops.so"):
        spoil(library, damage)
    assert re.search("is damaged|not a regular file", installed.refusal())


def test_a_wheel_for_another_architecture_is_not_built(tmp_path):
    script = f"""
from _calcops_jit.ship import wheel
wheel.MACHINE = 'aarch64'
wheel.write({str(tmp_path / "dist")!r})
"""
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=HERE, capture_output=True, text=True
    )
    assert "cannot make a wheel" in result.stderr
    assert "this is aarch64" in result.stderr
    assert not list(tmp_path.iterdir())
