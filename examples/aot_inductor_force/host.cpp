// Runs the package of energy_model.py for crystals of several sizes, and adds an interaction of its
// own.
//
//     host PACKAGE [cpu|cuda] [RESULTS]
//
// README.md shows what is printed. RESULTS gets every tensor, for torch.load.
#include <ATen/ATen.h>
#include <calcops.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>
#include <stdexcept>

constexpr double kShake = 0.1;   // Angstrom
constexpr double kCore = 900.0;  // eV Angstrom^12

struct System {
  at::Tensor types, list_neigh, Rij;
  at::Tensor origin;  // [n + nghost], the atom that each is or is an image of
  int64_t nghost;
};

// A rock salt crystal of edge^3 ions, shaken a little, and as ghosts the images within the cutoff
// of its box.
System crystal(int64_t edge, double spacing, double cutoff) {
  const at::Tensor axis = at::arange(edge, at::kDouble), image = at::arange(-1, 2, at::kDouble);
  const at::Tensor cell = at::cartesian_prod({axis, axis, axis});
  const at::Tensor shift = at::cartesian_prod({image, image, image}) * (edge * spacing);
  const int64_t natoms = cell.size(0);
  const at::Tensor local =
      spacing * cell + kShake * at::arange(1, 3 * natoms + 1, at::kDouble).view_as(cell).sin();
  const at::Tensor images = (local + shift.unsqueeze(1)).flatten(0, 1);
  at::Tensor near =
      (images > -cutoff - kShake).logical_and(images < edge * spacing + cutoff).all(1);
  near.view({27, natoms})[13].fill_(false);  // the box itself
  const at::Tensor ghost = near.nonzero().squeeze(1);
  const at::Tensor origin = at::cat({at::arange(natoms), ghost.remainder(natoms)});

  const at::Tensor all = at::cat({local, images.index({ghost})});
  const at::Tensor Rij = all - local.unsqueeze(1);  // [n, n+m, 3]
  const at::Tensor r = Rij.norm(2, -1);
  const at::Tensor far = (r >= cutoff).logical_or(r == 0);
  const int64_t slots = far.logical_not().sum(1).max().item<int64_t>();
  const auto [distance, nearest] =
      r.masked_fill(far, std::numeric_limits<double>::infinity()).topk(slots, 1, /*largest=*/false);
  const at::Tensor list_neigh = nearest.masked_fill(distance.isinf(), -1);  // -1: an empty slot
  const at::Tensor pairs = Rij.gather(1, nearest.unsqueeze(-1).expand({natoms, slots, 3}));
  const at::Tensor types = cell.sum(1).remainder(2).to(at::kLong).index({origin});
  return {types, list_neigh.unsqueeze(0), pairs.unsqueeze(0), origin, ghost.size(0)};
}

// E_i = 1/2 sum_j kCore / r^12. One operator serves every potential: with Ri = (1/r, 0, 0, 0), dE
// is dE_i/d(1/r) and Ri_d is d(1/r)/dr_i.
std::tuple<at::Tensor, at::Tensor, at::Tensor> core_repulsion(const System& s) {
  const at::Tensor inverse = s.Rij.norm(2, -1, /*keepdim=*/true).reciprocal();
  const at::Tensor dE = at::constant_pad_nd(6 * kCore * inverse.pow(11), {0, 3});
  const at::Tensor Ri_d = at::constant_pad_nd((s.Rij * inverse.pow(3)).unsqueeze(3), {0, 0, 0, 3});
  return calcops::force_virial(s.list_neigh, dE, Ri_d.flatten(2, 3), s.Rij, s.nghost);
}

int main(int argc, char** argv) try {
  if (argc < 2) throw std::invalid_argument("host PACKAGE [cpu|cuda] [RESULTS]");
  const at::Device device(argc > 2 ? argv[2] : "cpu");
  torch::inductor::AOTIModelPackageLoader model(argv[1]);
  const double cutoff =
      std::stod(model.get_metadata().at("cutoff"));  // what energy_model.py put there
  std::vector<c10::IValue> results;

  for (const int64_t edge : {2, 4, 6}) {
    const double spacing = 2.6 + 0.05 * edge;  // Angstrom; so the number of neighbours differs, too
    System s = crystal(edge, spacing, cutoff);
    for (at::Tensor* x : {&s.types, &s.list_neigh, &s.Rij, &s.origin}) *x = x->to(device);
    const std::vector<at::Tensor> outputs = model.run({s.types, s.list_neigh, s.Rij});
    const at::Tensor &energy = outputs[0], &force = outputs[2], &virial = outputs[3];
    const auto [core_force, core_virial, core_atom_virial] = core_repulsion(s);
    const int64_t natoms = s.list_neigh.size(1);

    // What acts on a ghost acts on the atom that it is an image of.
    const at::Tensor total = (force + core_force)[0];
    const at::Tensor folded =
        at::zeros_like(total).index_add(0, s.origin, total).slice(0, 0, natoms);
    const double volume = std::pow(edge * spacing, 3);
    std::printf(
        "%3ld atoms, %3ld ghosts, %2ld slots: %12.9f eV/atom, force up to %11.9f eV/A, pressure "
        "%11.9f eV/A^3\n",
        natoms, s.nghost, s.list_neigh.size(2), energy.item<double>() / natoms,
        folded.abs().max().item<double>(),
        (virial + core_virial).sum({0}).trace().item<double>() / (3 * volume));

    std::vector<c10::IValue> row{s.types, s.list_neigh, s.Rij};
    row.insert(row.end(), outputs.begin(), outputs.end());
    row.insert(row.end(), {core_force, core_virial, core_atom_virial});
    results.emplace_back(c10::ivalue::Tuple::create(std::move(row)));
  }
  if (argc > 3) {
    const auto bytes = torch::jit::pickle_save(c10::ivalue::Tuple::create(std::move(results)));
    std::ofstream(argv[3], std::ios::binary).write(bytes.data(), bytes.size());
  }
} catch (const std::exception& error) {
  std::fprintf(stderr, "host: %s\n", error.what());
  return 1;
}
