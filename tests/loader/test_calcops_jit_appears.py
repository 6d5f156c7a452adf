"""A file that appears and would be linked, included or run instead of another causes a rebuild."""

import os

import pytest
from test_calcops_jit_inputs import ANSWER, Folder

from _calcops_jit.request import Request


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


CALLS_VALUE = "int value();\n" + ANSWER.format("return value();")
INCLUDES_VALUE = "#include <value.h>\n" + ANSWER.format("return VALUE;")

# ---- libraries and archives ----------------------------------------------------------------------

# Options and variables with which a build searches the folder `early` before the folder `late`.
EARLIER = {
    "-L": lambda dir: {"extra_ldflags": [f"-L{dir}/early", f"-L{dir}/late", "-lvalue"]},
    "-L in two words": lambda dir: {
        "extra_ldflags": ["-L", f"{dir}/early", "-L", f"{dir}/late", "-lvalue"]
    },
    "LIBRARY_PATH": lambda dir: {
        "extra_ldflags": ["-lvalue"],
        "LIBRARY_PATH": f"{dir}/early:{dir}/late",
    },
    "a file's name": lambda dir: {
        "extra_ldflags": [f"-L{dir}/early", f"-L{dir}/late", "-l:libvalue.a"]
    },
    "-l in two words": lambda dir: {"extra_ldflags": [f"-L{dir}/early -L{dir}/late -l value"]},
    "-Wl": lambda dir: {"extra_ldflags": [f"-Wl,-L,{dir}/early,-L{dir}/late,-lvalue"]},
    "-Xlinker": lambda dir: {
        "extra_ldflags": [f"-Xlinker -L{dir}/early -Xlinker -L{dir}/late -Xlinker -lvalue"]
    },
    "long options": lambda dir: {
        "extra_ldflags": [
            f"-Wl,--library-path={dir}/early,--library-path,{dir}/late,--library=value"
        ]
    },
    "the compiler's command": lambda dir: {
        "CXX": f"g++ -L{dir}/early",
        "extra_ldflags": [f"-L{dir}/late", "-lvalue"],
    },
    "-B": lambda dir: {
        "extra_ldflags": [f"-B{dir}/early", "-lvalue"],
        "LIBRARY_PATH": f"{dir}/late",
    },
    "a response file": lambda dir: {"extra_ldflags": [f"@{dir}/link"]},
    "the linker's response file": lambda dir: {"extra_ldflags": [f"-Wl,@{dir}/link"]},
    "a linker script": lambda dir: {
        "extra_ldflags": [f"-L{dir}/early", f"-L{dir}/late", f"{dir}/script"]
    },
    "SEARCH_DIR of a linker script": lambda dir: {"extra_ldflags": [f"-fuse-ld=bfd {dir}/folders"]},
}
EARLY_STATES = ["no folder", "a folder of that name", "a dangling link"]


@pytest.mark.parametrize(
    "searched, early",
    [*((name, "empty") for name in EARLIER), *(("-L", state) for state in EARLY_STATES)],
)
def test_an_archive_that_appears_in_an_earlier_search_folder_is_linked(folder, searched, early):
    folder.put("mine.cpp", CALLS_VALUE)
    folder.put("link", f"-L{folder.project}/early -L{folder.project}/late -lvalue\n")
    folder.put("script", "INPUT(-lvalue)\n")
    directories = f"SEARCH_DIR({folder.project}/early) SEARCH_DIR({folder.project}/late)"
    folder.put("folders", f"{directories} INPUT(-lvalue)\n")
    folder.archive(1, "late/libvalue.a")
    path = folder.project / "early/libvalue.a"
    if early != "no folder":
        path.parent.mkdir()
    if early == "a folder of that name":
        path.mkdir()
    if early == "a dangling link":
        path.symlink_to("elsewhere.a")
    options = EARLIER[searched](folder.project)
    assert folder.loaded(**options) == 1
    folder.compiled()
    assert folder.loaded(**options) == 1
    assert folder.compiled() == 0
    if early == "a folder of that name":
        path.rmdir()
    folder.archive(2, "early/elsewhere.a" if path.is_symlink() else "early/libvalue.a")
    assert folder.loaded(**options) == 2


