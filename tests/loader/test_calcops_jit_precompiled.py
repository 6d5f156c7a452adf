"""A source that is edited again does not parse PyTorch's headers each time, and is never built from
outdated ones."""

import json
import os
import signal
from pathlib import Path

import pytest
from checkout import CALL, Checkout, in_cache, spoil, the_zygote, wait_for

from _calcops_jit import requests
from _calcops_jit.compile.precompiled import preamble, strangers
from _calcops_jit.request import SHADOW

TORCH = "#include <torch/library.h>\n"


@pytest.mark.parametrize(
    "text, expected",
    [
        (
            "#include <torch/library.h>\n#include <vector>\nint x;\n#include <string>\n",
            TORCH + "#include <vector>\n",
        ),
        (
            "// what it is\n\n/* and\n   why */\n  #  include <torch/library.h>  // for this\n",
            TORCH,
        ),
        ('#include <torch/library.h>\n#include "mine.h"\n#include <vector>\n', TORCH),
        ("#include <torch/library.h>\n#define NDEBUG\n#include <cassert>\n", TORCH),
        ("#include <torch/library.h>\n#ifdef X\n#include <vector>\n#endif\n", TORCH),
        ("#include <torch/library.h>\n#include <mine.h>\n#include <vector>\n", TORCH),
        (
            (
                "// #include <map>\n/* #include <set>\n#include <list>\n*/\n"
                "#include <torch/library.h>\n"
            ),
            TORCH,
        ),
        ("#include <torch/library.h>\n// a path \\\n#include <vector>\n", TORCH),
        ("#include <torch/library.h>\n// a path \\ \n#include <vector>\n#include <map>\n", TORCH),
        ('#include "mine.h"\n#include <torch/library.h>\n', ""),
        ("#define X 1\n#include <torch/library.h>\n", ""),
        ("#include <vector>\nint x;\n", ""),
        ("", ""),
    ],
)
def test_the_preamble_is_what_comes_first_of_others_headers(tmp_path, text, expected):
    (tmp_path / "mine.h").touch()
    assert preamble(text.encode(), [str(tmp_path)]) == expected


def test_the_loaders_own_header_of_torch_library_is_no_stranger(tmp_path):
    """Nor where the project's folder is the checkout."""
    (tmp_path / "cell.cpp").touch()
    ours, theirs = f"{SHADOW}/torch/library.h", str(tmp_path / "cell.h")
    for source in tmp_path / "cell.cpp", Path(SHADOW).parents[1] / "calcops_jit.py":
        request = requests.foreign("cell", [source])
        assert strangers(request, {ours, theirs}) == {theirs}


SOURCE = """\
// tiny
#include <torch/tiny.h>

#include "tiny/tiny.h"
extern "C" __attribute__((visibility("default"))) int answer() {{ return ANSWER * FACTOR + {}; }}
"""
CLOSURE = """
import calcops_jit, json
from _calcops_jit.cache import store
generation = calcops_jit.library_path().rpartition("/")[0]
print(json.dumps(sorted(store.read_manifest(generation).closure.entries())))
"""


@pytest.fixture
def checkout(tmp_path):
    """A checkout whose operator includes a header of PyTorch's, as its name says, which is quick to
    compile."""
    checkout = Checkout(the_zygote(), tmp_path)
    checkout.others = tmp_path / "others"
    (checkout.others / "torch").mkdir(parents=True)
    (checkout.others / "torch/tiny.h").write_text("#pragma once\n#include <deep.h>\n")
    (checkout.others / "deep.h").write_text("#pragma once\n#define FACTOR 10\n")
    checkout.edit = lambda number: checkout.write("ops/tiny/tiny.cpp", SOURCE.format(number))
    # The compiler's own folder, as PyTorch's are too large for these tests.
    checkout.compiler.write_text(
        checkout.compiler.read_text().replace('"$@"', f'-isystem {checkout.others} "$@"')
    )
    checkout.ask = checkout.answer
    checkout.edit(0)
    assert checkout.ask() == 10
    assert not headers(checkout)
    checkout.edit(1)
    assert checkout.ask() == 11
    wait_for(lambda: headers(checkout))
    return checkout


def headers(checkout):
    return sorted(checkout.cache.glob("unit-preamble.*/*/unit.o"))


def used(checkout):
    """Whether the last build used a precompiled header."""
    lines = checkout.log.read_text().splitlines()
    checkout.log.unlink()
    return any(" -include preamble." in line for line in lines)


def test_the_second_edit_uses_what_the_first_one_made_and_reads_the_same_files(checkout):
    assert not used(checkout)
    checkout.edit(2)
    assert checkout.ask() == 12
    assert used(checkout)
    assert len(headers(checkout)) == 1
    with_it = json.loads(checkout.run(CLOSURE).out)
    assert any(path.endswith("/deep.h") for path in with_it)
    assert not any(".gch" in path for path in with_it)
    for header in headers(checkout):
        spoil(header, "empty")
    checkout.edit(3)
    assert checkout.ask() == 13
    assert not used(checkout)
    assert json.loads(checkout.run(CLOSURE).out) == with_it


