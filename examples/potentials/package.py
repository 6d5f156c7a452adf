"""A potential in one file for hosts in Python and C++: a package (.pt2) or an archive (.pt).

    from calcops.potentials.package import load, save
    save(LennardJones(), "lj.pt2")
    save(module, "own.pt2", cutoff=5.0, units="metal", type_names=["Si"])
    model = load("lj.pt2")

The third line takes any module that gives energies; layers=3 says that it passes messages three
times. load() returns model(types, list_neigh, Rij, nghost) with cutoff, units and type_names.

A package is AOTInductor's, an archive TorchScript's. Both hold strings: cutoff, units, type_names
(with spaces between), layers (how many cutoffs away an atom may be that an energy depends on),
neighbors (the most slots a row may have, where a model has such a limit), block_slots (the pairs of
a call that fit the cache), dtype, device, and
inputs, the arguments in their order; a package as its metadata, an archive as extra files. A
package takes tensors only, so the length of types [n+nghost] says how many ghosts there are. Load
the operator library, calcops_jit.library_path(), before either.
"""

import contextlib
import copy
import inspect
import logging
import warnings
from pathlib import Path

import torch
from calcops.potentials.blocks import call_in_blocks, kBlockSlots
from calcops.potentials.energies import check_cutoff, check_layers, potential_of
from calcops.potentials.potential import edges
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx

import calcops_jit


def save(model, path, dtype=torch.float64, device="cpu", edge_order=None, **about_energies):
    """Writes model, any module with the interface of potential.py, as the ending of `path` says;
    `model` stays. With cutoff, units and type_names, and layers where it passes messages: any
    module that gives energies, as energies.py takes and checks it.

    The weights become constants: save again after training. A package is bound to dtype, device and
    the processor's instructions (TORCHINDUCTOR_CPP_MARCH=x86-64-v3 in the environment makes one for
    others). edge_order: a fourth input of a package, calcops_jit.edge_order of the list's edges;
    None: on CUDA, where there is a use for it. With more than one layer a package takes `owned` of
    potential.py, too.
    """
    path, device = Path(path), torch.device(device)
    if path.suffix not in (".pt", ".pt2"):
        raise ValueError(f"expected a path that ends in .pt or .pt2, got {path}")
    needed = {"cutoff", "units", "type_names"}
    is_ours = not about_energies and all(hasattr(model, name) for name in needed)
    if not is_ours:
        missing = needed - about_energies.keys()
        if missing:
            raise TypeError(
                "expected cutoff, units and type_names of a module, "
                f"got no {', '.join(sorted(missing))}"
            )
        model = potential_of(model, **about_energies)
    model = copy.deepcopy(model).requires_grad_(False).eval()
    in_float64 = copy.deepcopy(model).to(device, torch.float64)
    check_cutoff(in_float64, device, is_smooth=not is_ours)
    if not is_ours:
        check_layers(in_float64, device)
    model = model.to(device, dtype)
    layers = getattr(model, "layers", 1)
    arguments = [*inspect.signature(model.forward).parameters]
    if path.suffix == ".pt2":
        if edge_order is None:
            edge_order = device.type == "cuda" and "edge_order" in arguments
        arguments = (
            ["types", "list_neigh", "Rij"] + ["edge_order"] * edge_order + ["owned"] * (layers > 1)
        )
    about = {"cutoff": model.cutoff, "units": model.units, "type_names": " ".join(model.type_names)}
    about |= {
        "layers": layers,
        "dtype": str(dtype).removeprefix("torch."),
        "device": device,
        "inputs": " ".join(arguments),
    }
    about |= {"neighbors": model.neighbors} if hasattr(model, "neighbors") else {}
    about |= {"block_slots": getattr(model, "block_slots", kBlockSlots)}
    about = {key: str(value) for key, value in about.items()}
    if path.suffix == ".pt":
        with quietly():
            torch.jit.save(torch.jit.script(model), path, _extra_files=about)
    elif path.suffix == ".pt2":
        # Threads: as many as where it runs, not as where it was made.
        configs = {"aot_inductor.metadata": about, "cpp.dynamic_threads": True}
        program = export(model, dtype, device, arguments)
        with quietly():
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(path), inductor_configs=configs
            )


@contextlib.contextmanager
def quietly():
    """Keeps PyTorch from warning that TorchScript is deprecated, which
    ../aot_inductor_force/README.md says, and that a machine with a CUDA toolkit has no GPU, which a
    package for the CPU does not need.
    """
    logger = logging.getLogger("torch.utils.cpp_extension")

    def needed(record):
        return "No CUDA runtime" not in record.getMessage()

    logger.addFilter(needed)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch.jit.* is deprecated")
            yield
    finally:
        logger.removeFilter(needed)