def test_a_shared_library_that_appears_beside_an_archive_is_linked(folder):
    folder.put("mine.cpp", CALLS_VALUE)
    folder.archive(1)
    options = {"extra_ldflags": [f"-L{folder.project}", "-lvalue", f"-Wl,-rpath,{folder.project}"]}
    assert folder.loaded(**options) == 1
    source = folder.put("shared.cpp", "int value() { return 2; }\n")
    assert os.system(f"c++ -fPIC -shared {source} -o {folder.project}/libvalue.so") == 0
    assert folder.loaded(**options) == 2


THIN = {
    "an object": "ar rcT libthin.a inner/value.cpp.o",
    "an archive": "ar rc inner/libvalue.a inner/value.cpp.o && ar rcT libthin.a inner/libvalue.a",
    "a thin archive": (
        "cd inner && ar rcT libvalue.a value.cpp.o && cd .. && ar rcT libthin.a inner/libvalue.a"
    ),
}


@pytest.mark.parametrize("member", THIN)
def test_the_members_of_a_thin_archive_are_inputs(folder, member):
    folder.put("mine.cpp", CALLS_VALUE)

    def compile_value(value):
        source = folder.put("inner/value.cpp", f"int value() {{ return {value}; }}\n")
        assert os.system(f"c++ -fPIC -c {source} -o {source}.o") == 0

    compile_value(1)
    assert os.system(f"cd {folder.project} && {THIN[member]}") == 0
    options = {"extra_ldflags": [f"{folder.project}/libthin.a"]}
    assert folder.loaded(**options) == 1
    compile_value(2)
    if member == "an archive":
        assert os.system(f"cd {folder.project} && ar rc inner/libvalue.a inner/value.cpp.o") == 0
    assert folder.loaded(**options) == 2


@pytest.mark.parametrize("flags", ["-I{}/early -I{}/late", "-Wa,-I{}/early,-I,{}/late"])
def test_an_assembler_include_that_appears_in_an_earlier_folder_is_used(folder, flags):
    text = 'asm(".include \\"value.s\\"");\nextern "C" const char value;\n'
    folder.put("mine.cpp", text + ANSWER.format("return value;"))
    (folder.project / "early").mkdir()
    options = {"extra_cflags": [flags.format(folder.project, folder.project)]}
    for value, name in (1, "late"), (2, "early"):
        folder.put(f"{name}/value.s", f".section .rodata\nvalue: .byte {value}\n.previous\n")
        assert folder.loaded(**options) == value


# ---- headers -------------------------------------------------------------------------------------

SEARCHED = {
    "include_paths": lambda dir: {"extra_include_paths": [f"{dir}/early", f"{dir}/late"]},
    "-I": lambda dir: {"extra_cflags": [f"-I{dir}/early", f"-I{dir}/late"]},
    "-I in two words": lambda dir: {"extra_cflags": ["-I", f"{dir}/early", "-I", f"{dir}/late"]},
    "-isystem": lambda dir: {
        "extra_cflags": ["-isystem", f"{dir}/early", "-isystem", f"{dir}/late"]
    },
    "-isystem in one word": lambda dir: {
        "extra_cflags": [f"-isystem{dir}/early", f"-isystem{dir}/late"]
    },
    "-idirafter": lambda dir: {"extra_cflags": [f"-idirafter{dir}/early", f"-idirafter{dir}/late"]},
    "-I before -isystem": lambda dir: {
        "extra_cflags": ["-isystem", f"{dir}/late", f"-I{dir}/early"]
    },
    "CPATH": lambda dir: {"CPATH": f"{dir}/early:{dir}/late"},
    "-I before CPATH": lambda dir: {"extra_cflags": [f"-I{dir}/early"], "CPATH": f"{dir}/late"},
    "a response file": lambda dir: {"extra_cflags": [f"@{dir}/flags"]},
}


