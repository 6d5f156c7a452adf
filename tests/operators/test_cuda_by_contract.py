"""CUDA kernels give the CPU's results and gradients, in calls that are drawn from contracts."""

import sys
from pathlib import Path

import calcops.ops
import contract_cases
import pytest
from kernels import EMULATED, EmulatedBelowAutograd, write_kernels_that_ran
from programs import run

import calcops_jit

pytest.importorskip("hypothesis")
from _calcops_jit.testing import transforms
from _calcops_jit.testing.derivatives import with_gradients

CASES = Path(contract_cases.__file__)


@pytest.mark.parametrize("library", ["calcops", "calcops_models"])
def test_a_gpu_gives_the_results_of_the_cpu(gpu, library):
    """A process of its own makes the calls: a fork cannot use CUDA after its parent has used it."""
    options = "--operators * --only cuda --seconds 5 --cases".split()
    run(sys.executable, "-m", "calcops_jit", "test", library, *options, CASES)


def on_emulated_cuda(call):
    """Take the place of transforms.on_cuda."""
    with EmulatedBelowAutograd():
        results = with_gradients(call.changed({}))
    write_kernels_that_ran()
    return results


if EMULATED:
    transforms.on_cuda = on_emulated_cuda

    def emulated_tests_of(library, operators):
        options = dict(only="cuda", seconds=1, adjust=contract_cases.adjust)
        return calcops_jit.tests_of(library, operators, **options)

    test_force = emulated_tests_of("calcops", "force*,_force*")
    test_edge_force = emulated_tests_of("calcops", "edge_force*,_edge_force*")
    test_warp_perspective = emulated_tests_of("calcops", "*warp*")
    test_density = emulated_tests_of(calcops.ops.library, "density,_density*")
    test_density_net = emulated_tests_of(calcops.ops.library, "density_net")
    test_environment_spline = emulated_tests_of(calcops.ops.library, "*environment_spline*")
    test_tabulated_sum = emulated_tests_of(calcops.ops.library, "*tabulated_sum*")
    test_near_pairs = emulated_tests_of(calcops.ops.library, "near_pairs")
    test_screened_repulsion = emulated_tests_of(calcops.ops.library, "screened_repulsion")
    test_matrix_product = emulated_tests_of(calcops.ops.library, "matrix_product")
