"""Everything that a build reads is an input: files that flags name, what the linker and the
assembler read, odd names.

Each case is a library of calcops_jit.load that is built, changed in one place and asked again in
another process."""

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
        self.project = folder / "own"
        self.project.mkdir()

    def put(self, name: str, text: str) -> Path:
        path = self.project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def load(self, **options):
        environment = {name: options.pop(name) for name in list(options) if name.isupper()}
        return self.run(
            LOAD.format(options=options), cwd=self.project, CALCOPS_BUILD="0", **environment
        )

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


# ---- what is linked ------------------------------------------------------------------------------


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
    # For ninja and for the shell, as torch wants it.
    quoted = "'" + str(path.parent).replace("$", "$$") + "'"
    flags += [f"-L{quoted}", "-lvalue"]
    assert folder.loaded(extra_ldflags=flags) == 1
    folder.compiled()
    assert folder.loaded(extra_ldflags=flags) == 1
    assert folder.compiled() == 0
    folder.archive(2, name)
    assert folder.loaded(extra_ldflags=flags) == 2
    assert folder.compiled() == 0  # linked only


NAMES = {"lld": "LLD 14.0.6", "gold": "GNU gold 1.16"}


@pytest.mark.parametrize("linker", NAMES)
@pytest.mark.parametrize("works", [True, False])
def test_a_quicker_linker_is_used_where_there_is_one_and_it_works(folder, linker, works):
    """Where the compiler looks first, it finds this one of the two, and the other does not
    answer."""
    link = (
        f'echo "$@" >> {folder.project}/linked; exec {shutil.which("ld")} "$@"'
        if works
        else "exit 1"
    )
    for name in NAMES:
        folder.put(f"bin/ld.{name}", "#!/bin/sh\nexit 1\n").chmod(0o755)
    answer = f'case " $* " in *" --version "*) echo "{NAMES[linker]}"; exit;; esac'
    folder.put(f"bin/ld.{linker}", f"#!/bin/sh\n{answer}\n{link}\n")
    source = folder.put("mine.cpp", ANSWER.format("return 1;"))
    path = {"COMPILER_PATH": folder.project / "bin"}
    assert folder.loaded(**path) == 1
    assert (folder.project / "linked").exists() == works
    source.write_text("int absent();\n" + ANSWER.format("return absent();"))
    # What flags say comes first.
    for flags in ["-fuse-ld=bfd", "-Wl,-z,defs"], ["-lm -fuse-ld=bfd -Wl,-z,defs"]:
        child = folder.load(extra_ldflags=flags, **path)
        assert "undefined reference" in child.err or "undefined symbol" in child.err
    linked = (folder.project / "linked").read_text() if works else ""
    assert "-z defs" not in linked


def test_a_linker_that_does_not_tell_what_it_links_is_refused(folder):
    other = 'for a; do [[ $a == --dependency-file* ]] || others+=("$a"); done'
    silent = folder.put(
        "silent/ld", f'#!/bin/bash\n{other}\nexec {shutil.which("ld")} "${{others[@]}}"\n'
    )
    silent.chmod(0o755)
    folder.put("mine.cpp", ANSWER.format("return 1;"))
    child = folder.load(extra_ldflags=[f"-B{silent.parent}"])
    assert "the linker does not tell which files it links" in child.err
    assert not list(folder.cache.glob("*/*/mine.so"))


# ---- what flags name, and what compilers read without saying so ----------------------------------

VALUE = ANSWER.format("return VALUE;")
INCBIN = (
    'asm(".section .rodata\\nvalue: .incbin \\"{}\\"\\n.previous");\n'
    'extern "C" const char value[];\n'
)


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
    return {
        "extra_cflags": [
            f"-specs={f.put('my.specs', f'*cc1plus:{chr(10)}+ -DVALUE={value}{chr(10)}')}"
        ]
    }


def linker_script(f, value):
    f.put("mine.cpp", "extern char value;\n" + ANSWER.format("return (int)(long)&value;"))
    return {
        "extra_ldflags": [
            f"-Wl,-T,{f.put('extra.ld', f'value = {value};{chr(10)}INSERT AFTER .text;')}"
        ]
    }


def just_symbols(f, value):
    path = f.put("symbols.ld", f"value = {value};\n")
    f.put("mine.cpp", "extern char value;\n" + ANSWER.format("return (int)(long)&value;"))
    return {"extra_ldflags": [f"-Wl,--just-symbols={path}"]}


def linked_script(f, value):
    """A library that is a text for the linker."""
    f.put("mine.cpp", "int value();\n" + ANSWER.format("return value();"))
    for i in (1, 2):
        f.archive(i, f"libvalue{i}.a")
    script = f.put("libscript.so", f"INPUT({f.project}/libvalue{value}.a)\n")
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
    flags = folder.put("flags.rsp", f"-MMD -isystem {folder.project}/include\n")
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


