"""List the results in the pages, print them anew, and mark those of code that has changed since.

    python bench/results.py                   (make results)
    python bench/results.py force             (make results only=force): print anew those of a pattern
    python bench/results.py --mark            (make docs)

A result is what a command has printed into a page, with a line about the run:

    <!-- result NAME of PATHS: COMMAND -->
    ...
    *`COMMAND`, 2026-11-28, commit 0123abc, AMD EPYC with AVX-512, 2 processors, PyTorch 2.15.0*
    <!-- /result 1a2b3c4d 5e6f7a8b -->

PATHS are the files and folders that were measured, separated by spaces; they may be patterns such as
`ops/*.h`. The first word at the end is the digest of their code, of the headers that they include, of
the modules that they import from calcops or their own folder, of the program in COMMAND, and of the
module with the compiler's flags. If the code has another digest now, the line ends with "earlier
code". The loader and the runtime of contracts count only where PATHS has them. The second word is the
digest of what was printed, which nobody may edit. Patterns are regular expressions that lines of the list or PATHS must match, so
"earlier" chooses all such results. A pattern that is the name of a result chooses only that one.

A command may name variables of the environment, such as $GPUMD: what does not come with the project.
Output without a table is shown as text. A result stays as it was if its command fails or a variable
is not set. The exit status is then 1.
"""

import argparse
import ast
import datetime
import hashlib
import importlib.metadata
import io
import os
import platform
import re
import subprocess
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULT = re.compile(
    r"^<!-- result (?P<name>\S+) of (?P<paths>[^:]+): (?P<command>.+) -->\n"
    r"(?P<body>(?:(?!<!-- result ).*\n)*?)"
    r"(?P<about>\*`.*\*)\n"
    r"<!-- /result (?P<digest>\w+) (?P<printed>\w+) -->$",
    re.MULTILINE,
)
FOLDERS = ("_calcops_jit", "bench", "calcops", "contracts", "docs", "examples", "ops", "tests")
EARLIER = ", earlier code*"
SUFFIXES = (".py", ".cpp", ".cc", ".h", ".cu")
# A string of C++, which may look like a comment inside, or a comment.
IN_CPP = re.compile(
    r'(?P<text>R"(?P<mark>\w*)\(.*?\)(?P=mark)"|"(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/', re.DOTALL
)
INCLUDE = re.compile(r'^\s*#\s*include\s*["<](.+?)[>"]', re.MULTILINE)


class Result(NamedTuple):
    page: Path
    name: str
    paths: str
    command: str
    body: str
    about: str  # the line about the run
    digest: str
    printed: str  # the digest of command, body and about

    def is_older(self):
        """Return True if the code has changed since the run."""
        return self.digest != digest_of(self.paths, self.command)

    def digest_of_print(self):
        """Return the digest of what was printed, and of the command and the line about the run."""
        about = self.about.replace(EARLIER, "*")
        return hashlib.sha256("\n".join([self.command, self.body, about]).encode()).hexdigest()[:8]

    def text(self):
        """Return the result as it stands in the page, marked if it is older."""
        about = self.about.replace(EARLIER, "*")
        if self.is_older():
            about = about[:-1] + EARLIER
        head = f"<!-- result {self.name} of {self.paths}: {self.command} -->"
        return f"{head}\n{self.body}{about}\n<!-- /result {self.digest} {self.printed} -->"

    def line(self):
        """Return the line of the list."""
        date = re.search(r"\d{4}-\d\d-\d\d", self.about)
        page = self.page.relative_to(ROOT)
        state = "earlier code" if self.is_older() else "current"
        return f"{state:13} {date[0]}  {page}: {self.name}"


def pages():
    """Return the pages that have results."""
    found = [ROOT / "README.md"]
    for folder in FOLDERS:
        found += sorted((ROOT / folder).rglob("*.md"))
    return [page for page in found if "<!-- result " in page.read_text(encoding="utf-8")]


def results():
    """Return all results, in the order of the pages.

    Raises:
        ValueError: a result is not complete, or two have one name.
    """
    found = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        matches = list(RESULT.finditer(text))
        if len(matches) != len(re.findall("^<!-- result ", text, re.MULTILINE)):
            raise ValueError(
                f"{page}: expected each result to end with a line about its run and a mark"
            )
        found += [Result(page, **match.groupdict()) for match in matches]
    names = sorted(result.name for result in found)
    if len(set(names)) < len(names):
        raise ValueError(f"expected a name for each result, got {', '.join(names)}")
    return found


def files_of(paths):
    """Return the files of code below paths, and every file that is named itself.

    Raises:
        FileNotFoundError: a path has none.
    """
    files = set()
    for path in paths.split():
        below = []
        for found in ROOT.glob(path):
            inside = [file for file in found.rglob("*") if file.suffix in SUFFIXES]
            below += inside if found.is_dir() else [found]
        if not below:
            raise FileNotFoundError(f"expected code in {path}, got none")
        files |= set(below)
    return files


