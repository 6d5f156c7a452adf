"""What the cache holds, and how it stays below its bound."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
import time
from typing import NamedTuple

from . import cache, inputs


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
    for slot in cache.slots(folder):
        name = os.path.basename(slot).rpartition("-")[0]
        file = "unit.o" if name.startswith("unit-") else f"{name}.so"
        for path in map(os.path.dirname, glob.glob(f"{glob.escape(slot)}/*/manifest")):
            with contextlib.suppress(OSError):  # somebody removes it meanwhile
                size = sum(entry.stat().st_size for entry in os.scandir(path))
                found.append(Entry(os.stat(path).st_mtime, path, f"{path}/{file}", size))
    return sorted(found)


def bound() -> int:
    """CALCOPS_CACHE_SIZE in bytes."""
    text = os.environ.get("CALCOPS_CACHE_SIZE") or "2G"
    if not (match := re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", text)):
        raise ValueError(f"calcops_jit: expected CALCOPS_CACHE_SIZE such as 500M or 2G, got {text!r}")
    return int(float(match[1]) * 1024 ** ["", "K", "M", "G"].index(match[2]))


def prune(size: int) -> list[Entry]:
    """Removes what was not used for longest while a cache folder holds more than `size`; never what a process has."""
    removed = []
    for folder in filter(os.path.isdir, cache.folders()):
        found = entries(folder)
        excess = sum(entry.size for entry in found) - size
        for entry in found:
            if excess > 0 and not cache.in_use(entry.file):
                shutil.rmtree(entry.path, ignore_errors=True)
                excess -= entry.size
                removed.append(entry)
        for slot in cache.slots(folder):
            with contextlib.suppress(OSError):  # somebody else tidies up
                cache.sweep(slot)
                empty = set(os.listdir(slot)) <= {"lock", "failed.log"}
                if empty and time.time() - os.stat(slot).st_mtime > cache.DAY_S:  # nobody is about to build there
                    shutil.rmtree(slot)
    return removed
