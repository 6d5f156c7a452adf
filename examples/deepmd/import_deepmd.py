"""Reads a DeePMD-kit model of type se_e2_a as a DeepPotential, without DeePMD-kit.

    python examples/deepmd/import_deepmd.py frozen_model.pth water.pt2

    model = load("frozen_model.pth")        # in Python

It reads .pth, .pt, .dp and .yaml, also compressed ones, and writes .pt2, .pt and .npz.
DeepPotential is that of ../train_potential. What it does not compute is refused by name.

The formats were read in DeePMD-kit 3.2: .dp and .yaml in its deepmd/dpmodel/utils/serialization.py
and in serialize() of the descriptor, the fitting and the networks; .pth and .pt in
deepmd/pt/model/descriptor/se_a.py and deepmd/pt/model/task/fitting.py, whose tensors they hold.
"""

import argparse
import io
import json
import pickle
import re
import warnings
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from calcops.potentials.package import save
from calcops.train.deep_potential import DeepPotential, quick_form
from calcops.train.weights import kActivations, net, save_npz

# Options that are used here, that the weights show anyway, or that matter in training only. All
# others have to be off.
kOptions = {
    "model": """type type_map descriptor fitting fitting_net rcond preset_out_bias info resuming
        finetune_head model_branch_alias data_stat_nbatch data_stat_protect data_bias_nsample
        srtab_add_bias bridging_r_inner bridging_r_outer""",
    "descriptor": """type type_map ntypes rcut rcut_smth sel neuron axis_neuron type_one_side
        resnet_dt precision activation_function embeddings env_mat set_davg_zero trainable seed
        compress""",
    "environment": "rcut rcut_smth",
    "fitting": """type type_map ntypes var_name dim_out dim_descrpt embedding_width neuron resnet_dt
        precision activation_function nets atom_ener default_fparam rcond layer_name trainable
        seed""",
}
kTypes = {
    "model": ("standard",),
    "descriptor": ("se_e2_a", "se_a"),
    "environment": (None,),
    "fitting": ("ener",),
}
# What to do instead.
kAdvice = {"spin": "DeePMD-kit's own interfaces run it"}
kVersions = {"model": 2, "descriptor": 3, "environment": 0, "fitting": 4}


def load(path):
    """The model in a file of DeePMD-kit; float64 whatever its precision, eV and A."""
    try:
        model = DeepPotential(arrays(read(Path(path))))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    except KeyError as error:
        raise ValueError(
            f"{path}: expected a model of type se_e2_a, got one without {error}"
        ) from None
    error = 0.0 if model.table is None else model.table_error()
    if error > 1e-4:
        warnings.warn(
            f"{path}: its tables differ from its nets by {error:.0%}, as `dp compress` 3.2 makes "
            "them of nets with resnet_dt; the energies are those of the tables",
            stacklevel=2,
        )
    return model


def read(path):
    """The model as DeePMD-kit serialises it: dicts and lists, with arrays under "@variables"."""
    if path.suffix == ".dp":
        import h5py

        with h5py.File(path) as file:
            return filled(json.loads(file.attrs["json"])["model"], lambda name: file[name][()])
    if path.suffix in (".yaml", ".yml"):
        import yaml

        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        model = yaml.load(path.read_text(), loader)["model"]
        return filled(model, lambda array: np.array(array["value"], np.float64))
    if path.suffix == ".pth":
        archive = Archive(path).load()
        if not hasattr(archive, "model_def_script"):
            raise ValueError("expected a frozen model, as `dp --pt freeze` writes it")
        return serialised(json.loads(archive.model_def_script), dict(tensors(archive)))
    if path.suffix == ".pt":
        state = torch.load(path, "cpu", weights_only=True)
        state = state.get("model", state)
        own = {
            key.removeprefix("model.Default."): value
            for key, value in state.items()
            if key != "_extra_state"
        }
        return serialised(state["_extra_state"]["model_params"], own)
    raise ValueError(
        "expected .pth, .pt, .dp or .yaml; "
        "`dp convert-backend` makes a .dp of the others, as of a .pb"
    )


def filled(node, array, variable=False):
    """A copy of `node` in which array(value) stands for each value under "@variables"."""
    if isinstance(node, dict) and not node.get("@is_variable"):
        return {
            key: filled(value, array, variable or key == "@variables")
            for key, value in node.items()
        }
    if isinstance(node, list):
        return [filled(value, array, variable) for value in node]
    return array(node) if variable and node is not None else node


