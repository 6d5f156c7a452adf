"""The force operators on a GPU: large sizes, wrong entries, streams, graphs, launches and memory.

test_force.py tests values and derivatives, on both devices. test_force_cuda_kernels.py tests the sizes
at which the kernels branch, and wrong entries.
"""

import pytest
import torch
from kernels import launches
from reference import assert_equal_lists, neighbor_force, pairs

from calcops_jit import force, force_virial

backward = torch.ops.calcops._force_virial_backward


# ---- values --------------------------------------------------------------------------------------


def on(device, tensors):
    return [x.to(device) for x in tensors]


def upstream_of(list_neigh, dE, nghost=2):
    """Return random upstream gradients of force, virial and atom_virial."""
    frames = len(list_neigh)
    atoms = list_neigh.shape[1] + nghost
    sizes = [(frames, atoms, 3), (frames, 3, 3), (frames, atoms, 3, 3)]
    return [torch.randn(*size, device=dE.device, dtype=dE.dtype) for size in sizes]


def gradients(upstream, list_neigh, *values, nghost=2):
    """Return all outputs and the gradients of dE, Ri_d and Rij."""
    leaves = [x.detach().requires_grad_() for x in values]
    outputs = force_virial(list_neigh, *leaves, nghost)
    return *outputs, *torch.autograd.grad(outputs, leaves, upstream)


def assert_equals_cpu(inputs, nghost):
    upstream = upstream_of(*inputs[:2], nghost)
    is_double = inputs[1].dtype == torch.float64
    tolerance = dict(rtol=1e-12, atol=1e-11) if is_double else dict(rtol=2e-7, atol=1e-6)
    expected = gradients(on("cpu", upstream), *on("cpu", inputs), nghost=nghost)
    results = gradients(upstream, *inputs, nghost=nghost)
    assert_equal_lists(on("cpu", results), expected, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_atoms_equal_the_cpu(gpu, dtype):
    assert_equals_cpu(pairs(1, 100_000, 100, 12, dtype, device=gpu), 100)
    assert_equals_cpu(pairs(70_000, 1, 1, 2, dtype, device=gpu), 1)


def test_inputs_may_be_aligned_to_4_bytes_only(gpu):
    inputs = pairs(dtype=torch.float32, device=gpu)
    shifted = [torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x) for x in inputs]
    assert all(x.is_contiguous() for x in shifted)
    assert all(x.data_ptr() % 16 for x in shifted)
    upstream = upstream_of(*inputs[:2])
    assert_equal_lists(gradients(upstream, *shifted), gradients(upstream, *inputs), rtol=0, atol=0)


def expect_free_memory(gigabytes):
    if torch.cuda.mem_get_info()[0] < gigabytes << 30:
        pytest.skip(f"needs {gigabytes} GiB of free GPU memory")


def test_frames_of_more_than_2_to_the_31_elements_have_the_bits_of_single_frames(gpu):
    expect_free_memory(60)
    frames, natoms, neighbors = 2, 180_000, 512
    size = (frames, natoms, neighbors)
    list_neigh = torch.randint(-1, natoms, size, device=gpu, dtype=torch.int32)
    Ri_d = torch.randn(*size, 4, 3, device=gpu)
    assert Ri_d.numel() > 2**31
    inputs = list_neigh, torch.randn(*size, 4, device=gpu), Ri_d, torch.randn(*size, 3, device=gpu)
    whole = force_virial(*inputs)
    upstream = [torch.randn_like(x) for x in whole]
    gradient = backward(*upstream, *inputs, 0, True, [True] * 3)
    for frame in range(frames):
        part = slice(frame, frame + 1)
        inputs_of_frame = [x[part] for x in inputs]
        upstream_of_frame = [x[part] for x in upstream]
        alone = force_virial(*inputs_of_frame)
        assert_equal_lists([x[part] for x in whole], alone, rtol=0, atol=0)
        alone = backward(*upstream_of_frame, *inputs_of_frame, 0, True, [True] * 3)
        assert_equal_lists([x[part] for x in gradient], alone, rtol=0, atol=0)


# ---- wrong entries -------------------------------------------------------------------------------


def test_calcops_check_names_the_first_wrong_entry_and_the_device_goes_on(gpu, monkeypatch):
    list_neigh, dE, Ri_d, Rij = pairs(device=gpu)
    list_neigh[1, 2, 3] = 7
    list_neigh[2, 0, 0] = -2
    monkeypatch.setenv("CALCOPS_CHECK", "1")
    rule = r"entries -1 or 0 <= j < n \+ nghost = 7, got 7 at frame 1, atom 2, slot 3"
    with pytest.raises(RuntimeError, match=f"^calcops::force_virial: expected `list_neigh` {rule}"):
        force_virial(list_neigh, dE, Ri_d, Rij, 2)
    upstream = [dE.new_zeros(3, 7, 3), None, None]
    with pytest.raises(RuntimeError, match=rule):
        backward(*upstream, list_neigh, dE, Ri_d, None, 2, True, [True, True, False])
    list_neigh.clamp_(-1, 6)
    assert force_virial(list_neigh, dE, Ri_d, Rij, 2)[0].isfinite().all()


