"""calcops_jit.load: its arguments, which are those of torch.utils.cpp_extension.load, and what
compilers and linkers make of them."""

import ctypes
import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkout import ANSWER, CONTRACT, LOAD, Checkout, with_file

import calcops_jit
from _calcops_jit import compile, request


@pytest.fixture(scope="module")
def shared_checkout(tmp_path_factory):
    return Checkout(tmp_path_factory.mktemp("load"))


@pytest.fixture
def checkout(shared_checkout, tmp_path):
    """Return a checkout with a project of its own. Its folder decides the place in the cache."""
    shared_checkout.project = tmp_path
    shared_checkout.compiled()
    return shared_checkout


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "mine.cpp"
    path.touch()
    return path


# ---- arguments -----------------------------------------------------------------------------------


def test_flags_may_be_a_string_or_words_and_paths_are_kept_whole(checkout):
    """All spellings are one library, which is compiled once."""
    checkout.put("my include/value.h", "#define VALUE 2\n")
    text = ANSWER.format("return 100 * VALUE + 10 * TENS + ONES;")
    checkout.put("mine.cpp", f'#include "value.h"\n{text}')
    script = """
import calcops_jit, ctypes, os
from pathlib import Path
libraries = set()
folder = os.getcwd()
for sources in ("mine.cpp", Path("mine.cpp"), ("mine.cpp",), [f"{folder}/mine.cpp"]):
    for flags in ("-DTENS=3 '-DONES=4'", ["-DTENS=3", "-DONES=4"]):
        for paths in ("my include", [Path(folder, "my include")]):
            library = calcops_jit.load("mine", sources, flags, extra_include_paths=paths)
            libraries.add(library)
[library] = libraries
print(ctypes.CDLL(library.path).answer(), os.path.basename(os.fspath(library)), library.operators)
"""
    child = checkout.run(script, cwd=checkout.project, CALCOPS_BUILD="0")
    assert child.out == "234 mine.so {}\n", child.err
    assert checkout.compiled() == 1


def test_quotes_in_a_string_of_flags_work_as_in_a_shell(checkout):
    text = 'static_assert(sizeof(TEXT) == 5, "no $1");\n' + ANSWER.format("return VALUE;")
    checkout.put("mine.cpp", f'#include "value.h"\n{text}')
    checkout.put("My Projects/value.h", "#define VALUE 5\n")
    flags = f"""-I'{checkout.project}/My Projects' -DTEXT='"a $1"'"""
    assert checkout.loaded(extra_cflags=flags) == 5


def test_a_string_of_flags_stays_the_same_when_a_library_is_loaded_again(source):
    flags = """-I'/My $X' -DTEXT='"a"' -O2"""
    wanted = request.request_for("mine", source, flags, flags, "-L'/My $X' -lmine")
    assert request.request_for(**wanted.asked).facts == wanted.facts


def test_a_list_of_flags_may_have_the_path_of_another_library_in_a_folder_with_a_space(checkout):
    other = checkout.put("a folder/libother.so", "")
    source = checkout.put("other.cpp", "int other() { return 6; }\n")
    assert os.system(f"c++ -shared -fPIC {source} -o '{other}'") == 0
    checkout.put("mine.cpp", "int other();\n" + ANSWER.format("return other();"))
    assert checkout.loaded(extra_ldflags=[str(other)]) == 6


@pytest.mark.parametrize("argument", ["extra_cflags", "extra_cuda_cflags", "extra_ldflags"])
@pytest.mark.parametrize("value", ["-I/it's", ["-I/it's"]])
def test_flags_with_an_open_quote_are_named_in_the_error(source, argument, value):
    with pytest.raises(
        ValueError, match=f"`{argument}` as a shell's words, got .*it's.*No closing"
    ):
        calcops_jit.load("mine", source, **{argument: value})


@pytest.mark.parametrize(
    "argument", ["sources", "extra_cflags", "extra_ldflags", "extra_include_paths"]
)
@pytest.mark.parametrize("value", [3, [3], [None]])
def test_an_argument_that_is_neither_string_nor_path_is_refused(source, argument, value):
    options = {"sources": source, argument: value}
    with pytest.raises(TypeError, match=f"expected `{argument}` as strings or paths, got "):
        calcops_jit.load("mine", **options)


@pytest.mark.parametrize(
    "name",
    [
        *("a/b", "", "calcops", "a" * 201, "ä b", None, "aten", "torch", "prim", "load_library"),
        *("class", "is", "True", "__file__", "__init__", "_dir", "_", "_quantized"),
    ],
)
def test_an_invalid_library_name_is_refused(source, name):
    with pytest.raises(ValueError, match="expected `name` "):
        calcops_jit.load(name, source)


