"""Everything that a build reads is an input: files that flags name, what the linker and the assembler read, odd names.

Each case is a library of calcops_jit.load that is built, changed in one place and asked again in another process."""

import os
import shutil
from pathlib import Path

import pytest
from checkout import Checkout, the_zygote

ANSWER = 'extern "C" __attribute__((visibility("default"))) int answer() {{ {} }}\n'
LOAD = """
import calcops_jit, ctypes
options = {options!r}
library = calcops_jit.load("mine", options.pop("sources", ["mine.cpp"]), **options)
print(ctypes.CDLL(library.path).answer())
"""
LINKERS = ["bfd", "gold", "lld", "mold"]


class Folder(Checkout):
    """Beside the checkout, a folder of somebody's own sources."""

    def __init__(self, folder: Path):
        super().__init__(the_zygote(), folder)
        self.own = folder / "own"
        self.own.mkdir()

    def put(self, name: str, text: str) -> Path:
        path = self.own / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def load(self, **options):
        environment = {name: options.pop(name) for name in list(options) if name.isupper()}
        return self.run(LOAD.format(options=options), cwd=self.own, CALCOPS_BUILD="0", **environment)

    def loaded(self, **options) -> int:
        child = self.load(**options)
        assert child.code == 0, child.err
        return int(child.out)

    def archive(self, value: int, name: str = "libvalue.a") -> Path:
        source = self.put("value.cpp", f"int value() {{ return {value}; }}\n")
        path = self.put(name, "")
        path.unlink()
        command = f"c++ -fPIC -c {source} -o {source}.o && ar rc '{path}' {source}.o"
        assert os.system(command) == 0
        return path


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


# ---- what is linked ---------------------------------------------------------------------------------------------


def needs(linker: str) -> list[str]:
    if shutil.which(f"ld.{linker}") is None:
        pytest.skip(f"no ld.{linker} here")
    return [f"-fuse-ld={linker}"]


@pytest.mark.parametrize("linker", LINKERS)
@pytest.mark.parametrize("name", ["libvalue.a", "we ird $;/libvalue.a"])
def test_a_static_library_that_was_rebuilt_is_linked_again_by(folder, linker, name):
    folder.put("mine.cpp", "int value();\n" + ANSWER.format("return value();"))
    flags = needs(linker)
    path = folder.archive(1, name)
    quoted = "'" + str(path.parent).replace("$", "$$") + "'"  # for ninja and for the shell, as torch wants it
    flags += [f"-L{quoted}", "-lvalue"]
    assert folder.loaded(extra_ldflags=flags) == 1
    folder.compiled()
    assert (folder.loaded(extra_ldflags=flags), folder.compiled()) == (1, 0)
    folder.archive(2, name)
    assert (folder.loaded(extra_ldflags=flags), folder.compiled()) == (2, 0)  # linked only


def test_a_static_library_is_seen_with_a_gnu_ld_that_writes_no_dependency_file(folder):
    refuse = "echo \"ld: unrecognized option '--dependency-file=link.d'\" >&2; exit 1"
    real = shutil.which("ld")
    text = f'#!/bin/sh\ncase "$*" in *--dependency-file*) {refuse};; esac\nexec {real} "$@"\n'
    old = folder.put("old/ld", text)
    old.chmod(0o755)
    folder.put("mine.cpp", "int value();\n" + ANSWER.format("return value();"))
    flags = [f"-B{old.parent}", str(folder.archive(1))]
    assert folder.loaded(extra_ldflags=flags) == 1
    folder.archive(2)
    assert folder.loaded(extra_ldflags=flags) == 2


NAMES = {"lld": "LLD 14.0.6", "gold": "GNU gold 1.16"}


