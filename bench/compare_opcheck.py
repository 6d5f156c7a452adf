"""What PyTorch's checks and the contract test find of twelve planted faults.

    python bench/compare_opcheck.py [OPERATOR ...]

The first lines of tests/contracts/faults.cpp say what is wrong with each operator. Three checks run,
each in a process of its own, because a fault may end the process:

- torch.library.opcheck, with the three calls in SAMPLES.
- torch.autograd.gradcheck and gradgradcheck with the same calls, as PyTorch's documentation
  recommends. They include batched gradients, and forward mode where an operator has it.
- calcops_jit.test, which draws calls from the contract. The table has its first finding, the
  processor seconds until then, and how many numbers the tensors of the shrunk call have.

Prints how many faults each check finds, and which ones. The operators without faults run first, and
must pass every check.
"""

import contextlib
import io
import math
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import torch
from torch.autograd import gradcheck, gradgradcheck

import calcops_jit

SOURCE = Path(__file__).resolve().parent.parent / "tests/contracts/faults.cpp"
OPENMP = {"extra_cflags": "-fopenmp", "extra_ldflags": "-fopenmp"}
LIBRARIES = {"right": OPENMP, "faulty": OPENMP | {"extra_cflags": "-fopenmp -DFAULTS"}}
HAVE_JVP = {"squared_distance"}
SECONDS = 10  # of the contract test of an operator
WITHOUT_DERIVATIVES = "no derivatives"

torch.manual_seed(0)


def numbers(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def constants(*shape):
    return numbers(*shape).detach()


def bonds(*rows):
    neighbor = torch.tensor(rows)
    return numbers(*neighbor.shape), neighbor


# {operator: three calls that a careful user writes}
SAMPLES = {
    "row_squares": [[numbers(3, 4)], [numbers(1, 7)], [numbers(5, 2)]],
    "row_sums": [[numbers(3, 4)], [numbers(1, 7)], [numbers(5, 2)]],
    "softplus": [[numbers(5)], [numbers(2, 3)], [numbers(1)]],
    "scaled_rows": [[numbers(n, k), numbers(k)] for n, k in ((3, 4), (1, 7), (5, 2))],
    "squared_distance": [[numbers(*s), numbers(*s)] for s in ([5], [2, 3], [1])],
    "median": [[constants(5)], [constants(8)], [constants(1)]],
    "total": [[numbers(5)], [numbers(1)], [numbers(2000)]],
    "bond_energy": [bonds([1, 0], [0, -1]), bonds([0, -1, -1]), bonds([1], [2], [-1])],
    "running_sum": [[numbers(5)], [numbers(8)], [numbers(1)]],
    "inverse_root": [[numbers(5)], [numbers(2, 3)], [numbers(2000)]],
    "column_sums": [[numbers(3, 4)], [numbers(1, 7)], [numbers(5, 2)]],
    "nonnegative": [[constants(5)], [constants(8)], [constants(1)]],
}


# ---- the checks: each returns what finds a fault, or "" ------------------------------------------


def with_opcheck(library, operator):
    found = []
    for arguments in SAMPLES[operator]:
        handle = getattr(library, operator)
        results = torch.library.opcheck(handle, arguments, raise_exception=False)
        found += [test for test, result in results.items() if result != "SUCCESS"]
    return ", ".join(dict.fromkeys(found))


def with_gradcheck(library, operator):
    if not any(x.requires_grad for x in SAMPLES[operator][0]):
        return WITHOUT_DERIVATIVES
    handle = getattr(library, operator)
    options = {"check_batched_grad": True, "raise_exception": False}
    for arguments in SAMPLES[operator]:
        if not gradcheck(handle, arguments, check_forward_ad=operator in HAVE_JVP, **options):
            return "gradcheck"
        if not gradgradcheck(handle, arguments, **options):
            return "gradgradcheck"
    return ""


def with_contract_test(library, operator):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        calcops_jit.test(library, operator, seconds=SECONDS)
    failure = re.search(r"FAILED \S+ (\w+),? after (\S+) s", printed.getvalue())
    if not failure:
        return ""
    call = re.search(r"arguments = (\{.*?\n    \})", printed.getvalue(), re.DOTALL)
    arguments = eval(call[1], {"torch": torch, "calcops_jit": calcops_jit}).values()
    count = sum(math.prod(x.shape) for x in arguments if hasattr(x, "shape"))
    return f"{failure[1]}, {failure[2]}, {count}"


CHECKS = {
    "opcheck": with_opcheck,
    "gradcheck, gradgradcheck": with_gradcheck,
    "contract test: check, seconds, numbers": with_contract_test,
}


# ---- the table ----------------------------------------------------------------------------------


def found_by(check, library, *operators):
    """Return {operator: what a check finds}, from a process of its own."""
    command = [sys.executable, __file__, "--one", check, library, *operators]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode < 0:
        ending = f"the process ends by {signal.Signals(-result.returncode).name}"
        return dict.fromkeys(operators, ending)
    if result.returncode:
        sys.exit(result.stdout + result.stderr)
    return dict(re.findall(r"^found in (\w+): (.*)$", result.stdout, re.MULTILINE))


def print_found(check, library, *operators):
    """Print what a check finds. This is the process of found_by()."""
    warnings.filterwarnings("ignore")
    loaded = calcops_jit.load(library, SOURCE, **LIBRARIES[library])
    for operator in operators:
        print(f"found in {operator}: {CHECKS[check](loaded, operator)}", flush=True)


def faults():
    """Return {operator: its fault} from the first lines of the source."""
    rows = re.findall(r"^// (\w+)  +(.*?)  +\w", SOURCE.read_text(), re.MULTILINE)
    return {operator: fault for operator, fault in rows if operator in SAMPLES}


def main():
    operators = sys.argv[1:] or list(SAMPLES)
    for check in CHECKS:
        for operator, alarm in found_by(check, "right", *operators).items():
            if alarm not in ("", WITHOUT_DERIVATIVES):
                sys.exit(f"{check} finds in {operator} without a fault: {alarm}")
    fault = faults()
    columns = {}
    for check in CHECKS:
        of_operators = [found_by(check, "faulty", name)[name] for name in operators]
        columns[check] = [cell or "-" for cell in of_operators]
    print("| check | finds |\n|---|---|")
    for check, cells in columns.items():
        count = sum(cell not in ("-", WITHOUT_DERIVATIVES) for cell in cells)
        print(f"| {check.partition(':')[0]} | {count} of {len(operators)} faults |")
    print("\n|", " | ".join(["operator", "fault", *CHECKS]), "|")
    print("|---" * (2 + len(CHECKS)) + "|")
    for operator, *cells in zip(operators, *columns.values(), strict=True):
        print("|", " | ".join([f"`{operator}`", fault[operator], *cells]), "|")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print_found(*sys.argv[2:])
    else:
        main()
