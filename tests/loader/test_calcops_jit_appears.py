"""What would be linked, included or run first if it appeared is an input of a build."""

import os

import pytest
from test_calcops_jit_inputs import ANSWER, Folder

from _calcops_jit.request import Request


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


# ---- what is linked ------------------------------------------------------------------------------

EARLIER = {
    "-L": lambda own: {"extra_ldflags": [f"-L{own}/early", f"-L{own}/late", "-lvalue"]},
    "-L in two words": lambda own: {
        "extra_ldflags": ["-L", f"{own}/early", "-L", f"{own}/late", "-lvalue"]
    },
    "LIBRARY_PATH": lambda own: {
        "extra_ldflags": ["-lvalue"],
        "LIBRARY_PATH": f"{own}/early:{own}/late",
    },
    "a file's name": lambda own: {
        "extra_ldflags": [f"-L{own}/early", f"-L{own}/late", "-l:libvalue.a"]
    },
    "-l in two words": lambda own: {"extra_ldflags": [f"-L{own}/early -L{own}/late -l value"]},
    "the linker's": lambda own: {"extra_ldflags": [f"-Wl,-L,{own}/early,-L{own}/late,-lvalue"]},
    "-Xlinker": lambda own: {
        "extra_ldflags": [f"-Xlinker -L{own}/early -Xlinker -L{own}/late -Xlinker -lvalue"]
    },
    "long options": lambda own: {
        "extra_ldflags": [
            f"-Wl,--library-path={own}/early,--library-path,{own}/late,--library=value"
        ]
    },
    "the compiler's command": lambda own: {
        "CXX": f"g++ -L{own}/early",
        "extra_ldflags": [f"-L{own}/late", "-lvalue"],
    },
    "-B": lambda own: {
        "extra_ldflags": [f"-B{own}/early", "-lvalue"],
        "LIBRARY_PATH": f"{own}/late",
    },
    "a response file": lambda own: {"extra_ldflags": [f"@{own}/link"]},
    "the linker's response file": lambda own: {"extra_ldflags": [f"-Wl,@{own}/link"]},
    "a script": lambda own: {"extra_ldflags": [f"-L{own}/early", f"-L{own}/late", f"{own}/script"]},
    "a script's folders": lambda own: {"extra_ldflags": [f"-fuse-ld=bfd {own}/folders"]},
}


HELD = ["not there", "a folder in its place", "a link to it"]


@pytest.mark.parametrize(
    "searched, early", [*((name, "empty") for name in EARLIER), *(("-L", held) for held in HELD)]
)
def test_an_archive_that_appears_in_a_folder_that_is_searched_earlier_is_linked(
    folder, searched, early
):
    folder.put("mine.cpp", "int value();\n" + ANSWER.format("return value();"))
    folder.put("link", f"-L{folder.own}/early -L{folder.own}/late -lvalue\n")
    folder.put("script", "INPUT(-lvalue)\n")
    folder.put(
        "folders", f"SEARCH_DIR({folder.own}/early) SEARCH_DIR({folder.own}/late) INPUT(-lvalue)\n"
    )
    folder.archive(1, "late/libvalue.a")
    path = folder.own / "early/libvalue.a"
    if early != "not there":
        path.parent.mkdir()
    if early == "a folder in its place":
        path.mkdir()
    if early == "a link to it":
        path.symlink_to("elsewhere.a")
    options = EARLIER[searched](folder.own)
    assert folder.loaded(**dict(options)) == 1
    folder.compiled()
    assert folder.loaded(**dict(options)) == 1
    assert folder.compiled() == 0
    if early == "a folder in its place":
        path.rmdir()
    folder.archive(2, "early/elsewhere.a" if path.is_symlink() else "early/libvalue.a")
    assert folder.loaded(**dict(options)) == 2


