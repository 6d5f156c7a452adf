"""The programs of a build: where ninja is, what a compiler is, how many may run at once."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import subprocess
import sys
import sysconfig

from .request import Request

_MEMORY = 2e9  # bytes that one compiler may need, with torch/extension.h


def find_ninja(request: Request) -> str:
    """Return the path of ninja: on PATH, beside this Python, or in its wheel; "" without one."""
    folders = [sysconfig.get_path("scripts"), os.path.dirname(sys.executable)]
    with contextlib.suppress(ImportError):
        from ninja import BIN_DIR

        folders.append(BIN_DIR)
    path = os.pathsep.join([request.environment.get("PATH", ""), *folders])
    return shutil.which("ninja", path=path) or ""


def version(request: Request) -> str:
    """Return what the C++ compiler prints for --version; "" if it does not run."""
    return _version(*request.compiler, path=request.environment.get("PATH", ""))


@functools.cache
def _version(*command: str, path: str) -> str:
    with contextlib.suppress(OSError):
        environment = os.environ | {"PATH": path, "LC_ALL": "C.UTF-8"}
        options = {"stdin": subprocess.DEVNULL, "encoding": "utf-8", "errors": "replace"}
        arguments = [*command, "--version"]
        return subprocess.run(arguments, capture_output=True, env=environment, **options).stdout
    return ""


def jobs(request: Request) -> int:
    """Return how many compilers may run: MAX_JOBS, or what processors and memory allow."""
    maximum = request.environment.get("MAX_JOBS", "")
    if maximum.isdigit() and int(maximum) > 0:
        return int(maximum)
    with open("/proc/meminfo") as file:
        available = re.search(r"MemAvailable:\s+(\d+) kB", file.read())
    by_memory = int(available[1]) * 1024 / _MEMORY if available else 1
    return max(1, int(min(len(os.sched_getaffinity(0)), by_memory)))
