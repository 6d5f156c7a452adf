"""Tests operators by their contracts, which say what a call may be and what it promises.

search.py draws calls (draws.py) from the contract (contract.py), and runs the checks (checks.py,
derivatives.py, transforms.py, broken.py) on them in another process (process.py).
"""

from __future__ import annotations

import os
import pickle
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from unittest import SkipTest

try:
    import hypothesis  # noqa: F401
except ImportError:
    what = "the test of contracts needs hypothesis, which draws the calls: pip install hypothesis"
    raise ImportError(what) from None

from .. import cli
from .. import library as libraries
from ..library import Library
from ..messages import BuildError
from ..request import request_for
from .checks import CHECKS, Unchecked
from .contract import Operator, operators_of
from .draws import Tensor
from .process import Process
from .search import Found, Search, outcomes_of
from .transforms import protected_pages

__all__ = ["CHECKS", "Tensor", "check", "test", "tests_of"]

Sources = str | os.PathLike | Library | Iterable[str | os.PathLike]
Names = str | Iterable[str]
Functions = Mapping[str, Callable] | None


def test(library: Sources, operators: Names = "[!_]*", *, seconds: float = 60, **options) -> bool:
    """Test operators by their contracts, and print what is wrong. Return True if nothing is.

    Calls are drawn from the contract. One that breaks a promise is shrunk, and printed as a test
    for pytest. The calls are made in a fork. So call this before the process uses CUDA or, on a
    machine with a GPU, runs a backward pass.

    Args:
        library: sources as for calcops_jit.load, a Library, or the name of one, such as "calcops".
            A folder of sources is "./folder".
        operators: names or patterns, in a list or with commas; default: those without a leading
            underscore.
        seconds: processor seconds for each operator.
        **options: `only`, names of checks, in a list or with commas;
            `seed`, an int, which repeats the draws;
            `reference`, {operator: function}, where the function has the operator's arguments, in
            float64, and returns its results;
            `adjust`, {operator: function}, where function(arguments, choose) changes a drawn call,
            in which tensors are calcops_jit.Tensor, if the contract cannot say what is valid;
            and, for sources, `name` and the options of calcops_jit.load.

    Raises:
        BuildError: the library cannot be built, or no operator has a contract.
        ImportError: hypothesis is missing.
        ValueError: an option has a wrong value.
    """
    loaded, searches = _searches(library, operators, seconds, **options)
    with closing(Process(outcomes_of(searches))) as process:
        for search in searches:
            search.run(process, partial(_show, search.op))
            if search.found:
                print(f"{_listing(loaded, search.op, search.found)}\n")
            print(_summary(search), flush=True)
    return not any(search.found for search in searches)


def tests_of(
    library: Sources, operators: Names = "[!_]*", *, seconds: float = 20, **options
) -> Callable:
    """Return a test for pytest, with a case for each operator and check.

        test_mine = calcops_jit.tests_of("mine.cpp")

    The options are those of test(). The first case of an operator runs all checks that are selected
    for it. A failure ends them, and the other cases are skipped.
    """
    import pytest

    loaded, searches = _searches(library, operators, seconds, **options)
    process = Process(outcomes_of(searches))
    cases = [(search, name) for search in searches for name in search.checks]

    @pytest.mark.parametrize(
        ("search", "check"), cases, ids=[f"{search.op.name}-{name}" for search, name in cases]
    )
    def test_contract(search: Search, check: str, request: pytest.FixtureRequest) -> None:
        selected = _selected(search, request.session.items)
        is_first = not search.tries
        if is_first:
            search.checks = [name for name in search.checks if name in ("call", *selected)]
            search.run(process, lambda left: None)
        found = search.found
        # Another process of pytest-xdist may have the case of the check, and find nothing.
        is_elsewhere = found and (
            "PYTEST_XDIST_WORKER" in os.environ or found.check not in selected
        )
        if found and (check == found.check or (is_first and is_elsewhere)):
            pytest.fail(_listing(loaded, search.op, found), pytrace=False)
        if not search.counts[check]:
            pytest.skip(search.reason_of(check))

    return test_contract


def _selected(search: Search, items: Iterable) -> list[str]:
    """Return the checks of an operator for which pytest has cases."""
    cases = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return [case["check"] for case in cases if case.get("search") is search]


def check(operator, name: str, arguments: dict, reference: Callable | None = None) -> None:
    """Run one check on one call, as a printed failure does.

    Args:
        operator: a handle, such as torch.ops.mine.twice.
        name: of the check.
        arguments: {name: value}, where a value may be a calcops_jit.Tensor, which describes one.
        reference: for the check of that name.

    Raises:
        AssertionError: the promise is broken.
        unittest.SkipTest: the check can say nothing about the call.
    """
    qualified = operator._qualified_op_name
    for library in libraries._loaded:
        for op in operators_of(library):
            if op.name == qualified:
                search = Search(op, _checks(name), 60, reference=reference)
                with closing(Process(outcomes_of([search]))) as process:
                    error = process.ask(pickle.dumps((qualified, arguments)), name)
                if isinstance(error, Unchecked):
                    raise SkipTest(str(error))
                if error:
                    raise AssertionError(f"{qualified} {name}: {error}")
                return
    raise ValueError(f"calcops_jit.check: no loaded library has a contract of {qualified}")


