"""An operator and a class in C++ from eager mode to a package that a C++ program runs.

    python examples/identity_conv/export_compile.py [--out build/identity_conv] [--device cpu|cuda]

README.md beside this file shows what is printed.
"""

import argparse
import copy
import logging
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import custom_ops
import torch
from identity_model import create_model
from torch._inductor import config

FOLDER, TORCH = Path(__file__).resolve().parent, torch.__path__[0]

# Inductor compiles for the processor it runs on. This is for any x86-64 since 2013: no instruction
# beyond AVX2, neither from the compiler (TORCHINDUCTOR_CPP_MARCH is the same) nor from the vectors
# that Inductor writes itself. A processor that has more makes Python warn of a "mismatch for
# AOTI_CPU_ISA" when it loads the package, which does no harm.
PORTABLE = {"cpp.march": "x86-64-v3", "cpp.simdlen": 256}


def export(model, x):
    dynamic = {"x": {0: torch.export.Dim("batch")}}
    return torch.export.export(model, (x,), dynamic_shapes=dynamic)


def compile_host(out):
    command = [
        *shlex.split(os.environ.get("CXX", "g++")),
        "-std=c++20",
        "-O2",
        FOLDER / "run_inference.cpp",
    ]
    command += [
        "-o",
        out / "run_inference",
        f"-I{TORCH}/include",
        f"-I{TORCH}/include/torch/csrc/api/include",
    ]
    command += [
        f"-L{TORCH}/lib",
        f"-Wl,-rpath,{TORCH}/lib",
        "-Wl,--no-as-needed",
        "-ltorch",
        "-Wl,--as-needed",
    ]
    subprocess.run([*command, "-ltorch_cpu", "-lc10"], check=True)
    return out / "run_inference"


# A machine may have a CUDA toolkit and no GPU; PyTorch's compilers warn of that.
logging.getLogger("torch.utils.cpp_extension").addFilter(
    lambda record: "No CUDA runtime" not in record.getMessage()
)


@torch.no_grad()
def main(out, device):
    out.mkdir(parents=True, exist_ok=True)
    model = create_model(device=device)
    x = torch.randn(2, 3, 224, 224, device=device)

    exported = export(model, x)
    torch.export.save(exported, out / "exported.pt2")
    runs = {
        "eager": model,
        "deepcopy": copy.deepcopy(model),
        "torch.compile": torch.compile(model, fullgraph=True),
        "export": exported.module(),
        "saved and loaded": torch.export.load(out / "exported.pt2").module(),
    }
    different = [name for name, run in runs.items() if not torch.equal(run(x), x)]
    print(", ".join(different or runs) + (": DIFFERENT" if different else ": identical"))
    print(exported.graph, flush=True)  # before what the processes below print

    packages = {"native.pt2": {}, "portable.pt2": PORTABLE}
    if not hasattr(config.cpp, "march"):
        print(
            f"no portable.pt2: PyTorch {torch.__version__} "
            "always compiles for the processor it runs on"
        )
        del packages["portable.pt2"]
    elif platform.machine() != "x86_64":
        print(f"no portable.pt2: its processors are x86-64, this is {platform.machine()}")
        del packages["portable.pt2"]
    host = compile_host(out)
    for name, options in packages.items():
        torch._inductor.aoti_compile_and_package(
            exported, package_path=str(out / name), inductor_configs=options
        )
        for command in ([sys.executable, FOLDER / "run_inference.py"], [host]):
            subprocess.run([*command, name, custom_ops.library], cwd=out, check=True)
    return 1 if different else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("build/identity_conv"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    sys.exit(main(arguments.out.resolve(), arguments.device))
