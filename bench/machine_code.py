"""Print registers, stack and instructions of operators' CUDA kernels, from their machine code.

    python bench/machine_code.py ops/force/force.cu [--arch sm_90] [--before FOLDER]

Prints a line for each kernel. `loops` are the numbers of instructions of the innermost loops. With
`--before`, the numbers of the checkout in FOLDER come first, and kernels that are the same in both
are left out. Needs nvcc, and the cuobjdump of the toolkit or of PyTorch's Triton, but no GPU.
"""

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def output_of(*command, **options):
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, **options)
    if result.returncode:
        sys.exit(f"machine_code: {command[0]} failed")
    return result.stdout


def cuobjdump(option, cubin):
    """Return what cuobjdump prints of a cubin, with the kernels' names demangled."""
    triton = importlib.util.find_spec("triton")
    of_triton = Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump" if triton else ""
    tool = shutil.which("cuobjdump") or of_triton
    folders = f"{Path(tool).parent}:{os.environ['PATH']}"  # it runs nvdisasm
    printed = output_of(tool, option, cubin, env=os.environ | {"PATH": folders})
    return output_of("c++filt", input=printed)


def short(name):
    """Return `sum_kernel<4, float>` for a kernel's full name."""
    name = re.sub(r"\(anonymous namespace\)::|\w+::|^void ", "", name)
    return re.sub(r"\((?!bool\)|int\)).*", "", name.strip())


def innermost_loops(code):
    """Return the lengths of the loops that contain no other loop, from lines (address, text)."""
    places = {address: place for place, (address, _) in enumerate(code)}
    loops = []
    for place, (address, text) in enumerate(code):
        target = re.search(r"\bBRA\b.*\b0x([0-9a-f]+)", text)
        if target and int(target[1], 16) < address:
            loops.append((places[int(target[1], 16)], place))
    return [
        end - begin + 1
        for begin, end in loops
        if not any(begin <= b and e <= end for b, e in loops if (b, e) != (begin, end))
    ]


def kernels(checkout, path, arch):
    """Return {name: (registers, stack, shared memory, instructions, loops)} of a source's kernels."""
    source = checkout / path
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernels.cubin")
        folders = [f"-I{source.parents[1]}", f"-I{checkout}/contracts/include"]
        options = ["-cubin", "-std=c++20", "-O3", f"-arch={arch}", *folders]
        output_of("nvcc", *options, source, "-o", cubin)
        usage = dict(re.findall(r" Function (.*):\n +(.*)", cuobjdump("-res-usage", cubin)))
        parts = cuobjdump("-sass", cubin).split("Function : ")[1:]
    results = {}
    for part in parts:
        name, _, text = part.partition("\n")
        sizes = [re.search(rf"{key}:(\d+)", usage[name])[1] for key in ("REG", "STACK", "SHARED")]
        lines = re.findall(r"/\*([0-9a-f]{4,})\*/ +(.*?);", text)
        code = [(int(address, 16), line) for address, line in lines if line.strip() != "NOP"]
        results[short(name)] = (*map(int, sizes), len(code), innermost_loops(code))
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="+", type=Path)
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--before", type=Path, help="another checkout")
    options = parser.parse_args()
    print("registers, bytes of stack, bytes of shared memory, instructions, loops")
    for source in options.sources:
        path = source.resolve().relative_to(ROOT)
        now = kernels(ROOT, path, options.arch)
        before = kernels(options.before.resolve(), path, options.arch) if options.before else {}
        print(f"\n{path}, {options.arch}")
        for name in before | now:
            if before.get(name) == now.get(name):
                continue
            columns = [before.get(name, "-"), "->"] if options.before else []
            print(f"{name:45}", *columns, now.get(name, "-"))


if __name__ == "__main__":
    main()
