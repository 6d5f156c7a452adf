"""List the entries of the cache, and keep it below CALCOPS_CACHE_SIZE."""

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

_KEPT_PREAMBLES = 2  # each is some hundreds of MB
_MONTH_S = 30 * 24 * 3600.0


class Entry(SimpleNamespace):
    """A generation: a library, or the object of one unit."""

    used: float  # when it was last used, to the day
    path: str  # its folder
    size: int  # bytes

    @property
    def is_preamble(self) -> bool:
        """Return True if the entry is a precompiled header."""
        return "/unit-preamble." in self.path


def entries(folder: str) -> list[Entry]:
    """Return the entries of a cache folder, the least recently used first."""
    entries = []
    for slot in folders.slots(folder):
        for path in map(os.path.dirname, glob.glob(f"{glob.escape(slot)}/*/manifest")):
            with contextlib.suppress(OSError):  # another process removed it meanwhile
                size = sum(file.stat().st_size for file in os.scandir(path))
                entries.append(Entry(used=os.stat(path).st_mtime, path=path, size=size))
    return sorted(entries, key=lambda entry: entry.used)


def bound() -> int:
    """Return CALCOPS_CACHE_SIZE in bytes. BuildError: its value is not a size."""
    text = os.environ.get("CALCOPS_CACHE_SIZE") or "2G"
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?\s*", text.upper())
    if not match:
        evidence = f"expected such as 500M or 2G, got {text!r}"
        raise report("CALCOPS_CACHE_SIZE is no size", [evidence], "export CALCOPS_CACHE_SIZE=2G")
    power = ["", "K", "M", "G", "T"].index(match[2])
    return int(float(match[1]) * 1024**power)


def prune(size: int) -> list[Entry]:
    """Remove the least recently used entries of each cache folder with more than `size` bytes.

    Return the removed entries. Libraries in use stay. Precompiled headers do not count: see
    prune_preambles().
    """
    removed = []
    for folder in filter(os.path.isdir, folders.own()):
        least_used_first = entries(folder)
        removed += prune_preambles(least_used_first)
        counted = [entry for entry in least_used_first if not entry.is_preamble]
        excess = sum(entry.size for entry in counted) - size
        for entry in counted:
            if excess > 0 and store.discard(entry.path):
                excess -= entry.size
                removed.append(entry)
        for slot in folders.slots(folder):
            store.tidy(slot)
    return removed


def prune_preambles(least_used_first: list[Entry]) -> list[Entry]:
    """Remove all precompiled headers but the two last used, and these after a month without use.

    Return the removed entries. `least_used_first` are all entries of a cache folder.
    """
    last_used_first = [entry for entry in reversed(least_used_first) if entry.is_preamble]
    removed = []
    for i, entry in enumerate(last_used_first):
        is_outdated = i >= _KEPT_PREAMBLES or time.time() - entry.used > _MONTH_S
        if is_outdated and store.discard(entry.path):
            removed.append(entry)
    return removed


def clean() -> Iterator[tuple[str, list[str]]]:
    """Remove everything but libraries in use and slots in which a process builds.

    Yield (cache folder, slots that are left in it).
    """
    for folder in filter(os.path.isdir, folders.own()):
        slots = folders.slots(folder)
        yield folder, [slot for slot in slots if not store.tidy(slot, everything=True)]