class Archive(pickle.Unpickler):
    """Loads a TorchScript archive's modules as plain objects with their attributes. torch.jit.load
    would compile their code, for which it needs DeePMD-kit's operators. Of what the archive names,
    only what is listed here is called.
    """

    def __init__(self, path):
        self.zip = zipfile.ZipFile(path)
        (name,) = (name for name in self.zip.namelist() if re.fullmatch("[^/]*/data.pkl", name))
        self.folder = name.removesuffix("data.pkl")
        super().__init__(io.BytesIO(self.zip.read(name)))

    def find_class(self, module, name):
        """Return what stands for a class or function of the archive; ValueError: it is unknown."""
        if module.startswith("__torch__"):
            return SimpleNamespace
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, size, stride, *_: torch.as_strided(
                storage, size, stride, offset
            ).clone()
        if module == "torch.jit._pickle" or (module, name) == ("collections", "OrderedDict"):
            return super().find_class(module, name)
        if module == "torch" and name.endswith("Storage"):
            return getattr(torch, name.removesuffix("Storage").lower())
        raise ValueError(f"its data.pkl asks for {module}.{name}, which a frozen model does not")

    def persistent_load(self, saved):
        """Return the numbers of a storage, which is a file of the archive."""
        _, dtype, key, _, count = saved
        data = bytearray(self.zip.read(f"{self.folder}data/{key}"))
        return torch.frombuffer(data, dtype=dtype) if count else torch.empty(0, dtype=dtype)


def tensors(module, prefix=""):
    """The tensors of a module that Archive loaded, with their names in its state_dict."""
    for key, value in vars(module).items():
        if isinstance(value, SimpleNamespace):
            yield from tensors(value, f"{prefix}{key}.")
        elif isinstance(value, torch.Tensor):
            yield prefix + key, value


def serialised(definition, state):
    """What DeePMD-kit's serialize() returns for a model of this definition and these tensors."""
    state = {
        key.removeprefix("atomic_model."): value.double().numpy() for key, value in state.items()
    }

    def networks(part, options, last):
        found = {}
        for key, value in state.items():
            place = re.fullmatch(
                rf"{part}\.filter_layers\.networks\.(\d+)\.layers\.(\d+)\.(matrix|bias|idt)", key
            )
            if place:
                name = {"matrix": "w", "bias": "b", "idt": "idt"}[place[3]]
                found.setdefault(int(place[1]), {}).setdefault(int(place[2]), {})[name] = value
        hidden = {"resnet": True, "activation_function": options.get("activation_function", "tanh")}
        result = []
        for _, variables in sorted(found.items()):
            result.append(
                {"layers": [hidden | {"@variables": variables[i]} for i in sorted(variables)]}
            )
            result[-1]["layers"][-1] |= last
        return {"networks": result}

    descriptor, fitting = definition.get("descriptor", {}), definition.get("fitting_net", {})
    linear = {"resnet": False, "activation_function": "none"}
    statistics = {
        "davg": state.get("descriptor.sea.mean"),
        "dstd": state.get("descriptor.sea.stddev"),
    }
    descriptor = descriptor | {
        "embeddings": networks("descriptor.sea", descriptor, {}),
        "@variables": statistics,
    }
    numbers = range(len(descriptor["embeddings"]["networks"]))
    data = [state.get(f"descriptor.sea.compress_data.{i}") for i in numbers]
    if any(array is not None and array.size for array in data):
        info = [state[f"descriptor.sea.compress_info.{i}"] for i in numbers]
        tables = {"compress_data": data, "compress_info": info}
        descriptor["compress"] = {"@variables": tables}
    bias = {"bias_atom_e": state.get("fitting_net.bias_atom_e")}
    fitting = fitting | {"nets": networks("fitting_net", fitting, linear), "@variables": bias}
    out_bias = {"out_bias": state.get("out_bias")}
    return definition | {"@variables": out_bias, "descriptor": descriptor, "fitting": fitting}


def check(part, options):
    """Refuses what DeepPotential does not compute."""
    expected = kTypes[part]
    found = options.get("type", expected[0])
    if found not in expected:
        raise ValueError(f"expected a {part} of type {expected[0]}, got {found}")
    if options.get("@version", 0) > kVersions[part]:
        raise ValueError(
            f"expected a {part} of version {kVersions[part]} at most, got {options['@version']}"
        )
    if options.get("precision", "default") not in (
        "default",
        "float64",
        "double",
        "float32",
        "single",
    ):
        raise ValueError(
            f"the {part} is of precision {options['precision']}; float64 and float32 are supported"
        )
    for name in sorted(options.keys() - kOptions[part].split()):
        value = options[name]
        if name[0] not in "@_" and value and str(value).lower() != "none":  # "_comment" is one
            advice = f": {kAdvice[name]}" if name in kAdvice else ""
            raise ValueError(f"the {part} has {name}, which is not supported{advice}")


