// SPDX-License-Identifier: GPL-2.0-or-later
#include "model.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>

#include <cmath>
#include <memory>
#include <regex>
#include <set>
#include <sstream>
#include <stdexcept>

namespace {

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

bool takes_edge_order(const std::string& inputs) {
  return inputs.find("edge_order") != std::string::npos;
}

template <class Number>
std::vector<Number> numbers_of(const std::string& text) {
  std::istringstream words(text);
  std::vector<Number> numbers;
  for (Number number; words >> number;) numbers.push_back(number);
  return numbers;
}

int number_of_layers(const std::string& layers) { return layers.empty() ? 1 : std::stoi(layers); }

// Throw if an operator that a model calls is in none of the libraries of this process.
void check_operators(const std::string& operators) {
  std::set<std::string> registered;
  for (const c10::OperatorName& each : c10::Dispatcher::singleton().getAllOpNames())
    registered.insert(each.name);
  std::istringstream names(operators);
  for (std::string name; names >> name;)
    if (!registered.count(name))
      throw std::invalid_argument(
          "expected a model that calls operators of calcops_jit and calcops.ops, got one that "
          "calls " +
          name);
}

// The sentence for a model that an earlier version saved, whose operators had other names; "" if
// the error that it causes is another one.
std::string moved_operator(const std::string& error) {
  static const std::regex moved(
      "\\bcalcops::(density|environment_spline|tabulated_sum|matrix_product)\\b");
  std::smatch name;
  if (!std::regex_search(error, name, moved)) return "";
  return "the model calls " + name.str(0) + ", which has become calcops_models::" + name.str(1) +
         " of calcops.ops: save it again";
}

}  // namespace

Model::Model(const std::string& file, at::Device gpu, size_t threads) {
  const bool package = ends_with(file, ".pt2");
  if (!package && !ends_with(file, ".pt"))
    throw std::invalid_argument("expected a file that ends in .pt2 or .pt");
  Metadata about;
  try {
    about = package ? load_package(file, gpu, threads) : load_archive(file, gpu);
  } catch (const std::exception& error) {
    const std::string moved = moved_operator(error.what());
    if (!moved.empty()) throw std::invalid_argument(moved);
    throw;
  }
  for (const char* key : {"cutoff", "units", "type_names", "dtype"})
    if (about[key].empty())
      throw std::invalid_argument(std::string("expected the metadata ") + key + ", got none");
  cutoff = std::stod(about["cutoff"]);
  if (!(cutoff > 0 && std::isfinite(cutoff)))
    throw std::invalid_argument("expected a positive cutoff, got " + about["cutoff"]);
  units = about["units"];
  std::istringstream names(about["type_names"]);
  for (std::string name; names >> name;) type_names.push_back(name);
  dtype = about["dtype"] == "float32" ? at::kFloat : at::kDouble;
  if (!about["neighbors"].empty()) neighbors = std::stoll(about["neighbors"]);
  sel = numbers_of<int64_t>(about["sel"]);
  shortest = numbers_of<double>(about["shortest"]);
  const size_t types = type_names.size();
  if (!(sel.empty() || sel.size() == types))
    throw std::invalid_argument("expected a sel for each type, got " + about["sel"]);
  if (!(shortest.empty() || shortest.size() == types * types))
    throw std::invalid_argument("expected a shortest pair for each two types, got " +
                                about["shortest"]);
  if (!about["block_slots"].empty()) block_slots = std::stoll(about["block_slots"]);
  if (block_slots <= 0)
    throw std::invalid_argument("expected positive block_slots, got " + about["block_slots"]);
}

Model::Metadata Model::load_package(const std::string& file, at::Device gpu, size_t threads) {
  using torch::inductor::AOTIModelPackageLoader;
  Metadata about = AOTIModelPackageLoader::load_metadata_from_package(file, "model");
  if (about["AOTI_DEVICE_KEY"] == "cuda") {
    if (gpu.is_cpu()) throw std::invalid_argument("made for CUDA, but no GPU is visible");
    device = gpu;
    threads = 1;
  }
  check_operators(about["operators"]);
  const auto loader =
      std::make_shared<AOTIModelPackageLoader>(file, "model", false, threads, device.index());
  takes_order = takes_edge_order(about["inputs"]);
  layers = number_of_layers(about["layers"]);
  run_ = [loader, order = takes_order, owned = layers > 1](std::vector<at::Tensor> inputs) {
    if (!owned) inputs.pop_back();
    if (!order) inputs.erase(inputs.begin() + 3);
    return loader->run(inputs);
  };
  return about;
}

Model::Metadata Model::load_archive(const std::string& file, at::Device gpu) {
  Metadata about;
  caffe2::serialize::PyTorchStreamReader reader(file);
  const std::string folder = "extra/";
  for (const std::string& record : reader.getAllRecords()) {
    if (record.compare(0, folder.size(), folder)) continue;
    const auto [data, size] = reader.getRecord(record);
    about[record.substr(folder.size())] = std::string(static_cast<const char*>(data.get()), size);
  }
  check_operators(about["operators"]);
  device = gpu;
  const auto archive = torch::jit::load(file, device);
  takes_order = device.is_cuda() && takes_edge_order(about["inputs"]);
  layers = number_of_layers(about["layers"]);
  run_ = [archive, order = takes_order, owned = layers > 1](const std::vector<at::Tensor>& inputs) {
    const int64_t nghost = inputs[0].size(0) - inputs[1].size(1);
    torch::jit::Kwargs others;
    if (order) others["edge_order"] = inputs[3];
    if (owned) others["owned"] = inputs[4];
    const c10::IValue tuple =
        archive.get_method("forward")({inputs[0], inputs[1], inputs[2], nghost}, others);
    std::vector<at::Tensor> results;
    for (const c10::IValue& x : tuple.toTupleRef().elements()) results.push_back(x.toTensor());
    return results;
  };
  return about;
}
