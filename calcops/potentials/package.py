"""A potential in one file for hosts in Python and C++: a package (.pt2) or an archive (.pt).

    from calcops.potentials.package import load, save
    save(LennardJones(), "lj.pt2")
    save(module, "own.pt2", cutoff=5.0, units="metal", type_names=["Si"])
    model = load("lj.pt2")

`module` is any module that gives energies. With layers=3 it passes messages three times. load()
returns model(types, list_neigh, Rij, nghost) with cutoff, units and type_names.

A package is AOTInductor's, an archive TorchScript's. A program has to load the libraries of the
operators that the file calls before either: calcops_jit.library_path() for calcops::, and
calcops.ops.library.path for calcops_models::. Both hold these strings, a package as its metadata,
an archive as extra files:

    cutoff, units, dtype, device
    type_names    with spaces between
    layers        the distance, in cutoffs, of the farthest atoms on which an energy depends
    neighbors     the most slots that a row may have, where a model has such a limit
    sel           the most neighbours of each type that count, where a model has such a limit
    shortest      the shortest pair of each two types in training, row by row, where it is known
    block_slots   the number of pairs in a call whose intermediate results fit the cache
    inputs        the arguments, in their order
    operators     the operators that it calls and that are none of PyTorch's own

A package takes tensors only. The length of types [n + nghost] gives the number of ghosts.
"""

import contextlib
import copy
import hashlib
import inspect
import logging
import re
import tempfile
import warnings
from pathlib import Path

import torch
from calcops.potentials.blocks import call_in_blocks, check_entries, kBlockSlots, near_pairs
from calcops.potentials.checks import (
    check_cutoff,
    check_file,
    check_layers,
    check_sizes,
    results_for,
    systems_for,
)
from calcops.potentials.energies import potential_of
from calcops.potentials.potential import edges
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx

import calcops_jit

# Operators that older files call.
kMoved = r"\bcalcops::(density|environment_spline|tabulated_sum|matrix_product)\b"


def save(model, path, dtype=torch.float64, device="cpu", edge_order=None, **about_energies):
    """Write a model to a file, which hosts in Python and C++ load.

    The file is compared with the model for systems of several sizes before it gets its name. The
    weights become constants: save again after training. A package is bound to dtype, device and
    the processor's instructions. TORCHINDUCTOR_CPP_MARCH=x86-64-v3 in the environment makes one for
    other processors. The model itself stays as it is.

    Args:
        model: a module with the interface of potential.py. With `about_energies`, any module that
            gives energies as energies.py takes and checks them.
        path: ends in .pt2 for a package, in .pt for an archive.
        dtype: of the numbers, torch.float64 or torch.float32.
        device: of the numbers.
        edge_order: True gives a package a fourth input, calcops_jit.edge_order of the list's edges.
            None: on CUDA, if the model uses it.
        about_energies: cutoff, units and type_names of such a module, and layers if it passes
            messages. With more than one layer a package takes `owned` of potential.py, too.

    Raises:
        TypeError: cutoff, units or type_names are missing.
        ValueError: the path has another end, energies depend on atoms beyond cutoff or layers,
            results are not finite, or the file computes something else than the model.
    """
    path = Path(path)
    device = torch.device(device)
    if path.suffix not in (".pt", ".pt2"):
        raise ValueError(f"expected a path that ends in .pt or .pt2, got {path}")
    if dtype not in (torch.float64, torch.float32):
        raise ValueError(f"expected dtype torch.float64 or torch.float32, got {dtype}")
    names = {"cutoff", "units", "type_names"}
    is_potential = not about_energies and all(hasattr(model, name) for name in names)
    if not is_potential:
        missing = names - about_energies.keys()
        if missing:
            raise TypeError(
                "expected cutoff, units and type_names of a module, "
                f"got no {', '.join(sorted(missing))}"
            )
        model = potential_of(model, **about_energies)
    model = copy.deepcopy(model).requires_grad_(False).eval()
    in_float64 = copy.deepcopy(model).to(device, torch.float64)
    check_cutoff(in_float64, device, is_smooth=not is_potential)
    if not is_potential:
        check_layers(in_float64, device)
    model = model.to(device, dtype)
    layers = getattr(model, "layers", 1)
    arguments = [*inspect.signature(model.forward).parameters]
    if path.suffix == ".pt2":
        if edge_order is None:
            edge_order = device.type == "cuda" and "edge_order" in arguments
        order = ["edge_order"] if edge_order else []
        owned = ["owned"] if layers > 1 else []
        arguments = ["types", "list_neigh", "Rij", *order, *owned]
    # An archive may hold a model that takes one frame only, as that of a graph's total energy.
    systems = systems_for(model, dtype, device, one_frame=path.suffix == ".pt")
    expected, tolerance = results_for(model, systems)
    # A file that is refused leaves nothing behind, nor does it replace another.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        unchecked = Path(folder, path.name)
        write(model, unchecked, dtype, device, arguments)
        check_file(load(unchecked, device), systems, expected, tolerance)
        unchecked.replace(path)


