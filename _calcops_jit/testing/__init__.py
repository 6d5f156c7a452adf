"""Tests operators by their contracts, which say what a call may be and what it promises.

search.py draws calls (draws.py) from the contract (contract.py), and runs the checks (checks.py,
derivatives.py, transforms.py, broken.py) on them.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

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
from .checks import CHECKS
from .contract import Operator, operators_of
from .draws import Tensor
from .search import Found, Progress, Report, Search, outcome_in_fork, run
from .transforms import protected_pages

__all__ = ["CHECKS", "Tensor", "check", "test", "tests_of"]

Sources = str | os.PathLike | Library | Iterable[str | os.PathLike]
Names = str | Iterable[str]
Functions = Mapping[str, Callable] | None


def test(
    library: Sources, operators: Names = "[!_]*", *, seconds: float = 60, first=False, **options
) -> bool:
    """Test operators by their contracts, and print what is wrong. Return True if nothing is.

    Calls are drawn from the contract. One that breaks a promise is shrunk, and printed as a test
    for pytest. Each operator is tested in a fork. So call this before the process uses CUDA or, on
    a machine with a GPU, runs a backward pass.

    Args:
        library: sources as for calcops_jit.load, a Library, or the name of one, such as "calcops".
            A folder of sources is "./folder".
        operators: names or patterns, in a list or with commas; default: those without a leading
            underscore.
        seconds: processor seconds for each operator.
        first: stop at the first failure.
        **options: `only` and `without`, names of checks, in a list or with commas;
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
    passed = True
    loaded, searches = _searches(library, operators, seconds, **options)
    if not _has_openmp(loaded):
        print("not threads: the library is built without -fopenmp")
    for search in searches:
        report = run(replace(search, first=first), partial(_show, loaded, search))
        print(_summary(search.op, report), flush=True)
        passed &= not report.found
        if first and not passed:
            break
    return passed


def tests_of(
    library: Sources, operators: Names = "[!_]*", *, seconds: float = 20, **options
) -> Callable:
    """Return a test for pytest, with a case for each operator and check.

        test_mine = calcops_jit.tests_of("mine.cpp")

    The options are those of test(). The checks of an operator share its seconds.
    """
    import pytest

    loaded, searches = _searches(library, operators, seconds, **options)
    cases = [
        replace(search, checks=[name], seconds=seconds / len(search.checks))
        for search in searches
        for name in search.checks
    ]

    @pytest.mark.parametrize("case", cases, ids=lambda case: f"{case.op.name}-{case.checks[0]}")
    def test_contract(case: Search) -> None:
        try:
            found = run(case, lambda shown: None).found
        except RuntimeError as error:  # this process cannot be forked
            pytest.skip(str(error))
        if found:
            pytest.fail(_listing(loaded, case.op, found[0]), pytrace=False)

    return test_contract


def check(operator, name: str, arguments: dict, reference: Callable | None = None) -> None:
    """Run one check on one call, as a printed failure does.

    Args:
        operator: a handle, such as torch.ops.mine.twice.
        name: of the check.
        arguments: {name: value}, where a value may be a calcops_jit.Tensor, which describes one.
        reference: for the check of that name.

    Raises:
        AssertionError: the promise is broken.
    """
    qualified = operator._qualified_op_name
    known = [op for each in libraries._loaded for op in operators_of(each.path)]
    op = next((op for op in known if op.name == qualified), None)
    if op is None:
        raise ValueError(f"calcops_jit.check: no loaded library has a contract of {qualified}")
    _expect_checks([name])
    names = _checks(op, name, (), reference)
    error = outcome_in_fork(Search(op, names, 60, reference=reference), arguments, name)
    if error:
        raise AssertionError(f"{qualified} {name}: {error.args[-1]}")


# ---- arguments -----------------------------------------------------------------------------------


def _searches(
    library: Sources,
    operators: Names,
    seconds: float,
    only: Names = (),
    without: Names = (),
    seed: int = 0,
    reference: Functions = None,
    adjust: Functions = None,
    **options,
) -> tuple[Library, list[Search]]:
    if not seconds > 0:
        raise ValueError(f"calcops_jit.test: expected `seconds` > 0, got {seconds}")
    _expect_checks([*_words(only), *_words(without)])
    loaded = _loaded(library, options)
    if not _has_openmp(loaded):
        without = [*_words(without), "threads"]
    searches = []
    for op in _chosen(loaded, operators):
        f, g = ((functions or {}).get(op.short) for functions in (reference, adjust))
        checks = _checks(op, only, without, f)
        searches.append(Search(op, checks, seconds, seed, adjust=g, reference=f))
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


