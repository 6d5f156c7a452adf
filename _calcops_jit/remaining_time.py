"""How far a build is and how much longer it will take, learnt from earlier builds on this machine.

<cache>/seconds    a log like ninja's; each line is named `library, digest of its flags, object`, and one without
                   an object stands for everything after the objects
"""

from __future__ import annotations

import contextlib
import heapq
import os
import re
import time

from . import cache
from .closure import digest, text_of
from .request import Request

_KEPT = 5000  # lines


class RemainingTime:
    """The time that a build in the private folder `staging` still takes, by ninja's own files.

    It is told only if every object was built before, since the time for one depends on the headers it includes and not
    on its size; and no longer once it proves to be wrong by a factor of two."""

    def __init__(self, request: Request, slot: str, staging: str):
        flags = [request.facts.get(kind) for kind in ("C++ flags", "CUDA flags", "GPU architectures")]
        self._library = f"{request.name} {digest(repr(flags).encode())} "
        self._history, self._staging, self._least = f"{os.path.dirname(slot)}/seconds", staging, float("inf")
        self._known = {file: end - start for file, (start, end) in _read(self._history).items()}

    def state(self, seconds: float) -> tuple[str, float]:
        """(a text: what is built and under way, for how long, how much longer; the part that is done, 0 to 1)"""
        sources, ran, age = self._ninja()
        waiting = [source for file, source in sources.items() if file not in ran]
        under_way = "" if not waiting else f" {waiting[0]}" if len(waiting) > 1 else " linking"
        done = len(sources) - len(waiting)
        text = f"[{done}/{len(sources) or '?'}]{under_way} {seconds:.0f} s"
        if sources and sources.keys() <= self._known.keys():
            left = max(1, round(self._end(list(sources), ran, age) - age))
            self._least = min(self._least, left)
            if left <= 2 * self._least:
                return f"{text}, {left} s left", seconds / (seconds + left)
            self._known = {}
        return text, done / (len(sources) or 1)

    def _end(self, files: list[str], ran: dict[str, tuple[float, float]], age: float) -> float:
        """When everything will be built, in seconds after the start: objects follow one another as ninja starts them,
        and take as much longer than last time as the finished ones did."""
        free, planned = [0.0] * max(1, min(len(files), self._jobs)), {}
        for file in files[:-1]:
            planned[file] = heapq.heappop(free) + self._known[file]
            heapq.heappush(free, planned[file])
        end = max(free) + self._known[files[-1]]
        ended = [(ran[file][1], at) for file, at in planned.items() if file in ran]
        factor = (end + sum(real for real, _ in ended)) / (end + sum(at for _, at in ended))
        return end * max([factor, *(age / at for file, at in planned.items() if file not in ran)])

    def learn(self) -> None:
        """Learns from the build, which has just ended."""
        sources, ran, age = self._ninja()
        if sources and sources.keys() <= ran.keys():
            compiled = [end for file, (_, end) in ran.items() if file != self._library]
            ran[self._library] = max(compiled, default=0.0), age
            spans = list((_read(self._history) | ran).items())[-_KEPT:]
            lines = [f"{start * 1e3:.0f}\t{end * 1e3:.0f}\t0\t{file}\t0\n" for file, (start, end) in spans]
            with contextlib.suppress(OSError):
                cache.write_whole(self._history, "".join(lines).encode())

    def _ninja(self) -> tuple[dict[str, str], dict[str, tuple[float, float]], float]:
        """({file: source} in the order in which ninja starts them, {file: (begin, end)}, seconds since ninja began)"""
        plan, age = f"{self._staging}/build.ninja", 0.0
        text = text_of(plan)
        self._jobs = int((re.findall(r"^jobs = (\d+)$", text, re.MULTILINE) or ["1"])[0])
        found = re.findall(r"^build (\S+):", text, re.MULTILINE)
        with contextlib.suppress(OSError):
            age = time.time() - os.stat(plan).st_mtime
        name = lambda target: self._library + (target if target.endswith(".o") else "")  # noqa: E731
        ran = {name(target): span for target, span in _read(f"{self._staging}/.ninja_log").items()}
        return {name(target): target.removesuffix(".o") for target in found}, ran, age


def _read(log: str) -> dict[str, tuple[float, float]]:
    """{file: (begin, end)} in seconds after ninja began"""
    text = text_of(log) if os.path.isfile(log) else ""
    lines = re.findall(r"^(\d{1,9})\t(\d{1,9})\t\d+\t(.+)\t", text, re.MULTILINE)
    return {file: (int(start) / 1e3, int(end) / 1e3) for start, end, file in lines}
