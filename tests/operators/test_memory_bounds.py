"""CPU kernels access no memory beyond their tensors.

A process calls every operator that has kernels, with tensors that end at a page which may not be
accessed, and with tensors that begin at one. A wrong access kills the process. Run as a program,
this file is that process.
"""

import ctypes
import faulthandler
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import calcops.ops
import pytest
import reference
import test_density
import test_environment_spline
import test_tabulated_sum
import torch
from fuzz import DTYPES, INDICES
from programs import LIBRARIES, ROOT
from reference_warp_perspective import BORDERS, IDENTITY, INTERPOLATIONS, TILTED, random_image
from reference_warp_perspective import DTYPES as PIXELS

import calcops_jit

models = calcops.ops.library
FOLDER = Path(__file__).parent
TYPES = tuple(zip(DTYPES, INDICES, strict=True))
THREADS = itertools.cycle((1, 2, 2, 1))  # of the calls
# Around the numbers of lanes of vectors.
SIZES = 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33


def call(operator, *arguments, orders):
    """Call an operator with tensors at pages, and differentiate the results `orders` times.

    The last line of the output is then that of the call that failed.
    """
    end_at_pages = ctypes.c_int.in_dll(ctypes.CDLL(None), "tensors_end_at_pages")
    for end_at_pages.value in (True, False):
        torch.set_num_threads(next(THREADS))
        shown = [(list(x.shape), x.dtype) if torch.is_tensor(x) else x for x in arguments]
        place = "end" if end_at_pages.value else "begin"
        print(f"{operator}, tensors {place} at pages:", *shown, flush=True)
        # A copy has memory of its own, and the same strides.
        own = [x.clone() if torch.is_tensor(x) else x for x in arguments]
        leaves = [x for x in own if torch.is_tensor(x) and x.requires_grad]
        results = operator(*own)
        results = [results] if torch.is_tensor(results) else results
        for _ in range(orders):
            results = [x for x in results if x is not None and x.requires_grad]
            if results:
                sums = sum(x.sum() for x in results)
                results = torch.autograd.grad(sums, leaves, create_graph=True, allow_unused=True)


def call_density():
    for F, (dtype, index), kinds in itertools.product(SIZES, TYPES, (1, 3)):
        for n, K, rows, harmonics in ((1, 1, 6, 1), (3, 9, 6, 25), (9, F, 7, 9)):
            d, kind, table, *rest = test_density.inputs(
                n, K, F, harmonics, rows, dtype=dtype, index=index, kinds=kinds
            )
            leaves = d.requires_grad_(), kind, table.requires_grad_()
            call(models.density, *leaves, *rest, orders=3)


def call_environment_spline():
    for K, (dtype, index), functions in itertools.product(SIZES, TYPES, (6, 7, 8, 9, 16)):
        for spline in ("quintic", "cubic"):
            d, *rest = test_environment_spline.inputs(3, K, functions, spline, dtype, index)
            call(models.environment_spline, d.requires_grad_(), *rest, orders=3)


def call_tabulated_sum():
    for M, (dtype, index), K in itertools.product(SIZES, TYPES, (1, 2, 9)):
        x, R, *rest = test_tabulated_sum.inputs(3, K, M, dtype, index=index)
        call(models.tabulated_sum, x.requires_grad_(), R.requires_grad_(), *rest, orders=2)


def call_matrix_product():
    for M, dtype, rows, K in itertools.product(SIZES, DTYPES, (1, 5, 6, 7, 49), (1, 3, 8)):
        x = torch.ones(rows, K, dtype=dtype)
        call(models.matrix_product, x, torch.ones(K, M, dtype=dtype), orders=0)


def call_force():
    for K, (dtype, index), natoms in itertools.product(SIZES, TYPES, (1, 2, 5)):
        for nghost in (0, 1):
            neighbors, *values = reference.pairs(2, natoms, nghost, K, dtype, index)
            dE, Ri_d, Rij = (x.requires_grad_() for x in values)
            call(calcops_jit.force, neighbors, dE, Ri_d, nghost, orders=2)
            call(calcops_jit.force_virial, neighbors, dE, Ri_d, Rij, nghost, orders=2)


def call_edge_force():
    for E, (dtype, index), natoms in itertools.product(SIZES, TYPES, (1, 2, 5, 65)):
        edges, *vectors, _, batch, frames = reference.graph(natoms, E, 2, dtype, index)
        for layout in LAYOUTS[:2]:
            g, vec = (layout(x).requires_grad_() for x in vectors)
            call(calcops_jit.edge_force, edges, g, natoms, orders=2)
            call(calcops_jit.edge_force_virial, edges, g, vec, natoms, batch, frames, orders=2)


def call_warp_perspective():
    shapes = (1, 1, 1), (2, 3, 4), (1, 5, 7), (1, 8, 8), (3, 9, 17), (1, 16, 15), (1, 33, 130)
    maps = IDENTITY, TILTED, torch.tensor([[-1, 0, 6.5], [0, -1, 7.5], [0, 0, 1]]).double()
    layouts = itertools.cycle(LAYOUTS)
    borders = (*BORDERS, "transparent")
    for options in itertools.product(INTERPOLATIONS, borders, maps, PIXELS, shapes):
        interpolation, border_mode, warp, dtype, shape = options
        image = next(layouts)(random_image(*shape, dtype=dtype))
        destination = torch.zeros(shape, dtype=dtype) if border_mode == "transparent" else None
        if dtype in DTYPES:  # the derivatives of other dtypes have no kernels of their own
            image.requires_grad_()
            warp = warp.clone().requires_grad_()
        rest = shape[1:], interpolation, border_mode, None, False, destination
        call(calcops_jit.warp_perspective, image, warp, *rest, orders=2 * (dtype in DTYPES))


LAYOUTS = (
    torch.Tensor.contiguous,
    lambda x: x.mT.contiguous().mT,
    lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
)
OPERATORS = {
    "density": call_density,
    "edge_force": call_edge_force,
    "environment_spline": call_environment_spline,
    "force": call_force,
    "matrix_product": call_matrix_product,
    "tabulated_sum": call_tabulated_sum,
    "warp_perspective": call_warp_perspective,
}


@pytest.fixture(scope="module")
def protected_pages(tmp_path_factory):
    """Return the library that puts tensors at protected pages."""
    compiler = shutil.which("cc")
    if not compiler:
        pytest.skip("there is no C compiler")
    if "san" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("a sanitizer allocates the memory")
    library = tmp_path_factory.mktemp("protected_pages") / "protected_pages.so"
    source = FOLDER / "protected_pages.c"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", source, "-o", library], check=True)
    return library


def test_every_folder_with_kernels_has_calls():
    folders = {path.parent.name for ops in LIBRARIES for path in ops.glob("*/*_cpu.cpp")}
    assert folders == OPERATORS.keys()


def test_kernels_access_no_memory_beyond_their_tensors(protected_pages):
    folders = os.pathsep.join(map(str, (ROOT, FOLDER.parent, FOLDER)))
    environment = os.environ | {"PYTHONPATH": folders, "LD_PRELOAD": str(protected_pages)}
    calls = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, check=False
    )
    last = calls.stdout.splitlines()[-1:]
    assert calls.returncode == 0, f"{last}\n{calls.stderr}"


if __name__ == "__main__":
    faulthandler.enable()
    for call_operator in OPERATORS.values():
        call_operator()