@pytest.mark.parametrize("linker", NAMES)
@pytest.mark.parametrize("works", [True, False])
def test_a_quicker_linker_is_used_where_there_is_one_and_it_works(folder, linker, works):
    """Where the compiler looks first, it finds this one of the two, and the other does not answer."""
    link = f'echo "$@" >> {folder.own}/linked; exec {shutil.which("ld")} "$@"' if works else "exit 1"
    for name in NAMES:
        folder.put(f"bin/ld.{name}", "#!/bin/sh\nexit 1\n").chmod(0o755)
    answer = f'case " $* " in *" --version "*) echo "{NAMES[linker]}"; exit;; esac'
    folder.put(f"bin/ld.{linker}", f"#!/bin/sh\n{answer}\n{link}\n")
    source = folder.put("mine.cpp", ANSWER.format("return 1;"))
    path = {"COMPILER_PATH": folder.own / "bin"}
    assert folder.loaded(**path) == 1
    assert (folder.own / "linked").exists() == works
    source.write_text("int absent();\n" + ANSWER.format("return absent();"))
    for flags in ["-fuse-ld=bfd", "-Wl,-z,defs"], ["-lm -fuse-ld=bfd -Wl,-z,defs"]:  # what flags say comes first
        child = folder.load(extra_ldflags=flags, **path)
        assert "undefined reference" in child.err or "undefined symbol" in child.err
    linked = (folder.own / "linked").read_text() if works else ""
    assert "-z defs" not in linked


def test_a_linker_that_does_not_tell_what_it_links_is_refused(folder):
    other = 'for a; do [[ $a == --dependency-file* ]] || others+=("$a"); done'
    silent = folder.put("silent/ld", f'#!/bin/bash\n{other}\nexec {shutil.which("ld")} "${{others[@]}}"\n')
    silent.chmod(0o755)
    folder.put("mine.cpp", ANSWER.format("return 1;"))
    child = folder.load(extra_ldflags=[f"-B{silent.parent}"])
    assert "the linker does not tell which files it links" in child.err
    assert not list(folder.cache.glob("*/*/mine.so"))


# ---- what flags name, and what compilers read without saying so --------------------------------------------------

VALUE = ANSWER.format("return VALUE;")
INCBIN = 'asm(".section .rodata\\nvalue: .incbin \\"{}\\"\\n.previous");\nextern "C" const char value[];\n'


def response_file(f, value):
    inner = f.put("inner.rsp", f"-DVALUE={value}\n")
    f.put("mine.cpp", VALUE)
    return {"extra_cflags": [f"@{f.put('outer.rsp', f'-DOTHER @{inner}')}"]}


def linkers_response_file(f, value):
    f.put("mine.cpp", "extern char value;\n" + ANSWER.format("return (int)(long)&value;"))
    return {"extra_ldflags": [f"@{f.put('link.rsp', f'-Wl,--defsym=value={value}')}"]}


def incbin(f, value):
    path = f.put("a b;c.bin", chr(value))
    f.put("mine.cpp", INCBIN.format(path) + ANSWER.format("return value[0];"))
    return {}


def flag_include(option):
    def case(f, value):
        f.put("mine.cpp", VALUE)
        return {"extra_cflags": [f"{option} {f.put('forced.h', f'#define VALUE {value}')}"]}

    return case


def specs(f, value):
    f.put("mine.cpp", VALUE)
    return {"extra_cflags": [f"-specs={f.put('my.specs', f'*cc1plus:{chr(10)}+ -DVALUE={value}{chr(10)}')}"]}


def linker_script(f, value):
    f.put("mine.cpp", "extern char value;\n" + ANSWER.format("return (int)(long)&value;"))
    return {"extra_ldflags": [f"-Wl,-T,{f.put('extra.ld', f'value = {value};{chr(10)}INSERT AFTER .text;')}"]}


def just_symbols(f, value):
    path = f.put("symbols.ld", f"value = {value};\n")
    f.put("mine.cpp", "extern char value;\n" + ANSWER.format("return (int)(long)&value;"))
    return {"extra_ldflags": [f"-Wl,--just-symbols={path}"]}


def linked_script(f, value):
    """A library that is a text for the linker."""
    f.put("mine.cpp", "int value();\n" + ANSWER.format("return value();"))
    for i in (1, 2):
        f.archive(i, f"libvalue{i}.a")
    script = f.put("libscript.so", f"INPUT({f.own}/libvalue{value}.a)\n")
    return {"extra_ldflags": [f"-L{script.parent}", "-lscript"]}


def part_of_the_compiler(f, value):
    """A compiler's part that -B finds."""
    f.put("mine.cpp", VALUE)
    real = os.popen("c++ -print-prog-name=cc1plus").read().strip()
    part = f.put("parts/cc1plus", f'#!/bin/sh\nexec {real} -DVALUE={value} "$@"\n')
    part.chmod(0o755)
    return {"extra_cflags": [f"-B{part.parent}"]}


def macro_include(f, value):
    f.put("hidden.h", f"#define VALUE {value}\n")
    f.put("mine.cpp", '#define HEADER "hidden.h"\n#include HEADER\n' + VALUE)
    return {}


