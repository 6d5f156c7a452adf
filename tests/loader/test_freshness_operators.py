"""The project's own operators are never stale: sources that come and go, another PyTorch, processor
or compiler, and files that change during a build."""

import os
import shutil

import pytest
from checkout import ANSWER, CALL, MAIN, Checkout, compiler, wait_for, with_cpuinfo


def test_a_new_renamed_or_deleted_source_of_the_operators_causes_a_rebuild(checkout):
    """Only what changed is compiled. The answer calls a function of the second source."""
    checkout.write("ops/tiny/tiny.cpp", "int second();\n" + ANSWER.format("return second();"))
    second = checkout.write("ops/second/second.cpp", "int second() { return 2; }\n")
    assert (checkout.answer(), checkout.compiled()) == (2, 2)
    checkout.write("ops/third/third.cpp", "int third() { return 3; }\n")
    assert "third.cpp" in checkout.main("why").out
    assert checkout.answer() == 2
    assert "third.cpp" in checkout.log.read_text()
    second.rename(second.with_name("renamed.cpp"))
    assert checkout.answer() == 2
    (second.with_name("renamed.cpp")).unlink()
    checkout.write("ops/third/third.cpp", "int second() { return 3; }\n")
    assert checkout.answer() == 3
    checkout.compiled()
    checkout.write("ops/third/third.cpp", "int second() { return }\n")
    child = checkout.run()
    assert child.code == 1
    assert "third.cpp:1:" in child.err
    checkout.compiled()
    checkout.write("ops/third/third.cpp", "int second() { return 4; }\n")
    assert (checkout.answer(), checkout.compiled()) == (4, 1)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    checkout = Checkout(tmp_path_factory.mktemp("built"))
    assert checkout.answer() == 1
    return checkout


@pytest.mark.parametrize(
    "change",
    [
        "import torch; torch.__version__ = '9.9'",
        "import torch; torch.version.git_version = 'another commit'",
        with_cpuinfo("flags : words of another processor\n"),
        "import os; os.environ['CALCOPS_CFLAGS'] = '-DX'",
        "import os; os.environ['CALCOPS_CUDA'] = '0' if 'CALCOPS_CUDA' not in os.environ else '1'",
    ],
    ids=[
        "PyTorch's version",
        "PyTorch's commit",
        "the processor",
        "CALCOPS_CFLAGS",
        "CALCOPS_CUDA",
    ],
)
def test_another_pytorch_processor_or_variable_is_another_build(built, change):
    child = built.run(f"{change}\n{MAIN}", arguments=["why"])
    assert (child.code, child.err) == (1, ""), child.out
    assert child.out != "it was never built\n"


def test_another_compiler_at_the_same_path_causes_a_rebuild(built, tmp_path):
    script = tmp_path / "my-c++"
    script.write_text(f'#!/bin/sh\nexec {compiler()} "$@"\n')
    script.chmod(0o755)
    assert built.answer(CXX=script) == 1
    assert built.main("why", CXX=script).code == 0
    script.write_text(script.read_text() + "# another release\n")
    why = built.main("why", CXX=script)
    assert (why.code, script.name in why.out) == (1, True)


def test_each_of_two_compilers_with_the_same_output_finds_its_build(built, tmp_path):
    scripts = [tmp_path / name for name in ("one", "two")]
    for script in scripts:
        script.write_text(f'#!/bin/sh\nexec {compiler()} "$@" # {script.name}\n')
        script.chmod(0o755)
        assert built.answer(CXX=script) == 1
    built.compiled()
    assert [built.answer(CXX=script) for script in scripts] == [1, 1]
    assert built.compiled() == 0


