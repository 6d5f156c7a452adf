"""`python -m calcops_jit export`: a folder with the built operators, for machines without a
compiler."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from pathlib import Path

import torch

from . import __version__, cache, library, recipes, request
from .errors import report

_HERE = Path(__file__).resolve().parent
_TEXTS = {  # {file in the folder: template in this package}
    "calcops_jit.py": "host/calcops_jit.py",
    "calcops_jit.pyi": "operators.pyi",
    "include/calcops.h": "include/calcops.h",
    "lib/pkgconfig/calcops.pc": "host/calcops.pc",
    "lib/cmake/calcops/calcops-config.cmake": "host/calcops-config.cmake",
}
# Macros of the extensions that a compiler may use by itself, and the kernel's names where these
# differ. SSE3, for the kernel "pni", comes with SSSE3 or AVX.
_INSTRUCTIONS = (
    r"#define __((?:SSE(?!3)|SSSE|AVX(?!10)|FMA|BMI|F16C|LZCNT|MOVBE|POPCNT)\w*?)(?<!_MATH)__ 1"
)
_IN_CPUINFO = {"bmi": "bmi1", "lzcnt": "abm"}
# The same on ARM, where the macros begin with __ARM_FEATURE_ or, that of NEON, with __ARM_.
_ARM_IN_CPUINFO = {
    **{
        "NEON": "asimd",
        "QRDMX": "asimdrdm",
        "DOTPROD": "asimddp",
        "FP16_FML": "asimdfhm",
        "COMPLEX": "fcma",
    },
    **{
        "FP16_SCALAR_ARITHMETIC": "fphp",
        "FP16_VECTOR_ARITHMETIC": "asimdhp",
        "BF16_VECTOR_ARITHMETIC": "bf16",
    },
    **{"JCVT": "jscvt", "RCPC": "lrcpc", "MATMUL_INT8": "i8mm"},
    **{"SVE2_BITPERM": "svebitperm", "SVE_MATMUL_INT8": "svei8mm", "SVE_BF16": "svebf16"},
    **{
        word.upper(): word
        for word in "atomics crc32 rng aes sha2 sha3 sha512 frint sve sve2 mops cssc".split()
    },
}
# What nearly every machine of a kind can run, and what every one can.
_USUAL, _LEAST = (
    ("armv8.2-a", "armv8-a") if request.MACHINE == "aarch64" else ("x86-64-v3", "x86-64-v2")
)


def write(folder: str, isa: str) -> None:
    """Writes the folder, after building for `isa`, which request.processor_flag() takes, if need
    be.

    BuildError: this machine could not run that."""
    wanted = recipes.own(isa=isa)
    instructions = _instructions(wanted)
    here = request.isa().replace("_", "").split()
    if missing := [name for name in instructions if name.replace("_", "") not in here]:
        lack = f"this processor has no {' '.join(missing)}"  # but the library is loaded here, too
        raise report(f"cannot export for {isa}", [lack], "export on a machine that has it")
    built = library.obtain(wanted)
    data = Path(built.path).read_bytes()
    release = torch.__version__.partition("+")[0]
    about = {
        "torch": [release, torch.compiled_with_cxx11_abi()],
        "machine": [request.MACHINE, _LEAST],
        "instructions": instructions,
        "cuda": wanted.cuda.version,
        "sha256": hashlib.sha256(data).hexdigest(),
        "operators": {
            name: [*handle._qualified_op_name.split("::"), handle.__doc__]
            for name, handle in built.operators.items()
        },
    }
    words = {
        "version": __version__,
        "release": release,
        "torch": os.path.dirname(torch.__file__),
        "standard": "20" if tuple(map(int, release.split(".")[:2])) >= (2, 13) else "17",
        "libraries": "-ltorch_cuda -ltorch_cpu -lc10" if wanted.cuda.build else "-ltorch_cpu -lc10",
    }
    files = {"lib/libcalcops.so": data, "calcops.json": json.dumps(about, indent=1).encode()}
    for target, template in _TEXTS.items():
        text = (_HERE / template).read_text()
        files[target] = re.sub("@(\\w+)@", lambda match: words[match[1]], text).encode()
    files["calcops_jit.pyi"] += b"\ndef library_path() -> str: ...\n"
    for name, content in files.items():
        os.makedirs(os.path.dirname(f"{folder}/{name}"), exist_ok=True)
        cache.write_whole(f"{folder}/{name}", content)


def _instructions(wanted: request.Request) -> list[str]:
    """The instruction-set extensions that the compiler may use by itself, by its own macros: any
    flag may turn one on."""
    flags = [flag for flag in wanted.cflags if flag.startswith("-m")]
    asked = [*request.compiler_words(), *flags, "-dM", "-E", "-x", "c++", os.devnull]
    answer = subprocess.run(asked, capture_output=True, text=True)
    if answer.returncode != 0:
        raise report(
            f"cannot export with {' '.join(flags)}",
            answer.stderr.splitlines()[:2],
            f"--isa {_USUAL}",
        )
    if request.MACHINE == "aarch64":
        macros = re.findall(r"#define __ARM_(?:FEATURE_)?(\w+) 1", answer.stdout)
        return sorted({_ARM_IN_CPUINFO[name] for name in macros if name in _ARM_IN_CPUINFO})
    names = (name.lower() for name in re.findall(_INSTRUCTIONS, answer.stdout))
    return sorted(_IN_CPUINFO.get(name, name) for name in names)
