"""A potential in one file: an AOTInductor package (.pt2) or a TorchScript archive (.pt), for hosts in Python and C++.

    from package import load, save
    save(LennardJones(), "lj.pt2")
    model = load("lj.pt2")              # model(types, list_neigh, Rij, nghost); model.cutoff, .units, .type_names

Both hold `cutoff`, `units`, `type_names` (with spaces between), `dtype` and `device` as strings: a package as its
metadata, an archive as extra files. A C++ host calls a package with (types [n+nghost], list_neigh [B,n,K],
Rij [B,n,K,3]), of any sizes, and an archive with (types, list_neigh, Rij, nghost). The operator library,
calcops_jit.library_path(), is to be loaded before either.
"""

import copy
from pathlib import Path

import torch
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx

import calcops_jit  # noqa: F401 - brings torch.ops.calcops

kAbout = ("cutoff", "units", "type_names", "dtype", "device")


def save(model, path, dtype=torch.float64, device="cpu"):
    """Writes model, any module with the interface of potential.py, as the ending of `path` says; `model` stays.

    The weights become constants: save again after training. A package is bound to dtype, device and the processor's
    instructions (TORCHINDUCTOR_CPP_MARCH=x86-64-v3 in the environment makes one for others)."""
    path = Path(path)
    model = copy.deepcopy(model).requires_grad_(False).eval().to(device, dtype)
    values = (
        model.cutoff,
        model.units,
        " ".join(model.type_names),
        str(dtype).removeprefix("torch."),
        str(device),
    )
    about = dict(zip(kAbout, map(str, values)))
    if path.suffix == ".pt":
        torch.jit.save(torch.jit.script(model), path, _extra_files=about)
    elif path.suffix == ".pt2":
        torch._inductor.aoti_compile_and_package(
            export(model, dtype, device),
            package_path=str(path),
            inductor_configs={"aot_inductor.metadata": about},
        )
    else:
        raise ValueError(f"expected a path that ends in .pt or .pt2, got {path}")


def export(model, dtype, device):
    def from_tensors(types, list_neigh, Rij):
        """A package takes no int: the length of types says how many ghosts there are."""
        return model(types, list_neigh, Rij, types.shape[0] - list_neigh.shape[1])

    # Numbers for sizes and nothing else, no two of them equal, nor equal to a fixed one as the 3 of x, y, z: equal
    # sizes would be one symbol.
    frames, natoms, nghost, slots = 2, 7, 11, 5
    example = (
        torch.zeros(natoms + nghost, dtype=torch.int64, device=device),
        torch.zeros(frames, natoms, slots, dtype=torch.int64, device=device),
        torch.ones(frames, natoms, slots, 3, dtype=dtype, device=device),
    )
    # torch.export refuses a module that calls autograd.grad; make_fx follows it down to plain operators.
    graph = make_fx(from_tensors, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*example)
    pairs = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC, 2: Dim.DYNAMIC}
    return torch.export.export(graph, example, dynamic_shapes=({0: Dim.DYNAMIC}, pairs, pairs))


def load(path, device="cpu"):
    """What save() wrote, as a function of (types, list_neigh, Rij, nghost) with cutoff, units, type_names and dtype."""
    if Path(path).suffix == ".pt2":
        run = torch._inductor.aoti_load_package(str(path))
        about = run.loader.get_metadata()

        def model(types, list_neigh, Rij, nghost=0):
            return run(types, list_neigh, Rij)
    else:
        about = dict.fromkeys(kAbout, "")
        model = torch.jit.load(path, device, _extra_files=about)
        about = {key: value.decode() if isinstance(value, bytes) else value for key, value in about.items()}
    model.cutoff, model.units, model.type_names = (
        float(about["cutoff"]),
        about["units"],
        about["type_names"].split(),
    )
    model.dtype = getattr(torch, about["dtype"])
    return model
