"""A library is never stale: every file and variable that its build depends on causes a rebuild, and
nothing else does.

One library has an input of every kind. Its answer names the value of each input. A test changes one
input, and a new process must give the new answer.
"""

import os
import re
import shutil
import tarfile
from pathlib import Path

import pytest
from checkout import ANSWER, Checkout

# How a build finds a header in the folder `early`, or else in the folder `late`: flags, options of
# load, and variables.
SEARCHES = {
    "option": {"extra_include_paths": ["{early}", "{late}"]},
    "I": {"extra_cflags": ["-I{early}", "-I{late}"]},
    "I in two words": {"extra_cflags": ["-I", "{early}", "-I", "{late}"]},
    "isystem": {"extra_cflags": ["-isystem", "{early}", "-isystem", "{late}"]},
    "isystem in one word": {"extra_cflags": ["-isystem{early}", "-isystem{late}"]},
    "idirafter": {"extra_cflags": ["-idirafter{early}", "-idirafter{late}"]},
    "I before isystem": {"extra_cflags": ["-isystem", "{late}", "-I{early}"]},
    "I before a variable": {"extra_cflags": ["-I{early}"], "CPATH": ["{late}"]},
    "CPATH": {"CPATH": ["{early}", "{late}"]},
    "CPLUS_INCLUDE_PATH": {"CPLUS_INCLUDE_PATH": ["{early}", "{late}"]},
}
NAMES = {search: re.sub(r"\W", "_", search) for search in SEARCHES}
OTHERS = ["beside", "forced", "macros", "rsp", "macro_name", "tested", "source", "linked"]


# One of each kind: a flag, a folder of system headers, a variable. The others are long.
QUICK = {"I", "isystem", "I before a variable"}


def cases(names: list[str], quick: set[str]) -> list:
    """Return parameters, of which those that are not in `quick` are marked as long."""
    return [pytest.param(n, marks=() if n in quick else pytest.mark.long) for n in names]


class Everything(Checkout):
    """A library `mine` with inputs of every kind, and the values that they have now."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.values = dict.fromkeys([*NAMES.values(), *OTHERS], 1)
        self.values["tested"] = 0
        lines = [f"#include <{name}.h>" for name in NAMES.values()]
        lines += ['#include "beside.h"', '#define NAME "macro_name.h"', "#include NAME"]
        lines += ['#if __has_include("in/tested.h")', '#include "in/tested.h"', "#else"]
        lines += [
            "#define VALUE_tested 0",
            "#endif",
            "#define TEXT(x) #x",
            "#define STR(x) TEXT(x)",
        ]
        lines += ["#include <cstdio>", "int source(), value();", "static char text[9999];"]
        macros = [name for name in self.values if name not in ("source", "linked")]
        text = " ".join(f'"{name}=" STR(VALUE_{name}) "\\n"' for name in macros)
        call = f'snprintf(text, 9999, {text} "source=%d\\nlinked=%d\\n", source(), value());'
        lines += ['extern "C" __attribute__((visibility("default"))) const char* answer() {']
        self.put("mine.cpp", "\n".join([*lines, call, "return text;", "}\n"]))
        for name in NAMES.values():
            self.put(f"{name}/early/empty.h", "")
            self.put(f"{name}/late/{name}.h", f"#define VALUE_{name} 1\n")
        for name in ("beside", "forced", "macros", "macro_name"):
            self.put(f"{name}.h", f"#define VALUE_{name} 1\n")
        self.put("flags.rsp", "-DVALUE_rsp=1\n")
        self.put("source.cpp", "int source() { return 1; }\n")
        self.put("unread.h", "// no source includes this\n")
        self.archive(1)
        self.options = self._options()
        assert self.values_of_a_new_process() == self.values
        self.pristine = shutil.copytree(self.project, folder / "pristine")
        self.first_values = dict(self.values)

    def _options(self) -> dict:
        options = {
            "sources": ["mine.cpp", "source.cpp"],
            "extra_include_paths": [],
            "extra_cflags": ["-include", f"{self.project}/forced.h"],
            "extra_ldflags": [f"-L{self.project}", "-lvalue"],
            "CPATH": [],
            "CPLUS_INCLUDE_PATH": [],
        }
        options["extra_cflags"] += [
            "-imacros",
            f"{self.project}/macros.h",
            f"@{self.project}/flags.rsp",
        ]
        for search, words in SEARCHES.items():
            folders = {name: f"{self.project}/{NAMES[search]}/{name}" for name in ("early", "late")}
            for option, values in words.items():
                options[option] += [value.format(**folders) for value in values]
        variables = {name: ":".join(options.pop(name)) for name in list(options) if name.isupper()}
        return options | variables

    def values_of_a_new_process(self, **options) -> dict[str, int]:
        options = {**self.options, **options}
        variables = {name: options.pop(name) for name in list(options) if name.isupper()}
        script = f"""