def test_an_unknown_option_and_absent_sources_are_refused(source):
    with pytest.raises(TypeError, match="unexpected keyword argument 'extra_cflag'"):
        calcops_jit.load("mine", source, extra_cflag="-O2")
    with pytest.raises(FileNotFoundError, match="nosuch.cpp"):
        calcops_jit.load("mine", [source, "nosuch.cpp"])
    with pytest.raises(ValueError, match="`sources`"):
        calcops_jit.load("mine", [])


@pytest.mark.parametrize(
    "flag, words",
    [
        ("-MF x.d", "cannot determine which files were read for mine"),
        ("-E", "cannot build mine"),
        ("-S", "cannot build mine"),
        ("-fsyntax-only", "cannot build mine"),
        ("-o other.o", "cannot build mine"),
    ],
)
def test_a_flag_that_breaks_a_build_is_an_error_of_the_build(checkout, flag, words):
    checkout.put("mine.cpp", ANSWER.format("return 1;"))
    child = checkout.load(extra_cflags=flag)
    assert child.code == 1
    assert words in child.err
    assert "built mine" not in child.err


def test_a_source_of_another_kind_or_an_empty_folder_or_cuda_that_is_off_is_refused(source):
    for name in "a.txt", "a.cu":
        source.with_name(name).touch()
    with pytest.raises(ValueError, match=r"`sources` that end with \.cpp .*, got .*a\.txt"):
        calcops_jit.load("mine", source.with_name("a.txt"))
    with pytest.raises(ValueError, match="`with_cuda` None, True or 'auto', because .*a.cu is a "):
        calcops_jit.load("mine", source.with_name("a.cu"), with_cuda=False)
    with pytest.raises(ValueError, match="`with_cuda` None, True, False or 'auto', got 'yes'"):
        calcops_jit.load("mine", source, with_cuda="yes")
    (source.parent / "empty").mkdir()
    with pytest.raises(ValueError, match="with at least one file, got none"):
        calcops_jit.load("mine", source.parent / "empty")


def test_a_variable_with_an_open_quote_is_named_in_the_error(checkout):
    child = checkout.run("import calcops_jit", CALCOPS_CFLAGS="-DA='b")
    assert "CALCOPS_CFLAGS" in child.err.splitlines()[-1]
    assert "No closing quotation" in child.err.splitlines()[-1]


# ---- sources and names ---------------------------------------------------------------------------


def test_sources_of_one_base_name_do_not_overwrite_each_others_object(checkout):
    checkout.put("one/same.cpp", "int first() { return 10; }\n")
    checkout.put("two/same.cpp", '#include "two.h"\nint second() { return SECOND; }\n')
    checkout.put("two/two.h", "#define SECOND 20\n")
    functions = "int first(), second();\n"
    checkout.put("mine.cpp", functions + ANSWER.format("return first() + second();"))
    sources = ["mine.cpp", "one/same.cpp", "two/same.cpp"]
    assert checkout.loaded(sources=sources) == 30
    checkout.put("two/two.h", "#define SECOND 21\n")
    assert checkout.loaded(sources=sources) == 31


def test_a_folder_stands_for_the_sources_in_it_and_follows_new_ones(checkout):
    checkout.put("mine/mine.cpp", '#include "part/part.h"\nint answer_of() { return PART; }\n')
    checkout.put("mine/part/part.h", "#define PART 4\n")
    checkout.put("mine/part/part.cpp", "int answer_of();\n" + ANSWER.format("return answer_of();"))
    checkout.put("mine/_left_out/no.cpp", "#error no\n")
    checkout.put("mine/.hidden.cpp", "#error no\n")
    checkout.put("mine/kernel.cu", "#error without CUDA\n")
    options = {"sources": "mine", "with_cuda": "auto", "CALCOPS_CUDA": "0"}
    assert checkout.loaded(**options) == 4
    assert checkout.compiled() == 2
    checkout.put("mine/part/part.h", "#define PART 5\n")
    assert checkout.loaded(**options) == 5
    assert checkout.compiled() == 1
    checkout.put("mine/new/new.cpp", "int added() { return 0; }\n")
    assert checkout.loaded(**options) == 5
    assert [line for line in checkout.commands() if "new.cpp" in line]


def test_a_folder_below_a_hidden_one_deep_folders_and_a_source_named_twice_are_built_once(checkout):
    checkout.put(".hidden/mine/a/b/deep.cpp", ANSWER.format("return 8;"))
    checkout.put(".hidden/mine/_left_out/c/no.cpp", "#error no\n")
    (checkout.project / ".hidden/mine/dangling.cpp").symlink_to("nowhere")
    sources = [".hidden/mine", ".hidden/mine/a", ".hidden/mine/a/b/deep.cpp"]
    assert checkout.loaded(sources=sources) == 8
    assert checkout.compiled() == 1


