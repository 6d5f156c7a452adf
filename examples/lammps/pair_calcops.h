// SPDX-License-Identifier: GPL-2.0-or-later
//
// pair_style calcops MODEL.pt2|MODEL.pt
// pair_coeff * * NAME ...                     what the model calls each of LAMMPS's atom types
//
// Energy, forces and virial of a model with the interface of ../potentials/potential.py, saved by
// ../potentials/package.py. README.md says how to build and run it.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "pair.h"

namespace LAMMPS_NS {

class PairCalcOps : public Pair {
 public:
  explicit PairCalcOps(LAMMPS* lmp);
  ~PairCalcOps() override;

  void settings(int narg, char** arg) override;
  void coeff(int narg, char** arg) override;
  void init_style() override;
  double init_one(int, int) override { return cutoff_; }
  void compute(int eflag, int vflag) override;
  double memory_usage() override;

 private:
  using Metadata = std::unordered_map<std::string, std::string>;

  Metadata load_package(const std::string& file);
  Metadata load_archive(const std::string& file);
  at::Device own_device() const;
  void build_rows();
  void find_vectors();
  void add(const std::vector<at::Tensor>& results);

  std::function<std::vector<at::Tensor>()> model_;  // of the tensors below
  at::Device device_ = at::kCPU;
  at::ScalarType dtype_ = at::kDouble;
  double cutoff_ = 0;
  std::string units_;
  std::vector<std::string> type_names_;
  int64_t neighbors_ = 0;            // the most slots that the model takes; 0: any number
  bool takes_index_ = false;         // the model takes neighbor_index_
  std::vector<int64_t> model_type_;  // of LAMMPS's types, which start from 1

  // n = nlocal, m = nghost, K = the longest row. All but the vectors live as long as LAMMPS's list.
  at::Tensor types_;           // [n+m]
  at::Tensor list_neigh_;      // [1, n, K]
  at::Tensor named_;           // [nK], list_neigh_ with 0 in place of -1
  at::Tensor neighbor_index_;  // calcops::neighbor_index
  at::Tensor Rij_;             // [1, n, K, 3]
};

}  // namespace LAMMPS_NS