@pytest.mark.parametrize(
    "early", ["empty", "no folder", "with a folder of the header's", "with another header"]
)
@pytest.mark.parametrize("searched", SEARCHED)
def test_a_header_that_appears_in_an_earlier_search_folder_is_used(folder, searched, early):
    header = "inner/value.h" if early.startswith("with a folder") else "value.h"
    folder.put("mine.cpp", f"#include <{header}>\n" + ANSWER.format("return VALUE;"))
    folder.put(f"late/{header}", "#define VALUE 1\n")
    folder.put("flags", f"-I{folder.project}/early -I{folder.project}/late\n")
    if early != "no folder":
        (folder.project / "early").mkdir()
    if early.startswith("with a folder"):
        (folder.project / "early/inner").mkdir()
    if early == "with another header":
        folder.put("early/other.h", "")
    options = SEARCHED[searched](folder.project)
    assert folder.loaded(**options) == 1
    folder.compiled()
    assert folder.loaded(**options) == 1
    assert folder.compiled() == 0
    folder.put(f"early/{header}", "#define VALUE 2\n")
    assert folder.loaded(**options) == 2
    (folder.project / "early" / header).unlink()
    assert folder.loaded(**options) == 1


def test_a_header_that_appears_at_the_target_of_a_dangling_link_is_used(folder):
    folder.put("mine.cpp", INCLUDES_VALUE)
    folder.put("late/value.h", "#define VALUE 1\n")
    (folder.project / "first").symlink_to("nowhere")
    (folder.project / "second").mkdir()
    (folder.project / "second/value.h").symlink_to("../elsewhere.h")
    flags = [f"-I{folder.project}/{name}" for name in ("first", "second", "late")]
    options = {"extra_cflags": flags}
    assert folder.loaded(**options) == 1
    folder.put("elsewhere.h", "#define VALUE 2\n")
    assert folder.loaded(**options) == 2
    folder.put("nowhere/value.h", "#define VALUE 3\n")
    assert folder.loaded(**options) == 3


@pytest.mark.parametrize("header", ["value.h", "inner/value.h"])
def test_a_folder_replaced_by_a_header_and_back_causes_rebuilds(folder, header):
    folder.put("mine.cpp", f"#include <{header}>\n" + ANSWER.format("return VALUE;"))
    folder.put(f"late/{header}", "#define VALUE 1\n")
    path = folder.project / "early" / header
    if header == "value.h":
        path.mkdir(parents=True)
    else:
        folder.put("early/inner", "")
    options = {"extra_cflags": [f"-I{folder.project}/early", f"-I{folder.project}/late"]}
    assert folder.loaded(**options) == 1
    if path.is_dir():
        path.rmdir()
    else:
        path.parent.unlink()
    folder.put(f"early/{header}", "#define VALUE 2\n")
    assert folder.loaded(**options) == 2
    path.unlink()
    path.mkdir()
    assert folder.loaded(**options) == 1


@pytest.mark.parametrize(
    "include", ["#include <../b/value.h>", "#define NAME <../b/value.h>\n#include NAME"]
)
def test_a_header_that_appears_beside_an_earlier_search_folder_is_used(folder, include):
    folder.put("mine.cpp", f"{include}\n" + ANSWER.format("return VALUE;"))
    folder.put("late/b/value.h", "#define VALUE 1\n")
    (folder.project / "late/a").mkdir()
    (folder.project / "early/a").mkdir(parents=True)
    options = {"extra_cflags": [f"-I{folder.project}/early/a", f"-I{folder.project}/late/a"]}
    assert folder.loaded(**options) == 1
    folder.put("early/b/value.h", "#define VALUE 2\n")
    assert folder.loaded(**options) == 2


