"""Read a DeePMD-kit model of type se_e2_a as a DeepPotential, without DeePMD-kit.

    calcops deepmd frozen_model.pth water.pt2

    model = load("frozen_model.pth")        # in Python

The command reads .pth, .pt, .dp and .yaml, also compressed ones, and writes .pt2, .pt and .npz.
An option that it does not compute is an error.
"""

import argparse
import warnings
from pathlib import Path

import numpy as np
import torch
from calcops.deepmd.deep_potential import DeepPotential, quick_form
from calcops.deepmd.formats import read
from calcops.deepmd.nets import kActivations, net, save_npz
from calcops.potentials.package import save

# Options that DeepPotential uses, that follow from the weights, or that only training uses. All
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
# What a message adds for an option that is refused.
kAdvice = {"spin": "DeePMD-kit's own interfaces run it"}
kPrecisions = "default", "float64", "double", "float32", "single"
kVersions = {"model": 2, "descriptor": 3, "environment": 0, "fitting": 4}


def load(path):
    """Return the DeepPotential of a file of DeePMD-kit, in float64, eV and A.

    Args:
        path: of a .pth, .pt, .dp or .yaml.

    Raises:
        ValueError: the file cannot be read, or the model is of another type, or has an option that
            DeepPotential does not compute.
    """
    try:
        model = DeepPotential(arrays(read(Path(path))))
    except (ImportError, FileNotFoundError):
        raise
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    except KeyError as error:
        raise ValueError(
            f"{path}: expected a model of type se_e2_a, got one without {error}"
        ) from None
    except Exception as error:  # of pickles, zip files, HDF5, YAML and what else they may hold
        raise ValueError(
            f"{path}: expected a model of DeePMD-kit, got a file that cannot be read as one: "
            f"{str(error).partition(chr(10))[0] or type(error).__name__}"
        ) from error
    error = 0.0 if model.table is None else model.table_error()
    if error > 1e-4:
        warnings.warn(
            f"{path}: its tables differ from its nets by {error:.0%}, as `dp compress` 3.2 makes "
            "them of nets with resnet_dt; the energies are those of the tables",
            stacklevel=2,
        )
    return model


def check(part, options):
    """Raise ValueError if a part of a model has an option that DeepPotential does not compute."""
    expected = kTypes[part]
    kind = options.get("type", expected[0])
    if kind not in expected:
        raise ValueError(f"expected a {part} of type {expected[0]}, got {kind}")
    if options.get("@version", 0) > kVersions[part]:
        raise ValueError(
            f"expected a {part} of version {kVersions[part]} at most, got {options['@version']}"
        )
    if options.get("precision", "default") not in kPrecisions:
        raise ValueError(
            f"the {part} is of precision {options['precision']}; float64 and float32 are supported"
        )
    for name in sorted(options.keys() - kOptions[part].split()):
        value = options[name]
        if name[0] not in "@_" and value and str(value).lower() != "none":  # "_comment" is one
            advice = f": {kAdvice[name]}" if name in kAdvice else ""
            raise ValueError(f"the {part} has {name}, which is not supported{advice}")


def arrays(model):
    """Return the arrays that load_npz reads, of a serialised model.

    Raises:
        ValueError: DeepPotential does not compute the model.
    """
    check("model", model)
    descriptor = model["descriptor"]
    fitting = model["fitting"]
    check("descriptor", descriptor)
    check("environment", descriptor.get("env_mat", {}))
    check("fitting", fitting)
    sel = descriptor["sel"]
    result = {
        "type_names": model["type_map"],
        "sel": sel,
        "axis_neuron": descriptor["axis_neuron"],
        "rcut": descriptor["rcut"],
        "rcut_smth": descriptor["rcut_smth"],
    }
    for key in ("davg", "dstd"):
        result[key] = of_types(key, descriptor["@variables"][key], sel)

    T = len(model["type_map"])
    embeddings = descriptor["embeddings"]["networks"]
    if len(embeddings) not in (T, T * T) or None in embeddings:
        raise ValueError(
            f"expected an embedding net for each of {T} types or of {T * T} pairs of types"
        )
    embedding = [layers(network) for network in embeddings]
    # There is a net for each type of neighbour, or also for each type of centre: c + T t.
    nets_of_type = len(embedding) // T
    for t in range(T):
        first = nets_of_type * t
        result |= numbered(f"emb{t}", embedding[first : first + nets_of_type])
    if descriptor.get("compress"):
        result |= tables_of(descriptor["compress"]["@variables"])
    for t, network in enumerate(fitting["nets"]["networks"]):
        result |= numbered(f"fit{t}", [layers(network)])
    width = len(embedding[0][-1]["b"])
    if len(result["fit0_w0"]) != width * descriptor["axis_neuron"]:
        raise ValueError(
            "the fitting net has other inputs than the descriptor, which is not supported"
        )

    result["bias_atom_e"] = biases(model, result)
    return result


