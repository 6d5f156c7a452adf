"""Make one deliberate fault after another in the code, and run the tests that must fail.

    python bench/mutation_check.py [WORD ...]
    python bench/mutation_check.py --contract [--seconds 60] [--seed 0] [WORD ...]

With words, only the mutations that contain one of them are run: in their description, tests, path
or lines.

With --contract, `python -m calcops_jit test` runs in place of the tests. It tests the operators
that the fault can change, each for `--seconds` of processor time, until a check fails. Mutations
that it cannot find are listed below the table with the reason.

mutations.txt lists the faults. They are made in a copy of the tree with a cache of its own, which
begins with the operators of the user's cache. Prints a sentence and a table in Markdown, and the
progress on stderr. A mutation that is "not found" needs a test. The tests of the unchanged tree must
pass; this is not checked.
"""

import argparse
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_name("mutations.txt")
LIBRARIES = {"calcops": "ops", "calcops_models": "calcops/ops"}


class Mutation(NamedTuple):
    what: str
    tests: list[str]  # arguments of pytest, after variables of the environment such as A=1
    where: str  # a folder or a file
    old: str
    new: str
    unseen: str  # why the contract test cannot find it, or ""


def mutations():
    for block in LIST.read_text().split("\n## ")[1:]:
        what, tests, where, *lines = block.rstrip("\n").split("\n")
        old, new, unseen = (marked(lines, sign) for sign in "-+!")
        yield Mutation(what, shlex.split(tests), where, old, new, unseen)


def marked(lines, sign):
    """Return the lines that begin with a sign, without it."""
    return "\n".join(line[2:] for line in lines if line[0] == sign)


def file_of(tree, mutation):
    """Return the file below `where` that has the lines to replace."""
    where = tree / mutation.where
    if where.is_file():
        paths = [where]
    else:
        paths = [path for path in where.rglob("*.*") if path.suffix != ".pyc"]
    counts = {path: path.read_text().count(mutation.old) for path in paths if path.is_file()}
    assert sum(counts.values()) == 1, (
        f"{mutation.where} has this {sum(counts.values())} times:\n{mutation.old}"
    )
    return next(path for path, count in counts.items() if count)


