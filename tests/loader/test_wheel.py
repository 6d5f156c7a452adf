"""A wheel with prebuilt libraries. It needs no compiler, and never loads an outdated library."""

import os
import re
import shutil
import subprocess
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from checkout import (
    ANSWER,
    AUDITED,
    CALL,
    MAIN,
    Child,
    built_wheel,
    contents,
    copy,
    pip,
    replace_runtime,
    spoil,
    the_zygote,
    wheel_of,
    with_cpuinfo,
)
from test_cuda import machine

if os.uname().machine != "x86_64":
    pytest.skip("there are wheels for x86-64 only", allow_module_level=True)
pytest.importorskip("setuptools", minversion="77", reason="the build backend")

NO_COMPILER = {"PATH": "/nowhere", "HOME": "/nowhere", "CXX": None}
# The answer is 3 if the source was compiled for x86-64-v3.
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
# The words of /proc/cpuinfo that x86-64-v2, -v3 and -v4 add.
ADDED = [
    "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3",
    "abm avx avx2 bmi1 bmi2 f16c fma movbe xsave",
    "avx512bw avx512cd avx512dq avx512f avx512vl",
]
V2, V3, V4 = (" ".join(ADDED[:count]) for count in (1, 2, 3))


def processor(words: str) -> str:
    """Return the begin of a script that runs on a processor with these extensions."""
    return with_cpuinfo(f"processor\t: 0\nflags\t\t: {words}\n")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Return a checkout with one operator, which says for which processors it was compiled."""
    source = copy(tmp_path_factory.mktemp("source") / "calcops")
    replace_runtime(source / "contracts")
    shutil.rmtree(source / "ops")
    (source / "ops/tiny").mkdir(parents=True)
    (source / "ops/tiny/tiny.h").write_text("#define ANSWER 1\n")
    (source / "ops/tiny/tiny.cpp").write_text(LEVEL)
    return source


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    variables = {"CALCOPS_CUDA": "0", "CALCOPS_CACHE": str(cache)}
    return built_wheel(source, tmp_path_factory.mktemp("dist"), **variables)


class Installed:
    """The folder in which a wheel is installed. Child needs its path and its cache."""

    def __init__(self, path: Path, cache: Path):
        self.path = path
        self.package = path / "_calcops_jit"
        self.cache = cache
        self.zygote = the_zygote()

    def run(self, script: str = CALL, **variables) -> Child:
        return Child(self, script, **variables).wait()

    def refusal(self, script: str = CALL, **variables) -> str:
        """Return why the library of the wheel is not loaded. Without a compiler the import then
        fails."""
        child = self.run(script, **(NO_COMPILER | variables))
        assert child.code == 1, child.out
        assert "no C++ compiler" in child.err
        reasons = re.findall(r"^.*\bprebuilt\b.*$", child.err, re.MULTILINE)
        assert len(reasons) == 1, child.err
        return reasons[0]


@pytest.fixture
def installed(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    return Installed(tmp_path / "site", tmp_path / "cache")


# ---- its files -----------------------------------------------------------------------------------


def test_a_built_wheel_is_a_plain_wheel_with_a_library_among_the_sources(source, wheel, tmp_path):
    label = re.sub(r"\W+", ".", version("torch"))
    name = rf"calcops-[\d.]+\+torch\.{re.escape(label)}-py3-none-linux_x86_64\.whl"
    assert re.fullmatch(name, wheel.name)

    def relevant(files):
        return {name: data for name, data in files.items() if ".dist-info/" not in name}

    files = contents(wheel)
    shutil.rmtree(source / "ops/prebuilt")
    plain_files = relevant(contents(wheel_of(source, tmp_path)))
    assert plain_files.items() <= files.items()
    added = relevant(files).keys() - plain_files.keys()
    assert sorted(name.rpartition("/")[2] for name in added) == ["calcops.so", "manifest"]
    assert all(name.startswith("_calcops_jit/ops/prebuilt/calcops-") for name in added)


def test_a_library_of_a_wheel_needs_no_python_and_has_no_path_of_its_builder(installed):
    (library,) = installed.package.rglob("*.so")
    dynamic = subprocess.run(["readelf", "-d", library], capture_output=True, text=True).stdout
    assert "Dynamic section" in dynamic
    for word in "libpython", "libtorch_python", "RPATH", "RUNPATH":
        assert word not in dynamic


# ---- a library that fits -------------------------------------------------------------------------


def test_an_installed_wheel_needs_no_compiler_writes_nothing_and_starts_no_process(
    wheel, environment, tmp_path
):
    pip("install", wheel, python=environment)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    before = set(site.rglob("*"))
    script = f"""