def write(model, path, dtype, device, arguments):
    """Write a model to a file; save() describes the arguments."""
    about = metadata_of(model, dtype, device, arguments)
    if path.suffix == ".pt":
        with quietly():
            archive = scripted(model)
            about["operators"] = own_names(torch.jit.export_opnames(archive))
            torch.jit.save(archive, path, _extra_files=about)
        return
    program = export(model, dtype, device, arguments)
    targets = [node.target for node in program.graph.nodes]
    calls = [target for target in targets if isinstance(target, torch._ops.OpOverload)]
    about["operators"] = own_names(call.name() for call in calls)
    # The number of threads is that of the host, not of the machine that made the package.
    configs = {"aot_inductor.metadata": about, "cpp.dynamic_threads": True}
    with quietly():
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(path), inductor_configs=configs
        )


def scripted(model):
    """Return a model as torch.jit.script compiles it.

    Raises:
        ValueError: it does not compile.
    """
    try:
        return torch.jit.script(model)
    except Exception as error:  # of many types
        names = untyped_numbers(model)
        what = ", ".join(names) or "a forward in TorchScript, Python's typed subset"
        raise ValueError(
            f"expected a model that torch.jit.script compiles, as an archive (.pt) needs: {what}; "
            "a package (.pt2) accepts any code"
        ) from error


def untyped_numbers(model):
    """Return in words the numbers of ghosts or atoms without a type in the forwards of a model.

    torch.jit.script takes them for tensors.
    """
    words = []
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        parameters = inspect.signature(module.forward).parameters
        for name in ("nghost", "natoms"):
            if name in parameters and parameters[name].annotation not in (int, "int"):
                words.append(f"`{name}: int` in the forward of {type(module).__name__}")
    return words


def metadata_of(model, dtype, device, arguments):
    """Return the strings that a file holds beside its model."""
    about = {
        "cutoff": model.cutoff,
        "units": model.units,
        "type_names": " ".join(model.type_names),
        "layers": getattr(model, "layers", 1),
        "block_slots": getattr(model, "block_slots", kBlockSlots),
        "dtype": str(dtype).removeprefix("torch."),
        "device": device,
        "inputs": " ".join(arguments),
    }
    if hasattr(model, "neighbors"):
        about["neighbors"] = model.neighbors
    if hasattr(model, "sel"):
        about["sel"] = " ".join(map(str, model.sel))
    if getattr(model, "shortest", None) is not None:
        about["shortest"] = " ".join(f"{r:.9g}" for r in model.shortest.flatten().tolist())
    return {key: str(value) for key, value in about.items()}


def own_names(operators):
    """Return the names, without overloads, of operators that are none of PyTorch's."""
    names = {operator.partition(".")[0] for operator in operators}
    return " ".join(
        sorted(name for name in names if not name.startswith(("aten::", "prim::", "prims::")))
    )


@contextlib.contextmanager
def quietly():
    """Suppress two warnings of PyTorch.

    One says that TorchScript is deprecated, as ../aot_inductor_force/README.md does. The other says
    that a machine with a CUDA toolkit has no GPU, which a package for the CPU does not need.
    """
    logger = logging.getLogger("torch.utils.cpp_extension")

    def is_needed(record):
        return "No CUDA runtime" not in record.getMessage()

    logger.addFilter(is_needed)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch.jit.* is deprecated")
            yield
    finally:
        logger.removeFilter(is_needed)