def arrays(model):
    """The arrays that load_npz reads, from a serialised model."""
    check("model", model)
    descriptor, fitting = model["descriptor"], model["fitting"]
    check("descriptor", descriptor)
    check("environment", descriptor.get("env_mat", {}))
    check("fitting", fitting)
    names, sel, axis_neuron = model["type_map"], descriptor["sel"], descriptor["axis_neuron"]
    result = {
        "sel": sel,
        "axis_neuron": axis_neuron,
        "rcut": descriptor["rcut"],
        "rcut_smth": descriptor["rcut_smth"],
    }
    result |= {key: of_types(key, descriptor["@variables"][key], sel) for key in ("davg", "dstd")}
    result["type_names"] = names

    networks, T = descriptor["embeddings"]["networks"], len(names)
    if len(networks) not in (T, T * T) or None in networks:
        raise ValueError(
            f"expected an embedding net for each of {T} types or of {T * T} pairs of types"
        )
    embedding = [layers(network) for network in networks]
    for t in range(T):
        # Of nets for pairs, that of centre c and neighbour t has the number c + T t.
        nets = embedding[t : t + 1] if len(embedding) == T else embedding[T * t : T * (t + 1)]
        result |= numbered(f"emb{t}", nets)
    if descriptor.get("compress"):
        result |= tables_of(descriptor["compress"]["@variables"])
    for t, network in enumerate(fitting["nets"]["networks"]):
        result |= numbered(f"fit{t}", [layers(network)])
    if len(result["fit0_w0"]) != len(embedding[0][-1]["b"]) * axis_neuron:
        raise ValueError(
            "the fitting net has other inputs than the descriptor, which is not supported"
        )

    out_bias = model["@variables"].get("out_bias")
    bias = np.array(fitting["@variables"]["bias_atom_e"], np.float64).reshape(T)
    bias += 0 if out_bias is None else np.reshape(out_bias, T)
    atom_ener = fitting.get("atom_ener") or []
    if len(atom_ener) not in (0, T):
        raise ValueError(
            f"the fitting has atom_ener for {len(atom_ener)} of {T} types, which is not supported"
        )
    for t, energy in enumerate(atom_ener):
        # It is in the bias already; DeePMD-kit subtracts what the net gives for D = 0.
        if energy is not None:
            D = torch.zeros(len(result["fit0_w0"]), dtype=torch.float64)
            bias[t] -= net(result, f"fit{t}")(D, torch.tensor(t)).item()
    return result | {"bias_atom_e": bias}


def of_types(name, array, sel):
    """Takes [T,slots,4] to [T,T,4]: one row for all slots of a type of neighbour."""
    slots = np.split(array, np.cumsum(sel)[:-1], axis=1)
    if any(np.ptp(part, axis=1).any() for part in slots if part.size):
        raise ValueError(
            f"{name} differs between slots for neighbours of one type, which is not supported"
        )
    return np.stack(
        [part[:, 0] if part.size else np.ones((len(array), 4)) for part in slots], axis=1
    )


def tables_of(variables):
    """Return the arrays `table` and `grid` of a compressed descriptor.

    Its rows [cells, 6 M] have the six coefficients of a function side by side. Its info is begin,
    end of the first part, end of the second, both widths, and a number that is not needed here.
    """
    tables = [np.asarray(data, np.float64) for data in variables["compress_data"]]
    tables = [data.reshape(len(data), -1, 6).transpose(0, 2, 1) for data in tables]
    table = np.zeros((len(tables), max(map(len, tables)), *tables[0].shape[1:]))
    grid = np.zeros((len(tables), 5))
    for i, info in enumerate(variables["compress_info"]):
        table[i, : len(tables[i])] = tables[i]
        # Numbers such as 0.01, which float32 only approximates.
        begin, end, coarse_end, width, coarse_width = np.float32(info[:5]).astype(str).astype(float)
        grid[i] = begin, width, end, coarse_width, coarse_end
    return {"table": table, "grid": grid}


def layers(network):
    """A dictionary for each layer of a serialised network, with the keys of load_npz."""
    result = []
    for layer in network["layers"]:
        given, activation = layer["@variables"], layer["activation_function"].lower()
        activation = {"none": "linear", "gelu_tf": "gelu"}.get(activation, activation)
        if activation not in kActivations:
            raise ValueError(f"the activation function {activation} is not supported")
        b = np.zeros(given["w"].shape[1]) if given.get("b") is None else given["b"]
        result.append(
            {
                "w": given["w"],
                "b": b,
                "idt": given.get("idt"),
                "res": layer["resnet"],
                "act": activation,
            }
        )
    return result


def numbered(name, nets):
    """The arrays of one net, or of a net for each type of centre, stacked."""
    result = {}
    for i, same in enumerate(zip(*nets)):
        for key, first in same[0].items():
            if key in ("res", "act"):
                result[f"{name}_{key}{i}"] = first
            elif first is not None:
                result[f"{name}_{key}{i}"] = (
                    first if len(nets) == 1 else np.stack([layer[key] for layer in same])
                )
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="what DeePMD-kit wrote: .pth, .pt, .dp or .yaml")
    parser.add_argument("output", type=Path, help=".pt2, .pt or .npz")
    parser.add_argument(
        "--tabulated", action="store_true", help="splines or tables in the place of embedding nets"
    )
    parser.add_argument("--float32-nets", action="store_true", help="nets compute in float32")
    options = parser.parse_args()
    model = quick_form(load(options.model), options)
    (save_npz if options.output.suffix == ".npz" else save)(model, options.output)
    kinds = ", ".join(f"{name} up to {count}" for name, count in zip(model.type_names, model.sel))
    print(f"{options.output}: neighbours within {model.cutoff:g} A: {kinds}")


if __name__ == "__main__":
    main()
