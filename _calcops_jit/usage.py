"""What the cache holds, and how it stays below its bound."""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Iterator
from typing import NamedTuple

from . import cache, inputs, places
from .diagnosis import report


class Entry(NamedTuple):
    """A generation: a library, or the object of one of its units. `used` is when it was last found, to the day."""

    used: float
    path: str
    file: str
    size: int

    def is_sound(self) -> bool:
        """Whether its bytes are those of its manifest."""
        with contextlib.suppress(OSError, ValueError):
            return os.path.isfile(self.file) and inputs.file_digest(self.file) == cache.read_manifest(self.path).digest
        return False


def entries(folder: str) -> list[Entry]:
    """All in a cache folder, the least recently used first."""
    found = []
    for slot in places.slots(folder):
        for path in map(os.path.dirname, glob.glob(f"{glob.escape(slot)}/*/manifest")):
            with contextlib.suppress(OSError):  # somebody removes it meanwhile
                size = sum(entry.stat().st_size for entry in os.scandir(path))
                found.append(Entry(os.stat(path).st_mtime, path, cache.output(path), size))
    return sorted(found)


def bound() -> int:
    """CALCOPS_CACHE_SIZE in bytes."""
    text = os.environ.get("CALCOPS_CACHE_SIZE") or "2G"
    if not (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?\s*", text.upper())):
        evidence = f"expected such as 500M or 2G, got {text!r}"
        raise report("CALCOPS_CACHE_SIZE is no size", [evidence], "export CALCOPS_CACHE_SIZE=2G")
    return int(float(match[1]) * 1024 ** ["", "K", "M", "G", "T"].index(match[2]))


def prune(size: int) -> list[Entry]:
    """Removes what was not used for longest while a cache folder holds more than `size`; never what a process has."""
    removed = []
    for folder in filter(os.path.isdir, places.folders()):
        found = entries(folder)
        excess = sum(entry.size for entry in found) - size
        for entry in found:
            if excess > 0 and cache.discard(entry.path):
                excess -= entry.size
                removed.append(entry)
        for slot in places.slots(folder):
            cache.tidy(slot)
    return removed


def clean() -> Iterator[tuple[str, list[str]]]:
    """Removes all that no process has or builds: (cache folder, what is left there)."""
    for folder in filter(os.path.isdir, places.folders()):
        yield folder, [slot for slot in places.slots(folder) if not cache.tidy(slot, everything=True)]
