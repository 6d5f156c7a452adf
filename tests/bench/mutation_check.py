"""Whether the tests notice: breaks one place after another and runs the tests that ought to fail.

python tests/bench/mutation_check.py [WORD ...]

With words it breaks only those places that have one of them in a description or a path.

mutations.txt says what is broken. It is a copy of the tree that is broken; it builds into a cache
of its own, and takes from yours what is as it was. The table is Markdown; SURVIVED is a test that
is missing. That the tree as it is passes its tests is taken for granted.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent


class Mutation(NamedTuple):
    what: str
    tests: list[str]
    where: str
    old: str
    new: str


def mutations():
    text = Path(__file__).with_name("mutations.txt").read_text()
    for block in text.split("\n## ")[1:]:
        what, tests, where, *lines = block.rstrip("\n").split("\n")
        old, new = ("\n".join(line[2:] for line in lines if line[0] == sign) for sign in "-+")
        yield Mutation(what, shlex.split(tests), where, old, new)


def file_of(tree, mutation):
    """The file below `where` with the lines that are replaced."""
    where = tree / mutation.where
    paths = (
        [where]
        if where.is_file()
        else [path for path in where.rglob("*.*") if path.suffix != ".pyc"]
    )
    counts = {path: path.read_text().count(mutation.old) for path in paths if path.is_file()}
    assert sum(counts.values()) == 1, (
        f"{mutation.where} has this {sum(counts.values())} times:\n{mutation.old}"
    )
    return next(path for path, count in counts.items() if count)


def copy(folder):
    """The tracked files and those that git does not ignore, as they are."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True
    )
    names = [name for name in os.fsdecode(listed.stdout).split("\0") if (ROOT / name).is_file()]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())


def found_by(tree, tests, cache):
    """The first test that fails, or how it ends the process; "": all pass."""
    yours = os.environ.get("CALCOPS_CACHE") or os.path.expanduser("~/.cache/calcops")
    environment = os.environ | {
        "CALCOPS_CACHE": str(cache),
        "CALCOPS_CACHE_READONLY": yours,
        "PYTHONPATH": str(tree),
    }
    options = shlex.split("-x -q --tb=line -p no:cacheprovider -m 'not long'")
    command = [sys.executable, "-m", "pytest", *options, *tests]
    result = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if result.returncode == 0:
        return ""
    if result.returncode < 0:
        return f"{tests[0]} ends by {signal.Signals(-result.returncode).name}"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", result.stdout, re.MULTILINE)
    if not failed:  # the mutation itself is wrong
        print(result.stdout[-3000:], result.stderr[-3000:], file=sys.stderr)
    return failed[1] if failed else ""


def main():
    chosen = [
        m for m in mutations() if not sys.argv[1:] or any(word in f"{m}" for word in sys.argv[1:])
    ]
    for mutation in chosen:  # before anything is run
        file_of(ROOT, mutation)
    survived = 0
    print("| what is wrong | found by | seconds |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "calcops")
        copy(tree)
        for mutation in chosen:
            path = file_of(tree, mutation)
            text = path.read_text()
            path.write_text(text.replace(mutation.old, mutation.new))
            start = time.monotonic()
            test = found_by(tree, mutation.tests, Path(folder, "cache"))
            path.write_text(text)
            survived += not test
            name = f"`{test.removeprefix('tests/')}`" if test else "**SURVIVED**"
            print(f"| {mutation.what} | {name} | {time.monotonic() - start:.0f} |", flush=True)
    print(f"\n{len(chosen)} mutations, {survived} survived", file=sys.stderr)
    sys.exit(survived > 0)


if __name__ == "__main__":
    main()
