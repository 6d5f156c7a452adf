"""How many compilers may run at once."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping

from ..cache.closure import text_of

_MEMORY = 2e9  # bytes that one compiler may need, with torch/extension.h


def number(environment: Mapping[str, str] = os.environ) -> int:
    """Return how many compilers may run: MAX_JOBS, or what processors and memory allow."""
    maximum = environment.get("MAX_JOBS", "")
    if maximum.isdigit() and int(maximum) > 0:
        return int(maximum)
    processors, free = cgroup_limits()
    processors = min(processors, len(os.sched_getaffinity(0)))
    available = re.search(r"MemAvailable:\s+(\d+)", text_of("/proc/meminfo"))
    if available:
        free = min(free, int(available[1]) * 1024)
    return max(1, int(min(processors, free / _MEMORY, 1024)))


def cgroup_limits(
    mounted: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup"
) -> tuple[float, float]:
    """Return the processors and the bytes of memory that control groups leave (inf: no limit).

    Only version 2 of control groups is read.
    """
    processors = free = float("inf")
    for line in text_of(own).splitlines():
        _, _, group = line.split(":", 2)
        parts = [part for part in group.split("/") if part]
        # The limits of all parent groups apply, too. A container sees only some of them.
        for depth in range(len(parts) + 1):
            folder = "/".join([mounted, *parts[:depth]])
            quota = _numbers(f"{folder}/cpu.max")
            if quota:
                processors = min(processors, quota[0] / quota[1])
            limit = _numbers(f"{folder}/memory.max")
            used = _numbers(f"{folder}/memory.current")
            if limit and used:  # cached pages of files count as used, but the kernel frees them
                files = re.search(r"^inactive_file (\d+)$", text_of(f"{folder}/memory.stat"), re.M)
                free = min(free, limit[0] - used[0] + int(files[1] if files else 0))
    return processors, free


def _numbers(path: str) -> list[int]:
    """Return the numbers in a control group's file; none if it has "max" or does not exist."""
    with contextlib.suppress(ValueError):
        return [int(word) for word in text_of(path).split()]
    return []