def export(model, dtype, device, arguments):
    """Return the exported program of a model, for any number of frames, atoms, ghosts and slots."""

    def from_tensors(types, list_neigh, Rij, *others):
        nghost = types.shape[0] - list_neigh.shape[1]
        options = dict(zip(arguments[3:], others))
        return model(types, list_neigh, Rij, nghost, **options)

    # Equal sizes would be one symbol. So no two are equal, and none equals the 3 of x, y, z.
    frames = 2
    natoms = 7
    nghost = 11
    slots = 5
    list_neigh = torch.zeros(frames, natoms, slots, dtype=torch.int64, device=device)
    examples = {
        "types": torch.zeros(natoms + nghost, dtype=torch.int64, device=device),
        "list_neigh": list_neigh,
        "Rij": torch.ones(frames, natoms, slots, 3, dtype=dtype, device=device),
        "edge_order": order_of(list_neigh, nghost),
        "owned": torch.ones(natoms, dtype=torch.bool, device=device),
    }
    example = tuple(examples[name] for name in arguments)
    # torch.export refuses a module that calls autograd.grad. make_fx writes it as plain operators.
    graph = make_fx(from_tensors, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*example)
    check_sizes(graph, model)
    pairs = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC, 2: Dim.DYNAMIC}
    dynamic = {
        "types": {0: Dim.DYNAMIC},
        "list_neigh": pairs,
        "Rij": pairs,
        "edge_order": {0: Dim.AUTO, 1: Dim.AUTO},
        "owned": {0: Dim.DYNAMIC},
    }
    shapes = tuple(dynamic[name] for name in arguments)
    return torch.export.export(graph, example, dynamic_shapes=shapes)


def order_of(list_neigh, nghost):
    """Return the edge_order of potential.py for a list [B, n, K]."""
    natoms = list_neigh.shape[1] + nghost
    return calcops_jit.edge_order(edges(list_neigh, natoms), list_neigh.shape[0] * natoms)


def load(path, device="cpu"):
    """Return the Package that save() wrote to a file.

    Args:
        path: of the file.
        device: of an archive. A package is bound to its own.

    Raises:
        ValueError: there is no such file, save() did not write it, or an operator that it calls is
            not loaded.
    """
    path = Path(path).absolute()
    if not path.exists():
        raise ValueError(f"expected a package or an archive, got no file {path}")
    if path.suffix not in (".pt", ".pt2"):
        raise ValueError(
            f"expected a file that ends in .pt or .pt2, got {path} (calcops.nep reads a nep.txt)"
        )
    return Package(path, device)


@contextlib.contextmanager
def refusals(path):
    """Turn an error of opening a file, of many types, into a ValueError of one sentence."""
    try:
        yield
    except Exception as error:
        moved = re.search(kMoved, str(error))
        if moved:
            raise ValueError(
                f"{path} calls {moved[0]}, which has become calcops_models::{moved[1]} of "
                "calcops.ops: save the model again"
            ) from error
        raise ValueError(
            f"expected a model that save() wrote, got {path}, "
            f"perhaps a checkpoint of torch.save: {str(error).strip().partition(chr(10))[0]}"
        ) from error


def metadata_in(path):
    """Return the strings that a file holds beside the model. Its operators need not be loaded."""
    if path.suffix == ".pt2":
        loader = torch._C._aoti.AOTIModelPackageLoader
        return loader.load_metadata_from_package(str(path), "model")
    archive = torch._C.PyTorchFileReader(str(path))
    records = [name for name in archive.get_all_records() if name.startswith("extra/")]
    return {name[6:]: archive.get_record(name).decode() for name in records}


def load_operators(names, path):
    """Load the operators of calcops.ops, if a file calls them, and check that the others are there.

    Raises:
        ValueError: an operator is not there.
    """
    if "calcops_models::" in names:
        import calcops.ops  # noqa: F401 - compiles at its first import
    for name in names.split():
        namespace, _, operator = name.partition("::")
        if not hasattr(getattr(torch.ops, namespace), operator):
            raise ValueError(
                f"expected the operator {name}, which {path} calls, to be loaded: "
                "load its library first"
            )


