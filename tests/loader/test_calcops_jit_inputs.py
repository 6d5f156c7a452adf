"""Every file that a build reads is an input. Here: files that flags name, files that the linker and
the assembler read, and files with unusual names.

Each case builds a library with calcops_jit.load, changes one file, and loads the library again in
another process."""

import os
import shutil
from pathlib import Path

import pytest
from checkout import Checkout, the_zygote

from _calcops_jit.cache import store

ANSWER = 'extern "C" __attribute__((visibility("default"))) int answer() {{ {} }}\n'
LOAD = """
import calcops_jit, ctypes
options = {options!r}
library = calcops_jit.load("mine", options.pop("sources", ["mine.cpp"]), **options)
print(ctypes.CDLL(library.path).answer())
"""
LINKERS = ["bfd", "gold", "lld", "mold"]


class Folder(Checkout):
    """A checkout and, beside it, the folder of a user's project."""

    def __init__(self, folder: Path):
        super().__init__(the_zygote(), folder)
        self.project = folder / "project"
        self.project.mkdir()

    def put(self, name: str, text: str) -> Path:
        path = self.project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def load(self, **options):
        """Run a process that loads the library with these options. Options in capitals are
        environment variables."""
        environment = {name: options.pop(name) for name in list(options) if name.isupper()}
        return self.run(
            LOAD.format(options=options), cwd=self.project, CALCOPS_BUILD="0", **environment
        )

    def loaded(self, **options) -> int:
        """Return the answer of the library."""
        child = self.load(**options)
        assert child.code == 0, child.err
        return int(child.out)

    def archive(self, value: int, name: str = "libvalue.a") -> Path:
        """Write a static library whose function value() returns `value`."""
        source = self.put("value.cpp", f"int value() {{ return {value}; }}\n")
        path = self.put(name, "")  # makes the folder
        path.unlink()
        command = f"c++ -fPIC -c {source} -o {source}.o && ar rc '{path}' {source}.o"
        assert os.system(command) == 0
        return path


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


# ---- linkers -------------------------------------------------------------------------------------


def flags_of(linker: str) -> list[str]:
    if shutil.which(f"ld.{linker}") is None:
        pytest.skip(f"no ld.{linker} here")
    return [f"-fuse-ld={linker}"]


@pytest.mark.parametrize("linker", LINKERS)
@pytest.mark.parametrize("name", ["libvalue.a", "we ird $;/libvalue.a"])
def test_a_rebuilt_static_library_is_linked_again(folder, linker, name):
    folder.put("mine.cpp", "int value();\n" + ANSWER.format("return value();"))
    flags = flags_of(linker)
    path = folder.archive(1, name)
    # ninja takes $$ for a dollar, and the shell removes the quotes. torch's load needs both, too.
    quoted = "'" + str(path.parent).replace("$", "$$") + "'"
    flags += [f"-L{quoted}", "-lvalue"]
    assert folder.loaded(extra_ldflags=flags) == 1
    folder.compiled()
    assert folder.loaded(extra_ldflags=flags) == 1
    assert folder.compiled() == 0
    folder.archive(2, name)
    assert folder.loaded(extra_ldflags=flags) == 2
    assert folder.compiled() == 0  # the library was only linked


VERSIONS = {"lld": "LLD 14.0.6", "gold": "GNU gold 1.16"}


@pytest.mark.parametrize("linker", VERSIONS)
@pytest.mark.parametrize("works", [True, False])
def test_a_quicker_linker_is_used_if_it_works(folder, linker, works):
    """COMPILER_PATH has an lld and a gold. One of them prints its version, the other one fails."""
    link = "exit 1"
    if works:
        link = f'echo "$@" >> {folder.project}/linked; exec {shutil.which("ld")} "$@"'
    for name in VERSIONS:
        folder.put(f"bin/ld.{name}", "#!/bin/sh\nexit 1\n").chmod(0o755)
    version = f'case " $* " in *" --version "*) echo "{VERSIONS[linker]}"; exit;; esac'
    folder.put(f"bin/ld.{linker}", f"#!/bin/sh\n{version}\n{link}\n")
    source = folder.put("mine.cpp", ANSWER.format("return 1;"))
    path = {"COMPILER_PATH": folder.project / "bin"}
    assert folder.loaded(**path) == 1
    log = folder.project / "linked"
    assert log.exists() == works
    # A linker that the compiler's command names is used.
    links = log.read_text() if works else ""
    assert folder.loaded(CXX="c++ -fuse-ld=bfd", **path) == 1
    assert not works or log.read_text() == links
    source.write_text("int absent();\n" + ANSWER.format("return absent();"))
    # A linker that a flag names is used.
    for flags in ["-fuse-ld=bfd", "-Wl,-z,defs"], ["-lm -fuse-ld=bfd -Wl,-z,defs"]:
        child = folder.load(extra_ldflags=flags, **path)
        assert "undefined reference" in child.err or "undefined symbol" in child.err
    assert not works or "-z defs" not in log.read_text()


