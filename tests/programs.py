"""Programs as a user starts them, what READMEs show of them, and the files that they write."""

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = ROOT / "ops", ROOT / "calcops" / "ops"  # the folders of the operators' folders


def run(*command, cwd=None, fails=False, **variables):
    """Run a program with the modules of this checkout, and return the finished process.

    It must succeed, or end with an error if `fails` is True. LD_LIBRARY_PATH is not set, so that
    libraries must be found without it.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    environment.pop("LD_LIBRARY_PATH", None)
    command = [str(word) for word in command]
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert bool(result.returncode) == fails, result.stdout + result.stderr
    return result


def blocks(page, language):
    """Return the texts that a page shows in blocks of a language."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def assert_needs_no_python(*files):
    """Check that programs or libraries find PyTorch's libraries, and need none of Python."""
    for file in files:
        needed = run("ldd", file).stdout
        assert "libtorch_cpu.so" in needed
        assert not re.search(r"libpython|libtorch_python|not found", needed)


def assert_shows_something(path, height, width):
    """Check that a picture has at least this size, and is not blank."""
    import matplotlib.image

    picture = matplotlib.image.imread(path)[..., :3]
    assert picture.shape[0] >= height
    assert picture.shape[1] >= width
    assert picture.std() > 0.1
