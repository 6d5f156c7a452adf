"""The size of the cache: the command that lists it, and the bound that builds enforce."""

import os
import time

import pytest
from checkout import Checkout, wait_for

from _calcops_jit.cache import bounds

MAIN = "import runpy; runpy.run_module('calcops_jit', run_name='__main__', alter_sys=True)"
KEEP_LIBRARY = "import calcops_jit, time; print('loaded', flush=True); time.sleep(60)"
DAY = 24 * 3600.0


def cache_command(checkout: Checkout) -> list[str]:
    """Return the lines that `python -m calcops_jit cache` prints."""
    return checkout.run(MAIN, arguments=["cache"]).out.splitlines()


def prune(checkout: Checkout, size: int) -> int:
    """Remove libraries and objects as a build does. Return how many were removed."""
    script = f"from _calcops_jit.cache import bounds; print(len(bounds.prune({size})))"
    return int(checkout.run(script).out)


def set_last_use(folder, days_ago: float):
    seconds = time.time() - days_ago * DAY
    os.utime(folder, (seconds, seconds))


def build(checkout: Checkout, answer: int, days_ago: float, **environment):
    """Build a library that returns `answer`, with its object. Return its folder, which then looks
    as if it was last used `days_ago`."""
    before = set(checkout.cache.glob("*/*/manifest"))
    checkout.write("ops/tiny/tiny.h", f"#define ANSWER {answer}\n")
    assert checkout.answer(**environment) == answer
    new = [manifest.parent for manifest in set(checkout.cache.glob("*/*/manifest")) - before]
    for generation in new:
        set_last_use(generation, days_ago)
    (library,) = [generation for generation in new if list(generation.glob("*.so"))]
    return library


def test_the_command_cache_lists_size_last_use_and_libraries_in_use(checkout):
    unused = build(checkout, 1, 3)
    used = build(checkout, 2, 0)
    child = checkout.start(KEEP_LIBRARY)
    wait_for(lambda: child.out, 120.0)
    lines = cache_command(checkout)
    child.kill()
    # Each library has a line, and so has its object.
    times = [time.localtime(time.time() - days_ago * DAY) for days_ago in (3, 3, 0, 0)]
    days = [time.strftime("%Y-%m-%d", day) for day in times]
    assert [line.split()[2] for line in lines[:4]] == days
    assert str(unused) in [line.split()[-1] for line in lines[:2]]
    assert [line.split()[-1] for line in lines if "in use" in line] == [str(used)]
    size = sum(file.stat().st_size for file in used.iterdir())
    assert [line.split()[0] for line in lines if str(used) in line] == [f"{size / 1e6:.2f}"]
    assert lines[4].endswith(f"in 4 libraries and objects in {checkout.cache}")


def test_a_build_removes_the_least_recently_used_library_that_no_process_has(checkout):
    held = build(checkout, 1, 30)
    child = checkout.start(KEEP_LIBRARY)
    wait_for(lambda: child.out, 120.0)
    set_last_use(held, 30)
    old = build(checkout, 2, 20)
    recent = build(checkout, 3, 10)
    size = sum(entry.size for entry in bounds.entries(str(checkout.cache)))
    # The bound has no room for this library and its object.
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


def test_a_cache_below_its_bound_keeps_everything(checkout):
    libraries = [build(checkout, answer, 300 - answer) for answer in (1, 2, 3)]
    assert prune(checkout, 2 << 30) == 0
    assert all(library.exists() for library in libraries)


def test_pruning_removes_only_libraries_and_objects(checkout):
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
    second = prune(checkout, 0)  # this removes the empty slots, too, because they are old now
    assert (first, second) == (2, 0)
    files = [path for path in checkout.cache.rglob("*") if path.is_file()]
    assert sorted(str(file.relative_to(checkout.cache)) for file in files) == sorted(others)
    assert not list(checkout.cache.glob("*calcops-*"))


def test_a_library_replaced_by_reload_stays_while_its_process_runs(checkout):
    """Calls and autograd graphs that began before the reload may still use the code of the first
    library."""
    first = build(checkout, 1, 3)
    header = checkout.path / "ops/tiny/tiny.h"
    script = f"""
import calcops_jit, time
from pathlib import Path
Path({str(header)!r}).write_text('#define ANSWER 2')
print(calcops_jit.reload(), flush=True)
time.sleep(60)
"""
    child = checkout.start(script)
    wait_for(lambda: child.out, 120.0)
    assert child.out == "['calcops']\n", child.err
    prune(checkout, 0)
    assert first in {library.parent for library in checkout.libraries()}
    assert len(checkout.libraries()) == 2
    child.kill()
    child.wait()
    prune(checkout, 0)
    assert not checkout.libraries()


def test_a_warm_import_does_not_prune_the_cache(checkout):
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
def test_the_bound_is_a_number_of_bytes_or_has_a_suffix_k_m_g(monkeypatch, text, size):
    monkeypatch.setenv("CALCOPS_CACHE_SIZE", text)
    assert bounds.bound() == size


def test_an_invalid_bound_is_refused_before_anything_is_built(checkout):
    child = checkout.run("import calcops_jit", CALCOPS_CACHE_SIZE="two")
    assert (child.code, child.err) == (
        0,
        "calcops_jit: CALCOPS_CACHE_SIZE is no size\n"
        "  expected such as 500M or 2G, got 'two'\n"
        "  fix: export CALCOPS_CACHE_SIZE=2G\n",
    )
    assert checkout.compiled() == 0
    assert checkout.libraries() == []
