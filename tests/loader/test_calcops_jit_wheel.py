"""A wheel with built operators: it needs no compiler, loads what suits the processor, and never
what is stale."""

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

BARE = {"PATH": "/nowhere", "HOME": "/nowhere", "CXX": None}
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
V2, V3, V4 = (" ".join(list(prebuilt.LEVELS.values())[:count]) for count in (1, 2, 3))
PROCESSOR = "from _calcops_jit import request\nrequest.isa = lambda: {!r}\n"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkout with one operator, which tells for which processors it was compiled."""
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
    """The folder that a wheel is installed in; what Child wants of a checkout."""

    def __init__(self, path: Path, cache: Path):
        self.path, self.cache = path, cache

    def run(self, script: str = CALL, **variables) -> Child:
        return Child(the_zygote(), self, script, **variables).wait()

    def refusal(self, script: str = CALL, **variables) -> str:
        """Why what the wheel brought does not fit: the one line that it says where there is no
        compiler."""
        child = self.run(script, **(BARE | variables))
        assert child.code == 1, child.out
        assert "calcops_jit: cannot build calcops: no C++ compiler\n" in child.err
        said = re.findall(
            "^calcops_jit: .* what the wheel brings does not fit: (.*)$", child.err, re.MULTILINE
        )
        assert len(said) == 1, child.err
        return said[0]


@pytest.fixture
def installed(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    return Installed(tmp_path / "site", tmp_path / "cache")


def test_it_holds_a_library_for_each_level_and_else_what_any_wheel_of_the_project_does(
    source, wheel, tmp_path
):
    label = prebuilt.label()
    assert re.fullmatch(
        rf"calcops-[\d.]+\+torch{re.escape(label)}-py3-none-linux_x86_64\.whl", wheel.name
    )
    found = contents(wheel)
    libraries = {name for name in found if "/built/" in name}
    assert libraries == {
        f"_calcops_jit/built/{folder}/{level}/{file}"
        for folder, built in ((label, "calcops.so"), ("objects", "unit.o"))
        for level in prebuilt.LEVELS
        for file in (built, "manifest")
    }
    plain = contents(wheel_of(source, tmp_path))
    ours = {
        name: data
        for name, data in found.items()
        if name not in libraries and ".dist-info/" not in name
    }
    assert ours == {name: data for name, data in plain.items() if ".dist-info/" not in name}
    (about,) = (data.decode() for name, data in found.items() if name.endswith(".dist-info/WHEEL"))
    assert "Root-Is-Purelib: false\n" in about


def test_its_libraries_find_pytorch_beside_themselves_and_need_no_python(wheel):
    libraries = [data for name, data in contents(wheel).items() if name.endswith(".so")]
    assert libraries
    assert all(b"\0$ORIGIN/../../../../torch/lib\0" in data for data in libraries)
    assert not [data for data in libraries if b"libpython" in data or b"libtorch_python" in data]


@pytest.mark.parametrize("level", prebuilt.LEVELS)
def test_the_compiler_uses_no_instructions_beyond_those_that_a_level_is_chosen_by(level):
    levels = list(prebuilt.LEVELS)
    here = " ".join(prebuilt.LEVELS[lower] for lower in levels[: levels.index(level) + 1]).split()
    always = {"fxsr", "mmx", "sse", "sse2"}  # of x86-64
    asked = [*request.compiler_words(), f"-march={level}", "-dM", "-E", "-x", "c++", os.devnull]
    macros = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    # SSE3, for the kernel "pni", comes with SSSE3 or AVX.
    extensions = (
        r"#define __((?:SSE(?!3)|SSSE|AVX|FMA|BMI|F16C|LZCNT|MOVBE|POPCNT)\w*?)(?<!_MATH)__ 1"
    )
    kernels_names = {"bmi": "bmi1", "lzcnt": "abm"}
    used = {name.lower() for name in re.findall(extensions, macros)}
    assert used
    assert {kernels_names.get(name, name) for name in used} <= always | set(here)


def test_a_fresh_environment_without_a_compiler_calls_them_and_writes_and_starts_nothing(
    wheel, environment, tmp_path
):
    pip("install", wheel, python=environment)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    before = {path for path in site.rglob("*")}
    script = f"import torch\n{EVENTS}\n{CALL}\nprint(calcops_jit.library_path(), events)"
    variables = {"PATH": "/nowhere", "CALCOPS_CACHE": str(tmp_path / "cache"), "HOME": "/nowhere"}
    command = [environment, "-c", script]
    child = subprocess.run(command, cwd="/", env=variables, capture_output=True, text=True)
    lacking = {
        level: set(words.split()) - set(request.isa().split())
        for level, words in prebuilt.LEVELS.items()
    }
    number = [*map(bool, lacking.values()), True].index(True) + 1
    path = f"{site}/_calcops_jit/built/{prebuilt.label()}/x86-64-v{number}/calcops.so"
    assert (child.stdout, child.stderr) == (f"{number}\n{path} []\n", "")
    assert {path for path in site.rglob("*")} == before
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
def test_the_library_is_the_best_that_the_processor_can_run(installed, flags, level):
    child = installed.run(PROCESSOR.format(flags) + CALL, **BARE)
    assert (child.out, child.err) == (f"{level}\n", "")


REWRITE = """
from _calcops_jit import cuda; from _calcops_jit.cache import closure, store; from _calcops_jit.ship import prebuilt
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
    manifest.size, manifest.digest = 17, closure.file_digest(f"{folder}/calcops.so")