def test_a_first_build_and_one_that_keeps_every_processor_busy_make_none(checkout):
    for header in headers(checkout):
        spoil(header, "empty")
    checkout.edit(2)
    assert checkout.ask(MAX_JOBS="1") == 12
    assert [header.stat().st_size for header in headers(checkout)] == [0]


@pytest.mark.parametrize(
    "change", ["a header behind it", "a header that newly matches", "other flags"]
)
def test_it_is_not_used_after_a_change_of(checkout, change):
    if change == "a header that newly matches":
        (checkout.others / "deep.h").write_text(
            "#pragma once\n#if __has_include(<new.h>)\n#include <new.h>\n#else\n"
            "#define FACTOR 10\n#endif\n"
        )
        checkout.edit(2)
        assert checkout.ask() == 12
        wait_for(lambda: len(headers(checkout)) == 2)
        checkout.edit(3)
        assert checkout.ask() == 13
        assert used(checkout)
        (checkout.others / "new.h").write_text("#define FACTOR 20\n")
        assert checkout.ask() == 23
    elif change == "a header behind it":
        (checkout.others / "deep.h").write_text("#pragma once\n#define FACTOR 20\n")
        assert checkout.ask() == 21
    else:  # which GCC would not notice
        assert checkout.ask(CALCOPS_CFLAGS="-g -fvisibility=default") == 11
    assert not used(checkout)


@pytest.mark.parametrize("damage", ["truncated", "one byte"])
def test_a_damaged_one_is_not_used(checkout, damage):
    used(checkout)
    for header in headers(checkout):
        spoil(header, damage)
    checkout.edit(2)
    assert checkout.ask() == 12
    assert not used(checkout)


def test_a_mistake_is_told_as_without_it(checkout):
    checkout.write("ops/tiny/tiny.cpp", SOURCE.format("mistake"))
    child = checkout.run(CALL)
    assert child.code, child.err
    assert "tiny.cpp" in child.err, child.err
    assert "mistake" in child.err, child.err
    checkout.edit(7)
    assert checkout.ask() == 17


def test_what_one_library_made_serves_the_first_build_of_another(checkout):
    def load(name, number):
        source = checkout.path / f"{name}.cpp"
        source.write_text(SOURCE.format(number).replace("tiny/tiny.h", "ops/tiny/tiny.h"))
        script = f"import calcops_jit\ncalcops_jit.load({name!r}, [{str(source)!r}])"
        child = checkout.run(script)
        assert child.code == 0, child.err
        return used(checkout)

    seen = len(headers(checkout))
    assert not load("one", 1)
    assert not load("one", 2)
    wait_for(lambda: len(headers(checkout)) > seen)
    assert load("two", 3)
    assert load("one", 4)


def test_there_are_two_at_most(checkout):
    seen = set(headers(checkout))
    for name in ("<vector>", "<map>"):
        checkout.write(
            "ops/tiny/tiny.cpp", SOURCE.format(2).replace("tiny.h>", f"tiny.h>\n#include {name}")
        )
        assert checkout.ask() == 12
        wait_for(lambda seen=seen: set(headers(checkout)) - seen)
        seen = seen | set(headers(checkout))
    wait_for(lambda: len(headers(checkout)) == 2)
    assert len(seen) == 3


def test_one_that_was_killed_leaves_nothing_and_is_made_again(checkout):
    checkout.write(
        "ops/tiny/tiny.cpp", SOURCE.format(2).replace("tiny.h>", "tiny.h>\n#include <algorithm>")
    )
    assert checkout.ask() == 12
    wait_for(lambda: in_cache(checkout, "unit-preamble"))
    os.killpg(os.getpgid(in_cache(checkout, "unit-preamble")[0]), signal.SIGKILL)
    checkout.write(
        "ops/tiny/tiny.cpp", SOURCE.format(3).replace("tiny.h>", "tiny.h>\n#include <algorithm>")
    )
    assert checkout.ask() == 13
    wait_for(lambda: len(headers(checkout)) == 2)
    wait_for(lambda: not [*checkout.cache.glob("*/stage.*"), *in_cache(checkout)])


def test_a_cache_that_goes_with_its_process_gets_none(checkout, tmp_path):
    (tmp_path / f"calcops-{os.getuid()}").touch()
    edited = SOURCE.format(2).replace("\n", "\\n").replace("{", "{{").replace("}", "}}").format()
    script = f"""
import tempfile; tempfile.tempdir = {str(tmp_path)!r}
import calcops_jit, time
from pathlib import Path
Path({str(checkout.path / "ops/tiny/tiny.cpp")!r}).write_text('''{edited}''')
print(calcops_jit.reload()); time.sleep(6)
import atexit; atexit._run_exitfuncs()
"""
    child = checkout.run(script, CALCOPS_CACHE="/dev/null/cache", TMPDIR=tmp_path)
    assert child.out == "['calcops']\n", child.err
    assert not list(tmp_path.glob("calcops-*.*"))
