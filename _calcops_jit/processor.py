"""The processor of this machine."""

from __future__ import annotations

import os
import re

MACHINE = os.uname().machine
# The extensions that each level of the x86-64 psABI adds, in the words of /proc/cpuinfo.
LEVELS = {
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


def levels() -> list[str]:
    """Return the levels that this processor has, the highest first."""
    words = set(features())
    here: list[str] = []
    for level, extensions in LEVELS.items():
        if not words.issuperset(extensions.split()):
            break
        here.insert(0, level)
    return here
