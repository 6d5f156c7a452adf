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
from torch.utils import cpp_extension
ninja, build = [], cpp_extension._run_ninja_build
def timed(*arguments, **options):
    start = time.perf_counter()
    build(*arguments, **options)
    ninja.append(time.perf_counter() - start)
cpp_extension._run_ninja_build = timed
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
        start = time.perf_counter()
        library = run("-m", "calcops_jit", "build", folder=folder).strip()
        cold, used = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        run(
            "-c", _IMPORT, folder=folder
        )  # the first look at fresh files compares contents and writes their stats down
        time.sleep(2.5)
        run("-c", _IMPORT, folder=folder)
        kernel = Path(folder, "ops/force/force_cpu.cpp")
        kernel.write_text(kernel.read_text() + "// edited\n")
        edited = sum(float(x) for x in run("-c", _IMPORT, folder=folder).split()[1:2])
        time.sleep(2.5)
        run("-c", _IMPORT, folder=folder)
        rounds = [[float(x) for x in run("-c", _IMPORT, folder=folder).split()] for _ in range(ROUNDS)]
        size = os.path.getsize(library)
        reload_s, overhead_s, idle_s, back_s = map(float, run("-c", _RELOAD, folder=folder).split())
    torch_s, import_s, processes = (statistics.median(column) for column in zip(*rounds, strict=True))
    print(
        f"loader, {len(os.sched_getaffinity(0))} processors, load {os.getloadavg()[0]:.1f}, library {size / 1e6:.2f} MB"
    )
    print(
        f"  cold build                {cold:8.1f} s    with {used.ru_utime + used.ru_stime:.0f} s of processor time"
    )
    print(f"  kernel edited to imported {edited:8.1f} s    over import torch")
    print(f"  import torch              {torch_s * 1e3:8.1f} ms   median of {ROUNDS} fresh processes")
    print(f"  import calcops_jit, warm  {import_s * 1e3:8.1f} ms   {import_s / torch_s:.4f} of import torch")
    print(
        f"  reload() of an edit       {reload_s:8.2f} s    {overhead_s * 1e3:.0f} ms beyond compiler and linker"
    )
    print(
        f"  reload() without a change {idle_s * 1e3:8.1f} ms   back to an earlier build {back_s * 1e3:.1f} ms"
    )
    print(f"  processes started, warm   {max(r[2] for r in rounds):8.0f}")


if __name__ == "__main__":
    main()