"""


@pytest.mark.parametrize(
    "wheels, here, why",
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
def test_whether_cuda_is_in_it_must_suit_what_is_asked_for(installed, wheels, here, why):
    script = REWRITE.format(wheels.strip()) + f"cuda.choose = lambda: cuda.Choice(**{here})\n{CALL}"
    child = installed.run(script, **BARE, CALCOPS_CUDA="0" if "was set" in why else None)
    if why:
        assert f"what the wheel brings does not fit: {why}\n" in child.err
    else:
        assert (child.code, child.err) == (0, "")


def test_a_library_that_this_system_cannot_load_is_told(installed):
    script = REWRITE.format(UNLOADABLE.strip()) + CALL
    assert installed.refusal(script).startswith("cannot load calcops.so ")


def test_without_building_it_is_still_found_and_the_commands_show_it(installed):
    assert installed.run(**BARE, CALCOPS_BUILD="0").err == ""
    main = "import runpy; runpy.run_module('calcops_jit', run_name='__main__', alter_sys=True)"
    shown = installed.run(main, **BARE, arguments=["where"]).out
    assert re.search(
        "^library  .*/site/_calcops_jit/built/[^/]+/x86-64-v./calcops.so$", shown, re.MULTILINE
    )
    assert installed.run(main, **BARE, arguments=["why"]).out.startswith("nothing changed: ")
    (installed.path / "_calcops_jit/ops/tiny/tiny.h").unlink()
    assert installed.run(main, **BARE, arguments=["why"]).out.endswith("/ops/tiny/tiny.h is gone\n")


def test_what_fits_not_is_built_once_from_the_sources_and_reload_follows_an_edit(installed):
    script = f"""
{CALL}
from pathlib import Path
Path({str(installed.path / "_calcops_jit/ops/tiny/tiny.h")!r}).write_text("#define ANSWER 100")
print(calcops_jit.reload(), "/built/" in calcops_jit.library_path())
"""
    child = installed.run(script, CALCOPS_CUDA="0")
    assert child.out.splitlines()[1:] == ["['calcops'] False"], child.err
    lines = [
        line for line in child.err.splitlines() if "what the wheel brings does not fit: " in line
    ]
    assert len(lines) == 1
    assert lines[0].endswith("/ops/tiny/tiny.h changed")
    again = installed.run(CALCOPS_CUDA="0")  # from the cache
    assert int(again.out) >= 200
    assert again.err == ""


@pytest.mark.parametrize(
    "change, why",
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
def test_another_pytorch_another_processor_and_other_flags_are_told(installed, change, why):
    words = {"label": prebuilt.label(), "commit": torch.version.git_version}
    assert installed.refusal(f"import torch\n{change}\n{CALL}").startswith(why.format(**words))


def test_for_another_pytorch_only_what_knows_it_is_compiled(installed):
    other = f"import torch\ntorch.__version__ = '2.14.0'\n{CALL}"
    child = installed.run(other, CALCOPS_CUDA="0")
    assert int(child.out) in (2, 3, 4), child.err
    assert "does not fit" not in child.err, child.err
    slots = sorted(path.name.rpartition("-")[0] for path in installed.cache.iterdir())
    assert slots == ["calcops", "unit-runtime.cpp"]
    again = installed.run(other, CALCOPS_CUDA="0")  # from the cache
    assert (again.out, again.err) == (child.out, "")


def test_objects_that_a_linker_cannot_take_are_no_obstacle(installed):
    """The operators are built from their sources then."""
    for objects in installed.path.glob("_calcops_jit/built/objects/*"):
        manifest = store.read_manifest(str(objects))
        (objects / "unit.o").write_bytes(b"of another kind")
        manifest.size, manifest.digest = 15, file_digest(str(objects / "unit.o"))
        store.write_whole(f"{objects}/manifest", manifest.dump())
    other = f"import torch\ntorch.__version__ = '2.14.0'\n{CALL}"
    child = installed.run(other, CALCOPS_CUDA="0")
    assert child.code == 0
    assert "does not fit: it is for PyTorch" in child.err


@pytest.mark.parametrize(
    "file, text, why",
    [
        ("ops/tiny/tiny.cpp", "int answer;\n", "{ops}/tiny/tiny.cpp changed"),
        ("ops/tiny/tiny.h", "#define ANSWER 5\n", "{ops}/tiny/tiny.h changed"),
        ("ops/tiny/tiny.h", None, "{ops}/tiny/tiny.h is gone"),
        ("ops/tiny/more.cpp", "", "sources: +[@root/tiny/more.cpp]"),
        # Where a quoted include looks first.
        ("ops/tiny/tiny/tiny.h", "", "{ops}/tiny/tiny is new"),
        ("shadow/hidden.map", "", "{package}/shadow/hidden.map changed"),
        ("built/{label}/x86-64-v{level}/manifest", "{{", "manifest is damaged"),
        ("built/{label}/x86-64-v{level}/manifest", None, "[Errno 2] No such file or directory: "),
    ],
)
def test_an_edited_file_is_told_and_never_run(installed, file, text, why):
    package = installed.path / "_calcops_jit"
    child = installed.run(**BARE)
    path = package / file.format(level=int(child.out), label=prebuilt.label())
    if text is None:
        path.unlink()
    else:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert installed.refusal().startswith(why.format(ops=package / "ops", package=package))


@pytest.mark.parametrize("damage", ["truncated", "empty", "one byte", "folder", "fifo"])
def test_a_damaged_library_is_told_and_never_loaded(installed, damage):
    for library in installed.path.glob("_calcops_jit/built/*/*/calcops.so"):
        spoil(library, damage)
    assert re.search("is damaged|not a regular file", installed.refusal())


def test_a_wheel_for_another_kind_of_machine_is_refused(tmp_path):
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