EMPTIED = """
import os, calcops_jit
library = calcops_jit.load("mine", "mine")
os.unlink("mine/mine.cpp")
print(calcops_jit.reload())
os.rename("other", "mine/new")
print(calcops_jit.reload())
"""


def test_a_folder_without_sources_stays_as_it_is_until_there_are_new_ones(checkout):
    checkout.put("mine/mine.cpp", ANSWER.format("return 1;"))
    checkout.put("other/new.cpp", ANSWER.format("return 2;"))
    child = checkout.run(EMPTIED, cwd=checkout.project, CALCOPS_BUILD="0")
    assert child.out == "[]\n['mine']\n", child.err


MOVED_LINK = """
import ctypes, os, calcops_jit
os.symlink("first", "link")
library = calcops_jit.load("mine", "link")
print(ctypes.CDLL(library.path).answer())
os.unlink("link")
os.symlink("second", "link")
print(calcops_jit.load("mine", "link") is library, ctypes.CDLL(library.path).answer())
"""


def test_a_folder_behind_a_link_that_moves_stays_one_library(checkout):
    for number, name in enumerate(("first", "second")):
        checkout.put(f"{name}/mine.cpp", ANSWER.format(f"return {number};"))
    child = checkout.run(MOVED_LINK, cwd=checkout.project, CALCOPS_BUILD="0")
    assert child.out == "0\nTrue 1\n", child.err


def test_a_native_library_has_the_processor_openmp_and_the_flags_of_the_environment(checkout):
    macros = "#if !defined(_OPENMP) || !defined(FROM_ENVIRONMENT)\n#error no\n#endif\n"
    checkout.put("mine.cpp", macros + ANSWER.format("return FROM_ENVIRONMENT;"))
    for value in 6, 7:
        flags = f"-DFROM_ENVIRONMENT={value}"
        assert checkout.loaded(native=True, CALCOPS_CFLAGS=flags) == value
    assert "=native" in checkout.commands()[0]
    assert "no" in checkout.load(CALCOPS_CFLAGS="-DFROM_ENVIRONMENT=1").err


@pytest.mark.parametrize("name", ["a b é", "a;b^c", "(a),'b", "a$b|c:d"])
def test_a_folder_of_any_name_works(checkout, name):
    checkout.put(f"{name}/value.h", "#define VALUE 1\n")
    source = checkout.put(
        f"{name}/mine.cpp", "#include <value.h>\n" + ANSWER.format("return VALUE;")
    )
    options = {"sources": [str(source)], "extra_include_paths": [str(source.parent)]}
    for value in 1, 2:
        checkout.put(f"{name}/value.h", f"#define VALUE {value}\n")
        assert checkout.loaded(**options) == value


# Makes PyTorch and the loader lie in folders of other names.
MOVED_TORCH = """
import os, torch
from torch.utils import cpp_extension
folder = {folder!r}
os.mkdir(folder)
for name in ("include", "lib"):
    os.symlink(os.path.join(os.path.dirname(torch.__file__), name), os.path.join(folder, name))
torch.__file__ = torch.__spec__.origin = f"{{folder}}/__init__.py"
cpp_extension._TORCH_PATH = folder
cpp_extension.TORCH_LIB_PATH = f"{{folder}}/lib"
"""


def test_pytorch_the_loader_and_the_cache_may_lie_in_folders_of_any_name(tmp_path):
    checkout = Checkout(tmp_path)
    folder = tmp_path / "My Projects (a), 'b"
    folder.mkdir()
    checkout.path = checkout.path.rename(folder / "checkout")
    checkout.cache = folder / "cache"
    source = checkout.put("mine.cpp", ANSWER.format("return 1;"))
    script = MOVED_TORCH.format(folder=str(folder / "torch"))
    script += LOAD.format(options={"sources": [str(source)]})
    child = checkout.run(script, CALCOPS_BUILD="0")
    assert child.code == 0, child.err
    assert child.out == "1\n"
    (library,) = checkout.libraries("mine")
    assert f"{folder}/torch/lib".encode() in library.read_bytes()  # its rpath


def test_ninja_beside_python_is_found_without_path(checkout):
    folder = checkout.put("bin/empty", "").parent
    for tool in ("c++", "sh", "ld", "as", "ar", "sleep", "ld.lld"):
        if shutil.which(tool):
            (folder / tool).symlink_to(shutil.which(tool))
    checkout.put("mine.cpp", ANSWER.format("return 1;"))
    assert checkout.loaded(PATH=folder) == 1


def test_ninja_that_pip_installed_for_the_user_is_found_without_path(tmp_path, monkeypatch):
    """As in a hosted notebook whose Python belongs to the administrator."""
    ninja = tmp_path / "bin" / "ninja"
    ninja.parent.mkdir()
    ninja.write_text("#!/bin/sh\n")
    ninja.chmod(0o755)
    monkeypatch.setattr(sys, "executable", "/nowhere/bin/python")
    monkeypatch.setitem(sysconfig.get_config_vars(), "base", "/nowhere")
    monkeypatch.setitem(sysconfig.get_config_vars(), "userbase", str(tmp_path))
    assert compile.find_ninja(SimpleNamespace(environment={})) == str(ninja)


