"""Files in unusual places, other copies of the loader and a moved cache leave no library stale."""

import os
import shutil
import threading

import pytest
from checkout import ANSWER, compiler

from _calcops_jit import inputs


@pytest.mark.parametrize("folder", ["x86_64-linux-gnu/include", "lib/gcc/include"])
def test_a_project_folder_named_like_one_of_the_compiler_is_an_input(checkout, folder):
    """The project has a script that runs the compiler, too."""
    script = checkout.put("bin/c++", f'#!/bin/sh\nexec {compiler()} "$@"\n')
    script.chmod(0o755)
    checkout.put("src/mine.cpp", "#include <value.h>\n" + ANSWER.format("return VALUE;"))
    options = {"sources": ["src/mine.cpp"], "extra_include_paths": [folder], "CXX": script}
    for value in 1, 2:
        checkout.put(f"{folder}/value.h", f"#define VALUE {value}\n")
        assert checkout.loaded(**options) == value


def test_a_header_whose_path_ninja_cannot_read_is_an_input(checkout):
    checkout.put("mine.cpp", "#include <value.h>\n" + ANSWER.format("return VALUE;"))
    for value in 1, 2:
        checkout.put("a&b#c d/value.h", f"#define VALUE {value}\n")
        assert checkout.loaded(extra_include_paths=["a&b#c d"]) == value


def test_a_header_in_place_of_a_folder_of_its_name_is_an_input(checkout):
    checkout.put("mine.cpp", "#include <value.h>\n" + ANSWER.format("return VALUE;"))
    checkout.put("late/value.h", "#define VALUE 1\n")
    folder = checkout.project / "early/value.h"
    folder.mkdir(parents=True)
    options = {"extra_include_paths": ["early", "late"]}
    assert [checkout.loaded(**options), checkout.loaded(**options)] == [1, 1]
    assert checkout.compiled() == 1
    folder.rmdir()
    checkout.put("early/value.h", "#define VALUE 2\n")
    assert checkout.loaded(**options) == 2


def test_a_header_behind_a_link_and_two_points_is_an_input(checkout):
    """ninja removes `link/..` from the path, which then names no file."""
    checkout.put("mine.cpp", '#include "link/../value.h"\n' + ANSWER.format("return VALUE;"))
    checkout.put("real/inner/other.h", "")
    (checkout.project / "link").symlink_to("real/inner")
    for value in 1, 2:
        checkout.put("real/value.h", f"#define VALUE {value}\n")
        assert checkout.loaded() == value


def test_a_folder_that_appears_changes_a_header_above_it(checkout):
    checkout.put("mine.cpp", "#include <../base/value.h>\n" + ANSWER.format("return VALUE;"))
    checkout.put("late/base/value.h", "#define VALUE 1\n")
    checkout.put("late/folder/other.h", "")
    checkout.put("base/value.h", "#define VALUE 2\n")
    options = {"extra_include_paths": ["early", "late/folder"]}
    assert checkout.loaded(**options) == 1
    (checkout.project / "early").mkdir()
    assert checkout.loaded(**options) == 2


@pytest.mark.parametrize("other", ["", '#include "tested.h"\n'])
def test_a_header_that_is_tested_and_goes_changes_each_source(checkout, other):
    test = '#if __has_include("tested.h")\n#define VALUE 1\n#else\n#define VALUE 2\n#endif\n'
    checkout.put("mine.cpp", test + ANSWER.format("return VALUE;"))
    checkout.put(
        "other.cpp", test.replace("#define VALUE 1", other) + "int other() { return 1; }\n"
    )
    header = checkout.put("tested.h", "")
    options = {"sources": ["mine.cpp", "other.cpp"]}
    assert checkout.loaded(**options) == 1
    header.unlink()
    assert checkout.loaded(**options) == 2


def test_a_header_that_appears_in_a_folder_of_a_response_file_is_an_input(checkout):
    checkout.put("mine.cpp", "#include <value.h>\n" + ANSWER.format("return VALUE;"))
    checkout.put("early/other.h", "")
    checkout.put("late/value.h", "#define VALUE 1\n")
    flags = checkout.put("flags", "-Iearly -Ilate\n".replace("-I", f"-I{checkout.project}/"))
    assert checkout.loaded(extra_cflags=[f"@{flags}"]) == 1
    checkout.put("early/value.h", "#define VALUE 2\n")
    assert checkout.loaded(extra_cflags=[f"@{flags}"]) == 2


@pytest.mark.parametrize("linker", ["bfd", "gold", "lld", "mold"])
@pytest.mark.parametrize("name", ["a folder", "C# $ b"])
def test_a_rebuilt_archive_in_a_folder_of_any_name_is_linked_by_any_linker(checkout, linker, name):
    if not shutil.which(f"ld.{linker}"):
        pytest.skip(f"no ld.{linker}")
    checkout.put("mine.cpp", "int value();\n" + ANSWER.format("return value();"))
    flags = f"-L'{checkout.project}/{name}' -lvalue -fuse-ld={linker}"
    for value in 1, 2:
        checkout.archive(value, f"{name}/libvalue.a")
        assert checkout.loaded(extra_ldflags=flags) == value