# ---- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
@pytest.mark.parametrize("name", ["a;b^c<d`e#f", "a$b 'c", 'a:b|c"d é', "a\\b"])
def test_a_folder_may_have_any_name(folder, name, compiler):
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} here")
    folder.put(f"{name}/value.h", "#define VALUE 1\n")
    source = folder.put(f"{name}/{name}.cpp", "#include <value.h>\n" + VALUE)
    options = {
        "sources": [str(source)],
        "extra_include_paths": [str(source.parent)],
        "CXX": compiler,
    }
    if (name, compiler) == ("a\\b", "clang++"):  # which writes a slash
        assert "which is no file" in folder.load(**options).err
        return
    assert folder.loaded(**options) == 1
    folder.put(f"{name}/value.h", "#define VALUE 2\n")
    assert folder.loaded(**options) == 2


def test_a_name_with_a_line_break_is_refused(folder):
    folder.put("a\nb/value.h", "#define VALUE 1\n")
    folder.put("mine.cpp", "#include <value.h>\n" + VALUE)
    child = folder.load(extra_include_paths=[f"{folder.project}/a\nb"])
    assert "cannot build mine: a line break in a name" in child.err


def test_sources_without_a_common_folder_are_watched_and_reloaded(folder):
    elsewhere = Path(f"/dev/shm/calcops-{os.getpid()}")
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no other folder at / that can be written")
    folder.put("mine.cpp", "int value();\n" + ANSWER.format("return value();"))
    elsewhere.mkdir()
    try:
        (elsewhere / "value.cpp").write_text("int value() { return 1; }\n")
        options = {"sources": [str(folder.project / "mine.cpp"), str(elsewhere / "value.cpp")]}
        assert folder.loaded(**options) == 1
        reload = LOAD.format(options=options) + (
            f"""
open('{elsewhere}/value.cpp', 'w').write('int value() {{ return 2; }}')
from _calcops_jit.live.library import project_files
print(calcops_jit.reload(), ctypes.CDLL(library.path).answer())
print('{elsewhere}/value.cpp' in project_files(), '/' in project_files())
"""
        )
        child = folder.run(reload, cwd=folder.project, CALCOPS_BUILD="0")
        assert child.out == "1\n['mine'] 2\nTrue False\n", child.err
    finally:
        shutil.rmtree(elsewhere)


def test_a_folder_behind_a_link_that_is_flipped_is_reloaded(folder):
    for value in (1, 2):
        folder.put(f"release{value}/value.h", f"#define VALUE {value}\n")
        folder.put(f"release{value}/mine.cpp", '#include "value.h"\n' + VALUE)
    (folder.project / "current").symlink_to("release1")
    script = LOAD.format(options={"sources": ["current/mine.cpp"]}) + (
        """
import os
os.symlink('release2', 'new'); os.rename('new', 'current')
print(calcops_jit.reload(), ctypes.CDLL(library.path).answer())
"""
    )
    child = folder.run(script, cwd=folder.project, CALCOPS_BUILD="0")
    assert child.out == "1\n['mine'] 2\n", child.err


def test_a_header_that_is_a_folder_or_a_link_to_nothing_is_left_alone(folder):
    folder.put("mine.cpp", ANSWER.format("return 1;"))
    (folder.project / "in/folder.h").mkdir(parents=True)
    (folder.project / "in/link.h").symlink_to("nothing")
    assert folder.loaded() == 1


ABOVE = {
    "-I": {"extra_cflags": ["-I{dir}/current/../include"]},
    "extra_include_paths": {"extra_include_paths": ["{dir}/current/../include"]},
    "-L": {"extra_ldflags": ["-L{dir}/current/../lib", "-lvalue"]},
    "an archive": {"extra_ldflags": ["{dir}/current/../lib/libvalue.a"]},
    "a source": {
        "sources": ["current/../src/mine.cpp"],
        "extra_cflags": ["-I{dir}/releases/1/include"],
    },
    ".incbin": {},
}


@pytest.mark.parametrize("searched", ABOVE)
def test_a_folder_above_a_link_is_the_one_above_where_the_link_leads(folder, searched):
    """The folder above the link has files of these names, too."""
    call = "int value();\n" + ANSWER.format("return value();")
    embedded = INCBIN.format(f"{folder.project}/current/../include/value.h") + ANSWER.format(
        "return value[14] - 48;"
    )
    text = {"-L": call, "an archive": call, ".incbin": embedded}.get(
        searched, "#include <value.h>\n" + VALUE
    )
    for value, place in (1, "releases/1"), (2, "releases/2"), (3, "."):
        folder.put(f"{place}/include/value.h", f"#define VALUE {value}\n")
        folder.put(f"{place}/src/mine.cpp", ANSWER.format(f"return {value};"))
        folder.archive(value, f"{place}/lib/libvalue.a")
        folder.put(f"{place}/bin/empty", "")
    folder.put("mine.cpp", text)
    options = {
        name: [word.format(dir=folder.project) for word in words]
        for name, words in ABOVE[searched].items()
    }
    for value in (1, 2):
        (folder.project / "current").unlink(missing_ok=True)
        (folder.project / "current").symlink_to(f"releases/{value}/bin")
        assert folder.loaded(**options) == value
