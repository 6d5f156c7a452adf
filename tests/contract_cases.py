"""What the contracts of the built-in operators do not say, for `python -m calcops_jit test`.

`reference[operator](**arguments)` returns the operator's results. `adjust[operator](arguments,
choose)` makes a drawn call valid where only a `Check` or a text says what is valid.
"""

import math

import reference as force_references
import reference_models
import torch
from reference_warp_perspective import warp_perspective as warp_reference

import calcops_jit


def calculate_force(F, nghost=None, **arguments):
    ghosts = 0 if nghost is None else int(nghost)
    force = force_references.force(**arguments, nghost=ghosts, center=False)
    return force + torch.nn.functional.pad(F, (0, 0, 0, ghosts))


def calculate_virial(nghost=None, **arguments):
    ghosts = 0 if nghost is None else int(nghost)
    _, virial, atom_virial = force_references.force_virial(**arguments, nghost=ghosts)
    return virial.flatten(1), atom_virial.flatten(2)


reference = {
    "force": force_references.force,
    "force_virial": force_references.force_virial,
    "neighbor_index": force_references.index_reference,
    "edge_force": force_references.edge_force,
    "edge_force_virial": force_references.edge_force_virial,
    "edge_order": force_references.order_reference,
    "calculateForce": calculate_force,
    "calculateVirial": calculate_virial,
    "warp_perspective": warp_reference,
    "density": reference_models.density,
    "environment_spline": reference_models.environment_spline,
    "tabulated_sum": reference_models.tabulated_sum,
    "near_pairs": reference_models.near_pairs,
    "density_net": reference_models.density_net,
    "screened_repulsion": reference_models.screened_repulsion,
    "matrix_product": lambda x, weights: x @ weights,
}


SIZES = [3, 1, 2, 5, 8, 9, 16, 17, 33, 0]  # of images


def random(shape, choose):
    """Return random numbers from 0 to 1."""
    generator = torch.Generator().manual_seed(choose(range(100)))
    return torch.rand(shape, generator=generator, dtype=torch.float64)


# ---- ops -----------------------------------------------------------------------------------------


def force_virial(arguments, choose):
    vectors = arguments["Rij" if "Rij" in arguments else "edge_vec"]
    has_virial = vectors is not None and choose([True, False])
    arguments["output_mask"] = [True, has_virial, has_virial]
    if not has_virial:
        arguments |= {name: None for name in arguments if name == "batch"}  # it is not read


def edge_force_virial_backward(arguments, choose):
    if arguments["grad_virial"] is None:
        arguments["batch"] = None  # it is not read


def calculate(arguments, choose):
    list_neigh, ghosts = arguments["list_neigh"], choose([None, 2, 0])
    if ghosts is not None:
        dtype = choose([torch.int64, torch.int32])
        arguments["nghost"] = calcops_jit.Tensor(choose([[], [1]]), dtype, torch.tensor(ghosts))
    list_neigh.values, list_neigh.entries = "normal", (-1, arguments["dE"].shape[1] + (ghosts or 0))


def near_identity(matrices, choose):
    size = torch.tensor([[1.2, 1.2, 6], [1.2, 1.2, 6], [0.006, 0.006, 0]], dtype=torch.float64)
    matrices.values = torch.eye(3) + size * (random(matrices.shape, choose) - 0.5)


def shift(matrices, choose, errors=(0, 1e-9, 1e-16, 1e-320)):
    """Move pixels onto pixels, or halfway between them, but for an error."""
    matrices.dtype, matrices.values = torch.float64, torch.eye(3, dtype=torch.float64)
    for axis in (0, 1):
        matrices.values[axis, 2] = choose([0, 1, -2, 0.5]) + choose(errors)


def exact_shift(matrices, choose):
    shift(matrices, choose, errors=[0])


def singular(matrices, choose):
    """Have rank 2 but for rounding."""
    matrices.dtype = torch.float64
    matrices.values = torch.arange(1, 10, dtype=torch.float64).view(3, 3) / 10


def some_infinite(x, choose):
    x.values = torch.where(random(x.shape, choose) < 0.1, torch.inf, random(x.shape, choose))


