// Runs a saved potential in C++: energy, forces, and the first and second derivative of |force|^2.
//
//     host ARCHIVE [cpu|cuda] [OPERATOR_LIBRARY]
//
// Makefile and CMakeLists.txt link the operator library, so that the third argument is not needed.
// README.md shows what is printed; load.py, its twin, prints the same.
#include <calcops.h>
#include <dlfcn.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/script.h>

#include <cstdio>
#include <stdexcept>

using torch::autograd::grad;

void show(const char* name, const at::Tensor& row) {
  std::printf("%-8s", name);
  for (int64_t i = 0; i < row.size(0); ++i) std::printf(" %18.11g", row[i].item<double>());
  std::printf("\n");
}

int main(int argc, char** argv) try {
  if (argc < 2) throw std::invalid_argument("host ARCHIVE [cpu|cuda] [OPERATOR_LIBRARY]");
  const at::Device device(argc > 2 ? argv[2] : "cpu");

  // For a program that was linked without the operators: before the archive, which names them.
  if (argc > 3 && !dlopen(argv[3], RTLD_NOW)) throw std::runtime_error(dlerror());

  torch::jit::ExtraFilesMap files{{"frame", ""}};
  auto model = torch::jit::load(argv[1], device, files);
  const std::string& bytes = files["frame"];
  std::vector<c10::IValue> inputs;
  const c10::IValue frame = torch::jit::pickle_load({bytes.begin(), bytes.end()});
  for (const c10::IValue& value : frame.toListRef())
    inputs.emplace_back(value.toTensor().to(device));
  const at::Tensor Ri = inputs[1].toTensor().requires_grad_();

  at::Tensor energy, dE, force, first, second;
  // TorchScript rewrites its graph during the first calls; the third is as all that follow.
  for (int call = 0; call < 3; ++call) {
    const auto outputs = model.forward(inputs).toTuple();
    energy = outputs->elements()[0].toTensor();
    dE = outputs->elements()[1].toTensor();
    force = outputs->elements()[2].toTensor();
    first = grad({force.square().sum()}, {Ri}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    second = grad({first.square().sum()}, {Ri})[0];
  }
  // The same operator without the archive: calcops.h has a function for each.
  const at::Tensor list_neigh = inputs[0].toTensor(), Ri_d = inputs[2].toTensor();
  const int64_t nghost = force.size(1) - list_neigh.size(1);
  const at::Tensor direct = calcops::force(list_neigh, dE, Ri_d, nghost);

  show("energy", energy);
  for (int64_t atom = 0; atom < force.size(1); ++atom) show("force", force[0][atom]);
  show("first", at::stack({first.sum(), first.norm()}));
  show("second", at::stack({second.sum(), second.norm()}));
  show("direct", direct[0][0]);
} catch (const std::exception& error) {
  std::fprintf(stderr, "host: %s\n", error.what());
  return 1;
}
