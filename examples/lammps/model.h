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
  // gpu: the rank's own GPU, or the CPU where there is none; threads: how many may call at a time.
  Model(const std::string& file, at::Device gpu, size_t threads);

  // What the interface of ../potentials/potential.py returns.
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
  int64_t neighbors = 0;          // the most slots of a row that it takes; 0: any number
  int64_t block_slots = 1 << 14;  // pairs of a call whose intermediate results fit the cache
  int layers = 1;            // cutoffs that an energy depends on; owned is used if there are more
  bool takes_order = false;  // edge_order is used

 private:
  using Metadata = std::unordered_map<std::string, std::string>;

  Metadata load_package(const std::string& file, at::Device gpu, size_t threads);
  Metadata load_archive(const std::string& file, at::Device gpu);

  std::function<std::vector<at::Tensor>(std::vector<at::Tensor>)> run_;
};