def image_and_warp(arguments, choose):
    """Return the dimensions of the result before its channels, and these: [] or [C]."""
    image, warp = arguments["image"], arguments["warp"]
    leading = choose([[], [2], [1], [2, 3], [0]])
    channels = choose([[], [3], [1], [2], [17], [0]])
    of_image = choose([leading, [], [1]]) if channels else []
    of_warp = choose([leading, [], [1]])
    image.shape = of_image + channels + [choose(SIZES), choose(SIZES)]
    warp.shape = [*of_warp, 3, 3]
    set_map = choose([near_identity, shift, exact_shift, singular])
    set_map(warp, choose)
    if set_map == exact_shift and image.dtype.is_floating_point:
        some_infinite(image, choose)
    each = [0.5 * c for c in range(sum(channels or [1]))]
    arguments["border_value"] = choose([None, [0.5], each])
    if "order_x" in arguments:
        arguments |= {"order_x": choose([0, 1, 2]), "order_y": choose([0, 1, 2])}
    return of_warp if of_warp and of_image in ([], [1]) else of_image, channels


def warp_perspective(arguments, choose):
    leading, channels = image_and_warp(arguments, choose)
    image = arguments["image"]
    size = arguments["dsize"] = choose([[], [2, 3], [9, 17], [1, 33], [0, 4]])
    shape = leading + channels + (size or image.shape[-2:])
    is_transparent = arguments["border_mode"] == "transparent"
    destination = calcops_jit.Tensor(shape, image.dtype) if is_transparent else None
    arguments["destination"] = destination


def warp_perspective_backward(arguments, choose):
    leading, channels = image_and_warp(arguments, choose)
    arguments["grad_result"].shape = leading + channels + [choose(SIZES), choose(SIZES)]


def warp_perspective_slope(arguments, choose):
    arguments["interpolation"] = choose(["linear", "cubic"])
    leading, _ = image_and_warp(arguments, choose)
    arguments["motion"].shape[0] = choose([1, math.prod(leading)])


def warp_perspective_motion(arguments, choose):
    arguments["interpolation"] = choose(["linear", "cubic"])
    near_identity(arguments["matrices"], choose)


# ---- calcops/ops ---------------------------------------------------------------------------------


def few_directions(arguments, choose):
    """Leave as many directions as have derivatives."""
    if arguments.get("directions"):
        is_gradient = "grad_result" in arguments
        arguments["directions"].shape[2] = choose([1, 0] if is_gradient else [1, 2, 0])


def density(arguments, choose):
    few_directions(arguments, choose)
    arguments["harmonics"] = choose([1, 4, 9, 16, 25])
    arguments["grid"].values = [choose([0.0, 1.5]), 2.5]
    if "grad_result" in arguments:
        arguments["grad_result"].shape[0] = arguments["harmonics"]


def environment_spline(arguments, choose):
    few_directions(arguments, choose)
    arguments |= {"rcut_smth": 0.5, "rcut": 2.5}
    if arguments["d"].values in ("zeros", "ties"):
        arguments["d"].values = "normal"  # two atoms in one place make the sums NaN or infinite
    arguments["dstd"].values = [0.5, 0.7, 1.0, 2.0]
    arguments["grid"].values = [-1.0, 3.0]


def tabulated_sum(arguments, choose):
    cells = arguments["table"].shape[1]
    fine = choose([cells, (cells + 1) // 2])  # the cells of the first part
    middle = -1 + 0.25 * fine
    arguments["grid"].values = [-1, 0.25, middle, 0.5, middle + 0.5 * (cells - fine)]
    arguments["order"] = choose(range(8))


def screened_repulsion(arguments, choose):
    arguments["table"].values = [choose([0.0, 0.4]), 1.2, 1.0, 3.0, 0.5, 1.0, 0.3, 0.4, 0.1, 0.2]


adjust = {
    "_force_virial": force_virial,
    "_edge_force_virial": force_virial,
    "_edge_force_virial_backward": edge_force_virial_backward,
    "calculateForce": calculate,
    "calculateVirial": calculate,
    "warp_perspective": warp_perspective,
    "_warp_perspective_backward": warp_perspective_backward,
    "_warp_perspective_slope": warp_perspective_slope,
    "_warp_perspective_motion": warp_perspective_motion,
    "_warp_perspective_motion_backward": warp_perspective_motion,
    "density": density,
    "_density_along": density,
    "_density_backward": density,
    "_density_table_backward": density,
    "environment_spline": environment_spline,
    "_environment_spline_along": environment_spline,
    "_environment_spline_backward": environment_spline,
    "screened_repulsion": screened_repulsion,
    "tabulated_sum": tabulated_sum,
    "_tabulated_sum_backward": tabulated_sum,
}