def biases(model, arrays):
    """Return the energies [T] of types that are added to those of the nets in `arrays`."""
    fitting = model["fitting"]
    T = len(model["type_map"])
    bias = np.array(fitting["@variables"]["bias_atom_e"], np.float64).reshape(T)
    out_bias = model["@variables"].get("out_bias")
    if out_bias is not None:
        bias += np.reshape(out_bias, T)
    atom_ener = fitting.get("atom_ener") or []
    if len(atom_ener) not in (0, T):
        raise ValueError(
            f"the fitting has atom_ener for {len(atom_ener)} of {T} types, which is not supported"
        )
    for t, energy in enumerate(atom_ener):
        # The bias contains atom_ener. DeePMD-kit subtracts the energy that the net has for D = 0.
        if energy is not None:
            D = torch.zeros(len(arrays["fit0_w0"]), dtype=torch.float64)
            bias[t] -= net(arrays, f"fit{t}")(D, torch.tensor(t)).item()
    return bias


def of_types(name, array, sel):
    """Return davg or dstd for types [T, T, 4], from that for slots [T, slots, 4].

    Raises:
        ValueError: slots for neighbours of one type differ.
    """
    rows = []
    for slots in np.split(array, np.cumsum(sel)[:-1], axis=1):
        if slots.size == 0:
            rows.append(np.ones((len(array), 4)))
            continue
        if np.ptp(slots, axis=1).any():
            raise ValueError(
                f"{name} differs between slots for neighbours of one type, which is not supported"
            )
        rows.append(slots[:, 0])
    return np.stack(rows, axis=1)


def tables_of(variables):
    """Return the arrays `table` and `grid` of a compressed descriptor.

    The rows [cells, 6 M] of `compress_data` have the six coefficients of a function side by side.
    `compress_info` has begin, end of the first part, end of the second part, both widths, and a
    number that is not needed here.
    """
    tables = [np.asarray(data, np.float64) for data in variables["compress_data"]]
    tables = [data.reshape(len(data), -1, 6).transpose(0, 2, 1) for data in tables]
    table = np.zeros((len(tables), max(map(len, tables)), *tables[0].shape[1:]))
    grid = np.zeros((len(tables), 5))
    for i, info in enumerate(variables["compress_info"]):
        table[i, : len(tables[i])] = tables[i]
        # Numbers such as 0.01, which are rounded to float32 in the file.
        begin, end, coarse_end, width, coarse_width = np.float32(info[:5]).astype(str).astype(float)
        grid[i] = begin, width, end, coarse_width, coarse_end
    return {"table": table, "grid": grid}


def layers(network):
    """Return a dictionary for each layer of a serialised network, with the keys of load_npz."""
    result = []
    for layer in network["layers"]:
        variables = layer["@variables"]
        activation = layer["activation_function"].lower()
        activation = {"none": "linear", "gelu_tf": "gelu"}.get(activation, activation)
        if activation not in kActivations:
            raise ValueError(f"the activation function {activation} is not supported")
        b = variables.get("b")
        if b is None:
            b = np.zeros(variables["w"].shape[1])
        result.append(
            {
                "w": variables["w"],
                "b": b,
                "idt": variables.get("idt"),
                "res": layer["resnet"],
                "act": activation,
            }
        )
    return result


def numbered(name, nets):
    """Return the arrays of one net, or of a net for each type of centre, stacked.

    Args:
        name: what the arrays' names begin with.
        nets: the layers of each net. The nets have the same shape.
    """
    result = {}
    for i, same_layers in enumerate(zip(*nets)):
        for key, value in same_layers[0].items():
            if value is None:
                continue
            if key not in ("res", "act") and len(nets) > 1:
                value = np.stack([layer[key] for layer in same_layers])
            result[f"{name}_{key}{i}"] = value
    return result


def main():
    """Run the command."""
    parser = argparse.ArgumentParser(prog="calcops deepmd", description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a file of DeePMD-kit: .pth, .pt, .dp or .yaml")
    parser.add_argument("output", type=Path, help=".pt2, .pt or .npz")
    parser.add_argument(
        "--tabulated", action="store_true", help="splines or tables instead of embedding nets"
    )
    parser.add_argument("--float32-nets", action="store_true", help="compute the nets in float32")
    options = parser.parse_args()
    model = quick_form(load(options.model), options)
    if options.output.suffix == ".npz":
        save_npz(model, options.output)
    else:
        save(model, options.output)
    counts = zip(model.type_names, model.sel)
    neighbours = ", ".join(f"{name} up to {count}" for name, count in counts)
    print(f"{options.output}: neighbours within {model.cutoff:g} A: {neighbours}")


if __name__ == "__main__":
    from calcops.__main__ import renamed

    renamed("deepmd")