def test_a_shared_library_that_appears_beside_an_archive_is_linked(folder):
    folder.put("mine.cpp", "int value();\n" + ANSWER.format("return value();"))
    folder.archive(1)
    options = {"extra_ldflags": [f"-L{folder.own}", "-lvalue", f"-Wl,-rpath,{folder.own}"]}
    assert folder.loaded(**dict(options)) == 1
    source = folder.put("shared.cpp", "int value() { return 2; }\n")
    assert os.system(f"c++ -fPIC -shared {source} -o {folder.own}/libvalue.so") == 0
    assert folder.loaded(**dict(options)) == 2


THIN = {
    "an object": "ar rcT libthin.a inner/value.cpp.o",
    "an archive": "ar rc inner/libvalue.a inner/value.cpp.o && ar rcT libthin.a inner/libvalue.a",
    "a thin archive": (
        "cd inner && ar rcT libvalue.a value.cpp.o && cd .. && ar rcT libthin.a inner/libvalue.a"
    ),
}


@pytest.mark.parametrize("member", THIN)
def test_what_is_behind_a_thin_archive_is_an_input(folder, member):
    folder.put("mine.cpp", "int value();\n" + ANSWER.format("return value();"))

    def compile_value(value):
        source = folder.put("inner/value.cpp", f"int value() {{ return {value}; }}\n")
        assert os.system(f"c++ -fPIC -c {source} -o {source}.o") == 0

    compile_value(1)
    assert os.system(f"cd {folder.own} && {THIN[member]}") == 0
    options = {"extra_ldflags": [f"{folder.own}/libthin.a"]}
    assert folder.loaded(**dict(options)) == 1
    compile_value(2)
    if member == "an archive":
        assert os.system(f"cd {folder.own} && ar rc inner/libvalue.a inner/value.cpp.o") == 0
    assert folder.loaded(**dict(options)) == 2


@pytest.mark.parametrize("flags", ["-I{}/early -I{}/late", "-Wa,-I{}/early,-I,{}/late"])
def test_a_file_that_the_assembler_would_find_earlier_is_seen(folder, flags):
    text = 'asm(".include \\"value.s\\"");\nextern "C" const char value;\n'
    folder.put("mine.cpp", text + ANSWER.format("return value;"))
    (folder.own / "early").mkdir()
    options = {"extra_cflags": [flags.format(folder.own, folder.own)]}
    for value, name in (1, "late"), (2, "early"):
        folder.put(f"{name}/value.s", f".section .rodata\nvalue: .byte {value}\n.previous\n")
        assert folder.loaded(**options) == value


# ---- where headers are looked for ----------------------------------------------------------------

EARLY, LATE = "early", "late"
SEARCHED = {
    "include_paths": lambda own: {"extra_include_paths": [f"{own}/early", f"{own}/late"]},
    "-I": lambda own: {"extra_cflags": [f"-I{own}/early", f"-I{own}/late"]},
    "-I in two words": lambda own: {"extra_cflags": ["-I", f"{own}/early", "-I", f"{own}/late"]},
    "-isystem": lambda own: {
        "extra_cflags": ["-isystem", f"{own}/early", "-isystem", f"{own}/late"]
    },
    "-isystem in one word": lambda own: {
        "extra_cflags": [f"-isystem{own}/early", f"-isystem{own}/late"]
    },
    "-idirafter": lambda own: {"extra_cflags": [f"-idirafter{own}/early", f"-idirafter{own}/late"]},
    "-I before -isystem": lambda own: {
        "extra_cflags": ["-isystem", f"{own}/late", f"-I{own}/early"]
    },
    "CPATH": lambda own: {"CPATH": f"{own}/early:{own}/late"},
    "-I before CPATH": lambda own: {"extra_cflags": [f"-I{own}/early"], "CPATH": f"{own}/late"},
    "a response file": lambda own: {"extra_cflags": [f"@{own}/flags"]},
}