def test_a_link_to_a_search_folder_that_becomes_a_folder_causes_a_rebuild(folder):
    """A compiler ignores -I for a folder that -isystem names, too."""
    folder.put("mine.cpp", INCLUDES_VALUE)
    folder.put("one/value.h", "#define VALUE 1\n")
    folder.put("two/value.h", "#define VALUE 2\n")
    (folder.project / "link").symlink_to("one")
    dir = folder.project
    options = {"extra_cflags": [f"-I{dir}/one", f"-I{dir}/two", f"-isystem{dir}/link"]}
    assert folder.loaded(**options) == 2
    (folder.project / "link").unlink()
    (folder.project / "link").mkdir()
    assert folder.loaded(**options) == 1


PROBES = {
    "a name": "#if __has_include(<maybe.h>)\n",
    "a comment": "#if __has_include( /* why */ <maybe.h>)\n",
    "two lines": "#if __has_include(\\\n<may\\\nbe.h>)\n",
    "a macro with the call": "#define HAS __has_include(<maybe.h>)\n#if HAS\n",
    "a macro with the name": (
        "#define NAME <maybe.h>\n#if defined(__has_include) && __has_include(NAME)\n"
    ),
    "a macro with a folder": "#define NAME <inner/maybe.h>\n#if __has_include(NAME)\n",
}


@pytest.mark.parametrize("probe", PROBES)
def test_a_header_tested_by_has_include_causes_a_rebuild_when_it_appears_or_goes(folder, probe):
    text = PROBES[probe] + "#define VALUE 2\n#else\n#define VALUE 1\n#endif\n"
    folder.put("mine.cpp", text + ANSWER.format("return VALUE;"))
    header = folder.put("late/inner/maybe.h" if "folder" in probe else "late/maybe.h", "")
    options = {"extra_include_paths": [f"{folder.project}/late"]}
    assert folder.loaded(**options) == 2
    header.unlink()
    assert folder.loaded(**options) == 1
    folder.compiled()
    assert folder.loaded(**options) == 1
    assert folder.compiled() == 0
    header.touch()
    assert folder.loaded(**options) == 2


NESTED_PROBES = {
    "a macro with two folders": ("#define NAME <in/side/maybe.h>\n", []),
    "a macro of a flag with two folders": ("", ["'-DNAME=<in/side/maybe.h>'"]),
    "an absolute path": ('#define NAME "{dir}/late/in/side/maybe.h"\n', []),
}


@pytest.mark.parametrize("probe", NESTED_PROBES)
def test_a_nested_header_tested_by_has_include_causes_a_rebuild_when_it_appears(folder, probe):
    text, flags = NESTED_PROBES[probe]
    text = text.replace("{dir}", str(folder.project))
    text += "#if __has_include(NAME)\n#define VALUE 2\n#else\n#define VALUE 1\n#endif\n"
    folder.put("mine.cpp", text + ANSWER.format("return VALUE;"))
    (folder.project / "late/in/side").mkdir(parents=True)
    options = {"extra_cflags": [f"-I{folder.project}/late", *flags]}
    assert folder.loaded(**options) == 1
    folder.put("late/in/side/maybe.h", "")
    assert folder.loaded(**options) == 2


# ---- the compiler's command ----------------------------------------------------------------------

COMMANDS = {
    "a macro in two words": ("g++ -D VALUE=1", "g++ -D VALUE=2"),
    "a macro in one word": ("g++ -DVALUE=1", "g++ -DVALUE=2"),
    "a folder in two words": ("g++ -I {dir}/one", "g++ -I {dir}/two"),
    "a folder in a variable": ("env CPATH={dir}/one g++", "env CPATH={dir}/two g++"),
    "a response file": ("g++ @{dir}/one/flags", "g++ @{dir}/two/flags"),
    "an included file": ("g++ -include {dir}/one/value.h", "g++ -include {dir}/two/value.h"),
}


