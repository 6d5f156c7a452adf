"""The loader's numbers: cold build, warm import over `import torch`, processes started. Run: make bench"""

import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
ROUNDS = 50

# The same sources by torch.utils.cpp_extension.load as it is mostly used: each with torch/extension.h, default flags.
_PLAIN = """
import glob, os, time, torch
from torch.utils import cpp_extension
os.mkdir("plain")
start = time.perf_counter()
cpp_extension.load("plain", sorted(glob.glob("ops/*/*.cpp")), build_directory="plain", is_python_module=False,
    extra_include_paths=["ops"], extra_cflags=["-include torch/extension.h", "-DCALCOPS_NO_CUDA='\\"plain\\"'"])
print(time.perf_counter() - start)
"""
_COLD = """
import time, torch
start = time.perf_counter()
import calcops_jit
print(time.perf_counter() - start, calcops_jit.library_path())
"""

# Further libraries, found in the cache; a large one costs its hash as well.
_FURTHER = """
import time, torch, calcops_jit
from _calcops_jit.closure import file_digest
from pathlib import Path
text = '#include <torch/library.h>\\nTORCH_LIBRARY(%s, m) { m.def("one() -> int", [] { return int64_t(1); }); }'
for name in ("first", "second", "third"):
    source = Path(f"{name}.cpp")
    if not source.exists():
        source.write_text(text % name)
    start = time.perf_counter()
    assert calcops_jit.load(name, str(source), ["-DAT_PER_OPERATOR_HEADERS"]).one() == 1
    print(time.perf_counter() - start)
large = Path("large")
large.write_bytes(bytes(10 ** 8))
start = time.perf_counter()
file_digest("large")
print((time.perf_counter() - start) / 100)
"""

_IMPORT = """
import sys, time
processes = []
events = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork")
sys.addaudithook(lambda event, _: processes.append(event) if event in events else None)
start = time.perf_counter()
import torch
middle = time.perf_counter()
processes.clear()
import calcops_jit
for name in dir(calcops_jit):
    getattr(calcops_jit, name)
print(middle - start, time.perf_counter() - middle, len(processes))
"""

# Reloads of an edited kernel in one process. What ninja takes is compiling and linking; the rest is the loader's.
_RELOAD = """
import statistics, sys, time
import calcops_jit
from pathlib import Path
from _calcops_jit import compiler as build
ninja, run = [], build._run
def timed(*arguments):
    start = time.perf_counter()
    said = run(*arguments)
    ninja.append(time.perf_counter() - start)
    return said
build._run = timed
kernel = Path("ops/force/force_cpu.cpp")
text = kernel.read_text()
walls, idles = [], []
for i in range(5):
    kernel.write_text(text + f'extern "C" int edited_{i}() {{ return {i}; }}\\n')
    start = time.perf_counter()
    assert calcops_jit.reload() == ["calcops"]
    walls.append(time.perf_counter() - start)
    start = time.perf_counter()
    assert calcops_jit.reload() == []
    idles.append(time.perf_counter() - start)
kernel.write_text(text)
start = time.perf_counter()
assert calcops_jit.reload() == ["calcops"]
back = time.perf_counter() - start
overhead = statistics.median(wall - inner for wall, inner in zip(walls, ninja))
print(statistics.median(walls), overhead, statistics.median(idles), back)
"""


def run(*command: str, folder: str) -> str:
    environment = os.environ | {"CALCOPS_CACHE": f"{folder}/cache", "PYTHONPATH": folder}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return subprocess.run(
        [sys.executable, *command], env=environment, cwd=folder, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:  # a copy, which nobody edits meanwhile
        shutil.copy(HERE / "calcops_jit.py", folder)
        for part in ("_calcops_jit", "ops"):
            shutil.copytree(HERE / part, f"{folder}/{part}", ignore=shutil.ignore_patterns("__pycache__"))
        plain = float(run("-c", _PLAIN, folder=folder))
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        cold, library = run("-c", _COLD, folder=folder).split()
        used = [b - a for a, b in zip(used, resource.getrusage(resource.RUSAGE_CHILDREN))]
        run("-c", _IMPORT, folder=folder)  # the first look at fresh files compares contents and writes their stats down
        time.sleep(2.5)
        run("-c", _IMPORT, folder=folder)
        kernel = Path(folder, "ops/force/force_cpu.cpp")
        kernel.write_text(kernel.read_text() + "// edited\n")
        edited = sum(float(x) for x in run("-c", _IMPORT, folder=folder).split()[1:2])
        time.sleep(2.5)
        run("-c", _IMPORT, folder=folder)
        rounds = [[float(x) for x in run("-c", _IMPORT, folder=folder).split()] for _ in range(ROUNDS)]
        size = os.path.getsize(library)
        run("-c", _FURTHER, folder=folder)
        time.sleep(2.5)
        run("-c", _FURTHER, folder=folder)
        *further, per_MB = map(float, run("-c", _FURTHER, folder=folder).split())
        reload_s, overhead_s, idle_s, back_s = map(float, run("-c", _RELOAD, folder=folder).split())
    torch_s, import_s, processes = (statistics.median(column) for column in zip(*rounds, strict=True))
    print(
        f"loader, {len(os.sched_getaffinity(0))} processors, load {os.getloadavg()[0]:.1f}, library {size / 1e6:.2f} MB"
    )
    print(
        f"  cold build                {float(cold):8.1f} s    with {used[0] + used[1]:.0f} s of processor time; "
        f"{float(cold) / plain:.2f} of a plain cpp_extension.load: {plain:.1f} s"
    )
    print(f"  kernel edited to imported {edited:8.1f} s    over import torch")
    print(f"  import torch              {torch_s * 1e3:8.1f} ms   median of {ROUNDS} fresh processes")
    print(f"  import calcops_jit, warm  {import_s * 1e3:8.1f} ms   {import_s / torch_s:.4f} of import torch")
    print(
        f"  load(), warm              {statistics.median(further) * 1e3:8.1f} ms   a further library; "
        f"hashing takes {per_MB * 1e3:.2f} ms a MB"
    )
    print(f"  reload() of an edit       {reload_s:8.2f} s    {overhead_s * 1e3:.0f} ms beyond compiler and linker")
    print(f"  reload() without a change {idle_s * 1e3:8.1f} ms   back to an earlier build {back_s * 1e3:.1f} ms")
    print(f"  processes started, warm   {max(r[2] for r in rounds):8.0f}")


if __name__ == "__main__":
    main()
