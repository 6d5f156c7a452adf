"""Changes that must cause a rebuild and changes that must not. The log of the compiler shows which
units were compiled.

The source begins with a header of PyTorch, so the loader uses a precompiled header for it. The
loader must also notice changes of the headers that the precompiled one includes.
"""

import os
import shutil
import tarfile
from pathlib import Path

import pytest
from checkout import CALL, Checkout, the_zygote, wait_for

MAIN = "import runpy; runpy.run_module('calcops_jit', run_name='__main__', alter_sys=True)"
SOURCE = """
#include <c10/macros/Export.h>
#include "tiny/tiny.h"
#include <by_i.h>
#include <by_isystem.h>
#if __has_include(<newly_there.h>)
#include <newly_there.h>
#else
#define NEW 0
#endif
#ifndef FLAG
#define FLAG 0
#endif
int second();
int archived();
// Each input has a digit.
extern "C" __attribute__((visibility("default"))) int answer() {
  return 100000 * archived() + 10000 * second() + 1000 * (FLAG + NEW) + 100 * ANSWER + 10 * BY_I +
         BY_SYSTEM;
}
"""


class Built(Checkout):
    """A built checkout with folders for -I and -isystem, an archive to link, and a compiler that is
    a wrapper of another one."""

    def __init__(self, folder: Path):
        super().__init__(the_zygote(), folder)
        self.inner = folder / "inner-g++"
        self.inner.write_text(f'#!/bin/sh\nexec {shutil.which("c++")} "$@"\n')
        self.inner.chmod(0o755)
        self.compiler.write_text(
            self.compiler.read_text().replace(shutil.which("c++"), str(self.inner))
        )
        self.write("ops/tiny/tiny.cpp", SOURCE)
        self.write("ops/second/second.cpp", "int second() { return 1; }\n")
        self.write("by_i/by_i.h", "#define BY_I 1\n")
        self.write("by_isystem/by_isystem.h", "#define BY_SYSTEM 1\n")
        self.write("unread.h", "// no source includes this\n")
        self.archive(1)
        self.flags = f"-I{self.path}/by_i -isystem {self.path}/by_isystem"
        # The second build of a unit starts to build the unit's precompiled header.
        for text in (SOURCE + "// first\n", SOURCE):
            self.write("ops/tiny/tiny.cpp", text)
            assert self.answer(MAX_JOBS="2") == 110111
        wait_for(lambda: list(self.cache.glob("unit-preamble.*/*/unit.o")))
        self.pristine = folder / "pristine"
        shutil.copytree(self.path, self.pristine)
        self.compilers = {path: path.read_text() for path in (self.compiler, self.inner)}

    def archive(self, value: int) -> None:
        source = self.write("archived/archived.cpp", f"int archived() {{ return {value}; }}\n")
        library = source.with_name("libarchived.a")
        object_file = source.with_suffix(".o")
        library.unlink(missing_ok=True)
        compile_command = f"c++ -fPIC -c {source} -o {object_file}"
        assert os.system(f"{compile_command} && ar rc {library} {object_file}") == 0

    def restore(self) -> None:
        shutil.rmtree(self.path)
        shutil.copytree(self.pristine, self.path)
        for path, text in self.compilers.items():
            if path.read_text() != text:
                path.write_text(text)
        assert self.answer() == 110111  # `why` compares with this build
        self.compiled()

    def start(self, script=CALL, **options):
        options.setdefault("CALCOPS_CFLAGS", self.flags)
        # With one job a build uses precompiled headers and makes no new ones.
        options.setdefault("MAX_JOBS", "1")
        preamble = f"""
import _calcops_jit.requests as requests
own = requests.own
def with_archive(*arguments):
    return own(*arguments).but(ldflags=('{self.path}/archived/libarchived.a',))
requests.own = with_archive
"""
        return super().start(preamble + script, **options)


@pytest.fixture(scope="module")
def shared_checkout(tmp_path_factory):
    return Built(tmp_path_factory.mktemp("fresh"))


@pytest.fixture
def built(shared_checkout):
    shared_checkout.restore()
    return shared_checkout