@pytest.mark.parametrize("way", ["-L", "-L in two words", "-Wl,-L", "LIBRARY_PATH"])
def test_a_library_that_the_linker_prefers_is_linked_when_it_appears(checkout, way):
    """A shared library is preferred to an archive beside it, and an earlier folder to a later one."""
    checkout.put("mine.cpp", "int value();\n" + ANSWER.format("return value();"))
    early, late = (str(checkout.project / folder) for folder in ("early", "late"))
    options = {"extra_ldflags": ["-lvalue"], "LIBRARY_PATH": f"{early}:{late}"}
    if way != "LIBRARY_PATH":
        word = way.partition(" ")[0]
        separator = "," if word.startswith("-Wl") else " " if " " in way else ""
        flags = [f"{word}{separator}{folder}" for folder in (early, late)]
        options = {"extra_ldflags": [*flags, "-lvalue"]}
    checkout.archive(1, "late/libvalue.a")
    assert checkout.loaded(**options) == 1
    source = checkout.put("value.cpp", "int value() { return 2; }\n")
    library = f"{late}/libvalue.so"
    os.system(f"c++ -shared -fPIC {source} -o {library} -Wl,-soname,{library}")
    assert checkout.loaded(**options) == 2
    checkout.archive(3, "early/libvalue.a")
    assert checkout.loaded(**options) == 3
    checkout.compiled()
    assert checkout.loaded(**options) == 3
    assert checkout.compiled() == 0


def test_an_edit_under_another_copy_of_the_loader_is_seen_after_a_build_with_the_first(checkout):
    checkout.put("mine.cpp", "#include <value.h>\n" + ANSWER.format("return VALUE;"))
    checkout.put("other.cpp", "int other() { return 1; }\n")
    checkout.write("_calcops_jit/shadow/value.h", "#define VALUE 1\n")
    options = {"sources": ["mine.cpp", "other.cpp"]}
    assert checkout.loaded(**options) == 1
    checkout.path = shutil.copytree(checkout.path, checkout.path.with_name("another checkout"))
    # The object of mine.cpp is compiled again, to the same bytes.
    checkout.put("other.cpp", "int other() { return 2; }\n")
    assert checkout.loaded(**options) == 1
    checkout.write("_calcops_jit/shadow/value.h", "#define VALUE 2\n")
    assert checkout.loaded(**options) == 2


def test_a_copied_cache_follows_an_edit_of_two_sources_with_one_base_name(checkout):
    checkout.put("mine.cpp", ANSWER.format("return 1;"))
    checkout.put("folder/mine.cpp", "int other() { return 1; }\n")
    options = {"sources": ["mine.cpp", "folder/mine.cpp"]}
    assert checkout.loaded(**options) == 1
    checkout.cache = checkout.cache.rename(checkout.cache.with_name("moved cache"))
    checkout.put("mine.cpp", ANSWER.format("return 2;"))
    assert checkout.loaded(**options) == 2


@pytest.mark.parametrize(
    "name",
    [".hidden.cpp", "link.cpp", "library.cpp", "new.cpp", "mine.o.cpp", "-dash.cpp", "a b.cpp"],
)
def test_a_source_of_any_name_follows_its_header_and_is_not_compiled_without_an_edit(
    checkout, name
):
    checkout.put(name, '#include "value.h"\n' + ANSWER.format("return VALUE;"))
    checkout.put("other.cpp", "int other() { return 1; }\n")
    options = {"sources": [name, "other.cpp"]}
    for value in 1, 2:
        checkout.put("value.h", f"#define VALUE {value}\n")
        assert checkout.loaded(**options) == value
    checkout.compiled()
    checkout.put("other.cpp", "int other() { return 2; }\n")
    assert checkout.loaded(**options) == 2
    assert checkout.compiled() == 1


@pytest.mark.parametrize("first", ["x.3.cpp", "other.cpp"])
def test_of_sources_with_one_base_name_only_the_edited_one_is_compiled(checkout, first):
    """The object of autograd/x.cpp would be x.3.o, because it is the source with index 3."""
    names = [first, "cpu/x.cpp", "autograd/x.cpp"]
    for i, name in enumerate(names):
        checkout.put(name, f"int f{i}() {{ return {i}; }}\n")
    checkout.put("mine.cpp", "int f0(), f1(), f2();" + ANSWER.format("return f0() + f1() + f2();"))
    assert checkout.loaded(sources=["mine.cpp", *names]) == 3
    checkout.compiled()
    checkout.put("cpu/x.cpp", "int f1() { return 5; }\n")
    assert checkout.loaded(sources=["mine.cpp", *names]) == 7
    (command,) = checkout.commands()
    assert "/cpu/x.cpp" in command


