"""examples/aot_inductor_force: the C++ host's results of the package are those of the eager model.
Its forces and virials are derivatives of the energy."""

import platform
import re
import shutil
import sys
from pathlib import Path

import pytest
import reference
import torch
from programs import ROOT, assert_needs_no_python, blocks, run
from torch._inductor import config

FOLDER = ROOT / "examples" / "aot_inductor_force"
PACKAGES = ROOT / "tests" / "packages"
sys.path.append(str(FOLDER))
from calcops.potentials import LennardJones  # noqa: E402
from calcops.potentials.package import save  # noqa: E402
from energy_model import EnergyModel  # noqa: E402

# test_train_processes.py runs a package, and test_library.py a C++ host.
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    return tmp_path_factory.mktemp("aot_inductor_force")


def make(build, *words):
    return run("make", "-C", FOLDER, f"PYTHON={sys.executable}", f"BUILD={build}", *words)


@pytest.fixture(scope="module", params=reference.DEVICES)
def ran(request, build):
    return make(build, f"DEVICE={request.param}", "MODELS=1")


@pytest.fixture(scope="module")
def results(ran, build):
    """Return the tensors that the host saved for each of three sizes.

    Each size has three inputs, the package's five outputs, and three outputs of the host's core
    repulsion: its force, virial and atom_virial.
    """
    sizes = torch.load(build / "results.pt")
    assert len(sizes) == 3
    assert len({len(types) for types, *_ in sizes}) == 3
    assert len({list_neigh.shape[2] for _, list_neigh, *_ in sizes}) == 3
    return sizes


@pytest.fixture(scope="module")
def model():
    return EnergyModel()


def ghosts(types, list_neigh):
    return len(types) - list_neigh.shape[1]


def assert_close(result, expected):
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12 * expected.abs().max().item())


def test_the_package_is_equal_to_eager_for_every_size(results, model):
    for types, list_neigh, Rij, *tensors in results:
        eager = model.to(Rij.device)(types, list_neigh, Rij, ghosts(types, list_neigh))
        for result, expected in zip(tensors[:5], eager, strict=True):
            assert_close(result, expected)


def test_the_package_in_python_is_equal_to_eager(ran):
    differences = re.findall(r"slots, \d+ ghosts: (\S+) from eager", ran.stdout)
    assert len(differences) == 3
    assert all(float(difference) <= 1e-12 for difference in differences)


def model_of(kind):
    """Return a model of two types or more."""
    if kind == "Lennard-Jones":
        return LennardJones([0.01, 0.02], [2.0, 2.2], 4.0, units="metal", type_names=["Na", "Cl"])
    for module in ("scipy", "vesin"):
        pytest.importorskip(module, reason=f"needs {module} (extra `deepmd`)")
    from calcops import deepmd, nep

    if kind == "NEP":
        return nep.load(PACKAGES / "nep_models/nep4_types.txt")
    return deepmd.load(PACKAGES / "deepmd_models/pairs.pth")


@pytest.mark.parametrize("kind", ["Lennard-Jones", "NEP", "Deep Potential"])
def test_the_host_runs_a_package_of_every_kind_of_potential(ran, build, kind):
    """Its ions are the first two of the model's types."""
    model = model_of(kind)
    save(model, build / "imported.pt2")
    run(build / "host", build / "imported.pt2", "cpu", build / "imported_results.pt")
    for types, list_neigh, Rij, *tensors in torch.load(build / "imported_results.pt"):
        eager = model(types, list_neigh, Rij, ghosts(types, list_neigh))
        for result, expected in zip(tensors[:5], eager, strict=True):
            assert_close(result, expected)


def by_autograd(energy, types, list_neigh, Rij):
    """Return force, virial and atom_virial of an energy of the pair vectors.

    dE/dRij is minus the force of the pair (i, j) on j. The reference gets -dE/dRij as the first of
    the four rows of Ri_d, with the factor dE = 1.
    """
    (slope,) = torch.autograd.grad(energy, Rij)
    dE = torch.zeros(*Rij.shape[:3], 4, dtype=Rij.dtype, device=Rij.device)
    dE[..., 0] = 1
    Ri_d = torch.nn.functional.pad(-slope.unsqueeze(3), (0, 0, 0, 3)).flatten(2, 3)
    return reference.force_virial(list_neigh, dE, Ri_d, Rij.detach(), ghosts(types, list_neigh))


def test_force_and_virials_of_the_core_repulsion_are_derivatives_of_its_energy(results):
    """The host computes this repulsion, 900 / r^12, itself."""
    for types, list_neigh, Rij, *tensors in results:
        leaf = Rij.clone().requires_grad_()
        total = 0.5 * (900 / leaf.square().sum(-1) ** 6)[list_neigh >= 0].sum()
        derivatives = by_autograd(total, types, list_neigh, leaf)
        for result, expected in zip(tensors[5:], derivatives, strict=True):
            assert_close(result, expected)


def test_the_lists_of_the_host_are_those_of_its_crystal(results):
    """Each ion has 6 nearest neighbours, of the other kind. The list has each pair twice."""
    for types, list_neigh, Rij, *_ in results:
        live = list_neigh >= 0
        r = Rij.norm(dim=-1)
        near = live & (r < 3.3)
        assert (near.sum(-1) == 6).all()
        assert (r[live] < 4).all()
        assert ghosts(types, list_neigh) > 0
        natoms = list_neigh.shape[1]
        other = types[list_neigh.clamp(min=0)] != types[:natoms, None]
        assert other[near].all()
        assert Rij[live].sum(0).abs().max() < 1e-9
    assert any((list_neigh < 0).any() for _, list_neigh, *_ in results)


def test_the_readme_shows_what_is_printed(ran):
    (shown,) = blocks("examples/aot_inductor_force/README.md", "text")
    assert len(shown.splitlines()) == 6
    for line in shown.splitlines():
        assert re.sub(r"\S+ from eager", "", line) in ran.stdout


def test_no_tool_prints_a_warning(ran):
    """PyTorch could warn of deprecated TorchScript, or of a missing CUDA toolkit."""
    assert not re.search("warning|No CUDA", ran.stderr, re.IGNORECASE), ran.stderr


def test_the_host_needs_neither_python_nor_ld_library_path(ran, build):
    assert_needs_no_python(build / "host")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the portable package is for x86-64")
def test_the_portable_package_gives_the_same_and_has_no_instruction_beyond_avx2(ran, build):
    if not hasattr(config.cpp, "march"):
        pytest.skip(f"PyTorch {torch.__version__} always compiles for the processor it runs on")
    if not shutil.which("objdump"):
        pytest.skip("no objdump")

    def atoms(result):
        return re.findall(r"^ *\d+ atoms,.*", result.stdout, re.MULTILINE)

    def registers_of_avx512(package):
        shutil.unpack_archive(package, f"{package}.d", "zip")
        (library,) = Path(f"{package}.d").rglob("*.so")
        code = run("objdump", "-d", library).stdout
        return re.findall(r"%zmm|%k[0-7]|[xy]mm(?:1[6-9]|2[0-9]|3[01])", code)

    assert atoms(ran)
    assert atoms(make(build, "portable")) == atoms(ran)
    assert not registers_of_avx512(build / "portable" / "potential_cpu.pt2")
    if "avx512vl" in Path("/proc/cpuinfo").read_text() and (build / "potential_cpu.pt2").exists():
        assert registers_of_avx512(build / "potential_cpu.pt2"), "the native package uses AVX-512"
