"""The CPU kernels compiled for ARM give under QEMU what they give on this machine.

`make test-arm` runs this. On an ARM machine it is skipped, because there the operators' own tests
run.
"""

import shutil
import subprocess
from pathlib import Path

import pytest
from programs import LIBRARIES, ROOT

from _calcops_jit.processor import MACHINE
from _calcops_jit.request import BASE

HERE = Path(__file__).resolve().parent
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
FLAGS = [
    *BASE,
    "-fopenmp",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-DCALCOPS_NO_CUDA",
    *(f"-I{library}" for library in LIBRARIES),
    f"-I{ROOT / 'contracts' / 'include'}",
    f"-I{HERE / 'arm'}",
]
KERNELS = sorted(kernel for library in LIBRARIES for kernel in library.glob("*/*_cpu.cpp"))
OPERATORS = sorted({kernel.parent.name for kernel in KERNELS})
# {build: (names for -mcpu, processors that QEMU emulates)}. The compiler gets the first name that
# it knows.
BUILDS = {
    "NEON": (["generic"], ["cortex-a57"]),
    # SVE code runs on vectors of any length: Neoverse V2's 128 bits, V1's 256, A64FX's 512.
    "SVE2": (
        ["neoverse-v2", "demeter"],  # "demeter" was the name of Neoverse V2 in GCC 12
        [f"max,sve-default-vector-length={size}" for size in (16, 32, 64)],
    ),
}
MISSING = [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        MACHINE == "aarch64", reason="this is ARM: the operators' own tests run here"
    ),
    pytest.mark.skipif(
        bool(MISSING),
        reason=f"no {' '.join(MISSING)}: apt-get install g++-aarch64-linux-gnu qemu-user-static",
    ),
]


def compiled(compiler: list[str], operator: str, program: Path) -> Path:
    """Build and return the program that calls an operator's kernels."""
    driver = HERE / "arm" / f"{operator}.cpp"
    assert driver.exists(), (
        f"{operator} has a CPU kernel that nothing runs on ARM: "
        f"write tests/operators/arm/{operator}.cpp"
    )
    kernels = [kernel for kernel in KERNELS if kernel.parent.name == operator]
    subprocess.run([*compiler, *FLAGS, driver, *kernels, "-o", program], check=True)
    return program


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Return a function: expected(operator) is the file of the results of this machine's build."""
    folder = tmp_path_factory.mktemp("here")
    files = {}

    def file_of(operator):
        if operator not in files:
            program = compiled(["c++", "-march=native"], operator, folder / operator)
            subprocess.run([program, "write", folder / f"{operator}.bin"], check=True)
            files[operator] = folder / f"{operator}.bin"
        return files[operator]

    return file_of


def knows(model: str) -> bool:
    """Return True if the compiler for ARM knows a processor."""
    command = [COMPILER, f"-mcpu={model}", "-E", "-x", "c++", "/dev/null"]
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_the_kernels_give_the_same_on_arm_as_on_this_machine(expected, operator, build, tmp_path):
    models, processors = BUILDS[build]
    model = next(filter(knows, models), None)
    if model is None:
        pytest.skip(f"{COMPILER} knows no {' or '.join(models)}")
    program = compiled([COMPILER, "-static", f"-mcpu={model}"], operator, tmp_path / operator)
    for processor in processors:
        command = [EMULATOR, "-cpu", processor, program, "compare", expected(operator)]
        run = subprocess.run(command, capture_output=True, text=True)
        print(f"{operator}, {build} on {processor}: {run.stdout}", end="")
        assert run.returncode == 0, run.stdout + run.stderr
