// SPDX-License-Identifier: GPL-2.0-or-later
//
// A model saved by ../potentials/package.py: a package .pt2 or an archive .pt.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

class Model {
 public:
  // gpu: the rank's own GPU, or the CPU if there is none; threads: the most calls at a time.
  Model(const std::string& file, at::Device gpu, size_t threads);

  // Returns energy, atom_energy, force, virial and atom_virial, as ../potentials/potential.py does.
  std::vector<at::Tensor> operator()(const at::Tensor& types, const at::Tensor& list_neigh,
                                     const at::Tensor& Rij, const at::Tensor& edge_order,
                                     const at::Tensor& owned) const {
    return run_({types, list_neigh, Rij, edge_order, owned});
  }

  at::Device device = at::kCPU;
  at::ScalarType dtype = at::kDouble;
  double cutoff = 0;
  std::string units;
  std::vector<std::string> type_names;
  int64_t neighbors = 0;          // the most slots that a row may have; 0: any number
  std::vector<int64_t> sel;       // the most neighbours of each type that count; empty: any number
  std::vector<double> shortest;   // [T, T] the shortest pairs in training; empty: not known
  int64_t block_slots = 1 << 14;  // pairs of a call whose intermediate results fit the cache
  int layers = 1;            // an energy depends on atoms up to so many cutoffs away; if > 1, the
                             // model takes owned
  bool takes_order = false;  // the model takes edge_order

 private:
  using Metadata = std::unordered_map<std::string, std::string>;

  Metadata load_package(const std::string& file, at::Device gpu, size_t threads);
  Metadata load_archive(const std::string& file, at::Device gpu);

  std::function<std::vector<at::Tensor>(std::vector<at::Tensor>)> run_;
};