def _has_openmp(loaded: Library) -> bool:
    """Return whether the library was built with OpenMP. Otherwise its loops run in one thread."""
    return "-fopenmp" in loaded._request.cflags


def _chosen(loaded: Library, patterns: Names) -> list[Operator]:
    known = operators_of(loaded.path)
    if not known:
        raise BuildError(f"{loaded.path}: no operator has a contract, from which to draw calls")
    chosen = [op for op in known if any(fnmatchcase(op.short, x) for x in _words(patterns))]
    if not chosen:
        names = ", ".join(op.short for op in known)
        raise ValueError(f"calcops_jit.test: expected `operators` among {names}, got {patterns!r}")
    return chosen


def _words(names: Names) -> list[str]:
    return re.findall(r"[^\s,]+", names if isinstance(names, str) else ",".join(names))


def _expect_checks(names: list[str]) -> None:
    for name in names:
        if name not in CHECKS:
            what = f"expected a check among {', '.join(CHECKS)}, got {name!r}"
            raise ValueError(f"calcops_jit.test: {what}")


def _checks(op: Operator, only: Names, without: Names, reference: Callable | None) -> list[str]:
    """Return the checks that can say something about an operator."""
    only, without = _words(only) or [*CHECKS], _words(without)
    lines = list(filter(None, op.arguments.values()))
    possible = {
        "reverse": op.has_derivatives,
        "second": op.has_derivatives,
        "third": op.has_derivatives,
        "forward": op.has_jvp or op.is_composition,
        "constant": op.has_vjp and any(line.is_constant for line in lines),
        "empty_slots": any(line.may_be_none for line in lines),
        "reference": reference is not None,
    }
    names = [name for name in CHECKS if name in only and name not in without]
    if "memory" in names:
        protected_pages()
    return [name for name in names if possible.get(name, True)]


# ---- what is printed -----------------------------------------------------------------------------


def _show(loaded: Library, search: Search, shown: Found | Progress) -> None:
    name = search.op.name
    if isinstance(shown, Found):
        print(f"FAILED {name} {shown.check} after {shown.seconds:.1f} s: {shown.message}")
        print(f"{_listing(loaded, search.op, shown)}\n", flush=True)
    elif sys.stderr.isatty():
        left = max(0, search.seconds - shown.seconds)
        text = f"{name}: {shown.calls} calls, {left:.0f} s left"
        print(f"\r{text:<78}\r", end="", file=sys.stderr, flush=True)


def _summary(op: Operator, report: Report) -> str:
    """Return a line: calls and checks, what was discarded, and what could not be checked."""
    counts = report.counts
    text = f"{op.name}: {counts['']} calls, {counts.total() - counts['']} checks"
    if report.found:
        text += f"; failed: {', '.join(found.check for found in report.found)}"
    for reason, _ in report.discarded.most_common(1):
        text += f"; {report.discarded.total()} calls discarded, such as: {reason}"
    reasons = defaultdict(list)
    for name, seen in report.unchecked.items():
        if not counts[name] and name not in [found.check for found in report.found]:
            reasons[seen.most_common(1)[0][0]].append(name)
    return text + "".join(f"; not {', '.join(names)}: {why}" for why, names in reasons.items())


def _listing(loaded: Library, op: Operator, found: Found) -> str:
    """Return a test for pytest with the smallest call."""
    asked = {key: x for key, x in loaded._request.asked.items() if x}
    name, sources = asked.pop("name"), list(asked.pop("sources"))
    given = [json.dumps(name), json.dumps(sources if len(sources) > 1 else sources[0])]
    given += [f"{key}={x!r}" if x is True else f"{key}={json.dumps(x)}" for key, x in asked.items()]
    lines = ["import calcops_jit", "import torch", "", ""]
    lines += [f"def test_{op.short}_{found.check}():", f'    """{found.message}"""']
    lines += [f"    calcops_jit.load({', '.join(given)})"] * (name != "calcops")
    if found.check == "reference":
        lines.append("    reference = ...  # the function that calcops_jit.test had")
    lines += ["    arguments = {"]
    lines += [f'        "{key}": {text},' for key, text in found.arguments.items()]
    reference = ", reference" if found.check == "reference" else ""
    handle = f"torch.ops.{op.namespace}.{op.short}"
    lines += ["    }", f'    calcops_jit.check({handle}, "{found.check}", arguments{reference})']
    return "\n".join(lines)
