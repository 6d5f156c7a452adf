"""The loader on ARM, simulated by another /proc/cpuinfo and machine name. tests/operators/arm has a
run under emulation."""

import builtins
import io

import pytest
import torch

from _calcops_jit import cuda, request, requests
from _calcops_jit.compile import doctor, plan

# /proc/cpuinfo of a Grace, and of a chip with cores of two kinds.
FEATURES = (
    "fp asimd evtstrm aes atomics fphp asimdhp cpuid asimdrdm fcma asimddp sha3 sve "
    "asimdfhm sve2 i8mm bf16"
)
PROCESSOR = """\
processor\t: {}
BogoMIPS\t: 2000.00
Features\t: {}
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x0
CPU part\t: {}
CPU revision\t: 0

"""
GRACE = "".join(PROCESSOR.format(i, FEATURES, "0xd4f") for i in range(72))
TWO_KINDS = "".join(PROCESSOR.format(i, FEATURES, "0xd85" if i % 2 else "0xd87") for i in range(20))
CROSS_COMPILER = "aarch64-linux-gnu-g++"


@pytest.fixture
def arm(monkeypatch):
    """Return a function that makes this process see an ARM machine with the given
    /proc/cpuinfo."""

    def simulate(cpuinfo=GRACE):
        def opened(path, *arguments, real=builtins.open, **options):
            if path == "/proc/cpuinfo":
                return io.BytesIO(cpuinfo.encode())
            return real(path, *arguments, **options)

        monkeypatch.setattr(builtins, "open", opened)
        for module in (request, doctor):
            monkeypatch.setattr(module, "MACHINE", "aarch64")

    return simulate


def test_the_instruction_set_has_the_processors_features_and_model_without_kernel_features(arm):
    arm()
    words = request.isa().split()
    assert set(FEATURES.split()) - set(words) == {"evtstrm", "cpuid"}
    assert set(words) - set(FEATURES.split()) == {"0x41", "0x0", "0xd4f"}


def test_other_models_and_features_have_other_cache_slots(arm):
    slots = []
    for cpuinfo in (GRACE, TWO_KINDS, GRACE.replace("0xd4f", "0xd40"), GRACE.replace(" bf16", "")):
        arm(cpuinfo)
        slots.append(requests.own().slot)
    # Another processor, with pointer authentication (paca).
    arm(GRACE.replace("evtstrm", "paca"))
    slots.append(requests.own().slot)
    assert len(set(slots)) == 5


def test_mcpu_is_used_for_native_and_processors_and_march_for_architectures(arm):
    arm()

    def machine_flags(isa):
        return [flag for flag in requests.own(isa=isa).cflags if flag.startswith("-m")]

    assert machine_flags("native") == ["-mcpu=native"]
    assert machine_flags("neoverse-v2") == ["-mcpu=neoverse-v2"]
    assert machine_flags("armv8.2-a+sve") == ["-march=armv8.2-a+sve"]


def test_doctor_names_the_mcpu_flag_and_notes_an_unknown_processor(arm):
    arm()
    assert vars(doctor._processor()) == {
        "what": "processor",
        "verdict": "ok",
        "evidence": "aarch64, -mcpu=native",
    }
    arm("processor\t: 0\n")
    finding = doctor._processor()
    assert finding.verdict == "note"
    assert finding.fix == "export CALCOPS_CFLAGS=-mcpu=<its name>"


@pytest.mark.parametrize("target, version", [("x86_64-linux", "13.2"), ("sbsa-linux", "13.1")])
def test_cuda_headers_are_found_in_the_toolkits_folder_of_this_machine(
    tmp_path, monkeypatch, target, version
):
    for name, number in {"x86_64-linux": 13020, "sbsa-linux": 13010}.items():
        header = tmp_path / f"targets/{name}/include/cuda_runtime_api.h"
        header.parent.mkdir(parents=True)
        header.write_text(f"#define CUDART_VERSION {number}\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").touch(0o755)
    monkeypatch.setattr(cuda, "TARGET", target)
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert cuda.find_toolkit() == (str(tmp_path), version)
    choice = cuda.Choice(build=True, home=str(tmp_path), version=version, arches="9.0")
    flags = plan.Plan.of(requests.own().but(cuda=choice), str(tmp_path), [], [], jobs=1).flags
    for kind in ("cflags", "cuda_cflags"):
        assert f"-isystem {tmp_path}/targets/{target}/include " in flags[kind] + " "
