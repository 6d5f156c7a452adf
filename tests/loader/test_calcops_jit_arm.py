"""The loader on ARM, as far as it can be told here that this is ARM; tests/README.md has a run
under emulation."""

import builtins
import io

import pytest
import torch

from _calcops_jit import cuda, request, requests
from _calcops_jit.compile import doctor, plan

# The first processors of a Grace, and of a chip with processors of two kinds.
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
    """arm(text) makes this process take itself for one on ARM, with that /proc/cpuinfo."""

    def on(cpuinfo=GRACE):
        def opened(path, *arguments, real=builtins.open, **options):
            return (
                io.BytesIO(cpuinfo.encode())
                if path == "/proc/cpuinfo"
                else real(path, *arguments, **options)
            )

        monkeypatch.setattr(builtins, "open", opened)
        for module in (request, doctor):
            monkeypatch.setattr(module, "MACHINE", "aarch64")

    return on


def test_the_instruction_set_is_the_processors_features_and_its_model_but_not_what_the_kernel_adds(
    arm,
):
    arm()
    words = request.isa().split()
    assert set(FEATURES.split()) - set(words) == {"evtstrm", "cpuid"}
    assert set(words) - set(FEATURES.split()) == {"0x41", "0x0", "0xd4f"}


def test_processors_of_two_kinds_and_other_models_and_features_have_other_slots(arm):
    slots = []
    for cpuinfo in (GRACE, TWO_KINDS, GRACE.replace("0xd4f", "0xd40"), GRACE.replace(" bf16", "")):
        arm(cpuinfo)
        slots.append(requests.own().slot)
    arm(GRACE.replace("evtstrm", "paca"))
    assert len({*slots, requests.own().slot}) == 5


def test_it_compiles_for_this_processor_by_mcpu_and_for_an_architecture_by_march(arm):
    arm()
    flags = [requests.own(isa=isa).cflags for isa in ("native", "neoverse-v2", "armv8.2-a+sve")]
    chosen = [[flag for flag in each if flag.startswith("-m")] for each in flags]
    assert chosen == [["-mcpu=native"], ["-mcpu=neoverse-v2"], ["-march=armv8.2-a+sve"]]


def test_doctor_names_the_flag_and_says_where_the_processor_is_not_told(arm):
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
def test_a_toolkit_whose_headers_lie_in_its_targets_folder_serves_this_kind_of_machine(
    tmp_path, monkeypatch, target, version
):
    for name, number in {"x86_64-linux": 13020, "sbsa-linux": 13010}.items():
        (tmp_path / f"targets/{name}/include").mkdir(parents=True)
        (tmp_path / f"targets/{name}/include/cuda_runtime_api.h").write_text(
            f"#define CUDART_VERSION {number}\n"
        )
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
