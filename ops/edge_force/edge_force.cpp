// The edge force operators as PyTorch sees them: checks, devices, derivatives, registration.
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <tuple>

#include "autograd.h"
#include "edge_force/edge_force.h"
#include "expect.h"
#include "kernel.h"

namespace calcops {
namespace {

using at::Tensor;
using c10::SymInt;
using OptTensor = std::optional<Tensor>;
using Mask = std::array<bool, 2>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

constexpr const char* kForce = "calcops::edge_force";
constexpr const char* kForceVirial = "calcops::edge_force_virial";
constexpr const char* kEdges = "calcops::_edge_force_virial";
constexpr const char* kEdgesBackward = "calcops::_edge_force_virial_backward";
constexpr const char* kOrder = "calcops::edge_order";

// Their derivatives: forces are linear in edge_gradient, virials in it and in edge_vec.
const Multilinear kDerivatives(kEdges, kEdgesBackward,
                               {{"grad_force", "edge_gradient"},
                                {"grad_virial", "edge_gradient", "edge_vec"},
                                {"grad_atom_virial", "edge_gradient", "edge_vec"}});

// ---- checks, the same for every device ----------------------------------------------------------

void check_count(const char* op, const char* name, const SymInt& count) {
  expect(op, name, count.sym_ge(0), count, ">= 0");
  // Beyond, sizes in bytes leave 64 bits. A symbol gets no guard for what cannot be.
  const int64_t known = count.maybe_as_int().value_or(0);
  expect(op, name, known <= int64_t(1) << 40, known, "of at most 2^40");
}

void check_index(const char* op, const Tensor& edge_index, const SymInt& natoms) {
  expect_dtype({op, "edge_index", edge_index}, {at::kInt, at::kLong}, "int32 or int64");
  expect(op, "edge_index",
         edge_index.dim() == 2 ? edge_index.sym_size(0).sym_eq(2) : c10::SymBool(false),
         edge_index.sym_sizes(), "of shape [2, E]");
  check_count(op, "natoms", natoms);
}

// An order counts the ends of edges in 32 bits.
void check_ends(const char* op, const Tensor& edge_index) {
  expect(op, "edge_index", edge_index.sym_size(1).sym_lt(int64_t(1) << 30), edge_index.sym_sizes(),
         "of less than 2^30 edges");
}

// Without a batch all atoms are of frame 0.
void check_frames(const char* op, const Tensor& batch, const SymInt& natoms,
                  const SymInt& nframes) {
  if (!batch.defined() && nframes.maybe_as_int() == 0)
    expect(op, "nframes", natoms.sym_eq(0), nframes, ">= 1 where `batch` is None");
}

// What all operators but edge_order take; an absent tensor is undefined.
struct Graph {
  const char* op;
  Tensor edge_index, edge_gradient, edge_vec, batch, edge_order;
  SymInt natoms, nframes;

  void check() const {
    check_index(op, edge_index, natoms);
    check_count(op, "nframes", nframes);
    if (edge_vec.defined()) check_frames(op, batch, natoms, nframes);
    const Arg index{op, "edge_index", edge_index}, gradient{op, "edge_gradient", edge_gradient};
    expect_dtype(gradient, {at::kFloat, at::kDouble}, "float32 or float64");
    expect_device(gradient, index);
    const SymInt edges = edge_index.sym_size(1);
    check_rows(gradient, {edges, 3}, "of shape [E, 3] = ");
    if (edge_vec.defined()) {
      expect_dtype_and_device({op, "edge_vec", edge_vec}, gradient);
      check_rows({op, "edge_vec", edge_vec}, {edges, 3}, "of shape [E, 3] = ");
    }
    if (batch.defined()) {
      expect_dtype({op, "batch", batch}, {at::kInt, at::kLong}, "int32 or int64");
      expect_device({op, "batch", batch}, index);
      check_rows({op, "batch", batch}, {natoms}, "of shape [natoms] = ");
    }
    if (edge_order.defined()) {
      check_ends(op, edge_index);
      expect_dtype({op, "edge_order", edge_order}, {at::kInt}, "int32");
      expect_device({op, "edge_order", edge_order}, index);
      check_rows({op, "edge_order", edge_order}, {natoms + edges * 2},
                 "from edge_order(edge_index, natoms), of shape [natoms + 2E] = ");
    }
  }