def test_calcops_check_checks_nothing_in_a_captured_graph(gpu, monkeypatch):
    inputs = pairs(device=gpu)
    upstream = upstream_of(*inputs[:2])
    gradients(upstream, *inputs)  # warm up on this stream
    monkeypatch.setenv("CALCOPS_CHECK", "1")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(upstream, *inputs)
    inputs[0][1, 2, 3] = 7
    graph.replay()
    assert captured[0][1, 2].isnan().all()
    assert captured[3][1, 2].isnan().all()
    inputs[0][1, 2, 3] = -1
    graph.replay()
    assert all(x.isfinite().all() for x in captured)


# ---- streams, devices, graphs --------------------------------------------------------------------


def test_kernels_run_on_the_current_stream(gpu):
    late = pairs(natoms=50, neighbors=40, device=gpu)
    upstream = upstream_of(*late[:2])
    expected = gradients(upstream, *late)
    inputs = [torch.full_like(late[0], -1), *map(torch.zeros_like, late[1:])]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # some 25 ms: a kernel on another stream would read the zeros
        for x, value in zip(inputs, late):
            x.copy_(value)
        results = gradients(upstream, *inputs)
    stream.synchronize()
    assert_equal_lists(results, expected, rtol=0, atol=0)


def test_kernels_run_on_the_device_of_the_inputs(gpu):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    inputs = pairs()
    upstream = upstream_of(*inputs[:2])
    first, second = (gradients(on(d, upstream), *on(d, inputs)) for d in ("cuda:0", "cuda:1"))
    assert torch.cuda.current_device() == 0
    assert {x.device for x in second} == {torch.device("cuda:1")}
    assert_equal_lists(on("cpu", second), on("cpu", first), rtol=0, atol=0)


def everything(upstream, list_neigh, *values):
    """Return outputs, first and second derivatives, a tangent, and a result of vmap."""
    leaves = [x.detach().requires_grad_() for x in values]
    outputs = force_virial(list_neigh, *leaves, 2)
    first = torch.autograd.grad(outputs, leaves, upstream, create_graph=True)
    second = torch.autograd.grad(first, leaves, [x.detach() for x in leaves])
    dE, Ri_d, _ = values
    _, tangent = torch.func.jvp(lambda x: force(list_neigh, x, Ri_d, 2), (dE,), (dE,))
    stacked = (x.expand(2, *x.shape) for x in (list_neigh, *values[:2]))
    batch = torch.vmap(lambda *x: neighbor_force(*x, 2))(*stacked)
    return *outputs, *first, *second, tangent, batch


def test_the_host_never_waits(gpu):
    inputs = pairs(device=gpu)
    upstream = upstream_of(*inputs[:2])
    expected = everything(upstream, *inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = everything(upstream, *inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_equal_lists(results, expected, rtol=0, atol=0)


def test_a_captured_graph_follows_changed_inputs(gpu):
    inputs = pairs(natoms=40, neighbors=30, device=gpu, seed=1)
    upstream = upstream_of(*inputs[:2])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gradients(upstream, *inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(upstream, *inputs)
    for seed in (2, 3, 2):
        changed = pairs(natoms=40, neighbors=30, device=gpu, seed=seed)
        for x, value in zip(inputs, changed):
            x.copy_(value)
        graph.replay()
        assert_equal_lists(captured, gradients(upstream, *changed), rtol=0, atol=0)


@pytest.mark.parametrize("natoms", [3, 3000])
def test_a_call_launches_at_most_six_kernels_and_its_backward_three(gpu, natoms):
    inputs = pairs(natoms=natoms, neighbors=50, device=gpu)
    upstream = upstream_of(*inputs[:2])
    names = launches(lambda: force_virial(*inputs, 2))
    assert len(names) <= 6, names
    names = launches(lambda: force(*inputs[:3], 2))
    assert len(names) <= 6, names
    names = launches(lambda: backward(*upstream, *inputs, 2, True, [True] * 3))
    assert len(names) <= 3, names


# ---- bit for bit ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_workspace_is_below_a_quarter_of_the_inputs(gpu, dtype):
    inputs = pairs(1, 12288, 0, 138, dtype, device=gpu)
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    outputs = force_virial(*inputs)
    peak = torch.cuda.max_memory_allocated() - allocated
    workspace = peak - sum(x.nbytes for x in outputs)
    assert 0 < workspace <= sum(x.nbytes for x in inputs) / 4