import calcops_jit, ctypes
answer = ctypes.CDLL(calcops_jit.load("mine", **{options!r}).path).answer
answer.restype = ctypes.c_char_p
print(answer().decode())
"""
        child = self.run(script, cwd=self.project, CALCOPS_BUILD="0", **variables)
        assert child.code == 0, child.err
        return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", child.out)}

    def why(self) -> str:
        """Return what the command `why` says if the library is outdated, or ""."""
        variables = {name: value for name, value in self.options.items() if name.isupper()}
        child = self.main("why", "mine", **variables)
        assert child.err == ""
        return child.out if child.code else ""

    def restore(self) -> None:
        """Undo all edits. `why` compares with the library of the last load."""
        shutil.rmtree(self.project)
        shutil.copytree(self.pristine, self.project)
        self.values = dict(self.first_values)
        assert self.values_of_a_new_process() == self.values


@pytest.fixture(scope="module")
def shared_everything(tmp_path_factory):
    return Everything(tmp_path_factory.mktemp("everything"))


@pytest.fixture
def everything(shared_everything):
    if shared_everything.values != shared_everything.first_values:
        shared_everything.restore()
    shared_everything.log.unlink(missing_ok=True)
    return shared_everything


# ---- the inputs of load --------------------------------------------------------------------------


def in_place(path: Path, text: str) -> None:
    path.write_text(text)


def older(path: Path, text: str) -> None:
    """Replace a file by an older one."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.utime(new, (0, 0))
    new.rename(path)


def same_size_and_time(path: Path, text: str) -> None:
    before = path.stat()
    assert len(text) == before.st_size
    path.write_text(text)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


# {edit: (value that changes, file, how it is written)}
EDITS = {search: (name, f"{name}/late/{name}.h", in_place) for search, name in NAMES.items()}
EDITS |= {
    "a source": ("source", "source.cpp", in_place),
    "a header": ("beside", "beside.h", in_place),
    "an older header": ("beside", "beside.h", older),
    "a header of the same size and time": ("beside", "beside.h", same_size_and_time),
    "-include": ("forced", "forced.h", in_place),
    "-imacros": ("macros", "macros.h", in_place),
    "a response file": ("rsp", "flags.rsp", in_place),
    "a header that a macro names": ("macro_name", "macro_name.h", in_place),
    "a header that appears": ("tested", "in/tested.h", in_place),
}
TEXTS = {
    ".h": "#define VALUE_{} {}\n",
    ".rsp": "-DVALUE_{}={}\n",
    ".cpp": "int {}() {{ return {}; }}\n",
}


@pytest.mark.parametrize("edit", cases(EDITS, QUICK | (EDITS.keys() - SEARCHES.keys())))
def test_an_edited_file_causes_a_rebuild_and_why_names_it(everything, edit):
    name, file, write = EDITS[edit]
    path = everything.project / file
    path.parent.mkdir(exist_ok=True)
    everything.values[name] = 2 + list(EDITS).index(edit) % 8  # one digit, another for each edit
    write(path, TEXTS[path.suffix].format(name, everything.values[name]))
    assert file.partition("/")[0] in everything.why()
    assert everything.values_of_a_new_process() == everything.values
    assert 1 <= everything.compiled() <= 2
    assert everything.why() == ""
    if edit == "a header that appears":
        path.unlink()
        everything.values[name] = 0
        assert everything.values_of_a_new_process() == everything.values


def test_only_the_units_that_read_an_edited_file_are_compiled_and_going_back_compiles_none(
    everything,
):
    source = everything.project / "source.cpp"
    first = source.read_text()
    source.write_text(first.replace("1", "7"))
    assert everything.values_of_a_new_process()["source"] == 7
    (command,) = everything.commands()
    assert "source.cpp" in command
    source.write_text(first)
    assert everything.values_of_a_new_process() == everything.values
    assert everything.compiled() == 0


def test_a_rebuilt_archive_is_linked_again_without_a_compile(everything):
    for value in 2, 3:
        everything.archive(value)
        everything.values["linked"] = value
        assert "libvalue.a" in everything.why()
        everything.compiled()  # the objects of another test may be outdated in the first build
        assert everything.values_of_a_new_process() == everything.values
    assert everything.compiled() == 0


@pytest.mark.parametrize("search", cases(SEARCHES, QUICK))
def test_a_header_that_appears_in_an_earlier_folder_is_used(everything, search):
    name = NAMES[search]
    header = everything.put(f"{name}/early/{name}.h", f"#define VALUE_{name} 3\n")
    everything.values[name] = 3
    assert name in everything.why()
    assert everything.values_of_a_new_process() == everything.values
    header.unlink()
    everything.values[name] = 1
    assert everything.values_of_a_new_process() == everything.values


@pytest.mark.parametrize("early", ["no folder", "a dangling link"])
def test_a_header_that_appears_in_place_of_something_else_is_used(everything, early):
    """The folder of the earlier header is absent, or has a link of this name."""
    name = NAMES["I"]
    folder = everything.project / name / "early"
    header = folder / f"{name}.h"
    if early == "no folder":
        shutil.rmtree(folder)
    else:
        header.symlink_to("elsewhere.h")
    assert everything.values_of_a_new_process() == everything.values
    everything.compiled()
    assert everything.values_of_a_new_process() == everything.values
    assert everything.compiled() == 0
    folder.mkdir(exist_ok=True)
    header.write_text(f"#define VALUE_{name} 4\n")  # behind the link, if there is one
    everything.values[name] = 4
    assert everything.values_of_a_new_process() == everything.values