@pytest.mark.parametrize(
    "early", ["empty", "not there", "with a folder of the header's", "with another header"]
)
@pytest.mark.parametrize("searched", SEARCHED)
def test_a_header_that_appears_in_a_folder_that_is_searched_earlier_is_seen(
    folder, searched, early
):
    header = "inner/value.h" if early.startswith("with a folder") else "value.h"
    folder.put("mine.cpp", f"#include <{header}>\n" + ANSWER.format("return VALUE;"))
    folder.put(f"late/{header}", "#define VALUE 1\n")
    folder.put("flags", f"-I{folder.own}/early -I{folder.own}/late\n")
    if early != "not there":
        (folder.own / "early").mkdir()
    if early.startswith("with a folder"):
        (folder.own / "early/inner").mkdir()
    if early == "with another header":
        folder.put("early/other.h", "")
    options = SEARCHED[searched](folder.own)
    assert folder.loaded(**dict(options)) == 1
    folder.compiled()
    assert folder.loaded(**dict(options)) == 1
    assert folder.compiled() == 0
    folder.put(f"early/{header}", "#define VALUE 2\n")
    assert folder.loaded(**dict(options)) == 2
    (folder.own / "early" / header).unlink()
    assert folder.loaded(**dict(options)) == 1


def test_a_header_that_appears_behind_a_link_to_nothing_is_seen(folder):
    folder.put("mine.cpp", "#include <value.h>\n" + ANSWER.format("return VALUE;"))
    folder.put("late/value.h", "#define VALUE 1\n")
    (folder.own / "first").symlink_to("nowhere")
    (folder.own / "second").mkdir()
    (folder.own / "second/value.h").symlink_to("../elsewhere.h")
    options = {"extra_cflags": [f"-I{folder.own}/{name}" for name in ("first", "second", "late")]}
    assert folder.loaded(**options) == 1
    folder.put("elsewhere.h", "#define VALUE 2\n")
    assert folder.loaded(**options) == 2
    folder.put("nowhere/value.h", "#define VALUE 3\n")
    assert folder.loaded(**options) == 3


@pytest.mark.parametrize("header", ["value.h", "inner/value.h"])
def test_a_folder_and_a_header_take_the_place_of_each_other(folder, header):
    folder.put("mine.cpp", f"#include <{header}>\n" + ANSWER.format("return VALUE;"))
    folder.put(f"late/{header}", "#define VALUE 1\n")
    path = folder.own / "early" / header
    if header == "value.h":
        path.mkdir(parents=True)
    else:
        folder.put("early/inner", "")
    options = {"extra_cflags": [f"-I{folder.own}/early", f"-I{folder.own}/late"]}
    assert folder.loaded(**options) == 1
    path.rmdir() if path.is_dir() else path.parent.unlink()
    folder.put(f"early/{header}", "#define VALUE 2\n")
    assert folder.loaded(**options) == 2
    path.unlink()
    path.mkdir()
    assert folder.loaded(**options) == 1


@pytest.mark.parametrize(
    "named", ["#include <../b/value.h>", "#define NAME <../b/value.h>\n#include NAME"]
)
def test_a_header_above_a_folder_that_is_searched_earlier_is_seen(folder, named):
    folder.put("mine.cpp", f"{named}\n" + ANSWER.format("return VALUE;"))
    folder.put("late/b/value.h", "#define VALUE 1\n")
    (folder.own / "late/a").mkdir()
    (folder.own / "early/a").mkdir(parents=True)
    options = {"extra_cflags": [f"-I{folder.own}/early/a", f"-I{folder.own}/late/a"]}
    assert folder.loaded(**options) == 1
    folder.put("early/b/value.h", "#define VALUE 2\n")
    assert folder.loaded(**options) == 2