CASES = {
    "a response file in a response file": response_file,
    "the linker's response file": linkers_response_file,
    "what .incbin reads": incbin,
    "-include": flag_include("-include"),
    "-imacros": flag_include("-imacros"),
    "-specs": specs,
    "a linker script": linker_script,
    "--just-symbols": just_symbols,
    "a library that is a linker script": linked_script,
    "a part of the compiler behind -B": part_of_the_compiler,
    "a header that a macro names": macro_include,
}


@pytest.mark.parametrize("case", CASES)
def test_a_library_is_built_again_after_a_change_of(folder, case):
    options = CASES[case](folder, 1)
    assert folder.loaded(**options) == 1
    assert folder.loaded(**options) == 1
    assert CASES[case](folder, 2) == options
    assert folder.loaded(**options) == 2


def test_a_makefiles_flags_in_a_response_file_do_not_hide_a_system_header(folder):
    folder.put("include/value.h", "#define VALUE 1\n")
    folder.put("mine.cpp", "#include <value.h>\n" + VALUE)
    flags = folder.put("flags.rsp", f"-MMD -isystem {folder.own}/include\n")
    child = folder.load(extra_cflags=[f"@{flags}"])
    assert f"{flags} has -MMD" in child.err


@pytest.mark.parametrize("compiler", ["clang++", "g++ -flto"])
def test_incbin_is_refused_where_nobody_tells_what_it_reads(folder, compiler):
    command, *flags = compiler.split()
    if shutil.which(command) is None:
        pytest.skip(f"no {command} here")
    incbin(folder, 1)
    child = folder.load(extra_cflags=flags, CXX=command)
    assert "has .incbin; only GNU as tells what that reads" in child.err


# ---- names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
@pytest.mark.parametrize("name", ["a;b^c<d`e#f", "a$b 'c", 'a:b|c"d é', "a\\b"])
def test_a_folder_may_have_any_name(folder, name, compiler):
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} here")
    folder.put(f"{name}/value.h", "#define VALUE 1\n")
    source = folder.put(f"{name}/{name}.cpp", "#include <value.h>\n" + VALUE)
    options = {"sources": [str(source)], "extra_include_paths": [str(source.parent)], "CXX": compiler}
    if (name, compiler) == ("a\\b", "clang++"):  # which writes a slash
        assert "which is no file" in folder.load(**options).err
        return
    assert folder.loaded(**options) == 1
    folder.put(f"{name}/value.h", "#define VALUE 2\n")
    assert folder.loaded(**options) == 2


def test_a_name_with_a_line_break_is_refused(folder):
    folder.put("a\nb/value.h", "#define VALUE 1\n")
    folder.put("mine.cpp", "#include <value.h>\n" + VALUE)
    child = folder.load(extra_include_paths=[f"{folder.own}/a\nb"])
    assert "cannot build mine: a line break in a name" in child.err


def test_sources_without_a_common_folder_are_watched_and_reloaded(folder):
    elsewhere = Path(f"/dev/shm/calcops-{os.getpid()}")
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no other folder at / that can be written")
    folder.put("mine.cpp", "int value();\n" + ANSWER.format("return value();"))
    elsewhere.mkdir()
    try:
        (elsewhere / "value.cpp").write_text("int value() { return 1; }\n")
        options = {"sources": [str(folder.own / "mine.cpp"), str(elsewhere / "value.cpp")]}
        assert folder.loaded(**options) == 1
        reload = LOAD.format(options=options) + (
            f"open('{elsewhere}/value.cpp', 'w').write('int value() {{ return 2; }}')\n"
            "from _calcops_jit.library import project_files\n"
            "print(calcops_jit.reload(), ctypes.CDLL(library.path).answer())\n"
            f"print('{elsewhere}/value.cpp' in project_files(), '/' in project_files())\n"
        )
        child = folder.run(reload, cwd=folder.own, CALCOPS_BUILD="0")
        assert child.out == "1\n['mine'] 2\nTrue False\n", child.err
    finally:
        shutil.rmtree(elsewhere)


