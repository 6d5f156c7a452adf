"""What the cache holds, and how it is kept below CALCOPS_CACHE_SIZE."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import time
from collections.abc import Iterator
from types import SimpleNamespace

from ..errors import report
from . import folders, store

_PREAMBLES = 2  # each is some hundreds of MB
_MONTH_S = 30 * 24 * 3600.0


class Entry(SimpleNamespace):
    """A generation: a library, or the object of one unit."""

    used: float  # when it was last found, to the day
    path: str  # its folder
    size: int  # bytes

    @property
    def is_preamble(self) -> bool:
        """Whether it is a precompiled header."""
        return "/unit-preamble." in self.path


def entries(folder: str) -> list[Entry]:
    """All that a cache folder holds, the least recently used first."""
    found = []
    for slot in folders.slots(folder):
        for path in map(os.path.dirname, glob.glob(f"{glob.escape(slot)}/*/manifest")):
            with contextlib.suppress(OSError):  # somebody removed it meanwhile
                size = sum(entry.stat().st_size for entry in os.scandir(path))
                found.append(Entry(used=os.stat(path).st_mtime, path=path, size=size))
    return sorted(found, key=lambda entry: entry.used)


def bound() -> int:
    """CALCOPS_CACHE_SIZE in bytes. BuildError: it is no size."""
    text = os.environ.get("CALCOPS_CACHE_SIZE") or "2G"
    if not (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?\s*", text.upper())):
        evidence = f"expected such as 500M or 2G, got {text!r}"
        raise report("CALCOPS_CACHE_SIZE is no size", [evidence], "export CALCOPS_CACHE_SIZE=2G")
    return int(float(match[1]) * 1024 ** ["", "K", "M", "G", "T"].index(match[2]))


def prune(size: int) -> list[Entry]:
    """Removes what was not used for longest from a cache folder that holds more than `size`, but
    never a library in use. Precompiled headers do not count; see prune_preambles().
    """
    removed = []
    for folder in filter(os.path.isdir, folders.own()):
        found = entries(folder)
        removed += prune_preambles(found)
        found = [entry for entry in found if not entry.is_preamble]
        excess = sum(entry.size for entry in found) - size
        for entry in found:
            if excess > 0 and store.discard(entry.path):
                excess -= entry.size
                removed.append(entry)
        for slot in folders.slots(folder):
            store.tidy(slot)
    return removed


def prune_preambles(found: list[Entry]) -> list[Entry]:
    """Remove the precompiled headers of a folder. The last two stay if they were used within a
    month.
    """
    last_first = [entry for entry in reversed(found) if entry.is_preamble]
    outdated = [
        e for i, e in enumerate(last_first) if i >= _PREAMBLES or time.time() - e.used > _MONTH_S
    ]
    return [entry for entry in outdated if store.discard(entry.path)]


def clean() -> Iterator[tuple[str, list[str]]]:
    """Removes everything but libraries in use and slots in which somebody builds: (cache folder,
    slots that are left).
    """
    for folder in filter(os.path.isdir, folders.own()):
        yield (
            folder,
            [slot for slot in folders.slots(folder) if not store.tidy(slot, everything=True)],
        )