  void check_upstream(const char* name, const Tensor& gradient, c10::SymIntArrayRef shape) const {
    if (!gradient.defined()) return;
    expect_dtype_and_device({op, name, gradient}, {op, "edge_gradient", edge_gradient});
    check_rows({op, name, gradient}, shape, "of shape ");
  }

  static void check_rows(const Arg& arg, c10::SymIntArrayRef shape, const char* what) {
    expect(arg.op, arg.name, same_shape(arg.tensor.sym_sizes(), shape), arg.tensor.sym_sizes(),
           what, shape);
  }
};

// ---- the kernels --------------------------------------------------------------------------------

// Composed of PyTorch's operators: it is made once for many calls, and they know every device and
// transform. The stable sort keeps the ends of an atom in order.
Tensor edge_order(const Tensor& edge_index, SymInt natoms) try {
  check_index(kOrder, edge_index, natoms);
  check_ends(kOrder, edge_index);
  const Tensor right = edge_index.ge(0).logical_and(edge_index.lt(natoms)).all(0, true);
  const Tensor wide = holds(edge_index, natoms) ? edge_index : edge_index.to(at::kLong);
  const Tensor names = at::where(right, wide, c10::Scalar(natoms)).flatten();
  const auto [sorted, order] = names.sort(/*stable=*/true, 0, /*descending=*/false);
  // Counted, since searchsorted has no rule for vmap.
  const Tensor index = names.to(at::kLong);
  const Tensor ends = at::zeros_symint({natoms + 1}, index.options())
                          .scatter_add(0, index, at::ones_like(index))
                          .cumsum(0)
                          .narrow_symint(0, 0, natoms);
  return at::cat({ends, at::where(sorted.lt(natoms), order, -1)}).to(at::kInt);
} catch (...) {
  rethrow(kOrder, "natoms", natoms);
}

// Whether x [E, 3] is a contiguous [3, E], transposed.
bool is_transposed(const Tensor& x) {
  return x.defined() && x.is_cpu() && !x.is_contiguous() && x.mT().is_contiguous();
}

// x, or a copy of it in rows.
Tensor in_rows(const Tensor& x, bool takes_transposed) {
  return takes_transposed && is_transposed(x) ? x : contiguous(x);
}

// One call's inputs, contiguous, and the struct of pointers into them.
struct Contiguous {
  const char* op;
  Tensor edge_index, edge_gradient, edge_vec, batch, edge_order;
  int64_t atoms, edges, frames;

  // takes_transposed: what is_transposed stays so.
  explicit Contiguous(const Graph& graph, bool takes_transposed = false)
      : op(graph.op),
        edge_index(graph.edge_index.contiguous()),
        edge_gradient(in_rows(graph.edge_gradient, takes_transposed)),
        edge_vec(in_rows(graph.edge_vec, takes_transposed)),
        batch(graph.batch.defined() ? graph.batch.to(at::kLong).contiguous() : Tensor()),
        edge_order(contiguous(graph.edge_order)),
        atoms(graph.natoms.expect_int()),
        edges(edge_index.size(1)),
        frames(graph.nframes.expect_int()) {
    if (contents_are_checked(edge_index)) check_contents();
  }

  template <class Real, class Index>
  EdgeInputs<Real, Index> inputs() const {
    return {atoms,
            edges,
            frames,
            /*virial=*/edge_vec.defined(),
            read<Index>(edge_index),
            read<Real>(edge_gradient),
            read<Real>(edge_vec),
            read<int64_t>(batch),
            read<int32_t>(edge_order),
            is_transposed(edge_gradient),
            is_transposed(edge_vec)};
  }

