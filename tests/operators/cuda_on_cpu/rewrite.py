"""A checkout whose CUDA sources are C++: README.md says how and what for.

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
    """Every CUDA source with a kernel in it, of the operators and of the examples."""
    found = sorted([*ROOT.glob("ops/*/*.cu"), *ROOT.glob("examples/*/*.cu")])
    return [path for path in found if kernels(path.read_text())]


def kernels(text):
    return [match[1] for match in _KERNEL.finditer(text)]


def barriers():
    """(source, line) of every barrier in order of their fault numbers, from FIRST_BARRIER on."""
    for path in sources():
        text = path.read_text()
        for match in _BARRIER.finditer(text):
            yield path, text.count("\n", 0, match.start()) + 1


FIRST_BARRIER = 1000
# From 16,384 tiles on a block takes several in a row; in the emulation from 8 on, so that small
# images show it.
SMALLER = ("ops/warp_perspective/warp_perspective.cu", "tiles / 8192", "tiles / 4")
_BARRIER = re.compile(r"__sync(?:threads|warp)\(\);")
_KERNEL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(")


def _closing(text, start):
    """Position at which the bracket that is open at `start` closes."""
    depth = 1
    for i in range(start, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth == 0:
            return i
    raise ValueError(f"cuda_on_cpu: nothing closes {text[start - 40 : start]!r}")


def _shared(declaration):
    """`__shared__ type a[n], b;` as memory of the block that runs."""
    kind, names = declaration.groups()
    variables = re.findall(r"(\w+)((?:\[\w+\])*)", names)
    return " ".join(
        f"CUDA_ON_CPU_SHARED({kind}, {name}, {dimensions});" for name, dimensions in variables
    )


def emulated(text):
    """A CUDA source as C++: launches are calls, and every kernel says its name."""
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
        if opens := re.match(r"\)\s*\{", text[end:]):  # else a declaration
            at = end + opens.end()
            text = f'{text[:at]} cuda_on_cpu::enter("{match[1]}");{text[at:]}'
    if left := re.findall(r".*(?:<<<|>>>|__shared__|\basm\b|\bcooperative_groups\b).*", text):
        raise ValueError(f"cuda_on_cpu: cannot emulate {left[0].strip()!r}")
    # PyTorch's headers must not take this for nvcc; the operator's own must.
    own = re.search(r'^#include "', text, re.M)
    at = own.start() if own else [*re.finditer(r"^#include .*\n", text, re.M)][-1].end()
    return f'{text[:at]}#include "cuda_language.h"\n{text[at:]}'


def host(text):
    """A C++ source of an operator as with CUDA; it asks the emulation for a tensor's device."""
    text = text.replace("CALCOPS_NO_CUDA", "CALCOPS_NEVER_DEFINED")
    text = re.sub(
        r"((?:\b\w+(?:\(\))?\.)*\b\w+(?:\(\))?)\.is_(cpu|cuda)\(\)",
        r"cuda_on_cpu::is_\2(\1.is_cpu())",
        text,
    )
    if "cuda_on_cpu::" in text:
        text = '#include "cuda_runtime_api.h"\n' + text
    return text


def write_checkout(folder, faults=()):
    """The project as it is, but for its CUDA sources; `faults` are (file, what it says, what it
    says instead), and the instead may ask FAULT whether its own number, from 1, is the one to show.
    Each barrier is a fault too, which leaves it out: see barriers()."""
    folder = Path(folder)
    shutil.copytree(
        ROOT / "_calcops_jit", folder / "_calcops_jit", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(ROOT / "calcops_jit.py", folder)
    texts = {
        path: path.read_text()
        for path in [*ROOT.glob("ops/*/*"), *ROOT.glob("ops/*.*")]
        if path.is_file()
    }
    texts |= {path: path.read_text() for path in sources()}
    for number, (name, before, after) in enumerate([SMALLER, *faults]):
        text = texts[ROOT / name]
        if text.count(before) != 1:
            raise ValueError(f"cuda_on_cpu: {name} has {before!r} {text.count(before)} times")
        texts[ROOT / name] = text.replace(
            before, after.replace("FAULT", f"cuda_on_cpu::fault({number})")
        )
    number = itertools.count(FIRST_BARRIER)
    for path in sources():
        texts[path] = _BARRIER.sub(
            lambda m: f"if (!cuda_on_cpu::fault({next(number)})) {m[0]}", texts[path]
        )
    runtime, shadow = (folder / "_calcops_jit" / name for name in ("runtime", "shadow"))
    stream = "get && get(device.index(), &stream) == 0"
    of_emulation = "(stream = cuda_on_cpu::current_stream(), true || get(device.index(), nullptr))"
    if (runtime / "kernels.h").read_text().count(stream) != 1:
        raise ValueError(f"cuda_on_cpu: kernels.h does not have {stream!r} once")
    for path in [*runtime.iterdir(), *shadow.glob("calcops/*.h")]:
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
        shutil.copy(path, shadow)
    for path, text in texts.items():
        cuda = path.suffix == ".cu"
        parent = ops / path.relative_to(ROOT).parent.name if path.parent != ROOT / "ops" else ops
        parent.mkdir(exist_ok=True)
        name = f"{path.stem}_cuda.cpp" if cuda else path.name
        if path.suffix != ".cu" or path in sources():
            (parent / name).write_text(emulated(text) if cuda else host(text))


if __name__ == "__main__":
    write_checkout(sys.argv[1])
