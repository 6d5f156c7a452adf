"""The processor of this machine."""

from __future__ import annotations

import os
import re

MACHINE = os.uname().machine
# The extensions that each level of the x86-64 psABI adds, in the words of /proc/cpuinfo.
_LEVELS = {
    "x86-64-v2": "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3",
    "x86-64-v3": "abm avx avx2 bmi1 bmi2 f16c fma movbe xsave",
    "x86-64-v4": "avx512bw avx512cd avx512dq avx512f avx512vl",
}


def features() -> list[str]:
    """Return the words of /proc/cpuinfo on which -march=native depends, and some more."""
    with open("/proc/cpuinfo", errors="replace") as file:
        text = file.read(8192)  # all cores would take the kernel long
    lines = re.findall(r"(?m)^(?:flags|Features|CPU (?:part|implementer))\s*:(.*)\n", text)
    return sorted({word for line in lines for word in line.split()})


def lacking(flags: str) -> str:
    """Return why this processor cannot run code that was compiled with `flags`; "" if it can."""
    match = re.search(r"-march=(x86-64-v[234])(?:\s|$)", flags)
    if not match:
        return f"{flags} names none of {' '.join(_LEVELS)} for -march"
    here = set(features())
    for level, extensions in _LEVELS.items():
        missing = [word for word in extensions.split() if word not in here]
        if missing:
            return f"this processor has no {missing[0]}, which {match[1]} needs"
        if level == match[1]:
            break
    return ""