  // `bad` is what the CPU kernels return.
  void expect_entries(int64_t bad) const {
    if (bad < 0) return;
    if (bad < edges)
      TORCH_CHECK(false, op, ": expected `edge_index` entries -1 or 0 <= i < natoms = ", atoms,
                  ", got (", edge_index[0][bad].item<int64_t>(), ", ",
                  edge_index[1][bad].item<int64_t>(), ") at edge ", bad);
    const int64_t atom = bad - edges;
    TORCH_CHECK(false, op, ": expected `batch` entries 0 <= frame < nframes = ", frames, ", got ",
                batch[atom].item<int64_t>(), " at atom ", atom);
  }

  // What CALCOPS_CHECK=1 asks for, at the price of a synchronisation on CUDA.
  void check_contents() const {
    const auto first = [](const Tensor& bad) {
      const Tensor positions = bad.nonzero();
      return positions.numel() > 0 ? positions[0].item<int64_t>() : -1;
    };
    expect_entries(first(edge_index.lt(-1).logical_or(edge_index.ge(atoms)).any(0)));
    if (batch.defined())
      if (const int64_t atom = first(batch.lt(0).logical_or(batch.ge(frames))); atom >= 0)
        expect_entries(edges + atom);
    if (edge_order.defined())
      TORCH_CHECK(at::equal(edge_order, calcops::edge_order(edge_index, atoms)), op,
                  ": expected `edge_order` of this edge_index and natoms, got that of others");
  }
};

// Force, virial and atom_virial; without edge_vec the last two are undefined.
Three sum_edges(const Graph& graph) try {
  graph.check();
  const bool virial = graph.edge_vec.defined();
  const Tensor& gradient = graph.edge_gradient;
  const auto make = [&](bool wanted, c10::SymIntArrayRef shape) {
    return wanted ? at::empty_symint(shape, gradient.options()) : Tensor();
  };
  const Tensor force = make(true, {graph.natoms, 3}), total = make(virial, {graph.nframes, 3, 3}),
               atom_virial = make(virial, {graph.natoms, 3, 3});
  if (gradient.is_meta()) return {force, total, atom_virial};
  Contiguous from(graph, /*takes_transposed=*/true);
  if (gradient.is_cuda() && !from.edge_order.defined())
    from.edge_order = edge_order(from.edge_index, graph.natoms);
  with_types(gradient, graph.edge_index, [&](auto real, auto index) {
    using Real = decltype(real);
    const auto in = from.inputs<Real, decltype(index)>();
    const EdgeOutputs<Real> to{write<Real>(force, true), write<Real>(total, virial),
                               write<Real>(atom_virial, virial)};
    if (gradient.is_cpu()) return from.expect_entries(edge_force_cpu(in, to));
#ifndef CALCOPS_NO_CUDA
    launch(gradient, edge_force_cuda_workspace(in), [&](void* workspace, cudaStream_t stream) {
      return edge_force_cuda(in, to, workspace, stream);
    });
#endif
  });
  return {force, total, atom_virial};
} catch (...) {
  const bool frames = graph.natoms.maybe_as_int() < graph.nframes.maybe_as_int();
  rethrow(graph.op, frames ? "nframes" : "natoms", frames ? graph.nframes : graph.natoms);
}

Tensor edge_force(const Tensor& edge_index, const Tensor& edge_gradient, SymInt natoms,
                  const OptTensor& edge_order) {
  return std::get<0>(sum_edges({kForce, edge_index, edge_gradient, Tensor(), Tensor(),
                                edge_order.value_or(Tensor()), natoms, 1}));
}

Three edge_force_virial(const Tensor& edge_index, const Tensor& edge_gradient,
                        const Tensor& edge_vec, SymInt natoms, const OptTensor& batch,
                        SymInt nframes, const OptTensor& edge_order) {
  // Python's None is an undefined tensor.
  expect(kForceVirial, "edge_vec", edge_vec.defined(), "none", "of shape [E, 3]");
  return sum_edges({kForceVirial, edge_index, edge_gradient, edge_vec, batch.value_or(Tensor()),
                    edge_order.value_or(Tensor()), natoms, nframes});
}

// Both of them; a result that is not wanted has no elements.
Three edge_force_virial_of(const Tensor& edge_index, const Tensor& edge_gradient,
                           const OptTensor& edge_vec, SymInt natoms, const OptTensor& batch,
                           SymInt nframes, const OptTensor& edge_order) {
  auto [force, virial, atom_virial] =
      sum_edges({kEdges, edge_index, edge_gradient, edge_vec.value_or(Tensor()),
                 batch.value_or(Tensor()), edge_order.value_or(Tensor()), natoms, nframes});
  if (!virial.defined()) {
    virial = at::empty({0}, edge_gradient.options());
    atom_virial = at::empty({0}, edge_gradient.options());
  }
  return {force, virial, atom_virial};
}

// Gradients of edge_gradient and edge_vec; one that is not wanted has no elements.
std::tuple<Tensor, Tensor> edge_force_virial_backward(
    const OptTensor& grad_force, const OptTensor& grad_virial, const OptTensor& grad_atom_virial,
    const Tensor& edge_index, const Tensor& edge_gradient, const OptTensor& edge_vec, SymInt natoms,
    const OptTensor& batch, SymInt nframes, Mask output_mask, const OptTensor& edge_order) {
  const Graph graph{kEdgesBackward,
                    edge_index,
                    edge_gradient,
                    edge_vec.value_or(Tensor()),
                    batch.value_or(Tensor()),
                    edge_order.value_or(Tensor()),
                    natoms,
                    nframes};
  graph.check();
  const Tensor gF = contiguous(grad_force), gV = contiguous(grad_virial),
               gAV = contiguous(grad_atom_virial);
  graph.check_upstream("grad_force", gF, {natoms, 3});
  graph.check_upstream("grad_virial", gV, {nframes, 3, 3});
  graph.check_upstream("grad_atom_virial", gAV, {natoms, 3, 3});
  expect(kEdgesBackward, "edge_vec",
         graph.edge_vec.defined() || !(gV.defined() || gAV.defined() || output_mask[1]), "none",
         "where a virial or edge_vec has a gradient");
  const auto make = [&](bool wanted) {
    return wanted ? at::empty_symint(edge_gradient.sym_sizes(), edge_gradient.options())
                  : at::empty({0}, edge_gradient.options());
  };
  const Tensor to_gradient = make(output_mask[0]), to_vec = make(output_mask[1]);
  if (edge_gradient.is_meta()) return {to_gradient, to_vec};
  const Contiguous from(graph);
  with_types(edge_gradient, edge_index, [&](auto real, auto index) {
    using Real = decltype(real);
    const auto in = from.inputs<Real, decltype(index)>();
    const EdgeUpstream<Real> upstream{read<Real>(gF), read<Real>(gV), read<Real>(gAV)};
    const EdgeGradients<Real> to{write<Real>(to_gradient, output_mask[0]),
                                 write<Real>(to_vec, output_mask[1])};
    if (edge_gradient.is_cpu())
      return from.expect_entries(edge_force_backward_cpu(in, upstream, to));
#ifndef CALCOPS_NO_CUDA
    launch(edge_gradient, 0, [&](void*, cudaStream_t stream) {
      return edge_force_backward_cuda(in, upstream, to, stream);
    });
#endif
  });
  return {to_gradient, to_vec};
}

// ---- vmap and registration ----------------------------------------------------------------------

// The mapped graphs become one: atom a of graph k is a + k natoms there, frame f is f + k nframes.
tensor_list vmap_graphs(Call call, const SymInt& graphs) {
  const Tensor edge_index = call.tensor("edge_index");
  const SymInt natoms = call["natoms"].toSymInt(), edges = edge_index.sym_size(2);
  const SymInt nframes = call.has("nframes") ? call["nframes"].toSymInt() : SymInt(1);
  // names [graphs, count of names]; what is wrong stays wrong.
  const auto shifted = [&](const Tensor& names, const SymInt& count) {
    const Tensor wide = names.to(at::kLong);
    const Tensor step = at::arange(graphs, wide.options()).mul(c10::Scalar(count)).unsqueeze(1);
    const Tensor outside = at::where(wide.eq(-1), -1, c10::Scalar(count * graphs));
    return at::where(wide.ge(0).logical_and(wide.lt(count)), wide.add(step), outside);
  };
  call["edge_index"] = at::stack({shifted(edge_index.select(1, 0), natoms).flatten(),
                                  shifted(edge_index.select(1, 1), natoms).flatten()});
  call["natoms"] = natoms * graphs;
  call["edge_order"] = c10::IValue();
  if (call.has("nframes")) {
    const Tensor batch = call.tensor("batch");
    check_frames(call.op.schema().name().c_str(), batch, natoms, nframes);
    const Tensor frames =
        batch.defined() ? batch : at::zeros_symint({graphs, natoms}, edge_index.options());
    call["nframes"] = nframes * graphs;
    call["batch"] = shifted(frames, nframes).flatten();
  }
  for (const char* name :
       {"edge_gradient", "edge_vec", "grad_force", "grad_virial", "grad_atom_virial"})
    if (call.has(name) && call.tensor(name).defined()) call[name] = call.tensor(name).flatten(0, 1);

  tensor_list results = call.run();
  const bool backward = call.has("output_mask");
  for (size_t i = 0; i < results.size(); ++i) {
    const bool wanted = backward ? call["output_mask"].toBoolList()[i]
                                 : i == 0 || call.tensor("edge_vec").defined();
    const SymInt& rows = backward ? edges : i == 1 ? nframes : natoms;
    results[i] = results[i].unflatten_symint(0, {graphs, wanted ? rows : SymInt(0)});
  }
  return results;
}

TORCH_LIBRARY_FRAGMENT(calcops, m) {
  define<&edge_force, kDerivatives, vmap_with<vmap_graphs>>(
      m,
      "edge_force(Tensor edge_index, Tensor edge_gradient, SymInt natoms, *, "
      "Tensor? edge_order=None) -> Tensor");
  define<&edge_force_virial, kDerivatives, vmap_with<vmap_graphs>>(
      m,
      "edge_force_virial(Tensor edge_index, Tensor edge_gradient, Tensor edge_vec, SymInt natoms, "
      "Tensor? batch=None, SymInt nframes=1, *, Tensor? edge_order=None) -> "
      "(Tensor force, Tensor virial, Tensor atom_virial)");
  define<&edge_force_virial_of, kDerivatives, vmap_with<vmap_graphs>>(
      m,
      "_edge_force_virial(Tensor edge_index, Tensor edge_gradient, Tensor? edge_vec, "
      "SymInt natoms, Tensor? batch=None, SymInt nframes=1, *, Tensor? edge_order=None) -> "
      "(Tensor, Tensor, Tensor)");
  define<&edge_force_virial_backward, kDerivatives, vmap_with<vmap_graphs>>(
      m,
      "_edge_force_virial_backward(Tensor? grad_force, Tensor? grad_virial, "
      "Tensor? grad_atom_virial, Tensor edge_index, Tensor edge_gradient, Tensor? edge_vec, "
      "SymInt natoms, Tensor? batch=None, SymInt nframes=1, bool[2] output_mask=[True, True], *, "
      "Tensor? edge_order=None) -> (Tensor, Tensor)");
  define<&edge_order>(m, "edge_order(Tensor edge_index, SymInt natoms) -> Tensor");
}

}  // namespace
}  // namespace calcops
