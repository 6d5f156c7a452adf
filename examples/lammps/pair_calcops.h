// SPDX-License-Identifier: GPL-2.0-or-later
//
// pair_style calcops MODEL.pt2|MODEL.pt ...
// pair_coeff * * NAME|NULL ...      what the model calls each of LAMMPS's atom types; NULL, in a
//                                   hybrid style: atoms that it does not see
//
// Energy, forces and virial of a model with the interface of ../potentials/potential.py, saved by
// ../potentials/package.py. Of several, the first moves the atoms, and how far the forces and
// virials of all deviate from their mean tells how far to trust it. README.md says how to build and
// run it.
#pragma once

#include <string>
#include <vector>

#include "model.h"
#include "pair.h"

namespace LAMMPS_NS {

class PairCalcOps : public Pair {
 public:
  explicit PairCalcOps(LAMMPS* lmp);
  ~PairCalcOps() override;

  void settings(int narg, char** arg) override;
  void coeff(int narg, char** arg) override;
  void init_style() override;
  double init_one(int i, int j) override;
  void compute(int eflag, int vflag) override;
  int pack_reverse_comm(int n, int first, double* buffer) override;
  void unpack_reverse_comm(int n, int* atoms, double* buffer) override;
  void* extract(const char* name, int& dimensions) override;
  void* extract_peratom(const char* name, int& columns) override;
  double memory_usage() override;

 private:
  // Centres for one call of the model, so few that what it makes of them stays in the cache; all
  // of them for a model that passes messages, as those of a block would need many atoms around it.
  struct Block {
    // As long as LAMMPS's list lives; of a model that passes messages, of one step. Other than
    // that, atoms have their place in `atoms` as number.
    int64_t centres;         // how many
    std::vector<int> atoms;  // LAMMPS's numbers of the centres, then of the others in their rows
    std::vector<int> ends;   // where each centre's row ends in
    std::vector<int> rows;   // its neighbours within cutoff and skin
    int64_t K = 1;           // the longest row so far
    at::Tensor types;        // [atoms]
    // Of a model that takes all slots, on a GPU; otherwise pairs beyond the cutoff are left out in
    // each step.
    at::Tensor list_neigh;  // [1, centres, K]
    at::Tensor named;       // [centres K], list_neigh with 0 in place of -1
    at::Tensor edge_order;  // calcops::edge_order of its edges
    // Of a model that passes messages.
    at::Tensor owned;  // [centres], whose energies count here
    // Of one step.
    at::Tensor Rij;                                // [1, centres, K, 3]
    std::vector<std::vector<at::Tensor>> results;  // of the first model, or of each
  };

  at::Device own_gpu() const;
  bool passes_messages() const { return models_[0].layers > 1; }
  bool takes_all_slots() const {
    return !passes_messages() && (models_[0].device.is_cuda() || models_[0].takes_order);
  }
  void refuse_weighted_bonds() const;
  void refuse_few_ghosts() const;
  [[noreturn]] void refuse_coincidence(int i, int j) const;
  void build_blocks();
  void fill_rows(Block& block) const;
  void find_pairs(Block& block) const;
  void find_graph(Block& block) const;
  void find_edge_order(Block& block) const;
  template <class Real>
  void find_near_pairs(Block& block) const;
  void add(Block& block);
  void add_deviations();

  std::vector<Model> models_;
  std::vector<int64_t> model_type_;  // of LAMMPS's types, which start from 1; -1: NULL
  std::vector<Block> blocks_;

  // Of a committee, in steps that tell how far its models deviate.
  int deviations_wanted_ = 0;      // by `fix pair`, in this step
  std::vector<double> forces_;     // [atoms with ghosts, models, 3]
  std::vector<double> virials_;    // [models, 9]
  std::vector<double> deviation_;  // [atoms] of the forces
};

}  // namespace LAMMPS_NS
