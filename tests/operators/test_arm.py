"""The CPU kernels on ARM: compiled for it, run under QEMU and compared with what this machine's
build gives. `make test-arm`; on ARM itself the operators' own tests do more."""

import shutil
import subprocess
from pathlib import Path

import pytest

from _calcops_jit.request import BASE, MACHINE

HERE = Path(__file__).resolve().parent
OPS = HERE.parent / "ops"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
FLAGS = [
    *BASE,
    "-fopenmp",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-DCALCOPS_NO_CUDA",
    f"-I{OPS}",
    f"-I{HERE / 'arm'}",
]
OPERATORS = sorted({kernel.parent.name for kernel in OPS.glob("*/*_cpu.cpp")})
# The models that a compiler may know, newest compiler first, and the emulated processors.
BUILDS = {
    "NEON": (["generic"], ["cortex-a57"]),
    # SVE code runs on vectors of any length: Neoverse V2's 128 bits, V1's 256, A64FX's 512.
    "SVE2": (
        ["neoverse-v2", "demeter"],  # GCC 12 has Neoverse V2 under its working name
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
    """The program that calls an operator's kernels."""
    driver = HERE / "arm" / f"{operator}.cpp"
    assert driver.exists(), (
        f"ops/{operator} has a CPU kernel that nothing runs on ARM: write tests/operators/arm/{operator}.cpp"
    )
    kernels = sorted((OPS / operator).glob("*_cpu.cpp"))
    subprocess.run([*compiler, *FLAGS, driver, *kernels, "-o", program], check=True)
    return program


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """expected(operator) is the file of what this machine's build gives."""
    folder, files = tmp_path_factory.mktemp("here"), {}

    def of(operator):
        if operator not in files:
            program = compiled(["c++", "-march=native"], operator, folder / operator)
            subprocess.run([program, "write", folder / f"{operator}.bin"], check=True)
            files[operator] = folder / f"{operator}.bin"
        return files[operator]

    return of


def knows(model: str) -> bool:
    """Whether the compiler for ARM knows a model."""
    return (
        subprocess.run(
            [COMPILER, f"-mcpu={model}", "-E", "-x", "c++", "/dev/null"], capture_output=True
        ).returncode
        == 0
    )


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_the_kernels_give_on_arm_what_they_give_here(expected, operator, build, tmp_path):
    models, processors = BUILDS[build]
    model = next(filter(knows, models), None)
    if model is None:
        pytest.skip(f"{COMPILER} knows no {' or '.join(models)}")
    program = compiled([COMPILER, "-static", f"-mcpu={model}"], operator, tmp_path / operator)
    for processor in processors:
        command = [EMULATOR, "-cpu", processor, program, "compare", expected(operator)]
        answer = subprocess.run(command, capture_output=True, text=True)
        print(f"{operator}, {build} on {processor}: {answer.stdout}", end="")
        assert answer.returncode == 0, answer.stdout + answer.stderr
