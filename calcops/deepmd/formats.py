"""Files of DeePMD-kit, read without DeePMD-kit: .pth, .pt, .dp and .yaml.

    model = read(Path("frozen_model.pth"))

Sources of the formats, in DeePMD-kit 3.2: deepmd/dpmodel/utils/serialization.py and serialize() of
the descriptor, the fitting and the networks for .dp and .yaml; deepmd/pt/model/descriptor/se_a.py
and deepmd/pt/model/task/fitting.py for .pth and .pt, which hold the tensors of these modules.
"""

import io
import json
import pickle
import re
import zipfile
from types import SimpleNamespace

import numpy as np
import torch


def read(path):
    """Return a model as DeePMD-kit serialises it: dicts and lists, with arrays in "@variables"."""
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
        definition = state.pop("_extra_state")["model_params"]
        weights = {key.removeprefix("model.Default."): value for key, value in state.items()}
        return serialised(definition, weights)
    raise ValueError(
        "expected .pth, .pt, .dp or .yaml; "
        "`dp convert-backend` makes a .dp of the others, as of a .pb"
    )


def filled(node, array, is_variable=False):
    """Return a copy of dicts and lists, with array(value) for each value in "@variables"."""
    if isinstance(node, dict) and not node.get("@is_variable"):
        copy = {}
        for key, value in node.items():
            copy[key] = filled(value, array, is_variable or key == "@variables")
        return copy
    if isinstance(node, list):
        return [filled(value, array, is_variable) for value in node]
    return array(node) if is_variable and node is not None else node


class Archive(pickle.Unpickler):
    """Load a TorchScript archive's modules as plain objects with their attributes.

    torch.jit.load would compile the modules' code, which needs DeePMD-kit's operators. An archive
    can call nothing but the classes and functions that find_class returns.
    """

    def __init__(self, path):
        self.zip = zipfile.ZipFile(path)
        names = [name for name in self.zip.namelist() if re.fullmatch("[^/]*/data.pkl", name)]
        if len(names) != 1:
            raise ValueError("expected a frozen model, as `dp --pt freeze` writes it")
        self.folder = names[0].removesuffix("data.pkl")
        super().__init__(io.BytesIO(self.zip.read(names[0])))

    def find_class(self, module, name):
        """Return a class or function for one of the archive.

        Raises:
            ValueError: a frozen model has no such class or function.
        """
        if module.startswith("__torch__"):
            return SimpleNamespace
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return rebuild_tensor
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


def rebuild_tensor(storage, offset, size, stride, *_):
    """Return a tensor of numbers in a storage, as torch._utils._rebuild_tensor_v2 does."""
    return torch.as_strided(storage, size, stride, offset).clone()


def tensors(module, prefix=""):
    """Yield the tensors of a module that Archive loaded, with their names in its state_dict."""
    for key, value in vars(module).items():
        if isinstance(value, SimpleNamespace):
            yield from tensors(value, f"{prefix}{key}.")
        elif isinstance(value, torch.Tensor):
            yield prefix + key, value


def serialised(definition, state):
    """Return what DeePMD-kit's serialize() returns for a model.

    Args:
        definition: the model's part of an input file.
        state: the tensors, by their names in state_dict.
    """
    arrays = {}
    for key, value in state.items():
        arrays[key.removeprefix("atomic_model.")] = value.double().numpy()
    descriptor = definition.get("descriptor", {})
    fitting = definition.get("fitting_net", {})
    linear = {"resnet": False, "activation_function": "none"}
    statistics = {
        "davg": arrays.get("descriptor.sea.mean"),
        "dstd": arrays.get("descriptor.sea.stddev"),
    }
    descriptor = descriptor | {
        "embeddings": networks(arrays, "descriptor.sea", descriptor, {}),
        "@variables": statistics,
    }
    numbers = range(len(descriptor["embeddings"]["networks"]))
    data = [arrays.get(f"descriptor.sea.compress_data.{i}") for i in numbers]
    if any(array is not None and array.size for array in data):
        info = [arrays[f"descriptor.sea.compress_info.{i}"] for i in numbers]
        tables = {"compress_data": data, "compress_info": info}
        descriptor["compress"] = {"@variables": tables}
    fitting = fitting | {
        "nets": networks(arrays, "fitting_net", fitting, linear),
        "@variables": {"bias_atom_e": arrays.get("fitting_net.bias_atom_e")},
    }
    out_bias = {"out_bias": arrays.get("out_bias")}
    return definition | {"@variables": out_bias, "descriptor": descriptor, "fitting": fitting}


def networks(arrays, part, options, last):
    """Return the networks of a part of a model as serialize() does.

    Args:
        arrays: all weights of the model, by name.
        part: what the names begin with, "descriptor.sea" or "fitting_net".
        options: of the part.
        last: options of the last layer of each network.
    """
    pattern = rf"{part}\.filter_layers\.networks\.(\d+)\.layers\.(\d+)\.(matrix|bias|idt)"
    names = {"matrix": "w", "bias": "b", "idt": "idt"}
    variables = {}  # variables[network][place]: those of a layer
    for key, value in arrays.items():
        match = re.fullmatch(pattern, key)
        if match:
            network = variables.setdefault(int(match[1]), {})
            network.setdefault(int(match[2]), {})[names[match[3]]] = value
    hidden = {"resnet": True, "activation_function": options.get("activation_function", "tanh")}
    result = []
    for _, network in sorted(variables.items()):
        layers = [hidden | {"@variables": network[place]} for place in sorted(network)]
        layers[-1] |= last
        result.append({"layers": layers})
    return {"networks": result}