def write_values(folder):
    """Write a source that returns VALUE. VALUE is 1 with the files of `one`, and 2 with `two`."""
    source = "#ifndef VALUE\n#include <value.h>\n#endif\n" + ANSWER.format("return VALUE;")
    folder.put("mine.cpp", source)
    for value, name in (1, "one"), (2, "two"):
        folder.put(f"{name}/value.h", f"#define VALUE {value}\n")
        folder.put(f"{name}/flags", f"-DVALUE={value}\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_word_of_the_compiler_command_is_an_input(folder, command):
    write_values(folder)
    first, second = (words.format(dir=folder.project) for words in COMMANDS[command])
    assert [folder.loaded(CXX=words) for words in (first, second, first)] == [1, 2, 1]
    assert folder.compiled() == 0  # these commands do not use the compiler that writes a log


@pytest.mark.parametrize(
    "command, file",
    [
        ("g++ -I {dir}/one", "value.h"),
        ("env CPATH={dir}/one g++", "value.h"),
        ("g++ @{dir}/one/flags", "flags"),
    ],
)
def test_a_file_read_because_of_the_compiler_command_is_an_input(folder, command, file):
    write_values(folder)
    command = command.format(dir=folder.project)
    assert folder.loaded(CXX=command) == 1
    path = folder.project / "one" / file
    path.write_text(path.read_text().replace("1", "3"))
    assert folder.loaded(CXX=command) == 3


ASSEMBLER = """#!/bin/sh
for word; do case "$word" in *.s) sed -i 's/movl\t$1, %eax/movl\t$VALUE, %eax/' "$word";; esac; done
exec /usr/bin/as "$@"
"""
ASSEMBLERS = {
    "PATH": lambda dir: {"PATH": f"{dir}/bin:{os.environ['PATH']}"},
    "COMPILER_PATH": lambda dir: {"COMPILER_PATH": f"{dir}/bin"},
    "-B": lambda dir: {"extra_cflags": [f"-B{dir}/bin"]},
    "-B in two words": lambda dir: {"extra_cflags": [f"-B {dir}/bin"]},
}


@pytest.mark.parametrize("searched", ASSEMBLERS)
def test_an_assembler_that_appears_or_changes_is_used(folder, searched):
    """The new assembler replaces each 1 that a function returns by another number."""
    folder.put("mine.cpp", ANSWER.format("return 1;"))
    (folder.project / "bin").mkdir()
    options = ASSEMBLERS[searched](folder.project)
    assert folder.loaded(**options) == 1
    for value in ("2", "3"):
        folder.put("bin/as", ASSEMBLER.replace("VALUE", value)).chmod(0o755)
        assert folder.loaded(**options) == int(value)


@pytest.mark.parametrize(
    "options",
    [{"CXX": "g++ -march=native"}, {"CXX": "g++ @{dir}/flags"}, {"cflags": ("@{dir}/flags",)}],
)
def test_march_native_anywhere_puts_the_processor_into_the_key(folder, monkeypatch, options):
    folder.put("flags", "-march=native\n")
    monkeypatch.setenv("CXX", options.get("CXX", "g++").format(dir=folder.project))
    flags = tuple(flag.format(dir=folder.project) for flag in options.get("cflags", ()))
    request = Request(
        name="mine", root=str(folder.project), sources=(f"{folder.project}/mine.cpp",), cflags=flags
    )
    assert request.facts["CPU instruction set"]


@pytest.mark.parametrize("environment", [{"PATH": "/nowhere"}, {"CXX": "g++-99"}], ids=str)
def test_without_a_compiler_an_edited_header_is_an_error(folder, tmp_path, environment):
    header = tmp_path / "elsewhere" / "value.h"
    header.parent.mkdir()
    header.write_text("#define VALUE 1\n")
    folder.put("mine.cpp", INCLUDES_VALUE)
    options = {"extra_include_paths": [str(header.parent)], "CXX": "c++"}
    assert folder.loaded(**options) == 1
    child = folder.load(**options | environment)
    assert child.out == "1\n"
    assert ("CXX=g++-99 is no compiler here" in child.err) == ("CXX" in environment)
    header.write_text("#define VALUE 2\n")
    child = folder.load(**options | environment)
    assert child.code != 0
    assert "compiler" in child.err
    assert "fix: " in child.err
    assert folder.loaded(**options) == 2
