"""Precompiled headers: a source that is edited again does not parse PyTorch's headers each time,
and is never built from outdated ones."""

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
def test_the_preamble_is_the_leading_includes_of_foreign_headers(tmp_path, text, expected):
    (tmp_path / "mine.h").touch()
    assert preamble(text.encode(), [str(tmp_path)]) == expected


def test_the_loaders_own_torch_library_h_may_be_precompiled(tmp_path):
    """The second source lies in the folder above that header."""
    (tmp_path / "cell.cpp").touch()
    shadow_header = f"{SHADOW}/torch/library.h"
    own_header = str(tmp_path / "cell.h")
    for source in tmp_path / "cell.cpp", Path(SHADOW).parents[1] / "calcops_jit.py":
        request = requests.foreign("cell", [source])
        assert strangers(request, {shadow_header, own_header}) == {own_header}


SOURCE = """\
// tiny
#include <torch/tiny.h>
{includes}
#include "tiny/tiny.h"
extern "C" __attribute__((visibility("default"))) int answer() {{
  return ANSWER * FACTOR + {number};
}}
"""
CLOSURE = """
import calcops_jit, json
from _calcops_jit.cache import store
generation = calcops_jit.library_path().rpartition("/")[0]
print(json.dumps(sorted(store.read_manifest(generation).closure.entries())))
"""


@pytest.fixture
def checkout(tmp_path):
    """Return a checkout that was edited once, so it has a precompiled header.

    Its source includes a header that is named like one of PyTorch's and compiles in a moment.
    """
    checkout = Checkout(the_zygote(), tmp_path)
    checkout.package = tmp_path / "others"
    (checkout.package / "torch").mkdir(parents=True)
    (checkout.package / "torch/tiny.h").write_text("#pragma once\n#include <deep.h>\n")
    (checkout.package / "deep.h").write_text("#pragma once\n#define FACTOR 10\n")

    def edit(number, includes=""):
        text = SOURCE.format(number=number, includes=includes)
        return checkout.write("ops/tiny/tiny.cpp", text)

    checkout.edit = edit
    # The compiler itself names the folder of the package, as if it were a folder of the system.
    checkout.compiler.write_text(
        checkout.compiler.read_text().replace('"$@"', f'-isystem {checkout.package} "$@"')
    )
    checkout.edit(0)
    assert checkout.answer() == 10
    assert not headers(checkout)
    checkout.edit(1)
    assert checkout.answer() == 11
    wait_for(lambda: headers(checkout))
    return checkout


def headers(checkout):
    return sorted(checkout.cache.glob("unit-preamble.*/*/unit.o"))


def used_precompiled_header(checkout):
    """Return True if a build since the last call used a precompiled header."""
    lines = checkout.log.read_text().splitlines()
    checkout.log.unlink()
    return any(" -include preamble." in line for line in lines)


def test_the_second_edit_uses_the_precompiled_header_and_has_the_same_inputs(checkout):
    assert not used_precompiled_header(checkout)
    checkout.edit(2)
    assert checkout.answer() == 12
    assert used_precompiled_header(checkout)
    assert len(headers(checkout)) == 1
    inputs = json.loads(checkout.run(CLOSURE).out)
    assert any(path.endswith("/deep.h") for path in inputs)
    assert not any(".gch" in path for path in inputs)

    # The same inputs without a precompiled header.
    for header in headers(checkout):
        spoil(header, "empty")
    checkout.edit(3)
    assert checkout.answer() == 13
    assert not used_precompiled_header(checkout)
    assert json.loads(checkout.run(CLOSURE).out) == inputs


def test_a_build_that_uses_all_its_jobs_makes_no_precompiled_header(checkout):
    for header in headers(checkout):
        spoil(header, "empty")
    checkout.edit(2)
    assert checkout.answer(MAX_JOBS="1") == 12
    assert [header.stat().st_size for header in headers(checkout)] == [0]


