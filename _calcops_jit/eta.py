"""How far a build is and how long it will still take, learnt from earlier builds on this machine.

    <cache>/seconds    a log as ninja's, of `library, digest of its flags, object`; no object: all that comes after them

Nothing is said about the time that is left until every object was built before: what one takes depends on the headers
it includes, not on its size. And nothing any more once that time would have to be more than doubled: it was wrong.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import re
import time

from . import cache, inputs

_KEPT = 5000  # lines


class Eta:
    """Of the build in `staging`, by ninja's own files: torch runs ninja and keeps its output to itself."""

    def __init__(self, request: inputs.Request, slot: str, staging: str):
        flags = [request.facts.get(kind) for kind in ("C++ flags", "CUDA flags", "GPU architectures")]
        self._library = f"{request.name} {inputs.digest(repr(flags).encode())} "
        self._history, self._staging = f"{os.path.dirname(slot)}/seconds", staging
        self._known = {file: end - start for file, (start, end) in _read(self._history).items()}
        self._least = float("inf")

    def state(self, seconds: float) -> tuple[str, float]:
        """What is built and under way, for how long, and how long still; and the part that is done, 0 to 1."""
        sources, ran, age = self._ninja()
        waiting = [source for file, source in sources.items() if file not in ran]
        done, total = len(sources) - len(waiting), len(sources)
        under_way = "" if not waiting else f" {waiting[0]}" if len(waiting) > 1 else " linking"
        text = f"[{done}/{total or '?'}]{under_way} {seconds:.0f} s"
        if sources and sources.keys() <= self._known.keys():
            files = [(self._known[file], ran[file][1] if file in ran else None) for file in sources]
            files[-1] = files[-1][0], None  # which does not end with the link
            jobs = os.environ.get("MAX_JOBS", "")  # build.py sets it while ninja runs
            left = max(1.0, seconds_left(files, age, int(jobs) if jobs.isdigit() else 1))
            self._least = min(self._least, round(left))
            if round(left) <= 2 * self._least:
                return f"{text}, {left:.0f} s left", seconds / (seconds + left)
            self._known = {}
        return text, done / (total or 1)

    def learn(self) -> None:
        """From the build, which has just ended."""
        sources, ran, age = self._ninja()
        if sources and sources.keys() <= ran.keys():
            ran[self._library] = max(end for file, (_, end) in ran.items() if file != self._library), age
            spans = list((_read(self._history) | ran).items())[-_KEPT:]
            lines = [f"{start * 1e3:.0f}\t{end * 1e3:.0f}\t0\t{file}\t0\n" for file, (start, end) in spans]
            with contextlib.suppress(OSError):
                cache.write_whole(self._history, "".join(lines).encode())

    def _ninja(self) -> tuple[dict[str, str], dict[str, tuple[float, float]], float]:
        """{file: source} in the order in which ninja starts them, {file: when it began and ended}, ninja's age."""
        sources, age = {}, 0.0
        with contextlib.suppress(OSError), open(f"{self._staging}/build.ninja") as file:
            age = time.time() - os.fstat(file.fileno()).st_mtime
            for target, source in re.findall(r"^build (\S+): \w+ (\S+)", file.read(), re.MULTILINE):
                sources[self._file(target)] = os.path.basename(source)
        return sources, {self._file(t): span for t, span in _read(f"{self._staging}/.ninja_log").items()}, age

    def _file(self, target: str) -> str:
        return self._library + (target if target.endswith(".o") else "")


def _read(log: str) -> dict[str, tuple[float, float]]:
    """{file: when it began and ended}, in seconds since ninja did"""
    with contextlib.suppress(OSError):
        if os.path.isfile(log):
            with open(log, errors="replace") as file:
                lines = re.findall(r"^(\d{1,9})\t(\d{1,9})\t\d+\t(.+)\t", file.read(), re.MULTILINE)
            return {file: (int(start) / 1e3, int(end) / 1e3) for start, end, file in lines}
    return {}


def seconds_left(files: list[tuple[float, float | None]], age: float, jobs: int) -> float:
    """Of a build that has run for `age` seconds, by replaying it: the seconds that each file should take and when
    it ended, in the order in which `jobs` at a time are started, the last one when all others are there."""
    slower = 1.0
    for _ in range(2):  # the first time tells how much slower than expected it goes
        free, took, wanted = [0.0] * min(max(1, jobs), len(files)), 0.0, 0.0
        for i, (seconds, end) in enumerate(files, 1):
            start = heapq.heappop(free) if i < len(files) else max(free)
            ran = max(0.0, (age if end is None else end) - start)
            took, wanted = took + ran, wanted + (min(seconds, ran) if end is None else seconds)
            if end is None:  # what runs takes a tenth more at least, or it would end with a leap
                end = max(start + seconds * slower, ran and age + 0.1 * ran)
            heapq.heappush(free, end)
        belief = 2 * sum(seconds for seconds, _ in files) / len(files)  # in the past, as in two files of it
        slower = (took + belief) / (wanted + belief)
    return max(free) - age