def test_a_folder_that_is_searched_by_two_names_is_seen_to_become_two(folder):
    """A compiler ignores the -I for a folder that is also the system's."""
    folder.put("mine.cpp", "#include <value.h>\n" + ANSWER.format("return VALUE;"))
    folder.put("one/value.h", "#define VALUE 1\n")
    folder.put("two/value.h", "#define VALUE 2\n")
    (folder.own / "link").symlink_to("one")
    options = {
        "extra_cflags": [f"-I{folder.own}/one", f"-I{folder.own}/two", f"-isystem{folder.own}/link"]
    }
    assert folder.loaded(**options) == 2
    (folder.own / "link").unlink()
    (folder.own / "link").mkdir()
    assert folder.loaded(**options) == 1


ASKED = {
    "plainly": "#if __has_include(<maybe.h>)\n",
    "with a comment inside": "#if __has_include( /* why */ <maybe.h>)\n",
    "over two lines": "#if __has_include(\\\n<may\\\nbe.h>)\n",
    "by a macro that has the call": "#define HAS __has_include(<maybe.h>)\n#if HAS\n",
    (
        "by a macro that has the name"
    ): "#define NAME <maybe.h>\n#if defined(__has_include) && __has_include(NAME)\n",
    "by a macro with a folder": "#define NAME <inner/maybe.h>\n#if __has_include(NAME)\n",
}


@pytest.mark.parametrize("asked", ASKED)
def test_a_header_that_is_asked_for_but_not_read_is_seen_to_come_and_go(folder, asked):
    text = ASKED[asked] + "#define VALUE 2\n#else\n#define VALUE 1\n#endif\n"
    folder.put("mine.cpp", text + ANSWER.format("return VALUE;"))
    header = folder.put("late/inner/maybe.h" if "folder" in asked else "late/maybe.h", "")
    options = {"extra_include_paths": [f"{folder.own}/late"]}
    assert folder.loaded(**dict(options)) == 2
    header.unlink()
    assert folder.loaded(**dict(options)) == 1
    folder.compiled()
    assert folder.loaded(**dict(options)) == 1
    assert folder.compiled() == 0
    header.touch()
    assert folder.loaded(**dict(options)) == 2


HIDDEN = {
    "by a macro with two folders": ("#define NAME <in/side/maybe.h>\n", []),
    "by a flag's macro with two folders": ("", ["'-DNAME=<in/side/maybe.h>'"]),
    "by its whole path": ('#define NAME "{own}/late/in/side/maybe.h"\n', []),
}


@pytest.mark.parametrize("asked", HIDDEN)
def test_a_header_that_is_asked_for_in_a_folder_of_a_folder_is_seen_to_come(folder, asked):
    text, flags = HIDDEN[asked]
    text = (
        text.replace("{own}", str(folder.own))
        + "#if __has_include(NAME)\n#define VALUE 2\n#else\n#define VALUE 1\n#endif\n"
    )
    folder.put("mine.cpp", text + ANSWER.format("return VALUE;"))
    (folder.own / "late/in/side").mkdir(parents=True)
    options = {"extra_cflags": [f"-I{folder.own}/late", *flags]}
    assert folder.loaded(**options) == 1
    folder.put("late/in/side/maybe.h", "")
    assert folder.loaded(**options) == 2


# ---- the compiler's command ----------------------------------------------------------------------

COMMANDS = {
    "a macro in two words": ("g++ -D VALUE=1", "g++ -D VALUE=2"),
    "a macro in one word": ("g++ -DVALUE=1", "g++ -DVALUE=2"),
    "a folder in two words": ("g++ -I {own}/one", "g++ -I {own}/two"),
    "a folder of the environment": ("env CPATH={own}/one g++", "env CPATH={own}/two g++"),
    "a response file": ("g++ @{own}/one/flags", "g++ @{own}/two/flags"),
    "an included file": ("g++ -include {own}/one/value.h", "g++ -include {own}/two/value.h"),
}


