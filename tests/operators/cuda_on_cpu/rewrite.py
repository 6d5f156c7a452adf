"""Write a checkout whose CUDA sources are rewritten as C++; see README.md.

python tests/operators/cuda_on_cpu/rewrite.py FOLDER

Then PYTHONPATH=FOLDER python -c "import calcops_jit" builds it.
"""

import itertools
import re
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
LIBRARIES = "ops", "calcops/ops"
LAUNCH = ROOT / "contracts" / "include" / "calcops" / "launch.h"
_ENDINGS = ".h", ".cpp", ".cu", ".py"


def sources():
    """Return the CUDA sources of the operators and the examples that have a kernel."""
    folders = *LIBRARIES, "examples"
    paths = sorted(path for folder in folders for path in ROOT.glob(f"{folder}/*/*.cu"))
    return [path for path in paths if kernels(path.read_text())]


def kernels(text):
    return [match[1] for match in _KERNEL.finditer(text)]


def barriers():
    """Yield (source, line) of each barrier, in the order of their fault numbers."""
    for path in (*sources(), LAUNCH):
        text = path.read_text()
        for match in _BARRIER.finditer(text):
            yield path, text.count("\n", 0, match.start()) + 1


# The models' kernels call the emulator, which is in the core's library.
_WITH_EMULATOR = """import ctypes
import calcops_jit
ctypes.CDLL(calcops_jit.library_path(), ctypes.RTLD_GLOBAL)
"""
FIRST_BARRIER = 1  # number of the fault that leaves out the first barrier
_BARRIER = re.compile(r"__sync(?:threads|warp)\(\);")
_KERNEL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(")


def _closing(text, start):
    """Return the position of the bracket that closes the one before `start`."""
    depth = 1
    for i in range(start, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth == 0:
            return i
    raise ValueError(f"cuda_on_cpu: nothing closes {text[start - 40 : start]!r}")


def _shared(declaration):
    """Return the declaration `__shared__ type a[n], b;` as memory of the running block."""
    kind, names = declaration.groups()
    variables = re.findall(r"(\w+)((?:\[\w+\])*)", names)
    return " ".join(
        f"CUDA_ON_CPU_SHARED({kind}, {name}, {dimensions});" for name, dimensions in variables
    )


def emulated(text):
    """Return a CUDA source as C++. Launches become calls, and each kernel reports its name."""
    text = re.sub(
        r"((?:\w+::)*\w+(?:<[^<>;{}]*>)?)\s*<<<(.*?)>>>\s*\(",
        lambda m: f"CUDA_ON_CPU_LAUNCH(({m[1]}), {m[2]})(",
        text,
        flags=re.S,
    )
    text = re.sub(r"#pragma unroll.*", "", text)
    text = re.sub(r"(?<!extern )__shared__\s+(\w+(?:<\w+>)?)\s+([^;]+);", _shared, text)
    for match in reversed(list(_KERNEL.finditer(text))):
        end = _closing(text, match.end())
        opening = re.match(r"\)\s*\{", text[end:])
        if opening:  # a definition, not a declaration
            at = end + opening.end()
            text = f'{text[:at]} cuda_on_cpu::enter("{match[1]}");{text[at:]}'
    unknown = re.findall(r".*(?:<<<|>>>|__shared__|\basm\b|\bcooperative_groups\b).*", text)
    if unknown:
        raise ValueError(f"cuda_on_cpu: cannot emulate {unknown[0].strip()!r}")
    # cuda_language.h defines __CUDACC__: after PyTorch's headers, and before the operator's own.
    own = re.search(r'^#include "', text, re.M)
    at = own.start() if own else [*re.finditer(r"^#include .*\n", text, re.M)][-1].end()
    return f'{text[:at]}#include "cuda_language.h"\n{text[at:]}'


def host(text):
    """Return a C++ source as built with CUDA, in which the emulation decides a tensor's device."""
    text = text.replace("CALCOPS_NO_CUDA", "CALCOPS_NEVER_DEFINED")
    text = re.sub(
        r"((?:\b\w+(?:\(\))?\.)*\b\w+(?:\(\))?)\.is_(cpu|cuda)\(\)",
        r"cuda_on_cpu::is_\2(\1.is_cpu())",
        text,
    )
    if "cuda_on_cpu::" in text:
        text = '#include "cuda_runtime_api.h"\n' + text
    return text


def library_texts():
    """Return {path: text} of the libraries' files, of launch.h and of the examples' CUDA sources.

    Each barrier has a number, and is left out in a run for the fault of this number: see
    barriers().
    """
    paths = [*sources(), LAUNCH]
    for library in LIBRARIES:
        paths += [*ROOT.glob(f"{library}/*.*"), *ROOT.glob(f"{library}/*/*.*")]
    texts = {path: path.read_text() for path in paths if path.suffix in _ENDINGS}
    number = itertools.count(FIRST_BARRIER)
    for path in (*sources(), LAUNCH):
        texts[path] = _BARRIER.sub(
            lambda m: f"if (!cuda_on_cpu::fault({next(number)})) {m[0]}", texts[path]
        )
    models = ROOT / "calcops" / "ops" / "__init__.py"
    texts[models] = texts[models].replace("import calcops_jit\n", _WITH_EMULATOR)
    return texts


def write_checkout(folder):
    """Copy the project into `folder`, with its CUDA sources rewritten."""
    folder = Path(folder)
    shutil.copytree(
        ROOT / "_calcops_jit", folder / "_calcops_jit", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(ROOT / "calcops_jit.py", folder)
    contracts = folder / "contracts"
    shutil.copytree(ROOT / "contracts", contracts)
    runtime = contracts / "runtime"
    headers = contracts / "include"
    stream = "get && get(device.index(), &stream) == 0"
    of_emulation = "(stream = cuda_on_cpu::current_stream(), true || get(device.index(), nullptr))"
    if (runtime / "checked.h").read_text().count(stream) != 1:
        raise ValueError(f"cuda_on_cpu: checked.h does not have {stream!r} once")
    for path in [*runtime.iterdir(), *headers.glob("calcops/*.h")]:
        path.write_text(host(path.read_text().replace(stream, of_emulation)))
    shutil.copytree(HERE / "c10", headers / "c10")
    for path in HERE.glob("*.h"):
        shutil.copy(path, headers)
    for path, text in library_texts().items():
        place = folder / path.relative_to(ROOT)
        if place.parts[-3] == "examples":  # a part of the core's library in this checkout
            place = folder / "ops" / path.parent.name / path.name
        place.parent.mkdir(parents=True, exist_ok=True)
        if path == LAUNCH:
            place.write_text(emulated(text))
        elif path.suffix == ".py":
            place.write_text(text)
        elif path.suffix != ".cu":
            place.write_text(host(text))
        elif path in sources():
            place.with_name(f"{path.stem}_cuda.cpp").write_text(emulated(text))
    (folder / "ops" / "cuda_on_cpu").mkdir()
    shutil.copy(HERE / "emulator.cpp", folder / "ops" / "cuda_on_cpu")


if __name__ == "__main__":
    write_checkout(sys.argv[1])