@pytest.mark.parametrize("path, found", [("bin", "bin"), (":/nowhere", None)])
def test_ninja_on_path_is_absolute_and_not_that_of_the_current_folder(
    tmp_path, monkeypatch, path, found
):
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path / "bin", tmp_path):
        folder.mkdir(exist_ok=True)
        (folder / "ninja").write_text("#!/bin/sh\n")
        (folder / "ninja").chmod(0o755)
    ninja = Path(compile.find_ninja(SimpleNamespace(environment={"PATH": path})))
    assert ninja.is_absolute()
    assert ninja.parent == tmp_path / found if found else ninja.parent != tmp_path


# ---- compilers and linkers -----------------------------------------------------------------------


def test_a_symbol_of_two_archives_is_taken_from_the_one_that_the_plain_compiler_takes(checkout):
    """The archive `caller` needs value(). GNU ld takes it from the archive after `caller`, and lld
    from the first archive that has it."""
    parts = {
        "other": "int value() { return 1; } int other() { return value(); }",
        "late": "int value() { return 2; }",
        "caller": "int value(); int call() { return value(); }",
    }
    for name, text in parts.items():
        part = checkout.put(f"parts/{name}.cpp", text)
        assert os.system(f"c++ -fPIC -c {part} -o {part}.o") == 0
        assert os.system(f"ar rc {checkout.project}/lib{name}.a {part}.o") == 0
    source = checkout.put("mine.cpp", "int call();\n" + ANSWER.format("return call();"))
    flags = [f"{checkout.project}/lib{name}.a" for name in ("other", "caller", "late")]
    plain = f"c++ -shared -fPIC {source} {' '.join(flags)} -o {checkout.project}/plain.so"
    assert os.system(plain) == 0
    expected = ctypes.CDLL(f"{checkout.project}/plain.so").answer()
    assert checkout.loaded(extra_ldflags=flags) == expected
    libraries = [f"-L{checkout.project}", *(f"-l{name}" for name in ("other", "caller", "late"))]
    assert checkout.loaded(extra_ldflags=libraries) == expected


def test_objects_for_link_time_optimisation_are_not_linked_empty(checkout):
    checkout.put("mine.cpp", ANSWER.format("return 7;"))
    assert checkout.loaded(extra_cflags=["-flto"]) == 7


def test_a_header_is_an_input_despite_a_variable_for_dependency_files(checkout):
    checkout.put("mine.cpp", "#include <value.h>\n" + ANSWER.format("return VALUE;"))
    variable = f"{checkout.project}/dependencies mine.o"
    for value in 5, 6:
        checkout.put("include/value.h", f"#define VALUE {value}\n")
        options = {"extra_cflags": ["-isystem", f"{checkout.project}/include"]}
        assert checkout.loaded(**options, DEPENDENCIES_OUTPUT=variable) == value


def test_a_header_is_an_input_despite_rules_for_phony_targets(checkout):
    checkout.put("mine.cpp", '#include "value.h"\n' + ANSWER.format("return VALUE;"))
    for value in 5, 6:
        checkout.put("value.h", f"#define VALUE {value}\n")
        assert checkout.loaded(extra_cflags=["-MP"]) == value


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_the_header_of_contracts_compiles_with_strict_warnings(tmp_path, compiler):
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} here")
    source = tmp_path / "mine.cpp"
    source.write_text(CONTRACT.format(name="twice", factor=2))
    flags = "-Werror -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wsign-conversion"
    command = f"{compiler} -std=c++20 {flags} -fsyntax-only -I{request.HEADERS[1]} {source}"
    assert os.system(command) == 0


def test_verbose_prints_the_commands(checkout):
    checkout.put("mine.cpp", "// printed\n" + ANSWER.format("return 1;"))
    child = checkout.load(verbose=True)
    assert re.search(r"-c \S*mine\.cpp", child.out + child.err)
    assert Path(checkout.libraries("mine")[0]).exists()


@pytest.mark.parametrize("total, heap", [("24000000", 1048576), ("2000000", 400000)])
def test_gcc_saves_memory_on_a_machine_that_has_little(checkout, total, heap):
    meminfo = with_file("/proc/meminfo", f"MemTotal: {total} kB\nMemAvailable: {total} kB\n")
    checkout.put("mine.cpp", ANSWER.format(f"return {total};"))
    script = meminfo + LOAD.format(options={})
    assert checkout.run(script, cwd=checkout.project, CALCOPS_BUILD="0").out == f"{total}\n"
    assert f"ggc-min-heapsize={heap}" in checkout.commands()[0]
