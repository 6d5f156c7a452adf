"""The cache's own house-keeping: the list, and the bound that it keeps by itself."""

import os
import time

import pytest
from checkout import Checkout, wait_for

from _calcops_jit.cache import bounds

MAIN = "import runpy; runpy.run_module('calcops_jit', run_name='__main__', alter_sys=True)"
KEEP = "import calcops_jit, time; print('here', flush=True); time.sleep(60)"
DAY = 24 * 3600.0


def listed(checkout: Checkout) -> list[str]:
    return checkout.run(MAIN, arguments=["cache"]).out.splitlines()


def prune(checkout: Checkout, size: int) -> int:
    """Does what a build does with the cache, and returns the number of libraries and objects that
    it removes."""
    return int(
        checkout.run(f"from _calcops_jit.cache import bounds; print(len(bounds.prune({size})))").out
    )


def build(checkout: Checkout, answer: int, days_ago: float, **environment):
    """A library that answers so, and its object, last used then."""
    before = set(checkout.cache.glob("*/*/manifest"))
    checkout.write("ops/tiny/tiny.h", f"#define ANSWER {answer}\n")
    assert checkout.answer(**environment) == answer
    new = [manifest.parent for manifest in set(checkout.cache.glob("*/*/manifest")) - before]
    for generation in new:
        os.utime(generation, (time.time() - days_ago * DAY,) * 2)
    (library,) = [generation for generation in new if list(generation.glob("*.so"))]
    return library


def test_list_says_size_last_use_and_what_a_process_has(checkout):
    unused, used = build(checkout, 1, 3), build(checkout, 2, 0)
    child = checkout.start(KEEP)
    wait_for(lambda: child.out, 120.0)
    lines = listed(checkout)
    child.kill()
    days = [
        time.strftime("%Y-%m-%d", time.localtime(time.time() - ago * DAY)) for ago in (3, 3, 0, 0)
    ]
    assert [line.split()[2] for line in lines[:4]] == days  # each library and its object
    assert str(unused) in [line.split()[-1] for line in lines[:2]]
    assert [line.split()[-1] for line in lines if "in use" in line] == [str(used)]
    size = sum(file.stat().st_size for file in used.iterdir())
    assert [line.split()[0] for line in lines if str(used) in line] == [f"{size / 1e6:.2f}"]
    assert lines[4].endswith(f"in 4 libraries and objects in {checkout.cache}")


def test_a_build_removes_what_was_not_used_for_longest_and_never_what_a_process_has(checkout):
    held = build(checkout, 1, 30)
    child = checkout.start(KEEP)
    wait_for(lambda: child.out, 120.0)
    os.utime(held, (time.time() - 30 * DAY,) * 2)
    old, recent = build(checkout, 2, 20), build(checkout, 3, 10)
    size = sum(entry.size for entry in bounds.entries(str(checkout.cache)))
    # One library and one object too many.
    newest = build(checkout, 4, 0, CALCOPS_CACHE_SIZE=str(size))
    assert held.exists()
    assert not old.exists()
    assert recent.exists()
    assert newest.exists()
    child.kill()
    child.wait()
    assert prune(checkout, 0) > 0
    assert bounds.entries(str(checkout.cache)) == []
    assert checkout.answer() == 4


def test_within_its_bound_the_cache_keeps_everything(checkout):
    libraries = [build(checkout, answer, 300 - answer) for answer in (1, 2, 3)]
    assert prune(checkout, 2 << 30) == 0
    assert all(library.exists() for library in libraries)


def test_nothing_but_libraries_and_objects_is_ever_removed(checkout):
    build(checkout, 1, 30)
    others = [
        "README",
        "notes/a",
        "data-0123456789abcdef/notes/a",
        "data-0123456789abcdef/0123456789abcdef/a",
    ]
    for name in others:
        (checkout.cache / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout.cache / name).touch()
    first = prune(checkout, 0)
    for folder in checkout.cache.glob("*"):
        os.utime(folder, (0, 0))
    second = prune(checkout, 0)  # now the empty slots are old, too
    assert (first, second) == (2, 0)
    left = [
        str(path.relative_to(checkout.cache))
        for path in checkout.cache.rglob("*")
        if path.is_file()
    ]
    assert sorted(left) == sorted(others)
    assert not list(checkout.cache.glob("*calcops-*"))


def test_a_library_that_was_exchanged_for_another_is_held_too(checkout):
    """Its code stays in the process: calls and graphs that began before may still be in it."""
    first = build(checkout, 1, 3)
    header = checkout.path / "ops/tiny/tiny.h"
    child = checkout.start(
        f"""
import calcops_jit, time
from pathlib import Path
Path({str(header)!r}).write_text('#define ANSWER 2')
print(calcops_jit.reload(), flush=True)
time.sleep(60)
"""
    )
    wait_for(lambda: child.out, 120.0)
    assert child.out == "['calcops']\n", child.err
    prune(checkout, 0)
    assert first in {library.parent for library in checkout.libraries()}
    assert len(checkout.libraries()) == 2
    child.kill()
    child.wait()
    prune(checkout, 0)
    assert not checkout.libraries()


def test_a_warm_import_does_not_look_after_the_cache(checkout):
    assert checkout.answer() == 1
    child = checkout.run(
        "import sys, calcops_jit; print('_calcops_jit.cache.bounds' in sys.modules)",
        CALCOPS_CACHE_SIZE="0",
    )
    assert child.out == "False\n"
    assert checkout.answer() == 1
    assert checkout.compiled() == 1


@pytest.mark.parametrize(
    "text, size",
    [
        ("", 2 << 30),
        ("0", 0),
        ("1500", 1500),
        ("1.5K", 1536),
        ("3G", 3 << 30),
        ("3 gb", 3 << 30),
        ("1GiB", 1 << 30),
    ],
)
def test_the_bound_is_a_number_of_bytes_or_k_m_g(monkeypatch, text, size):
    monkeypatch.setenv("CALCOPS_CACHE_SIZE", text)
    assert bounds.bound() == size


def test_a_wrong_bound_is_refused_before_anything_is_built(checkout):
    child = checkout.run("import calcops_jit", CALCOPS_CACHE_SIZE="two")
    assert (child.code, child.err) == (
        0,
        "calcops_jit: CALCOPS_CACHE_SIZE is no size\n"
        "  expected such as 500M or 2G, got 'two'\n"
        "  fix: export CALCOPS_CACHE_SIZE=2G\n",
    )
    assert checkout.compiled() == 0
    assert checkout.libraries() == []