def rewrite_with_same_size_and_time(path: Path, text: str) -> None:
    before = path.stat()
    assert len(text) == before.st_size
    path.write_text(text)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_by_older_file(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    os.utime(new, (0, 0))
    new.rename(path)


def append_comment(path: Path) -> None:
    with open(path, "a") as file:
        file.write("# another release\n")


# For each change: a function that makes it and may return variables, the answer afterwards, the
# number of units that are compiled, and the name of the input that `why` prints. The cache keeps
# eight objects of a unit. So the cases that must find an object come before the many cases of
# headers.
REBUILDS = {
    "a library that is linked": (lambda c: c.archive(2), 210111, 0, "libarchived.a"),
    "a source": (
        lambda c: c.write("ops/second/second.cpp", "int second() { return 2; }\n"),
        120111,
        1,
        "second.cpp",
    ),
    "a new source": (lambda c: c.write("ops/tiny/new.cpp", "int unused;\n"), 110111, 1, "sources"),
    "a deleted source": (
        lambda c: [
            (c.path / "ops/second/second.cpp").unlink(),
            c.write("ops/tiny/tiny.cpp", SOURCE + "int second() { return 3; }\n"),
        ],
        130111,
        1,
        "sources",
    ),
    "a renamed source": (
        lambda c: (c.path / "ops/second/second.cpp").rename(c.path / "ops/second/other.cpp"),
        110111,
        1,
        "sources",
    ),
    "a header": (lambda c: c.write("ops/tiny/tiny.h", "#define ANSWER 2\n"), 110211, 1, "tiny.h"),
    "a header of an older time": (
        lambda c: replace_by_older_file(c.path / "ops/tiny/tiny.h", "#define ANSWER 4\n"),
        110411,
        1,
        "tiny.h",
    ),
    "a header of the same size and time": (
        lambda c: rewrite_with_same_size_and_time(c.path / "ops/tiny/tiny.h", "#define ANSWER 5\n"),
        110511,
        1,
        "tiny.h",
    ),
    "a header of -I": (lambda c: c.write("by_i/by_i.h", "#define BY_I 2\n"), 110121, 1, "by_i.h"),
    "a header of -isystem": (
        lambda c: c.write("by_isystem/by_isystem.h", "#define BY_SYSTEM 2\n"),
        110112,
        1,
        "by_isystem.h",
    ),
    "a header that __has_include tests": (
        lambda c: c.write("by_isystem/newly_there.h", "#define NEW 1\n"),
        111111,
        1,
        "newly_there.h",
    ),
    "a header that is found before another": (
        lambda c: c.write("by_i/by_isystem.h", "#define BY_SYSTEM 3\n"),
        110113,
        1,
        "by_isystem.h",
    ),
    "a header beside the source": (
        lambda c: c.write("ops/tiny/tiny/tiny.h", "#define ANSWER 3\n"),
        110311,
        1,
        "tiny/tiny",
    ),
    "another compiler at the same path": (
        lambda c: append_comment(c.compiler),
        110111,
        2,
        "logging-g++",
    ),
    "the compiler that a wrapper calls": (
        lambda c: append_comment(c.inner),
        110111,
        2,
        "inner-g++",
    ),
    "a flag": (lambda c: {"CALCOPS_CFLAGS": c.flags + " -DFLAG=1"}, 111111, 2, "C++ flags"),
    "the C++ standard": (
        lambda c: {"CALCOPS_CFLAGS": c.flags + " -std=c++20"},
        110111,
        2,
        "C++ flags",
    ),
    "CXX": (lambda c: {"CXX": str(c.inner)}, 110111, 0, "compiler"),  # this compiler keeps no log
    "CALCOPS_CUDA": (lambda c: {"CALCOPS_CUDA": "0"}, 110111, 2, "C++ flags"),
    **{
        name: (lambda c, name=name: {name: "/nowhere"}, 110111, 2, name)
        for name in ("CC", "CPATH", "CPLUS_INCLUDE_PATH", "C_INCLUDE_PATH", "LIBRARY_PATH")
    },
    **{
        name: (lambda c, name=name: {name: "-lineinfo"}, 110111, 2, name)
        for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
    },
}


# After these changes, the build compiles tiny.cpp with the precompiled header, because the flags of
# the two are the same.
PRECOMPILED = {"a deleted source", *(name for name in REBUILDS if name.startswith("a header"))}


@pytest.mark.parametrize("change", REBUILDS)
def test_a_changed_input_causes_a_rebuild_and_why_names_the_input(built, change):
    make_change, answer, units, words = REBUILDS[change]
    result = make_change(built)
    environment = result if isinstance(result, dict) else {}
    why = built.run(MAIN, arguments=["why"], **environment)
    assert (why.code, why.err) == (1, "")
    assert words in why.out
    assert len(why.out.splitlines()) <= 12
    assert built.compiled() == 0

    assert built.answer(**environment) == answer
    log = built.log.read_text() if built.log.exists() else ""
    assert (" -include preamble." in log) == (change in PRECOMPILED)
    assert built.compiled() == units
    assert built.answer(**environment) == answer
    assert built.compiled() == 0
    assert built.run(MAIN, arguments=["why"], **environment).out.startswith("nothing changed: ")


@pytest.mark.parametrize(
    "change",
    [
        "torch.__version__ = '9.9'",
        "torch.version.git_version = 'another commit'",
        "import _calcops_jit.request as request; request.isa = lambda: 'avx9'",
    ],
)
def test_another_torch_or_another_processor_causes_a_rebuild(built, change):
    child = built.run(f"import torch; {change}\n{CALL}")
    assert child.out == "110111\n"
    assert built.compiled() == 2


def restore_cache_from_archive(c):
    with tarfile.open(c.path.parent / "cache.tar", "w") as tar:
        tar.add(c.cache, "cache")
    shutil.rmtree(c.cache)
    with tarfile.open(c.path.parent / "cache.tar") as tar:
        tar.extractall(c.path.parent, filter="fully_trusted")


def copy_cache(c):
    shutil.copytree(c.cache, c.path.parent / "copy", dirs_exist_ok=True)
    return {"CALCOPS_CACHE": c.path.parent / "copy"}


def extend_path(c):
    return {"PATH": f"{c.path}{os.pathsep}{os.environ['PATH']}"}


NO_REBUILDS = {
    "the times of all files": lambda c: [path.touch() for path in (c.path / "ops").rglob("*.*")],
    "all files, written again": lambda c: [
        p.write_bytes(p.read_bytes()) for p in c.path.rglob("*.*") if p.is_file()
    ],
    "a header that no source includes": lambda c: append_comment(c.path / "unread.h"),
    "a new header that no source includes": lambda c: c.write("ops/tiny/lonely.h", "// hello\n"),
    "the cache, copied": copy_cache,
    "the cache, restored from an archive": restore_cache_from_archive,
    "another spelling of the cache": lambda c: {"CALCOPS_CACHE": f"{c.cache}/../{c.cache.name}/."},
    "MAX_JOBS": lambda c: {"MAX_JOBS": "7"},
    "PATH": extend_path,
    "HOME": lambda c: {"HOME": "/nowhere"},
    "locale": lambda c: {"LC_ALL": "de_DE.UTF-8", "LANG": "de_DE.UTF-8"},
    "TMPDIR": lambda c: {"TMPDIR": str(c.path)},
    "variables of other programs": lambda c: {
        "EDITOR": "vi",
        "PYTHONUNBUFFERED": "1",
        "CXXFLAGS": "-O1",
    },
    "the working directory": lambda c: {"cwd": "/"},
}


@pytest.mark.parametrize("change", NO_REBUILDS)
def test_no_compiler_starts_after_a_change_that_is_no_input(built, change):
    result = NO_REBUILDS[change](built)
    options = result if isinstance(result, dict) else {}
    child = built.run(**options)
    assert (child.code, child.out, child.err) == (0, "110111\n", "")
    assert not built.log.exists()


def test_no_compiler_starts_if_the_checkout_moves_or_is_reached_through_a_link(tmp_path):
    checkout = Checkout(the_zygote(), tmp_path)
    assert checkout.answer() == 1
    assert checkout.compiled() == 1
    checkout.path = checkout.path.rename(tmp_path / "moved here")
    assert checkout.answer() == 1
    assert not checkout.log.exists()
    (tmp_path / "link").symlink_to(checkout.path)
    checkout.path = tmp_path / "link"
    assert checkout.answer() == 1
    assert not checkout.log.exists()