def test_the_flags_of_the_runtime_are_an_input_of_each_library(checkout):
    checkout.put("mine.cpp", "")
    script = "from _calcops_jit.request import request_for; print(request_for('mine', {!r}).entry)"
    script = script.format(f"{checkout.project}/mine.cpp")
    before = checkout.run(script).out
    text = (checkout.path / "_calcops_jit/request.py").read_text()
    checkout.write("_calcops_jit/request.py", text.replace('"-O1"', '"-O2"'))
    assert checkout.run(script).out not in ("", before)


def test_a_flag_with_the_folder_of_the_sources_is_of_that_folder(checkout):
    text = "#include <string.h>\n" + ANSWER.format('return strstr(DATA, "second") ? 2 : 1;')
    for name, answer in (("first", 1), ("second", 2)):
        source = checkout.put(f"{name}/mine.cpp", text)
        flags = [f'-DDATA=\\"{source.parent}/data\\"']
        assert checkout.loaded(sources=[str(source)], extra_cflags=flags) == answer


@pytest.mark.parametrize("flag", ["-DLOG=", "-D LOG="])
def test_a_file_whose_path_is_only_a_macro_is_no_input(checkout, flag):
    checkout.put("mine.cpp", ANSWER.format("return 1;"))
    flags = [f"{flag}{checkout.project}/run.log"]
    for text in "one line\n", "two lines\n":
        checkout.put("run.log", text)
        assert checkout.loaded(extra_cflags=flags) == 1
    assert checkout.compiled() == 1


@pytest.mark.parametrize("way", ["-include", "#include"])
def test_a_header_in_a_precompiled_header_of_gcc_is_an_input(checkout, way):
    """GCC does not list it. Clang does, and refuses an outdated precompiled header."""
    if not shutil.which("g++"):
        pytest.skip("no g++")
    include = '#include "first.h"\n' if way == "#include" else ""
    checkout.put("mine.cpp", include + ANSWER.format("return VALUE;"))
    first = checkout.put("first.h", '#include "value.h"\n')
    checkout.put("value.h", "#define VALUE 1\n")
    # GCC takes a precompiled header only if it has the options of the source.
    words = "-O3 -fvisibility=hidden -fno-gnu-unique -fPIC -std=c++20 -x c++-header"
    assert os.system(f"g++ {words} {first} -o {first}.gch") == 0
    flags = ["-include", str(first)] if way == "-include" else []
    options = {"extra_cflags": flags, "CXX": compiler("g++")}
    assert checkout.loaded(**options) == 1
    checkout.put("value.h", "#define VALUE 2\n")
    assert checkout.loaded(**options) == 2


def test_a_header_of_a_default_folder_can_be_hidden_by_one_of_the_project():
    headers = {"/usr/local/include/mylib/api.h", "/usr/include/other/api.h"}
    assert {"mylib/api.h", "other/api.h"} <= inputs._names(headers, {"/project/include"})


PATHS = {
    "__FILE__": "__FILE__",
    "source_location": "std::source_location::current().file_name()",
    "a macro of a header elsewhere": "WHERE",
    # The path is not in the library.
    "a constant": '[]() consteval { return std::string_view(WHERE).find("second") + 1; }()'
    ' ? "second" : "first"',
}


@pytest.mark.parametrize("path", PATHS)
def test_a_copy_of_sources_that_name_their_path_is_built_once_and_names_its_own(checkout, path):
    checkout.put("common/where.h", "#include <source_location>\n#define WHERE __FILE__\n")
    text = "#include <string.h>\n#include <string_view>\n#include <where.h>\n"
    text += f"const char* volatile path = {PATHS[path]};\n"
    text += ANSWER.format('return strstr(path, "second") ? 2 : 1;')
    options = {"extra_include_paths": ["common"], "extra_cflags": ["-std=c++20"]}
    for _ in range(2):
        for name, answer in (("first", 1), ("second", 2)):
            checkout.put(f"{name}/mine.cpp", text)
            assert checkout.loaded(sources=[f"{name}/mine.cpp"], **options) == answer
    assert checkout.compiled() == 2


def test_a_copy_of_sources_that_name_no_path_uses_the_same_library(checkout):
    for name in "first", "second":
        checkout.put(f"{name}/mine.cpp", ANSWER.format("return 1;"))
        assert checkout.loaded(sources=[f"{name}/mine.cpp"]) == 1
    assert checkout.compiled() == 1


def test_an_edit_of_the_runtime_reaches_the_libraries_that_are_linked_with_it(checkout):
    text = "#include <calcops/operator.h>\nint of_runtime();\n"
    checkout.put("mine.cpp", text + ANSWER.format("return of_runtime();"))
    for value in 1, 2:
        runtime = f"int of_runtime() {{ return {value}; }}\n"
        checkout.write("contracts/runtime/runtime.cpp", runtime)
        assert checkout.loaded() == value


def test_the_progress_of_a_folder_with_pipes_in_place_of_files_waits_for_nothing(tmp_path):
    from _calcops_jit import build

    for name in "build.ninja", ".unfinished":
        os.mkfifo(tmp_path / name)
    lines = []
    thread = threading.Thread(target=lambda: lines.append(build.progress(tmp_path)), daemon=True)
    thread.start()
    thread.join(10)
    assert lines == ["[0/?]"]