def test_a_linker_without_dependency_files_is_refused(folder):
    skip_option = 'for a; do [[ $a == --dependency-file* ]] || others+=("$a"); done'
    link = f'exec {shutil.which("ld")} "${{others[@]}}"'
    linker = folder.put("bin/ld", f"#!/bin/bash\n{skip_option}\n{link}\n")
    linker.chmod(0o755)
    folder.put("mine.cpp", ANSWER.format("return 1;"))
    child = folder.load(extra_ldflags=[f"-B{linker.parent}"])
    assert "the linker does not tell which files it links" in child.err
    assert not list(folder.cache.glob("*/*/mine.so"))


# ---- files that flags name, and files that compilers do not report -------------------------------

# Each function writes the files of a library with the answer `value`, and returns its options for
# load.

VALUE = ANSWER.format("return VALUE;")
# The linker sets the address of the symbol `value`.
ADDRESS = "extern char value;\n" + ANSWER.format("return (int)(long)&value;")
INCBIN = (
    'asm(".section .rodata\\nvalue: .incbin \\"{}\\"\\n.previous");\n'
    'extern "C" const char value[];\n'
)


def response_file(f, value):
    inner = f.put("inner.rsp", f"-DVALUE={value}\n")
    outer = f.put("outer.rsp", f"-DOTHER @{inner}")
    f.put("mine.cpp", VALUE)
    return {"extra_cflags": [f"@{outer}"]}


def linkers_response_file(f, value):
    f.put("mine.cpp", ADDRESS)
    file = f.put("link.rsp", f"-Wl,--defsym=value={value}")
    return {"extra_ldflags": [f"@{file}"]}


def incbin(f, value):
    path = f.put("a b;c.bin", chr(value))
    f.put("mine.cpp", INCBIN.format(path) + ANSWER.format("return value[0];"))
    return {}


def flag_include(option):
    def case(f, value):
        f.put("mine.cpp", VALUE)
        header = f.put("forced.h", f"#define VALUE {value}")
        return {"extra_cflags": [f"{option} {header}"]}

    return case


def specs(f, value):
    f.put("mine.cpp", VALUE)
    file = f.put("my.specs", f"*cc1plus:\n+ -DVALUE={value}\n")
    return {"extra_cflags": [f"-specs={file}"]}


def linker_script(f, value):
    f.put("mine.cpp", ADDRESS)
    script = f.put("extra.ld", f"value = {value};\nINSERT AFTER .text;")
    return {"extra_ldflags": [f"-Wl,-T,{script}"]}


def just_symbols(f, value):
    path = f.put("symbols.ld", f"value = {value};\n")
    f.put("mine.cpp", ADDRESS)
    return {"extra_ldflags": [f"-Wl,--just-symbols={path}"]}


def linked_script(f, value):
    """A library that is a linker script."""
    f.put("mine.cpp", "int value();\n" + ANSWER.format("return value();"))
    for i in (1, 2):
        f.archive(i, f"libvalue{i}.a")
    script = f.put("libscript.so", f"INPUT({f.project}/libvalue{value}.a)\n")
    return {"extra_ldflags": [f"-L{script.parent}", "-lscript"]}


def part_of_the_compiler(f, value):
    """A cc1plus that g++ finds by -B."""
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
    "a file of .incbin": incbin,
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
def test_a_library_is_rebuilt_after_a_change_of_any_file_that_its_build_reads(folder, case):
    options = CASES[case](folder, 1)
    assert folder.loaded(**options) == 1
    assert folder.loaded(**options) == 1
    assert CASES[case](folder, 2) == options
    assert folder.loaded(**options) == 2