def used_by(file):
    """Return the headers and modules of this repository that a file names itself."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        names = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        modules = [ROOT / name.replace(".", "/") for name in names if name.startswith("calcops.")]
        modules += [file.parent / name for name in names if "." not in name]
        candidates = [module.with_suffix(".py") for module in modules]
        candidates += [module / "__init__.py" for module in modules]
    elif file.suffix in SUFFIXES:
        folders = file.parent, ROOT / "contracts/include", ROOT / "ops", ROOT / "calcops/ops"
        candidates = [folder / name for name in INCLUDE.findall(text) for folder in folders]
    else:
        candidates = []
    return {path.resolve() for path in candidates if path.is_file()}


def code_of(file):
    """Return the lines of a file without comments, docstrings and empty lines."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        text = without_comments(text)
    elif file.suffix in SUFFIXES:
        text = IN_CPP.sub(lambda match: match["text"] or " ", text)
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def without_comments(source):
    """Return Python's source without comments, and without strings that are whole statements."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            first, end = node.lineno - 1, node.end_lineno
            if "\n".join(lines[first:end]).strip() == ast.get_source_segment(source, node):
                lines[first:end] = [""] * (end - first)
    return "\n".join(lines)


def digest_of(paths, command=""):
    """Return the digest of the code of paths, and of what the docstring of this module names."""
    programs = [ROOT / name for name in re.findall(r"(?<!\S)[\w/]+\.py\b", command)]
    flags = ROOT / "_calcops_jit" / "request.py"
    files = files_of(paths) | {path for path in [flags, *programs] if path.is_file()}
    new = files
    while new:
        new = set().union(*map(used_by, new)) - files
        files |= new
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update("\n".join([str(file.relative_to(ROOT)), *code_of(file), ""]).encode())
    return digest.hexdigest()[:8]


def machine():
    """Return the processor, how many there are, and PyTorch's version."""
    about = Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*: (.*)", about)
    name = model[1] if model else platform.machine()
    widest = next((word for word in ("avx512f", "avx2") if f" {word} " in about), "")
    name += {"avx512f": " with AVX-512", "avx2": " with AVX2", "": ""}[widest]
    version = importlib.metadata.version("torch").partition("+")[0]
    return f"{name}, {len(os.sched_getaffinity(0))} processors, PyTorch {version}"


def run(result):
    """Return the result with what its command prints now.

    Raises:
        RuntimeError: a variable is not set, or the command failed.
    """
    for variable in re.findall(r"\$([A-Z]\w*)", result.command):
        if variable not in os.environ:
            raise RuntimeError(f"set {variable}")
    bin_folder = Path(sys.executable).parent
    environment = os.environ | {
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    digest = digest_of(result.paths, result.command)  # of what is about to run, not of later edits
    commit = output_of("git", "rev-parse", "--short", "HEAD").strip()
    if output_of("git", "status", "--porcelain", "--", *(f"*{suffix}" for suffix in SUFFIXES)):
        commit += " with edits"
    command = ["bash", "-euo", "pipefail", "-c", result.command]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode} of {result.command}")
    printed = done.stdout.strip("\n") + "\n"
    if not printed.strip() or "<!-- " in printed:
        raise RuntimeError(f"expected a table or text without marks, got {printed[:80]!r}")
    has_table = re.search(r"^\|(?:-+\|)+$", printed, re.MULTILINE)
    body = f"\n{printed}\n" if has_table else f"```text\n{printed}```\n"
    run_of = f"{datetime.date.today()}, commit {commit}, {machine()}"
    new = result._replace(body=body, about=f"*`{result.command}`, {run_of}*", digest=digest)
    return new._replace(printed=new.digest_of_print())


def output_of(*command):
    """Return what a command prints."""
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


def replace(old, new):
    """Put a result into its page."""
    text = old.page.read_text(encoding="utf-8")

    def renewed(match):
        return new.text() if match["name"] == old.name else match[0]

    old.page.write_text(RESULT.sub(renewed, text), encoding="utf-8")


def mark():
    """Write into the pages which results are older."""
    for result in results():
        replace(result, result)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mark", action="store_true", help="mark the older results in the pages")
    parser.add_argument("patterns", nargs="*", help="print anew the results whose line has one")
    options = parser.parse_args()
    if options.mark:
        return mark()
    found = results()
    if not options.patterns:
        print("\n".join(result.line() for result in found))
        return None
    names = {result.name for result in found}
    chosen = []
    for result in found:
        line = f"{result.line()} of {result.paths}"
        others = [pattern for pattern in options.patterns if pattern not in names]
        if result.name in options.patterns or any(re.search(other, line) for other in others):
            chosen.append(result)
    if not chosen:
        sys.exit(f"no result matches {' '.join(options.patterns)}: `make results` lists them all")
    failed = False
    for result in chosen:
        print(f"{result.name}: {result.command}", file=sys.stderr)
        try:
            replace(result, run(result))
        except (RuntimeError, OSError, ValueError, subprocess.CalledProcessError) as error:
            print(f"{result.name} stays as it is: {error}", file=sys.stderr)
            failed = True
    sys.exit(failed)


if __name__ == "__main__":
    main()
