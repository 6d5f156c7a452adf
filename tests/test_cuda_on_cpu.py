"""Every CUDA kernel of the operators and the examples runs on the CPU (tests/cuda_on_cpu), and the emulation finds the
faults that are put into them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS / "cuda_on_cpu"))

import rewrite  # noqa: E402