class Package:
    """A saved model: a function of (types, list_neigh, Rij, nghost).

    Its attributes are cutoff, units, type_names, dtype and device, digest (the file's SHA-256), and
    sel and shortest of a model that has them. A pickle or a copy of it holds the path, and opens
    the file again.
    """

    def __init__(self, path, device):
        self.path = path
        with refusals(path):
            about = metadata_in(path)
            if not about.get("cutoff"):
                raise ValueError("it has no cutoff")
        load_operators(about.get("operators", ""), path)
        self.digest = hashlib.sha256(path.read_bytes()).hexdigest()  # the file may be replaced
        with refusals(path), quietly():
            self.open(device)
        self.cutoff = float(about["cutoff"])
        self.units = about["units"]
        self.type_names = about["type_names"].split()
        self.dtype = getattr(torch, about["dtype"])
        self.layers = int(about.get("layers") or 1)
        self.neighbors = int(about.get("neighbors") or 0)
        self.block_slots = int(about.get("block_slots") or kBlockSlots)
        self.inputs = about["inputs"].split()
        self.device = about["device"] if path.suffix == ".pt2" else str(device)
        if about.get("sel"):
            self.sel = [int(count) for count in about["sel"].split()]
        if about.get("shortest"):
            lengths = torch.tensor(list(map(float, about["shortest"].split())), dtype=torch.float64)
            self.shortest = lengths.view(len(self.type_names), -1)

    def open(self, device):
        """Open the file."""
        if self.path.suffix == ".pt2":
            # PyTorch 2.10 uses this module here, and does not import it.
            from torch._inductor import codecache  # noqa: F401

            self.run = torch._inductor.aoti_load_package(str(self.path))
        else:
            self.run = torch.jit.load(self.path, device)

    def __call__(self, types, list_neigh, Rij, nghost=0, **options):
        """Return the results of potential.py's `forward`, whose arguments these are.

        On a CPU, large systems are computed in blocks of atoms that fit the cache, and pairs beyond
        the cutoff are left out. A package with layers takes the option `owned`.

        Raises:
            ValueError: the arguments do not fit each other or the file.
        """
        self.check_arguments(types, list_neigh, Rij, nghost)
        if list_neigh.device.type == "cpu":
            check_entries(list_neigh, list_neigh.shape[1] + nghost)
        if options or not self.is_local(list_neigh.device):
            return self.call(types, list_neigh, Rij, nghost, **options)
        list_neigh, Rij = near_pairs(list_neigh, Rij, self.cutoff)
        return self.of_near_pairs(types, list_neigh, Rij, nghost)

    def of_near_pairs(self, types, list_neigh, Rij, nghost=0):
        """Return the results of a call for pairs within the cutoff alone. It checks nothing."""
        if not self.is_local(list_neigh.device):
            return self.call(types, list_neigh, Rij, nghost)
        return call_in_blocks(self.call, types, list_neigh, Rij, nghost, self.block_slots)

    def is_local(self, device):
        """Return True if blocks of atoms can be computed one by one, which pays on CPUs."""
        takes_order = self.path.suffix == ".pt2" and "edge_order" in self.inputs
        return self.layers == 1 and not takes_order and device.type == "cpu"

    def check_arguments(self, types, list_neigh, Rij, nghost):
        """Raise ValueError if arguments have other shapes or a dtype than the file takes.

        A package itself does not look at them: it would read beyond their memory, or end the
        process. On a GPU, types are not read.
        """
        if list_neigh.dim() != 3 or Rij.shape != (*list_neigh.shape, 3):
            raise ValueError(
                "expected list_neigh [B, n, K] and Rij [B, n, K, 3], "
                f"got {list(list_neigh.shape)} and {list(Rij.shape)}"
            )
        B, n, _ = list_neigh.shape
        if types.shape not in ((n + nghost,), (B, n + nghost)):
            raise ValueError(
                f"expected types of {n} atoms and nghost={nghost} ghosts, "
                f"[{n + nghost}] or [{B}, {n + nghost}], got {list(types.shape)}"
            )
        if Rij.dtype != self.dtype:
            raise ValueError(f"expected Rij of {self.dtype}, as the file is, got {Rij.dtype}")
        ntypes = len(self.type_names)
        if types.device.type == "cpu" and ((types < 0) | (types >= ntypes)).any():
            raise ValueError(
                f"expected types from 0 to {ntypes - 1}, got {types.min()} to {types.max()}"
            )

    def call(self, types, list_neigh, Rij, nghost, **options):
        """Return the results of a single call, or of one for each frame with its own types."""
        if self.neighbors and list_neigh.shape[2] > self.neighbors:
            raise ValueError(
                f"expected at most {self.neighbors} neighbours of an atom, as the model takes, "
                f"got {list_neigh.shape[2]} slots"
            )
        if self.path.suffix == ".pt":
            return self.run(types, list_neigh, Rij, nghost, **options)
        if types.dim() == 2:
            frames = zip(types, list_neigh.split(1), Rij.split(1))
            results = [self.call(*frame, nghost, **options) for frame in frames]
            return [torch.cat(of_frames) for of_frames in zip(*results)]
        if "edge_order" in self.inputs:
            options["edge_order"] = order_of(list_neigh, nghost)
        if "owned" in self.inputs:
            all_atoms = torch.ones(list_neigh.shape[1], dtype=torch.bool, device=list_neigh.device)
            options.setdefault("owned", all_atoms)
        others = [options.pop(name) for name in self.inputs[3:]]
        # The code is compiled for these types, and for rows that follow one another.
        inputs = types.long(), list_neigh.long(), Rij, *others
        return self.run(*(x.contiguous() for x in inputs), **options)

    def __reduce__(self):
        return load, (self.path, self.device)
