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


def sources():
    """Return the CUDA sources of the operators and the examples that have a kernel."""
    paths = sorted([*ROOT.glob("ops/*/*.cu"), *ROOT.glob("examples/*/*.cu")])
    return [path for path in paths if kernels(path.read_text())]


def kernels(text):
    return [match[1] for match in _KERNEL.finditer(text)]


def barriers():
    """Yield (source, line) of each barrier, in the order of their fault numbers."""
    for path in sources():
        text = path.read_text()
        for match in _BARRIER.finditer(text):
            yield path, text.count("\n", 0, match.start()) + 1


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


def write_checkout(folder):
    """Copy the project into `folder`, with its CUDA sources rewritten.

    Each barrier has a number, and is left out in a run for the fault of this number: see
    barriers().
    """
    folder = Path(folder)
    shutil.copytree(
        ROOT / "_calcops_jit", folder / "_calcops_jit", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(ROOT / "calcops_jit.py", folder)
    paths = [*ROOT.glob("ops/*/*"), *ROOT.glob("ops/*.*"), *sources()]
    texts = {path: path.read_text() for path in paths if path.is_file()}
    number = itertools.count(FIRST_BARRIER)
    for path in sources():
        texts[path] = _BARRIER.sub(
            lambda m: f"if (!cuda_on_cpu::fault({next(number)})) {m[0]}", texts[path]
        )
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
    ops = folder / "ops"
    shutil.copytree(
        HERE,
        ops / "cuda_on_cpu",
        ignore=shutil.ignore_patterns("*.py", "*.md", "*.h", "c10", "__pycache__"),
    )
    shutil.copytree(HERE / "c10", ops / "c10")
    for path in HERE.glob("*.h"):
        shutil.copy(path, ops)
        shutil.copy(path, headers)
    for path, text in texts.items():
        parent = ops if path.parent == ROOT / "ops" else ops / path.parent.name
        parent.mkdir(exist_ok=True)
        if path.suffix != ".cu":
            (parent / path.name).write_text(host(text))
        elif path in sources():
            (parent / f"{path.stem}_cuda.cpp").write_text(emulated(text))


if __name__ == "__main__":
    write_checkout(sys.argv[1])