def test_every_word_of_the_compiler_command_is_an_input(built):
    """A command may have variables and response files, and words that follow an option."""
    flags = built.put("flags", "-DMORE=1\n")
    for name, value in ("first", 2), ("second", 3):
        built.put(f"{name}/more.h", f"#define MORE {value}\n")
    text = "#ifdef SIX\n#define MORE 6\n#elif !defined(MORE)\n#include <more.h>\n#endif\n"
    built.put("mine.cpp", text + ANSWER.format("return MORE;"))
    commands = [f"{compiler()} -DMORE=4", f"env X=1 {compiler()} -D MORE=5", f"c++ @{flags}"]
    commands += [f"{compiler()} -I {built.project}/{name}" for name in ("first", "second")]
    commands += [f"{compiler()} -I {built.project}/second -D SIX"]
    assert [built.loaded(CXX=command) for command in commands] == [4, 5, 1, 2, 3, 6]
    flags.write_text("-DMORE=7\n")
    assert built.loaded(CXX=commands[2]) == 7


def test_without_a_compiler_a_fresh_library_is_used_and_an_edit_is_an_error(built, tmp_path):
    assert built.answer(CXX=None) == 1
    assert built.answer(CXX=None, PATH="/nowhere") == 1
    compiler_link = tmp_path / "my-c++"
    compiler_link.symlink_to(compiler())
    assert built.answer(CXX=compiler_link) == 1
    compiler_link.unlink()
    assert built.answer(CXX=compiler_link) == 1
    header = built.path / "ops/tiny/tiny.h"
    header.write_text("#define ANSWER 8\n")
    child = built.run(CXX=compiler_link)
    assert child.code == 1
    assert compiler_link.name in child.err
    assert "fix: " in child.err
    header.write_text("#define ANSWER 1\n")


# ---- files that change during a build ------------------------------------------------------------

MACRO = '#define HEADER "tiny/tiny.h"\n#include HEADER\n' + ANSWER.format("return ANSWER;")


@pytest.mark.parametrize("time", ["now", pytest.param("long ago", marks=pytest.mark.long)])
@pytest.mark.parametrize("source", ["first build", "edited", "behind a macro"])
def test_a_header_saved_during_its_compile_is_compiled_again(checkout, source, time):
    if source != "first build":
        assert checkout.answer() == 1
        text = checkout.path.joinpath("ops/tiny/tiny.cpp").read_text()
        checkout.write("ops/tiny/tiny.cpp", MACRO if source == "behind a macro" else text + "//\n")
        checkout.compiled()
    checkout.slow.touch()
    child = checkout.start()
    wait_for(checkout.is_compiling)
    header = checkout.write("ops/tiny/tiny.h", "#define ANSWER 5\n")
    if time == "long ago":
        os.utime(header, (0, 0))
    checkout.slow.unlink()
    assert child.wait().out == "5\n", child.err
    assert checkout.compiled() == 2
    assert checkout.answer() == 5
    assert checkout.compiled() == 0


def test_a_header_that_appears_before_another_during_its_compile_is_used(checkout):
    """It appears after the compiler has looked for it, and before the compiler ends."""
    late = checkout.path / "ops/tiny/tiny/tiny.h"
    hook = checkout.hook(f"""
{shutil.which("c++")} "$@" || exit
case "$*" in *tiny.cpp*) mkdir -p {late.parent}; [ -e {late} ] || echo "#define ANSWER 7" > {late};; esac
exit""")
    assert checkout.run(CALL, **hook).out == "7\n"


def test_a_switch_between_two_checkouts_compiles_only_what_was_edited(checkout):
    checkout.write("ops/other/other.cpp", "int other() { return 1; }\n")
    assert checkout.answer() == 1
    first = checkout.path
    second = shutil.copytree(first, first.with_name("another checkout"))
    checkout.path = second
    checkout.write("ops/tiny/tiny.h", "#define ANSWER 2\n")
    assert checkout.answer() == 2
    checkout.compiled()
    for path, value in (first, 3), (second, 4):
        checkout.path = path
        checkout.write("ops/tiny/tiny.h", f"#define ANSWER {value}\n")
        assert checkout.answer() == value
        assert checkout.compiled() == 1
