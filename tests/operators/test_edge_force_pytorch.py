"""edge_force under opcheck, torch.compile and torch.export."""

import torch
from reference import assert_equal_lists, graph, opcheck
from test_edge_force import SMALL, backward, differentiable_graph

from calcops_jit import edge_force, edge_force_virial, edge_order


def test_opcheck_passes(device):
    inputs = differentiable_graph(**SMALL, device=device)
    edge_index, gradient, _, natoms, *_ = inputs
    order = edge_order(edge_index, natoms)
    opcheck(edge_order, (edge_index, natoms))
    opcheck(edge_force, (edge_index, gradient, natoms), {"edge_order": order})
    opcheck(edge_force_virial, inputs)
    opcheck(edge_force_virial, inputs[:4])
    upstream = [x.detach().requires_grad_() for x in edge_force_virial(*inputs)]
    opcheck(backward, (*upstream, *inputs, [True, True]))
    of_force = upstream[0], None, None, edge_index, gradient, None, natoms, None, 1, [True, False]
    opcheck(backward, of_force)


def force_matching(edge_index, g, v, positions):
    F, W, _ = torch.ops.calcops.edge_force_virial(edge_index, g.sin(), v, positions.shape[0])
    return F + positions, W


def test_compile_makes_one_graph_for_all_sizes_with_the_results_and_gradients_of_eager(device):
    torch._dynamo.reset()
    compiled = torch.compile(force_matching, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for natoms, edges in ((7, 23), (9, 40), (11, 31)):
            edge_index, g, v, *_ = differentiable_graph(natoms=natoms, edges=edges, device=device)
            positions = torch.zeros(natoms, 3, dtype=torch.float64, device=device)
            results = []
            for function in (compiled, force_matching):
                F, W = function(edge_index, g, v, positions)
                gradients = torch.autograd.grad(F.square().sum() + W.square().sum(), (g, v))
                results.append((F, W, *gradients))
            assert_equal_lists(*results, rtol=1e-12, atol=1e-12)


def test_compile_takes_an_unbacked_number_of_edges():
    torch._dynamo.reset()
    edge_index, g, v, *_ = graph()
    for x, dimension in ((edge_index, 1), (g, 0), (v, 0)):
        torch._dynamo.decorators.mark_unbacked(x, dimension)
    compiled = torch.compile(force_matching, fullgraph=True, backend="aot_eager")
    positions = torch.zeros(7, 3, dtype=torch.float64)
    expected = force_matching(edge_index, g, v, positions)
    assert_equal_lists(compiled(edge_index, g, v, positions), expected, rtol=0, atol=0)


def test_an_exported_program_runs_at_other_sizes():
    class Model(torch.nn.Module):
        def forward(self, *inputs):
            return force_matching(*inputs)

    def example(natoms, edges):
        edge_index, g, v, *_ = graph(natoms=natoms, edges=edges)
        return edge_index, g, v, torch.zeros(natoms, 3, dtype=torch.float64)

    edges = torch.export.Dim("edges", min=2)
    atoms = torch.export.Dim("atoms", min=2)
    shapes_of_inputs = ({1: edges}, {0: edges}, {0: edges}, {0: atoms})
    # The model takes *inputs, which is one argument for torch.export.
    shapes = (shapes_of_inputs,)
    program = torch.export.export(Model(), example(7, 23), dynamic_shapes=shapes)
    for sizes in ((7, 23), (3, 90), (20, 5)):
        inputs = example(*sizes)
        assert_equal_lists(program.module()(*inputs), force_matching(*inputs), rtol=0, atol=0)