@pytest.mark.parametrize(
    "change", ["a header behind it", "a new header of __has_include", "other flags"]
)
def test_a_precompiled_header_is_not_used_after_a_change(checkout, change):
    if change == "a new header of __has_include":
        (checkout.package / "deep.h").write_text(
            "#pragma once\n#if __has_include(<new.h>)\n#include <new.h>\n#else\n"
            "#define FACTOR 10\n#endif\n"
        )
        checkout.edit(2)
        assert checkout.answer() == 12
        wait_for(lambda: len(headers(checkout)) == 2)
        checkout.edit(3)
        assert checkout.answer() == 13
        assert used_precompiled_header(checkout)
        (checkout.package / "new.h").write_text("#define FACTOR 20\n")
        assert checkout.answer() == 23
    elif change == "a header behind it":
        (checkout.package / "deep.h").write_text("#pragma once\n#define FACTOR 20\n")
        assert checkout.answer() == 21
    else:  # GCC does not notice other flags by itself
        assert checkout.answer(CALCOPS_CFLAGS="-g -fvisibility=default") == 11
    assert not used_precompiled_header(checkout)


@pytest.mark.parametrize("damage", ["truncated", "one byte"])
def test_a_damaged_precompiled_header_is_not_used(checkout, damage):
    used_precompiled_header(checkout)
    for header in headers(checkout):
        spoil(header, damage)
    checkout.edit(2)
    assert checkout.answer() == 12
    assert not used_precompiled_header(checkout)


def test_a_compile_error_with_a_precompiled_header_names_the_source(checkout):
    checkout.edit("mistake")
    child = checkout.run(CALL)
    assert child.code, child.err
    assert "tiny.cpp" in child.err, child.err
    assert "mistake" in child.err, child.err
    checkout.edit(7)
    assert checkout.answer() == 17


def test_a_precompiled_header_serves_the_first_build_of_another_library(checkout):
    def load(name, number):
        source = checkout.path / f"{name}.cpp"
        text = SOURCE.format(number=number, includes="")
        source.write_text(text.replace("tiny/tiny.h", "ops/tiny/tiny.h"))
        script = f"import calcops_jit\ncalcops_jit.load({name!r}, [{str(source)!r}])"
        child = checkout.run(script)
        assert child.code == 0, child.err
        return used_precompiled_header(checkout)

    before = len(headers(checkout))
    assert not load("one", 1)
    assert not load("one", 2)
    wait_for(lambda: len(headers(checkout)) > before)
    assert load("two", 3)
    assert load("one", 4)


def test_the_cache_keeps_two_precompiled_headers_at_most(checkout):
    all_headers = set(headers(checkout))
    for name in ("<vector>", "<map>"):
        checkout.edit(2, f"#include {name}\n")
        assert checkout.answer() == 12
        wait_for(lambda before=all_headers: set(headers(checkout)) - before)
        all_headers = all_headers | set(headers(checkout))
    wait_for(lambda: len(headers(checkout)) == 2)
    assert len(all_headers) == 3


def test_a_killed_build_of_a_precompiled_header_leaves_nothing_and_is_repeated(checkout):
    checkout.edit(2, "#include <algorithm>\n")
    assert checkout.answer() == 12
    wait_for(lambda: in_cache(checkout, "unit-preamble"))
    os.killpg(os.getpgid(in_cache(checkout, "unit-preamble")[0]), signal.SIGKILL)
    checkout.edit(3, "#include <algorithm>\n")
    assert checkout.answer() == 13
    wait_for(lambda: len(headers(checkout)) == 2)
    wait_for(lambda: not [*checkout.cache.glob("*/stage.*"), *in_cache(checkout)])


def test_a_temporary_cache_gets_no_precompiled_header(checkout, tmp_path):
    # The loader would use a folder of this name instead of a cache. The file prevents that.
    (tmp_path / f"calcops-{os.getuid()}").touch()
    source = checkout.path / "ops/tiny/tiny.cpp"
    text = SOURCE.format(number=2, includes="")
    script = f"""
import tempfile
tempfile.tempdir = {str(tmp_path)!r}
import calcops_jit, time
from pathlib import Path
Path({str(source)!r}).write_text({text!r})
print(calcops_jit.reload())
time.sleep(6)
import atexit
atexit._run_exitfuncs()
"""
    child = checkout.run(script, CALCOPS_CACHE="/dev/null/cache", TMPDIR=tmp_path)
    assert child.out == "['calcops']\n", child.err
    assert not list(tmp_path.glob("calcops-*.*"))