def test_a_folder_behind_a_link_that_is_flipped_is_reloaded(folder):
    for value in (1, 2):
        folder.put(f"release{value}/value.h", f"#define VALUE {value}\n")
        folder.put(f"release{value}/mine.cpp", '#include "value.h"\n' + VALUE)
    (folder.own / "current").symlink_to("release1")
    script = LOAD.format(options={"sources": ["current/mine.cpp"]}) + (
        "import os\nos.symlink('release2', 'new'); os.rename('new', 'current')\n"
        "print(calcops_jit.reload(), ctypes.CDLL(library.path).answer())\n"
    )
    child = folder.run(script, cwd=folder.own, CALCOPS_BUILD="0")
    assert child.out == "1\n['mine'] 2\n", child.err


EARLIER = {
    "-L": lambda own: {"extra_ldflags": [f"-L{own}/early", f"-L{own}/late", "-lvalue"]},
    "-L in two words": lambda own: {"extra_ldflags": ["-L", f"{own}/early", "-L", f"{own}/late", "-lvalue"]},
    "LIBRARY_PATH": lambda own: {"extra_ldflags": ["-lvalue"], "LIBRARY_PATH": f"{own}/early:{own}/late"},
    "a file's name": lambda own: {"extra_ldflags": [f"-L{own}/early", f"-L{own}/late", "-l:libvalue.a"]},
}


@pytest.mark.parametrize("early", ["empty", "not there"])
@pytest.mark.parametrize("searched", EARLIER)
def test_an_archive_that_appears_in_a_folder_that_is_searched_earlier_is_linked(folder, searched, early):
    folder.put("mine.cpp", "int value();\n" + ANSWER.format("return value();"))
    folder.archive(1, "late/libvalue.a")
    if early == "empty":
        (folder.own / "early").mkdir()
    options = EARLIER[searched](folder.own)
    assert folder.loaded(**dict(options)) == 1
    folder.compiled()
    assert (folder.loaded(**dict(options)), folder.compiled()) == (1, 0)
    folder.archive(2, "early/libvalue.a")
    assert folder.loaded(**dict(options)) == 2


def test_a_shared_library_that_appears_beside_an_archive_is_linked(folder):
    folder.put("mine.cpp", "int value();\n" + ANSWER.format("return value();"))
    folder.archive(1)
    options = {"extra_ldflags": [f"-L{folder.own}", "-lvalue", f"-Wl,-rpath,{folder.own}"]}
    assert folder.loaded(**dict(options)) == 1
    source = folder.put("shared.cpp", "int value() { return 2; }\n")
    assert os.system(f"c++ -fPIC -shared {source} -o {folder.own}/libvalue.so") == 0
    assert folder.loaded(**dict(options)) == 2


def test_an_object_behind_a_thin_archive_is_an_input(folder):
    folder.put("mine.cpp", "int value();\n" + ANSWER.format("return value();"))

    def compile_value(value):
        source = folder.put("inner/value.cpp", f"int value() {{ return {value}; }}\n")
        assert os.system(f"c++ -fPIC -c {source} -o {source}.o") == 0

    compile_value(1)
    assert os.system(f"cd {folder.own} && ar rcT libthin.a inner/value.cpp.o") == 0
    options = {"extra_ldflags": [f"{folder.own}/libthin.a"]}
    assert folder.loaded(**dict(options)) == 1
    compile_value(2)
    assert folder.loaded(**dict(options)) == 2


# ---- where headers are looked for -------------------------------------------------------------------------------

EARLY, LATE = "early", "late"
SEARCHED = {
    "include_paths": lambda own: {"extra_include_paths": [f"{own}/early", f"{own}/late"]},
    "-I": lambda own: {"extra_cflags": [f"-I{own}/early", f"-I{own}/late"]},
    "-I in two words": lambda own: {"extra_cflags": ["-I", f"{own}/early", "-I", f"{own}/late"]},
    "-isystem": lambda own: {"extra_cflags": ["-isystem", f"{own}/early", "-isystem", f"{own}/late"]},
    "-isystem in one word": lambda own: {"extra_cflags": [f"-isystem{own}/early", f"-isystem{own}/late"]},
    "-idirafter": lambda own: {"extra_cflags": [f"-idirafter{own}/early", f"-idirafter{own}/late"]},
    "-I before -isystem": lambda own: {"extra_cflags": ["-isystem", f"{own}/late", f"-I{own}/early"]},
    "CPATH": lambda own: {"CPATH": f"{own}/early:{own}/late"},
    "-I before CPATH": lambda own: {"extra_cflags": [f"-I{own}/early"], "CPATH": f"{own}/late"},
    "a response file": lambda own: {"extra_cflags": [f"@{own}/flags"]},
}