import torch
{AUDITED}
{CALL}
print(calcops_jit.library_path(), events)
"""
    variables = {"PATH": "/nowhere", "CALCOPS_CACHE": str(tmp_path / "cache"), "HOME": "/nowhere"}
    command = [environment, "-c", script]
    child = subprocess.run(command, cwd="/", env=variables, capture_output=True, text=True)
    level, last = child.stdout.splitlines()
    assert level == "3"
    assert re.fullmatch(rf"{site}/_calcops_jit/ops/prebuilt/\S+\.so \[\]", last), last
    assert child.stderr == ""
    assert set(site.rglob("*")) == before
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "words, lacking",
    [
        (V3, ""),
        (V4, ""),
        (V4.replace("fma ", ""), "no fma"),
        (V2, "no abm"),
        (V2 + " avx512f", "no abm"),
        (V3.replace("cx16", ""), "no cx16"),
    ],
)
def test_a_library_of_a_wheel_is_loaded_if_the_processor_can_run_it(installed, words, lacking):
    if lacking:
        assert lacking in installed.refusal(processor(words) + CALL)
    else:
        child = installed.run(processor(words) + CALL, **NO_COMPILER)
        assert (child.out, child.err) == ("3\n", "")


def test_a_library_of_a_wheel_is_found_without_building_and_by_the_commands(installed):
    child = installed.run(
        "import calcops_jit; calcops_jit.library_path()", **NO_COMPILER, CALCOPS_BUILD="0"
    )
    assert (child.code, child.err) == (0, "")
    where = installed.run(MAIN, **NO_COMPILER, arguments=["where"]).out
    assert re.search(rf"^library  {installed.package}/\S+\.so$", where, re.MULTILINE)
    assert installed.run(MAIN, **NO_COMPILER, arguments=["why"]).out.startswith("nothing changed: ")
    (installed.package / "ops/tiny/tiny.h").unlink()
    why = installed.run(MAIN, **NO_COMPILER, arguments=["why"])
    assert (why.code, "ops/tiny/tiny.h" in why.out) == (1, True)


# ---- a library that does not fit -----------------------------------------------------------------


@pytest.mark.parametrize(
    "change, words",
    [
        ("import torch; torch.__version__ = '2.14.0'", "2.14.0"),
        ("import torch; torch.version.git_version = 'abc'", "PyTorch"),
        (processor("sse4_1 popcnt"), "x86-64-v3"),
        ("import os; os.environ['CALCOPS_CFLAGS'] = '-march=x86-64-v3'", "x86-64-v3"),
    ],
    ids=["PyTorch's version", "PyTorch's commit", "the processor", "CALCOPS_CFLAGS"],
)
def test_a_library_is_refused_for_another_pytorch_processor_or_flag(installed, change, words):
    assert words in installed.refusal(f"{change}\n{CALL}")


@pytest.mark.parametrize(
    "gpus, nvcc, variables, words",
    [
        ((), "", {}, ""),
        (("H100",), "", {}, ""),
        (("H100",), "nvcc", {}, "nvcc is here"),
        ((), "", {"CALCOPS_CUDA": "1"}, "CUDA was asked for"),
        (("H100",), "nvcc", {"CALCOPS_CUDA": "0"}, ""),
    ],
)
def test_a_cpu_library_is_refused_if_a_build_here_would_have_cuda(
    installed, tmp_path, gpus, nvcc, variables, words
):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").touch(0o755)
    home = tmp_path if nvcc else "nowhere"
    child = installed.run(
        machine(gpus, home) + CALL, **NO_COMPILER, **variables, CUDA_HOME=tmp_path
    )
    if words:
        assert words in child.err
        assert re.search(r"\bprebuilt\b", child.err)
    else:
        assert (child.code, child.err) == (0, "")


@pytest.mark.parametrize(
    "file, text",
    [
        ("ops/tiny/tiny.cpp", "int answer;\n"),
        ("ops/tiny/tiny.h", "#define ANSWER 5\n"),
        ("ops/tiny/tiny.h", None),
        ("ops/tiny/more.cpp", ""),
        ("ops/tiny/tiny/tiny.h", ""),  # a quoted include searches the folder of the source first
        ("shadow/hidden.map", ""),
    ],
)
def test_a_wheel_with_an_edited_file_is_refused_with_its_name(installed, file, text):
    path = installed.package / file
    if text is None:
        path.unlink()
    else:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    name = path.parent.name if file == "ops/tiny/tiny/tiny.h" else path.name
    assert name in installed.refusal()


@pytest.mark.parametrize("damage", ["truncated", "one byte", "gone"])
def test_damaged_files_of_a_wheel_are_reported_and_never_loaded(installed, damage):
    """First the libraries are damaged, then the other files beside them."""
    folder = installed.package / "ops/prebuilt"
    built = [path for path in folder.rglob("*") if path.is_file()]
    libraries = [path for path in built if path.suffix == ".so"]
    for damaged in libraries, [path for path in built if path.suffix != ".so"]:
        texts = {path: path.read_bytes() for path in damaged}
        for path in damaged:
            spoil(path, damage)
        installed.refusal()
        for path, text in texts.items():
            path.write_bytes(text)
    assert installed.run(**NO_COMPILER).code == 0


def test_an_unsuitable_library_of_a_wheel_is_rebuilt_once_and_follows_edits(installed):
    script = f"""
{CALL}
from pathlib import Path
Path({str(installed.package / "ops/tiny/tiny.h")!r}).write_text("#define ANSWER 100")
print(calcops_jit.reload(), "/prebuilt/" in calcops_jit.library_path())
"""
    child = installed.run(script, CALCOPS_CUDA="0")
    assert child.out.splitlines()[1:] == ["['calcops'] False"], child.err
    (line,) = re.findall(r"^.*\bprebuilt\b.*$", child.err, re.MULTILINE)
    assert "ops/tiny/tiny.h" in line
    again = installed.run(CALCOPS_CUDA="0")  # from the cache
    assert int(again.out) >= 200
    assert again.err == ""


def test_build_in_an_installed_wheel_is_for_this_processor_and_preferred(installed):
    built = installed.run(MAIN, arguments=["build"], CALCOPS_CUDA="0")
    path = built.out.strip()
    assert path.startswith(str(installed.cache)), built.err
    child = installed.run("import calcops_jit; print(calcops_jit.library_path())", CALCOPS_CUDA="0")
    assert child.out.strip() == path


def test_a_library_for_another_machine_that_could_not_use_it_is_not_prebuilt(checkout, tmp_path):
    as_arm = "import os; os.uname = lambda r=os.uname(): os.uname_result([*r[:4], 'aarch64'])\n"
    for preamble, variables, words in (
        (as_arm, {}, "aarch64"),
        ("", {"CALCOPS_CFLAGS": "-DX"}, "-DX names none of x86-64-v2 x86-64-v3 x86-64-v4"),
        (processor(V3), {"CALCOPS_CFLAGS": "-march=x86-64-v4"}, "no avx512bw"),
    ):
        child = checkout.run(preamble + MAIN, arguments=["prebuild"], **variables)
        assert child.code != 0
        assert "cannot prebuild calcops" in child.err
        assert words in child.err
        assert not (checkout.path / "ops/prebuilt").exists()


def test_a_library_that_only_this_machine_could_use_is_not_prebuilt(checkout, tmp_path):
    checkout.put("mine.cpp", ANSWER.format("return 1;"))
    (tmp_path / "include").mkdir()
    assert checkout.load(extra_include_paths=[str(tmp_path / "include")]).code == 0
    child = checkout.main("prebuild", "mine", cwd=checkout.project)
    assert (child.code, "include is outside of" in child.err) == (1, True), child.err


def test_a_prebuilt_library_follows_a_header_outside_of_its_sources(checkout):
    checkout.put("mine/mine.cpp", "#include <outside.h>\n" + ANSWER.format("return OUTSIDE;"))
    checkout.put("include/outside.h", "#define OUTSIDE 2\n")
    options = {"sources": "mine", "extra_cflags": [f"-I{checkout.project}/include"]}
    assert checkout.loaded(**options) == 2
    assert checkout.main("prebuild", "mine", cwd=checkout.project).code == 0
    shutil.rmtree(checkout.cache)
    assert checkout.loaded(**options, **NO_COMPILER) == 2
    checkout.put("include/outside.h", "#define OUTSIDE 5\n")
    assert "outside.h changed" in checkout.load(**options, **NO_COMPILER).err


def test_a_library_with_flags_for_one_processor_is_not_prebuilt(checkout):
    checkout.put("mine.cpp", ANSWER.format("return 1;"))
    assert checkout.load(extra_cflags=["-march=native"]).code == 0
    child = checkout.main("prebuild", "mine", cwd=checkout.project)
    assert (child.code, "its flags have -march=native" in child.err) == (1, True), child.err


def test_a_prebuilt_library_may_be_written_by_a_group_as_its_package_is(installed):
    for path in (installed.package / "ops/prebuilt").rglob("*"):
        path.chmod(path.stat().st_mode | 0o020)
    assert installed.run(**NO_COMPILER).out == "3\n"
