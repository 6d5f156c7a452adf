// read(text) returns "ok" or the error of a contract, for test_contract_text.py. details(text)
// returns the documentation of its first schema without the summary. Lines before a
// contract may name a composition ("composition f") or register kernels of the table below
// ("kernel f name").
#include <map>
#include <sstream>

#include "contract_proofs.h"

using namespace calcops;

namespace {

enum class Choice { kA, kB };
using In = View<const double, 1>;
using Out = View<double, 1>;

template <class Result, class... P>
KernelEntry entry(Result (*)(P...)) {
  using Call = Caller<Result, P...>;
  return {"",
          "",
          Call::parameters(),
          Call::kCount,
          !__is_same(Result, void),
          &Call::run,
          nullptr,
          nullptr,
          "",
          0,
          false};
}

template <class... P>
KernelEntry cpu() {
  return entry(static_cast<void (*)(P...)>(nullptr));
}

const std::map<std::string, KernelEntry> kKernels = {
    {"copy", cpu<In, Out>()},
    {"copy_float", cpu<View<const float, 1>, View<float, 1>>()},
    {"copy_int", cpu<View<const int64_t, 1>, View<int64_t, 1>>()},
    {"mixed", cpu<View<const float, 1>, Out>()},
    {"with_double", cpu<In, double, Out>()},
    {"with_int", cpu<In, int64_t, Out>()},
    {"with_bool", cpu<In, bool, Out>()},
    {"with_choice", cpu<In, Choice, Out>()},
    {"with_list", cpu<In, List<int64_t>, Out>()},
    {"with_view", cpu<In, In, Out>()},
    {"two_results", cpu<In, Out, Out>()},
    {"of_matrix", cpu<View<const double, 2>, Out>()},
    {"writes_argument", cpu<Out, Out>()},
    {"reads_result", cpu<In, In>()},
    {"strided_result", cpu<In, Strided<double, 1>>()},
    {"with_workspace", cpu<In, Out, Workspace&>()},
    {"workspace_first", cpu<Workspace&, In, Out>()},
    {"stream_first", cpu<CUstream_st*, In, Out>()},
    {"position", entry(static_cast<int64_t (*)(In, Out)>(nullptr))},
    {"many", cpu<In, In, In, In, In, In, In, In, In, In, In, In, In, In, In, In, In, In, In, In, In,
                 In, In, In, Out>()},
};

void prove(std::istringstream text) {
  std::vector<std::string> composed;
  std::vector<std::pair<std::string, std::string>> kernels;
  std::string contract, line;
  while (std::getline(text, line)) {
    std::istringstream words(line);
    std::string word, op, kernel;
    words >> word >> op >> kernel;
    if (word == "composition")
      composed.push_back(op);
    else if (word == "kernel")
      kernels.emplace_back(op, kernel);
    else
      contract += line + "\n";
  }
  contract::Text read = contract::Reader(contract).read();
  const contract::Prover proved(read, composed);
  std::vector<bool> has_kernels(proved.operators.size());
  for (size_t i = 0; i < proved.operators.size(); ++i)
    for (const auto& [name, kernel] : kernels)
      if (proved.operators[i].schema.name == name) {
        contract::bind(read, proved.operators[i], kKernels.at(kernel));
        has_kernels[i] = true;
      }
  for (const contract::Signature& op : proved.operators)
    if (!kernels.empty() && !has_kernels[op.owner])
      throw contract::Mistake(op.schema.number, "no kernel of " + op.schema.name);
}

std::string answer(std::string text) {
  try {
    prove(std::istringstream(text));
    return "ok";
  } catch (const contract::Mistake& mistake) {
    return "line " + std::to_string(mistake.number) + ": " + mistake.what();
  }
}

}  // namespace

TORCH_LIBRARY(read_contracts, m) {
  m.def("read(str text) -> str", &answer);
  m.def("details(str text) -> str",
        [](std::string text) { return contract::Reader(text).read().schemas[0].details; });
}
