"""Make one deliberate fault after another in the code, and run the tests that must fail.

    python bench/mutation_check.py [WORD ...]

With words, only the mutations that contain one of them are run: in their description, tests, path
or lines.

mutations.txt lists the faults. They are made in a copy of the tree with a cache of its own, which
begins with the operators of the user's cache. The printed table is Markdown. A mutation that
SURVIVED needs a test. The tests of the unchanged tree must pass; this is not checked.
"""

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


class Mutation(NamedTuple):
    what: str
    tests: list[str]  # arguments of pytest, after variables of the environment such as A=1
    where: str  # a folder or a file
    old: str
    new: str


def mutations():
    text = Path(__file__).with_name("mutations.txt").read_text()
    for block in text.split("\n## ")[1:]:
        what, tests, where, *lines = block.rstrip("\n").split("\n")
        old = "\n".join(line[2:] for line in lines if line[0] == "-")
        new = "\n".join(line[2:] for line in lines if line[0] == "+")
        yield Mutation(what, shlex.split(tests), where, old, new)


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


def failing_test(tree, words, cache):
    """Return the first test that fails or the signal that ends the tests, or "" if all pass."""
    variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    tests = words[len(variables) :]
    environment = os.environ | {"CALCOPS_CACHE": str(cache), "PYTHONPATH": str(tree), **variables}
    options = shlex.split("-x -q --tb=line -p no:cacheprovider -m 'not long'")
    command = [sys.executable, "-m", "pytest", *options, *tests]
    result = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if result.returncode == 0:
        return ""
    if result.returncode < 0:
        return f"{tests[0]} ends by {signal.Signals(-result.returncode).name}"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", result.stdout, re.MULTILINE)
    if not failed:  # pytest itself failed, because the mutation or its arguments are wrong
        print(result.stdout[-3000:], result.stderr[-3000:], file=sys.stderr)
    return failed[1] if failed else ""


def main():
    words = sys.argv[1:] or [""]
    chosen = [mutation for mutation in mutations() if any(word in str(mutation) for word in words)]
    for mutation in chosen:
        file_of(ROOT, mutation)  # raises before any test runs if the lines are not unique
    survived = 0
    print("| what is wrong | found by | seconds |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "calcops")
        copy(tree)
        copy_builds(tree, Path(folder, "cache"))
        for mutation in chosen:
            path = file_of(tree, mutation)
            text = path.read_text()
            path.write_text(text.replace(mutation.old, mutation.new))
            start = time.monotonic()
            test = failing_test(tree, mutation.tests, Path(folder, "cache"))
            path.write_text(text)
            survived += not test
            name = f"`{test.removeprefix('tests/')}`" if test else "**SURVIVED**"
            print(f"| {mutation.what} | {name} | {time.monotonic() - start:.0f} |", flush=True)
    print(f"\n{len(chosen)} mutations, {survived} survived", file=sys.stderr)
    sys.exit(survived > 0)


if __name__ == "__main__":
    main()
