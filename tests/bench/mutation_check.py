"""Whether the tests notice: breaks one place after another and runs the tests that ought to fail.

python tests/bench/mutation_check.py [WORD ...]      only those whose description has one of the words

mutations.txt says what is broken. The tree as it is here is copied, so that nothing happens to it; of the copies each
builds into one cache, so only what a mutation touches is compiled. The table is Markdown, SURVIVED a missing test. A
tree that passes its tests is taken for granted.
"""

import os
import re
import shlex
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
    paths = [path for path in ([where] if where.is_file() else where.rglob("*")) if path.is_file()]
    counts = {path: path.read_text(errors="replace").count(mutation.old) for path in paths}
    assert sum(counts.values()) == 1, f"{mutation.where} has this {sum(counts.values())} times:\n{mutation.old}"
    return next(path for path, count in counts.items() if count)


def copy(folder):
    """The tracked files and those that git does not ignore, as they are."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True)
    names = [name for name in os.fsdecode(listed.stdout).split("\0") if (ROOT / name).is_file()]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())


def found_by(tree, tests, cache):
    """The first test that fails; "": all pass."""
    environment = os.environ | {"PYTHONPATH": str(tree), "CALCOPS_CACHE": str(cache)}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    assert failed, f"no test failed, but pytest did:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return failed[1]


def main():
    chosen = [m for m in mutations() if not sys.argv[1:] or any(word in m.what for word in sys.argv[1:])]
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