def export(model, dtype, device, arguments):
    """Export a model whose frames, atoms, ghosts and slots may be any number."""

    def from_tensors(types, list_neigh, Rij, *others):
        nghost = types.shape[0] - list_neigh.shape[1]
        return model(types, list_neigh, Rij, nghost, **dict(zip(arguments[3:], others)))

    # These are sizes only. No two may be equal, and none may equal a fixed one such as the 3 of
    # x, y, z: they would be one symbol.
    frames, natoms, nghost, slots = 2, 7, 11, 5
    list_neigh = torch.zeros(frames, natoms, slots, dtype=torch.int64, device=device)
    examples = {
        "types": torch.zeros(natoms + nghost, dtype=torch.int64, device=device),
        "list_neigh": list_neigh,
        "Rij": torch.ones(frames, natoms, slots, 3, dtype=dtype, device=device),
        "edge_order": order_of(list_neigh, nghost),
        "owned": torch.ones(natoms, dtype=torch.bool, device=device),
    }
    example = tuple(examples[name] for name in arguments)
    # torch.export refuses a module that calls autograd.grad; make_fx follows it down to plain
    # operators.
    graph = make_fx(from_tensors, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*example)
    one, pairs = {0: Dim.DYNAMIC}, {0: Dim.DYNAMIC, 1: Dim.DYNAMIC, 2: Dim.DYNAMIC}
    order = {0: Dim.AUTO, 1: Dim.AUTO}
    dynamic = {"types": one, "list_neigh": pairs, "Rij": pairs, "edge_order": order, "owned": one}
    return torch.export.export(
        graph, example, dynamic_shapes=tuple(dynamic[name] for name in arguments)
    )


def order_of(list_neigh, nghost):
    """The edge_order of potential.py for a list."""
    natoms = list_neigh.shape[1] + nghost
    return calcops_jit.edge_order(edges(list_neigh, natoms), list_neigh.shape[0] * natoms)


def load(path, device="cpu"):
    """What save() wrote; an archive goes to `device`, a package is bound to its own."""
    return Package(Path(path).absolute(), device)


class Package:
    """A function of (types, list_neigh, Rij, nghost) with cutoff, units, type_names, dtype and
    device. A pickle or a copy of it holds the path and opens the file again.
    """

    skips_far_pairs = True  # beyond the cutoff, so that callers need not

    def __init__(self, path, device):
        self.path = path
        if path.suffix == ".pt2":
            with quietly():
                self.run = torch._inductor.aoti_load_package(str(path))
            about = self.run.loader.get_metadata()
            self.device = about["device"]
        else:
            about = dict.fromkeys(
                ("cutoff", "units", "type_names", "layers", "block_slots", "dtype", "inputs"), ""
            )
            try:
                with quietly():
                    self.run, self.device = (
                        torch.jit.load(path, device, _extra_files=about),
                        str(device),
                    )
            except RuntimeError as error:
                raise ValueError(
                    "expected a model that save() wrote, "
                    f"got {path}, perhaps a checkpoint of torch.save"
                ) from error
            about = {key: value.decode() for key, value in about.items()}
        self.cutoff, self.units = float(about["cutoff"]), about["units"]
        self.type_names, self.dtype = about["type_names"].split(), getattr(torch, about["dtype"])
        self.layers, self.inputs = int(about.get("layers") or 1), about["inputs"].split()
        self.block_slots = int(about.get("block_slots") or kBlockSlots)

    def __call__(self, types, list_neigh, Rij, nghost=0, **options):
        """Return the results of potential.py's `forward`, whose arguments these are.

        On a CPU, large systems are computed in blocks of atoms that fit the cache, and pairs beyond
        the cutoff are left out. A package with layers takes the option `owned`.
        """
        takes_order = self.path.suffix == ".pt2" and "edge_order" in self.inputs
        is_local = self.layers == 1 and not takes_order and list_neigh.device.type == "cpu"
        if is_local and not options:
            return call_in_blocks(
                self.call, self.cutoff, types, list_neigh, Rij, nghost, self.block_slots
            )
        return self.call(types, list_neigh, Rij, nghost, **options)

    def call(self, types, list_neigh, Rij, nghost, **options):
        """Return the results of a single call."""
        if self.path.suffix == ".pt":
            return self.run(types, list_neigh, Rij, nghost, **options)
        if "edge_order" in self.inputs:
            options["edge_order"] = order_of(list_neigh, nghost)
        if "owned" in self.inputs:
            options.setdefault("owned", torch.ones_like(list_neigh[0, :, 0], dtype=torch.bool))
        others = [options.pop(name) for name in self.inputs[3:]]
        return self.run(types, list_neigh, Rij, *others, **options)

    def __reduce__(self):
        return load, (self.path, self.device)
