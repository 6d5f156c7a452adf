// SPDX-License-Identifier: GPL-2.0-or-later
//
// pair_style calcops MODEL.pt2|MODEL.pt ...
// pair_coeff * * NAME|NULL ...      the model's name of each of LAMMPS's atom types; NULL, in a
//                                   hybrid style: the model does not get these atoms
//
// Computes energy, forces and virial by a model that ../potentials/package.py saved. Several models
// are a committee: the first one moves the atoms, and the deviations of all forces and virials from
// their mean measure the error. README.md says how to build and run it.
#pragma once

#include <optional>
#include <string>
#include <utility>
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
  void modify_params(int narg, char** arg) override;
  void init_style() override;
  double init_one(int i, int j) override;
  void compute(int eflag, int vflag) override;
  int pack_forward_comm(int n, int* atoms, double* buffer, int pbc_flag, int* pbc) override;
  void unpack_forward_comm(int n, int first, double* buffer) override;
  int pack_reverse_comm(int n, int first, double* buffer) override;
  void unpack_reverse_comm(int n, int* atoms, double* buffer) override;
  void* extract(const char* name, int& dimensions) override;
  void* extract_peratom(const char* name, int& columns) override;
  double memory_usage() override;

 private:
  // The atoms of one call of the model. On a CPU, a block is so small that the model's intermediate
  // results stay in the cache. All atoms are one block on a GPU, and also for a model that passes
  // messages, since each smaller block would need many atoms around it.
  struct NearPair {
    double d[3];  // r_j - r_i
    int64_t j;    // its place in block.atoms
  };
  struct Block {
    // Valid as long as LAMMPS's list; for a model that passes messages, for one step.
    int64_t centres;         // the number of centres
    std::vector<int> atoms;  // LAMMPS's numbers of the centres, then of the others in their rows
    std::vector<int> ends;   // where each centre's row ends in `rows`
    std::vector<int> rows;   // neighbours within cutoff and skin, by their places in `atoms`
    int64_t K = 1;           // the longest row so far
    // Valid as long as LAMMPS's list, if the model takes all slots. Otherwise list_neigh has the
    // pairs within the cutoff of one step.
    at::Tensor list_neigh;  // [1, centres, K]
    at::Tensor named;       // [centres K], list_neigh with 0 in place of -1
    at::Tensor edge_order;  // calcops::edge_order of its edges
    // What is unlike the model's training: the most neighbours beyond sel, and a too short pair.
    struct {
      int atom = -1;  // LAMMPS's number; -1: none
      int64_t type, count;
    } crowded;
    struct {
      int i = -1, j;  // LAMMPS's numbers; -1: none
      double length;
    } near;
    // Only for a model that passes messages.
    at::Tensor owned;  // [centres], true if the energy counts on this rank
    // Valid for one step.
    at::Tensor types;                              // [atoms]
    at::Tensor Rij;                                // [1, centres, K, 3]
    std::vector<std::vector<at::Tensor>> results;  // of the first model, or of each
  };

  at::Device own_gpu() const;
  bool passes_messages() const { return models_[0].layers > 1; }
  bool takes_all_slots() const {
    return !passes_messages() && (models_[0].device.is_cuda() || models_[0].takes_order);
  }
  void forget_types();
  void copy_exclusions();
  void find_centres();
  void refuse_lost_pairs() const;
  void refuse_new_atoms() const;
  void refuse_weighted_bonds() const;
  void refuse_few_ghosts() const;
  [[noreturn]] void refuse_coincidence(int i, int j) const;
  void refuse_infinite(const Block& block, const at::Tensor& force) const;
  void build_blocks();
  void fill_rows(Block& block) const;
  void find_types(Block& block) const;
  void find_pairs(Block& block) const;
  void find_graph(Block& block) const;
  void find_edge_order(Block& block) const;
  template <class Real>
  void find_near_pairs(Block& block) const;
  void compare_with_training(Block& block, int64_t i, const NearPair* pairs, int64_t near) const;
  void compare_with_training(Block& block) const;
  void warn_of_unlike(Block& block);
  void add(Block& block);
  void add_deviations();

  std::vector<Model> models_;
  std::vector<int64_t> model_type_;  // of LAMMPS's types, which start from 1; -1: NULL
  bool is_initialized_ = false;      // for these models and types, by init_style()
  std::optional<bigint> list_step_;  // of the list that blocks_ have; none since init_style()
  // What `neigh_modify exclude` excludes in this run.
  struct {
    std::vector<std::pair<int, int>> types;
    std::vector<std::pair<int, int>> groups;  // their bits
    int molecules = 0;                        // the bits of their groups
  } excluded_;
  int whole_groups_ = 0;      // bits of groups with all atoms of the model; 0: not known
  std::vector<int> centres_;  // this rank's own atoms that the model gets
  std::vector<Block> blocks_;
  std::vector<int64_t> sel_;      // of the models, the least for each type; empty: no limit
  std::vector<double> shortest_;  // of the models, the longest for each two types
  bool warned_of_crowded_ = false, warned_of_near_ = false, warned_of_hidden_ = false;

  // Only for a committee, in steps that compute deviations.
  int deviations_wanted_ = 0;      // `fix pair` sets it to 1 if it takes deviations of this step
  std::vector<double> forces_;     // [atoms with ghosts, models, 3]
  std::vector<double> virials_;    // [models, 9]
  std::vector<double> deviation_;  // [atoms], of the forces
};

}  // namespace LAMMPS_NS