def test_a_response_file_with_mmd_is_refused(folder):
    folder.put("include/value.h", "#define VALUE 1\n")
    folder.put("mine.cpp", "#include <value.h>\n" + VALUE)
    flags = folder.put("flags.rsp", f"-MMD -isystem {folder.project}/include\n")
    child = folder.load(extra_cflags=[f"@{flags}"])
    assert f"{flags} has -MMD" in child.err


@pytest.mark.parametrize("compiler", ["clang++", "g++ -flto"])
def test_incbin_is_refused_without_the_gnu_assembler(folder, compiler):
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
    if (name, compiler) == ("a\\b", "clang++"):  # clang++ writes a slash in its dependency file
        assert "which is no file" in folder.load(**options).err
        return
    assert folder.loaded(**options) == 1
    folder.put(f"{name}/value.h", "#define VALUE 2\n")
    assert folder.loaded(**options) == 2


def test_a_path_with_a_line_break_is_refused(folder):
    folder.put("a\nb/value.h", "#define VALUE 1\n")
    folder.put("mine.cpp", "#include <value.h>\n" + VALUE)
    child = folder.load(extra_include_paths=[f"{folder.project}/a\nb"])
    assert "cannot build mine: a line break in a name" in child.err


def test_sources_in_folders_without_a_common_parent_are_watched_and_reloaded(folder):
    elsewhere = Path(f"/dev/shm/calcops-{os.getpid()}")
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("/dev/shm cannot be written")
    folder.put("mine.cpp", "int value();\n" + ANSWER.format("return value();"))
    elsewhere.mkdir()
    try:
        (elsewhere / "value.cpp").write_text("int value() { return 1; }\n")
        options = {"sources": [str(folder.project / "mine.cpp"), str(elsewhere / "value.cpp")]}
        assert folder.loaded(**options) == 1
        script = f"""
open('{elsewhere}/value.cpp', 'w').write('int value() {{ return 2; }}')
from _calcops_jit.live.library import project_files
print(calcops_jit.reload(), ctypes.CDLL(library.path).answer())
print('{elsewhere}/value.cpp' in project_files(), '/' in project_files())
"""
        load = LOAD.format(options=options)
        child = folder.run(load + script, cwd=folder.project, CALCOPS_BUILD="0")
        assert child.out == "1\n['mine'] 2\nTrue False\n", child.err
    finally:
        shutil.rmtree(elsewhere)


def test_reload_follows_a_link_that_points_to_another_folder(folder):
    for value in (1, 2):
        folder.put(f"release{value}/value.h", f"#define VALUE {value}\n")
        folder.put(f"release{value}/mine.cpp", '#include "value.h"\n' + VALUE)
    (folder.project / "current").symlink_to("release1")
    load = LOAD.format(options={"sources": ["current/mine.cpp"]})
    script = """
import os
os.symlink('release2', 'new')
os.rename('new', 'current')
print(calcops_jit.reload(), ctypes.CDLL(library.path).answer())
"""
    child = folder.run(load + script, cwd=folder.project, CALCOPS_BUILD="0")
    assert child.out == "1\n['mine'] 2\n", child.err


def test_a_folder_or_a_dangling_link_named_like_a_header_is_ignored(folder):
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
def test_a_parent_folder_behind_a_link_is_that_of_its_target(folder, searched):
    """`current` is a link to a folder, so current/../include is the folder beside that one. The
    folder `include` beside the link has files of the same names, with the value 3."""
    if searched in ("-L", "an archive"):
        text = "int value();\n" + ANSWER.format("return value();")
    elif searched == ".incbin":
        text = INCBIN.format(f"{folder.project}/current/../include/value.h")
        text += ANSWER.format("return value[14] - 48;")  # the digit after "#define VALUE "
    else:
        text = "#include <value.h>\n" + VALUE
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


def test_a_response_file_of_the_compiler_command_is_an_input_of_the_loaders_unit(
    folder, monkeypatch
):
    flags = folder.put("flags", "-DUNUSED=1\n")
    source = "#include <torch/library.h>\nTORCH_LIBRARY_FRAGMENT(mine, m) {}\n"
    folder.put("mine.cpp", source + ANSWER.format("return 1;"))
    assert folder.loaded(CXX=f"g++ @{flags}") == 1
    monkeypatch.setenv("CALCOPS_CACHE", str(folder.cache))
    (unit,) = store.newest("unit-registry.cpp")
    assert str(flags) in unit.closure.entries()