def copy(folder):
    """Copy the tracked files, and the new files that git does not ignore."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True).stdout
    for name in os.fsdecode(files).split("\0"):
        if not (ROOT / name).is_file():
            continue
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())


def copy_builds(tree, cache):
    """Copy what was built already: the operators, and the runtime that checkout.py has built."""
    user_cache = os.environ.get("CALCOPS_CACHE") or os.path.expanduser("~/.cache/calcops")
    for name in ("calcops-*", "calcops_models-*", "runtime-*"):
        for slot in Path(user_cache).glob(name):
            shutil.copytree(slot, cache / slot.name, symlinks=True)
    of_tests = Path(".pytest_cache/loader")
    if (ROOT / of_tests).is_dir():
        shutil.copytree(ROOT / of_tests, tree / of_tests)


def run(tree, arguments, **variables):
    """Run Python in the tree."""
    environment = os.environ | {"PYTHONPATH": str(tree), **variables}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)


# ---- the tests ----------------------------------------------------------------------------------


def failing_test(tree, words, cache):
    """Return the first test that fails or the signal that ends the tests, and the seconds.

    If all pass, the first is "".
    """
    variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    tests = words[len(variables) :]
    options = shlex.split("-m pytest -x -q --tb=line -p no:cacheprovider -m 'not long'")
    start = time.monotonic()
    result = run(tree, [*options, *tests], CALCOPS_CACHE=cache, **variables)
    seconds = f"{time.monotonic() - start:.0f}"
    if result.returncode == 0:
        return "", seconds
    if result.returncode < 0:
        return f"{tests[0]} ends by {signal.Signals(-result.returncode).name}", seconds
    failed = failed_test(result.stdout)
    if not failed:  # pytest itself failed, because the mutation or its arguments are wrong
        print(result.stdout[-3000:], result.stderr[-3000:], file=sys.stderr)
    return failed, seconds


def failed_test(printed):
    """Return the first test that failed, from what pytest printed, or "".

    The contract test prints lines that begin with FAILED, too.
    """
    failed = re.search(r"^(?:FAILED|ERROR) (\S+\.py::.*?)(?: - .*)?$", printed, re.MULTILINE)
    return failed[1] if failed else ""


# ---- the contract test --------------------------------------------------------------------------


def reason_to_leave_out(path, mutation):
    """Return why the contract test cannot find a mutation of a file of ROOT, or ""."""
    folders = [ROOT / name for name in ("contracts", *LIBRARIES.values())]
    if not any(path.is_relative_to(folder) for folder in folders):
        return "not the code of operators"
    return "kernels for CUDA" if path.suffix == ".cu" else mutation.unseen


def operators_of(tree, path):
    """Return {library: the operators that a fault in `path` can change}.

    They are those of its folder, or of the folders that include it. A file of the runtime can
    change all operators.
    """
    changed = {}
    include = re.compile(rf'#include ["<](calcops/)?{re.escape(path.name)}[">]')
    for library, folder in LIBRARIES.items():
        for source in (tree / folder).glob("*/*.[ch]*"):
            if source == path or include.search(source.read_text()):
                contract = (source.parent / f"{source.parent.name}.cpp").read_text()
                # The contract has a line `name(Tensor ...` for each operator.
                names = re.findall(r"^(?:\w+::)?(\w+)\(Tensor", contract, re.MULTILINE)
                changed.setdefault(library, set()).update(names)
    return changed or dict.fromkeys(LIBRARIES, "*")


def failing_check(tree, path, options, cache):
    """Return the first check that fails, its processor seconds, and the numbers in its call."""
    variables = {"CALCOPS_CACHE": cache, "PYTHONPATH": f"{tree}:{tree}/tests"}
    run(tree, ["-c", "import calcops.ops"], **variables)  # builds both libraries
    for library, operators in operators_of(tree, path).items():
        command = f"-m calcops_jit test {library} --operators {','.join(operators)}"
        command += " --cases tests/contract_cases.py"
        command += f" --seconds {options.seconds} --seed {options.seed}"
        output = ""
        begun = subprocess.Popen(
            [sys.executable, *shlex.split(command)],
            cwd=tree,
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            text=True,
        )
        with begun as process:
            for line in process.stdout:
                output += line
                if line.startswith("    calcops_jit.check("):  # ends the first failure
                    process.kill()
        found = re.search(r"^FAILED \w+::(\w+) (\w+) after (\S+) s", output, re.MULTILINE)
        if found:
            operator, check, seconds = found.groups()
            return f"{check} of {operator}", seconds, str(count_numbers(output))
        if process.returncode:  # the command itself failed
            print(output[-3000:], file=sys.stderr)
    return "", "", ""


def count_numbers(listing):
    """Return how many numbers the tensors of a printed call have."""
    shapes = re.findall(r"calcops_jit\.Tensor\(\[(.*?)\]", listing)
    return sum(math.prod(map(int, re.findall(r"\d+", shape))) for shape in shapes)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--contract", action="store_true")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("words", nargs="*", default=[""])
    options = parser.parse_args()
    left_out = {}
    chosen = []
    for mutation in mutations():
        if not any(word in str(mutation) for word in options.words):
            continue
        path = file_of(ROOT, mutation)  # raises before any test runs if the lines are not unique
        reason = options.contract and reason_to_leave_out(path, mutation)
        if reason:
            left_out.setdefault(reason, []).append(mutation.what)
        else:
            chosen.append(mutation)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "calcops")
        cache = os.path.join(folder, "cache")
        copy(tree)
        copy_builds(tree, Path(cache))
        for mutation in chosen:
            path = file_of(tree, mutation)
            text = path.read_text()
            path.write_text(text.replace(mutation.old, mutation.new))
            if options.contract:
                found_by, *figures = failing_check(tree, path, options, cache)
            else:
                found_by, *figures = failing_test(tree, mutation.tests, cache)
            path.write_text(text)
            rows.append((mutation.what, found_by, *figures))
            print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    print_page(rows, left_out, options.contract)


def print_page(rows, left_out, by_contract):
    """Print how many mutations are found, each of them, and the ones that were not tried."""
    seconds = [float(row[2]) for row in rows if row[1]]
    checker = "contract test" if by_contract else "tests"
    print(f"The {checker} found {len(seconds)} of {len(rows)} faults.", end=" ")
    print(f"The slowest took {max(seconds, default=0):.0f} s.\n")
    figures = "processor seconds | numbers" if by_contract else "seconds"
    print(f"| what is wrong | found by | {figures} |\n|---|---|{'---|' * (1 + by_contract)}")
    for what, found_by, *numbers in rows:
        name = f"`{found_by.removeprefix('tests/')}`" if found_by else "**not found**"
        print("|", " | ".join([what, name, *numbers]), "|")
    if left_out:
        print("\n| not tried | why |\n|---|---|")
    for reason, names in left_out.items():
        few = "; ".join(names) if len(names) < 4 else f"{len(names)} faults"
        print(f"| {few} | {reason} |")


if __name__ == "__main__":
    main()