def valued(folder):
    folder.put(
        "mine.cpp", "#ifndef VALUE\n#include <value.h>\n#endif\n" + ANSWER.format("return VALUE;")
    )
    for value, name in (1, "one"), (2, "two"):
        folder.put(f"{name}/value.h", f"#define VALUE {value}\n")
        folder.put(f"{name}/flags", f"-DVALUE={value}\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_word_of_the_compilers_command_counts(folder, command):
    valued(folder)
    first, second = (words.format(own=folder.own) for words in COMMANDS[command])
    assert [folder.loaded(CXX=words) for words in (first, second, first)] == [1, 2, 1]
    assert folder.compiled() == 0  # the compiler that writes a log is another one


@pytest.mark.parametrize(
    "command, file",
    [
        ("g++ -I {own}/one", "value.h"),
        ("env CPATH={own}/one g++", "value.h"),
        ("g++ @{own}/one/flags", "flags"),
    ],
)
def test_a_file_that_the_compilers_command_leads_to_is_an_input(folder, command, file):
    valued(folder)
    command = command.format(own=folder.own)
    assert folder.loaded(CXX=command) == 1
    path = folder.own / "one" / file
    path.write_text(path.read_text().replace("1", "3"))
    assert folder.loaded(CXX=command) == 3


ASSEMBLER = """#!/bin/sh
for word; do case "$word" in *.s) sed -i 's/movl\t$1, %eax/movl\t$VALUE, %eax/' "$word";; esac; done
exec /usr/bin/as "$@"
"""
ASSEMBLERS = {
    "PATH": lambda own: {"PATH": f"{own}/bin:{os.environ['PATH']}"},
    "COMPILER_PATH": lambda own: {"COMPILER_PATH": f"{own}/bin"},
    "-B": lambda own: {"extra_cflags": [f"-B{own}/bin"]},
    "-B in two words": lambda own: {"extra_cflags": [f"-B {own}/bin"]},
}


@pytest.mark.parametrize("searched", ASSEMBLERS)
def test_another_assembler_that_appears_and_changes_assembles(folder, searched):
    """It makes every 1 that is returned another number."""
    folder.put("mine.cpp", ANSWER.format("return 1;"))
    (folder.own / "bin").mkdir()
    options = ASSEMBLERS[searched](folder.own)
    assert folder.loaded(**dict(options)) == 1
    for value in ("2", "3"):
        folder.put("bin/as", ASSEMBLER.replace("VALUE", value)).chmod(0o755)
        assert folder.loaded(**dict(options)) == int(value)


@pytest.mark.parametrize(
    "words",
    [{"CXX": "g++ -march=native"}, {"CXX": "g++ @{own}/flags"}, {"cflags": ("@{own}/flags",)}],
)
def test_the_processor_counts_wherever_its_instructions_may_be_asked_for(
    folder, monkeypatch, words
):
    folder.put("flags", "-march=native\n")
    monkeypatch.setenv("CXX", words.get("CXX", "g++").format(own=folder.own))
    flags = tuple(flag.format(own=folder.own) for flag in words.get("cflags", ()))
    request = Request(
        name="mine", root=str(folder.own), sources=(f"{folder.own}/mine.cpp",), cflags=flags
    )
    assert request.facts["CPU instruction set"]


@pytest.mark.parametrize(
    "environment", [{"PATH": "/nowhere"}, {"CXX": "g++-99"}], ids=["PATH", "CXX"]
)
def test_without_a_compiler_an_edited_header_is_never_ignored(folder, tmp_path, environment):
    header = tmp_path / "elsewhere" / "value.h"
    header.parent.mkdir()
    header.write_text("#define VALUE 1\n")
    folder.put("mine.cpp", "#include <value.h>\n" + ANSWER.format("return VALUE;"))
    options = {"extra_include_paths": [str(header.parent)], "CXX": "c++"}
    assert folder.loaded(**dict(options)) == 1
    child = folder.load(**options | environment)
    assert child.out == "1\n"
    assert ("CXX=g++-99 is no compiler here" in child.err) == ("CXX" in environment)
    header.write_text("#define VALUE 2\n")
    child = folder.load(**options | environment)
    assert child.code != 0
    assert "compiler" in child.err
    assert "fix: " in child.err
    assert folder.loaded(**options) == 2
