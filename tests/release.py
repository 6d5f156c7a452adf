"""Build the distributions calcops and calcops-lammps, and try them in bare environments.

    make dist                                       # each Python, the oldest and newest PyTorch
    make dist pythons=3.12 torch="2.10 2.13"
    make dist address=https://host/owner/name/blob/v1    # of the files to which READMEs link on PyPI

dist/release/ gets an sdist and a wheel of each, from the files that are committed. A line is printed
for each environment, which is deleted after its test: PyTorch with CUDA takes 6 GB.
"""

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist" / "release"
STEPS = ROOT / "tests" / "release_first_steps.py"
PYTHONS = "3.11", "3.12", "3.13", "3.14"


def with_absolute_links(page: str, address: str) -> str:
    """Return a page in Markdown whose relative links and pictures are found from anywhere.

    Args:
        page: its text.
        address: of its folder, such as https://host/owner/name/blob/v1.
    """
    code = r"```.*?```|`[^`]*`"
    target = rf'({code})|(!\[[^\]]*\]\(|\]\(|src(?:set)?=")(?!\w+:|#)'

    def replaced(match):
        if match[1]:
            return match[1]
        is_picture = match[2].startswith(("!", "src"))
        folder = address.replace("/blob/", "/raw/") if is_picture else address
        return f"{match[2]}{folder}/"

    return re.sub(target, replaced, page, flags=re.DOTALL)


def build(address: str | None) -> None:
    """Write the distributions to DIST, each wheel from its sdist, and check their metadata.

    Args:
        address: of the repository's files; None: the links in descriptions stay relative.
    """
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        run("git", "clone", "-q", ROOT, folder)
        for part in "", "/calcops/lammps":
            source = Path(f"{folder}{part}")
            page = source / "README.md"
            if address:
                page.write_text(with_absolute_links(page.read_text(), f"{address}{part}"))
            run(sys.executable, "-m", "build", "--outdir", DIST, source)
    run(sys.executable, "-m", "twine", "check", "--strict", *DIST.iterdir())


def run(*command: str | Path, **options) -> str:
    """Run a program and return what it prints.

    Raises:
        RuntimeError: it failed. The message ends with what it printed.
    """
    words = [str(word) for word in command]
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}\n{done.stdout}")
    return done.stdout


def interpreter(python: str) -> str | None:
    """Return the path of a Python such as "3.12", or None if it is not on this machine."""
    installed = Path.home().glob(f".pyenv/versions/{python}.*/bin/python")
    for path in f"python{python}", *map(str, installed):
        # A command of pyenv may exist and fail.
        if shutil.which(path) and not subprocess.call([path, "-c", ""], stderr=subprocess.DEVNULL):
            return path
    return None


def try_first_steps(interpreter: str, torch: str) -> str:
    """Install the wheels in a new environment, and return the last line of the first steps.

    Args:
        interpreter: the Python that makes the environment.
        torch: requirement of PyTorch.
    """
    (calcops,) = DIST.glob("calcops-*.whl")
    (lammps,) = DIST.glob("calcops_lammps-*.whl")
    outside = ("CALCOPS_", "PYTHON", "VIRTUAL_ENV")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(outside)}
    with tempfile.TemporaryDirectory() as folder:
        variables["CALCOPS_CACHE"] = f"{folder}/cache"
        run(interpreter, "-m", "venv", f"{folder}/venv")
        python = f"{folder}/venv/bin/python"
        requirements = torch, f"{calcops}[ase]", lammps
        run(python, "-m", "pip", "install", "-q", *requirements, cwd=folder, env=variables)
        printed = run(python, STEPS, cwd=folder, env=variables)
    return printed.splitlines()[-1]


def main() -> None:
    """Build, and try each Python with each PyTorch."""
    oldest = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pythons", nargs="+", metavar="3.12", help="default: those here")
    parser.add_argument(
        "--torch", nargs="*", default=[oldest, ""], metavar=oldest, help='"": the newest'
    )
    parser.add_argument("--address", metavar="URL", help="of the files to which READMEs link")
    options = parser.parse_args()
    build(options.address)
    print("built", *sorted(path.name for path in DIST.iterdir()), flush=True)

    failures = 0
    for python, torch in itertools.product(options.pythons or PYTHONS, options.torch):
        path = interpreter(python)
        if path is None:
            failures += bool(options.pythons)
            print(f"Python {python}: not tried, because it is not on this machine")
            continue
        start = time.monotonic()
        try:
            result = try_first_steps(path, f"torch=={torch}.*" if torch else "torch")
        except RuntimeError as error:
            failures += 1
            result = f"PyTorch {torch or 'newest'}, FAILED: {error}"
        print(f"Python {python}, {result}; {time.monotonic() - start:.0f} s", flush=True)
    sys.exit(failures)


if __name__ == "__main__":
    main()