@pytest.mark.parametrize("early", ["empty", "not there", "with a folder of the header's", "with another header"])
@pytest.mark.parametrize("searched", SEARCHED)
def test_a_header_that_appears_in_a_folder_that_is_searched_earlier_is_seen(folder, searched, early):
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
    assert (folder.loaded(**dict(options)), folder.compiled()) == (1, 0)
    folder.put(f"early/{header}", "#define VALUE 2\n")
    assert folder.loaded(**dict(options)) == 2
    (folder.own / "early" / header).unlink()
    assert folder.loaded(**dict(options)) == 1


ASKED = {
    "plainly": "#if __has_include(<maybe.h>)\n",
    "with a comment inside": "#if __has_include( /* why */ <maybe.h>)\n",
    "over two lines": "#if __has_include(\\\n<may\\\nbe.h>)\n",
    "by a macro that has the call": "#define HAS __has_include(<maybe.h>)\n#if HAS\n",
    "by a macro that has the name": "#define NAME <maybe.h>\n#if defined(__has_include) && __has_include(NAME)\n",
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
    assert (folder.loaded(**dict(options)), folder.compiled()) == (1, 0)
    header.touch()
    assert folder.loaded(**dict(options)) == 2


# ---- the compiler's command -------------------------------------------------------------------------------------

COMMANDS = {
    "a macro in two words": ("g++ -D VALUE=1", "g++ -D VALUE=2"),
    "a macro in one word": ("g++ -DVALUE=1", "g++ -DVALUE=2"),
    "a folder in two words": ("g++ -I {own}/one", "g++ -I {own}/two"),
    "a folder of the environment": ("env CPATH={own}/one g++", "env CPATH={own}/two g++"),
    "a response file": ("g++ @{own}/one/flags", "g++ @{own}/two/flags"),
    "an included file": ("g++ -include {own}/one/value.h", "g++ -include {own}/two/value.h"),
}


def valued(folder):
    folder.put("mine.cpp", "#ifndef VALUE\n#include <value.h>\n#endif\n" + ANSWER.format("return VALUE;"))
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
    [("g++ -I {own}/one", "value.h"), ("env CPATH={own}/one g++", "value.h"), ("g++ @{own}/one/flags", "flags")],
)
def test_a_file_that_the_compilers_command_leads_to_is_an_input(folder, command, file):
    valued(folder)
    command = command.format(own=folder.own)
    assert folder.loaded(CXX=command) == 1
    path = folder.own / "one" / file
    path.write_text(path.read_text().replace("1", "3"))
    assert folder.loaded(CXX=command) == 3


def test_another_assembler_first_on_path_assembles(folder):
    """It makes every 1 that is returned a 2."""
    folder.put("mine.cpp", ANSWER.format("return 1;"))
    assert folder.loaded() == 1
    assembler = folder.put("bin/as", "")
    script = """#!/bin/sh
for word; do case "$word" in *.s) sed -i 's/movl\t$1, %eax/movl\t$2, %eax/' "$word";; esac; done
exec /usr/bin/as "$@"
"""
    assembler.write_text(script)
    assembler.chmod(0o755)
    path = f"{assembler.parent}:{os.environ['PATH']}"
    assert folder.loaded(PATH=path) == 2
    assembler.write_text(script.replace("$2,", "$3,"))
    assert folder.loaded(PATH=path) == 3


@pytest.mark.parametrize("environment", [{"PATH": "/nowhere"}, {"CXX": "g++-99"}], ids=["PATH", "CXX"])
def test_without_a_compiler_an_edited_header_is_never_ignored(folder, tmp_path, environment):
    header = tmp_path / "elsewhere" / "value.h"
    header.parent.mkdir()
    header.write_text("#define VALUE 1\n")
    folder.put("mine.cpp", "#include <value.h>\n" + ANSWER.format("return VALUE;"))
    options = {"extra_include_paths": [str(header.parent)], "CXX": "c++"}
    assert folder.loaded(**dict(options)) == 1
    child = folder.load(**options | environment)
    assert child.out == "1\n" and ("CXX=g++-99 is no compiler here" in child.err) == ("CXX" in environment)
    header.write_text("#define VALUE 2\n")
    child = folder.load(**options | environment)
    assert child.code != 0 and "compiler" in child.err and "fix: " in child.err
    assert folder.loaded(**options) == 2