# ---- arguments -----------------------------------------------------------------------------------


def _searches(
    library: Sources,
    operators: Names,
    seconds: float,
    only: Names = (),
    seed: int = 0,
    reference: Functions = None,
    adjust: Functions = None,
    **options,
) -> tuple[Library, list[Search]]:
    if not seconds > 0:
        raise ValueError(f"calcops_jit.test: expected `seconds` > 0, got {seconds}")
    checks = _checks(only)
    loaded = _loaded(library, options)
    known = operators_of(loaded)
    if not known:
        raise BuildError(f"{loaded.path}: no operator has a contract, from which to draw calls")
    patterns = _words(operators)
    names = [op.short for op in known]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            what = f"expected `operators` among {', '.join(names)}, got {pattern!r}"
            raise ValueError(f"calcops_jit.test: {what}")
    searches = []
    for op in known:
        if any(fnmatchcase(op.short, pattern) for pattern in patterns):
            f, g = ((functions or {}).get(op.short) for functions in (reference, adjust))
            searches.append(Search(op, checks, seconds, seed, g, f))
    protected_pages()
    return loaded, searches


def _loaded(library: Sources, options: dict) -> Library:
    """Return a Library: one that is given, the one of a name, or that of sources."""
    if isinstance(library, Library):
        return library
    sources = [library] if isinstance(library, (str, os.PathLike)) else list(library)
    first = os.fspath(sources[0])
    if re.fullmatch(r"\w+", first):  # a folder of sources is ./folder
        known = [each for each in libraries._loaded if each._request.name == first]
        return known[-1] if known else libraries.obtain(cli.request_named(first))
    stem = re.sub(r"\W", "_", Path(first).stem)
    name = options.pop("name", stem if stem.isidentifier() else f"source_{stem}")
    return libraries.obtain(request_for(name, sources, **options))


def _words(names: Names) -> list[str]:
    return re.findall(r"[^\s,]+", names if isinstance(names, str) else ",".join(names))


def _checks(only: Names) -> list[str]:
    wanted = _words(only)
    for name in wanted:
        if name not in CHECKS:
            what = f"expected a check among {', '.join(CHECKS)}, got {name!r}"
            raise ValueError(f"calcops_jit.test: {what}")
    # `memory` is first, because others might not survive what it finds. `call` is always done.
    names = sorted(CHECKS, key=lambda name: name != "memory")
    return [name for name in names if not wanted or name in ("call", *wanted)]


# ---- what is printed -----------------------------------------------------------------------------


def _show(op: Operator, left: float) -> None:
    if sys.stderr.isatty():
        text = f"\r{op.name}: {max(0, left):.0f} s left\033[K\r"
        print(text, end="", file=sys.stderr, flush=True)


def _summary(search: Search) -> str:
    """Return a line: calls and checks, what was discarded, and what could not be checked."""
    counts, discarded = search.counts, search.discarded
    text = f"{search.op.name}: {counts['call']} calls, {counts.total()} checks"
    for reason, _ in discarded.most_common(1):
        text += f"; {discarded.total()} calls discarded, such as: {reason}"
    reasons = defaultdict(list)
    for name in search.checks:
        if not counts[name] and not search.found:
            reasons[search.reason_of(name)].append(name)
    return text + "".join(f"; not {', '.join(names)}: {why}" for why, names in reasons.items())


def _listing(loaded: Library, op: Operator, found: Found) -> str:
    """Return a test for pytest with the smallest call."""
    asked = ", ".join(f"{key}={x!r}" for key, x in loaded._request.asked.items() if x)
    is_own = loaded._request.name == "calcops"
    has_reference = found.check == "reference"
    lines = [
        f"FAILED {op.name} {found.check} after {found.seconds:.1f} s: {found.message}",
        "import calcops_jit\nimport torch\n\n",
        f"def test_{op.short}_{found.check}():",
        f"    # {found.message}",
        "" if is_own else f"    calcops_jit.load({asked})",
        "    reference = ...  # the function that calcops_jit.test had" if has_reference else "",
        "    arguments = {",
        *[f'        "{key}": {text},' for key, text in found.arguments.items()],
        "    }",
        f'    calcops_jit.check(torch.ops.{op.namespace}.{op.short}, "{found.check}", arguments'
        + (", reference)" if has_reference else ")"),
    ]
    return "\n".join(filter(None, lines))