def test_a_link_to_a_folder_of_headers_is_followed_when_it_changes(everything):
    name = NAMES["isystem"]
    early, late = (everything.project / name / folder for folder in ("early", "late"))
    shutil.copytree(late, everything.project / "release")
    everything.put(f"release/{name}.h", f"#define VALUE_{name} 5\n")
    shutil.rmtree(early)
    early.symlink_to("../release")
    everything.values[name] = 5
    assert everything.values_of_a_new_process() == everything.values
    early.unlink()
    early.symlink_to("late")
    everything.values[name] = 1
    assert everything.values_of_a_new_process() == everything.values


@pytest.mark.parametrize("option", ["extra_cflags", "extra_ldflags", "extra_include_paths"])
def test_another_flag_causes_a_rebuild(everything, option):
    words = {"extra_cflags": "-DX=1", "extra_ldflags": "-lm", "extra_include_paths": "/nowhere"}
    options = {option: [*everything.options[option], words[option]]}
    assert everything.values_of_a_new_process(**options) == everything.values
    assert everything.log.exists()


VARIABLES = ["CC", "CXX", "C_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH", "NVCC_APPEND_FLAGS"]
VARIABLES += ["CUDNN_HOME", "NIX_CFLAGS_COMPILE", "OMPI_CXX"]


@pytest.mark.parametrize("variable", VARIABLES)
def test_another_variable_of_the_compilers_causes_a_rebuild_and_why_names_it(everything, variable):
    values = {"CXX": shutil.which("c++"), "NVCC_APPEND_FLAGS": "-lineinfo"}
    variables = {name: value for name, value in everything.options.items() if name.isupper()}
    variables[variable] = values.get(variable, "/nowhere")
    why = everything.main("why", "mine", **variables)
    assert why.code == 1
    assert (variable if variable != "CXX" else Path(values["CXX"]).resolve().name) in why.out


# ---- what is no input ----------------------------------------------------------------------------


def touch_all(e):
    for path in e.project.rglob("*"):
        path.touch()


def write_all_again(e):
    for path in e.project.rglob("*"):
        if path.is_file() and path.suffix != ".a":
            path.write_bytes(path.read_bytes())


def copied_cache(e):
    copy = e.path.parent / "copy of the cache"
    shutil.copytree(e.cache, copy, dirs_exist_ok=True)
    return {"CALCOPS_CACHE": copy}


def restored_cache(e):
    """Replace the cache by one that was in an archive, as in a CI job."""
    archive = e.path.parent / "cache.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(e.cache, "cache")
    shutil.rmtree(e.cache)
    with tarfile.open(archive) as tar:
        tar.extractall(e.path.parent, filter="fully_trusted")


def moved_checkout(e):
    """Move the loader and the project into one other folder, and reach them through a link."""
    folder = e.path.parent / "moved"
    folder.mkdir(exist_ok=True)
    (e.path.parent / "link").symlink_to(folder)
    e.path = e.path.rename(folder / "loader")
    e.path = e.path.parent.parent / "link" / "loader"


NO_INPUTS = {
    "the times of all files": touch_all,
    "all files, written again": write_all_again,
    "a header that no source includes": lambda e: e.put("unread.h", "// another text\n"),
    "a new header that no source includes": lambda e: e.put("lonely.h", "// hello\n"),
    "the cache, copied": copied_cache,
    "the cache, restored from an archive": restored_cache,
    "the cache, spelled otherwise": lambda e: {"CALCOPS_CACHE": f"{e.cache}/../{e.cache.name}/."},
    "the folder of the loader": moved_checkout,
    "variables": lambda e: {
        "MAX_JOBS": "7",
        "PATH": f"{e.path}{os.pathsep}{os.environ['PATH']}",
        "HOME": "/nowhere",
        "LC_ALL": "de_DE.UTF-8",
        "LANG": "de_DE.UTF-8",
        "TMPDIR": str(e.path),
        "PYTHONUNBUFFERED": "1",
        "CXXFLAGS": "-O1",
    },
}


@pytest.mark.parametrize("change", NO_INPUTS)
def test_no_compiler_starts_after_a_change_that_is_no_input(everything, change):
    variables = NO_INPUTS[change](everything)
    variables = variables if isinstance(variables, dict) else {}
    assert everything.values_of_a_new_process(**variables) == everything.values
    assert not everything.log.exists()


def test_the_headers_of_a_source_named_link_are_followed(checkout):
    """The linker writes a file of dependencies, too."""
    checkout.put("value.h", "#define VALUE 1\n")
    checkout.put("link.cpp", '#include "value.h"\n' + ANSWER.format("return VALUE;"))
    assert checkout.loaded(sources=["link.cpp"]) == 1
    checkout.put("value.h", "#define VALUE 2\n")
    assert checkout.loaded(sources=["link.cpp"]) == 2
