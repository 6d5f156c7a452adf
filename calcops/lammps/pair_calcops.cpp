// SPDX-License-Identifier: GPL-2.0-or-later
#include "pair_calcops.h"

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/record_function.h>
#include <calcops.h>
#include <malloc.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>

#include "atom.h"
#include "comm.h"
#include "error.h"
#include "force.h"
#include "group.h"
#include "memory.h"
#include "neigh_list.h"
#include "neighbor.h"
#include "platform.h"
#include "update.h"
#include "utils.h"

using namespace LAMMPS_NS;

namespace {

// With LAMMPS's usual skin, a list has about two slots for each pair within the cutoff.
constexpr int64_t kSlotsPerPair = 2;

constexpr double kRounding = 1e-6;  // of lengths in a text

// The numbers of `compute ID all pair calcops`. First, the seconds of this run: means of a rank's
// threads, summed over the ranks. The time of the operators is a part of that of the model.
enum { kRows, kPairs, kModel, kOperators, kAdd, kTimers };
// For a committee, the largest, the least and the mean deviation follow, of virials and of forces.
// For a model that passes messages, the last number counts its rows.
enum { kVirials = kTimers, kForces = kVirials + 3, kNumbers = kForces + 3 };

class Stopwatch {
 public:
  explicit Stopwatch(std::atomic<double>& seconds) : seconds_(seconds) {}
  ~Stopwatch() { seconds_.fetch_add(platform::walltime() - start_); }

 private:
  std::atomic<double>& seconds_;
  const double start_ = platform::walltime();
};

struct OperatorCall : at::ObserverContext {
  explicit OperatorCall(std::atomic<double>& seconds) : stopwatch(seconds) {}
  Stopwatch stopwatch;
};
std::atomic<double> operator_seconds = 0;
thread_local bool in_operator = false;  // an operator calls itself again below autograd

void time_operators() {
  const auto start = [](const at::RecordFunction& f) -> std::unique_ptr<at::ObserverContext> {
    if (in_operator || std::strncmp(f.name(), "calcops::", 9) != 0) return nullptr;
    in_operator = true;
    return std::make_unique<OperatorCall>(operator_seconds);
  };
  const auto end = [](const at::RecordFunction&, at::ObserverContext* call) {
    if (call) in_operator = false;
  };
  at::addGlobalCallback(at::RecordFunctionCallback(start, end).scopes({at::RecordScope::FUNCTION}));
}

}  // namespace

extern "C" __attribute__((visibility("default"))) Pair* new_pair_calcops(LAMMPS* lmp) {
  return new PairCalcOps(lmp);
}

PairCalcOps::PairCalcOps(LAMMPS* lmp) : Pair(lmp) {
  one_coeff = manybody_flag = no_virial_fdotr_compute = 1;
  single_enable = restartinfo = 0;
  centroidstressflag = CENTROID_AVAIL;
  pvector = new double[kNumbers + 1]();
  cutghost = nullptr;
  comm_forward = 1;

  static const bool once = [] {
    time_operators();
#ifdef __GLIBC__
    // The process keeps the memory of a block's tensors. If it gave pages back, the kernel would
    // have to clear them when the next block touches them.
    mallopt(M_MMAP_THRESHOLD, 1 << 25);
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
#endif
    return true;
  }();
  (void)once;
}

PairCalcOps::~PairCalcOps() {
  delete[] pvector;
  forget_types();
}

// Makes LAMMPS demand `pair_coeff`. For a second `pair_style calcops`, LAMMPS calls settings() of
// the same object, and the numbers of the types belong to the first model.
void PairCalcOps::forget_types() {
  memory->destroy(setflag);
  memory->destroy(cutsq);
  memory->destroy(cutghost);
  allocated = 0;
  is_initialized_ = false;
}

void PairCalcOps::settings(int narg, char** arg) {
  if (narg == 0) error->all(FLERR, "Pair style calcops: expected a model's file, got none");
  forget_types();
  models_.clear();
  std::vector<Model> models;
  const at::Device gpu = own_gpu();
  for (int k = 0; k < narg; ++k) {
    const std::string file = arg[k];
    try {
      if (!platform::file_is_readable(file)) throw std::invalid_argument("cannot be read");
      models.emplace_back(file, gpu, std::max(1, comm->nthreads));
    } catch (const c10::Error& e) {
      error->one(FLERR, "Pair style calcops: {}: {}", file, e.what_without_backtrace());
    } catch (const std::exception& e) {
      error->one(FLERR, "Pair style calcops: {}: {}", file, e.what());
    }
    const Model &first = models.front(), &model = models.back();
    const auto expect = [&](bool alike, const char* what) {
      if (!alike)
        error->all(FLERR, "Pair style calcops: {}: expected the {} of {}, got another", file, what,
                   arg[0]);
    };
    expect(model.cutoff == first.cutoff, "cutoff");
    expect(model.units == first.units, "units");
    expect(model.type_names == first.type_names, "type_names");
    expect(model.dtype == first.dtype, "dtype");
    expect(model.device == first.device, "device");
    expect(model.takes_order == first.takes_order, "inputs");
    expect(model.layers == first.layers, "layers");
  }
  models_ = std::move(models);
  // A committee warns as soon as one of its models would.
  sel_.clear();
  shortest_.clear();
  for (const Model& model : models_) {
    if (sel_.empty()) sel_ = model.sel;
    if (shortest_.empty()) shortest_ = model.shortest;
    for (size_t t = 0; t < model.sel.size(); ++t) sel_[t] = std::min(sel_[t], model.sel[t]);
    for (size_t p = 0; p < model.shortest.size(); ++p)
      shortest_[p] = std::max(shortest_[p], model.shortest[p]);
  }
  warned_of_crowded_ = sel_.empty();
  warned_of_near_ = shortest_.empty();
  nextra = (narg == 1 ? static_cast<int>(kTimers) : kNumbers) + passes_messages();
  comm_reverse = narg == 1 ? 0 : 3 * narg;
  ghostneigh = passes_messages();
}

// Returns the GPU of this rank: one for each rank, in the order of the ranks of a machine.
at::Device PairCalcOps::own_gpu() const {
  const auto gpus = static_cast<int>(at::getNumGPUs());
  if (gpus == 0) return at::kCPU;
  MPI_Comm machine;
  MPI_Comm_split_type(world, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine);
  int rank;
  MPI_Comm_rank(machine, &rank);
  MPI_Comm_free(&machine);
  return at::Device(at::kCUDA, static_cast<at::DeviceIndex>(rank % gpus));
}

void PairCalcOps::coeff(int narg, char** arg) {
  const int ntypes = atom->ntypes;
  forget_types();
  if (models_.empty())
    error->all(FLERR, "Pair style calcops: expected a model of pair_style before pair_coeff");
  if (narg != 2 + ntypes)
    error->all(FLERR, "Pair style calcops: expected pair_coeff * * and {} names", ntypes);
  const std::vector<std::string>& names = models_[0].type_names;
  model_type_.assign(ntypes + 1, -1);
  for (int type = 1; type <= ntypes; ++type) {
    if (std::strcmp(arg[1 + type], "NULL") == 0) continue;
    const auto found = std::find(names.begin(), names.end(), arg[1 + type]);
    if (found == names.end())
      error->all(FLERR, "Pair style calcops: expected names that the model has ({}), got {}",
                 utils::join_words(names, " "), arg[1 + type]);
    model_type_[type] = found - names.begin();
  }
  memory->create(setflag, ntypes + 1, ntypes + 1, "pair:setflag");
  memory->create(cutsq, ntypes + 1, ntypes + 1, "pair:cutsq");
  memory->create(cutghost, ntypes + 1, ntypes + 1, "pair:cutghost");
  allocated = 1;
  for (int i = 1; i <= ntypes; ++i)
    for (int j = 1; j <= ntypes; ++j) setflag[i][j] = model_type_[i] >= 0 && model_type_[j] >= 0;
}

// LAMMPS's own many-body styles ignore these options silently. In a hybrid style, the options are
// meant for the other styles.
void PairCalcOps::modify_params(int narg, char** arg) {
  static const std::set<std::string> ignored{"mix", "table", "table/disp", "tabinner",
                                             "tabinner/disp"};
  if (force->pair == this && comm->me == 0)
    for (int k = 0; k < narg; ++k)
      if (ignored.count(arg[k]))
        error->warning(FLERR,
                       "Pair style calcops: pair_modify {} has no effect, as a model has no "
                       "coefficients of pairs",
                       arg[k]);
  Pair::modify_params(narg, arg);
}

void PairCalcOps::init_style() {
  const auto expect = [this](bool right, const char* expected, const std::string& got) {
    if (!right) error->all(FLERR, "Pair style calcops: expected {}, got {}", expected, got);
  };
  expect(force->newton_pair, "newton on, which brings the forces on ghosts to their owners",
         "newton off");
  expect(models_[0].units == update->unit_style,
         ("units " + models_[0].units + ", which are the model's").c_str(), update->unit_style);
  expect(!tail_flag, "pair_modify tail no, as a model has no known tail", "yes");
  expect(!offset_flag,
         "pair_modify shift no, as a model's energy is shifted where the model is made", "yes");
  expect(!passes_messages() || comm->mode == Comm::SINGLE,
         "comm_modify mode single for a model that passes messages", "another");
  warned_of_hidden_ = false;
  is_initialized_ = true;
  list_step_.reset();
  for (int i = 1; i <= atom->ntypes; ++i) std::fill_n(&cutghost[i][1], atom->ntypes, 0.0);
  at::set_num_threads(comm->nthreads);
  neighbor->add_request(
      this, NeighConst::REQ_FULL | (ghostneigh ? NeighConst::REQ_GHOST : NeighConst::REQ_DEFAULT));
  std::fill_n(pvector, nextra, 0.0);
}

double PairCalcOps::init_one(int i, int j) {
  return cutghost[i][j] = cutghost[j][i] = models_[0].cutoff;
}

// `pair_style hybrid` calls init_one() for the pairs of types that it gives to this style. It gives
// a pair to the style of the last `pair_coeff`, also if that is another one.
void PairCalcOps::refuse_lost_pairs() const {
  for (int i = 1; i <= atom->ntypes; ++i)
    for (int j = i; j <= atom->ntypes; ++j)
      if (setflag[i][j] && cutghost[i][j] == 0)
        error->all(FLERR,
                   "Pair style calcops: expected all pairs of the model's types, got a later "
                   "pair_coeff that gives types {} and {} to another style. Use hybrid/overlay to "
                   "add it, or NULL",
                   i, j);
}

// LAMMPS makes a new list before an atom has moved by more than half the skin. A chain of `layers`
// pairs within the cutoff joins two atoms at most `layers` cutoffs apart. When the ghosts were
// found, these atoms were at most one skin farther apart, because only their own moves count.
void PairCalcOps::refuse_few_ghosts() const {
  const double needed = models_[0].layers * models_[0].cutoff + neighbor->skin;
  // As in Comm::get_comm_cutoff(), which may print a warning at each call.
  const double reach = std::max(comm->cutghostuser, neighbor->cutneighmax);
  if (reach < needed * (1 - 1e-12))  // the sum in a script may be rounded down
    error->all(FLERR,
               "Pair style calcops: expected comm_modify cutoff {:.12g} or more, {} layers of "
               "cutoff {:.12g} and the skin {:.12g}, got {:.12g}",
               needed, models_[0].layers, models_[0].cutoff, neighbor->skin, reach);
}

// special_bonds takes pairs of weight 0 out of the list. A model cannot apply other weights.
void PairCalcOps::refuse_weighted_bonds() const {
  if (atom->molecular == Atom::ATOMIC) return;
  const double* const weight = force->special_lj;  // pair_style hybrid sets those of this style
  const auto counts = [&](int kind) { return weight[kind] == 1 && neighbor->special_flag[kind]; };
  if (counts(1) && counts(2) && counts(3)) return;
  const auto refuse = [&] {
    throw std::invalid_argument(
        fmt::format("expected special_bonds lj 1 1 1 for bonded atoms, whose pairs the model takes "
                    "like all others, got {} {} {}",
                    weight[1], weight[2], weight[3]));
  };
  if (atom->molecular == Atom::TEMPLATE) {
    if (atom->nbonds) refuse();
    return;
  }
  for (const int i : centres_) {
    // The entries of an atom are sorted by kind: 1-2, 1-3, 1-4. nspecial has the ends of the kinds.
    for (int s = 0, kind = 1; s < atom->nspecial[i][2]; ++s) {
      while (s >= atom->nspecial[i][kind - 1]) ++kind;
      const int j = counts(kind) ? -1 : atom->map(atom->special[i][s]);
      if (j >= 0 && model_type_[atom->type[j]] >= 0) refuse();
    }
  }
}

// Copies what LAMMPS's lists leave out from now on: they take it when a run starts. A command
// between two runs changes the fields at once, also if the next run has `pre no`.
void PairCalcOps::copy_exclusions() {
  excluded_ = {};
  whole_groups_ = 0;
  for (int k = 0; k < neighbor->nex_type; ++k)
    excluded_.types.emplace_back(neighbor->ex1_type[k], neighbor->ex2_type[k]);
  const int* const bit = group->bitmask;
  for (int k = 0; k < neighbor->nex_group; ++k)
    excluded_.groups.emplace_back(bit[neighbor->ex1_group[k]], bit[neighbor->ex2_group[k]]);
  for (int k = 0; k < neighbor->nex_mol; ++k) excluded_.molecules |= bit[neighbor->ex_mol_group[k]];
}

// Finds the atoms whose energies count: those of the list, without the atoms that
// `neigh_modify exclude` excludes from all pairs of the model. `fix gcmc` and others exclude an
// atom while they compute the energy without it. The model would give it the energy of a lone atom.
void PairCalcOps::find_centres() {
  const int ntypes = atom->ntypes, all = group->bitmask[0];
  int excluded_groups = 0;  // their bits
  for (const auto& [first, second] : excluded_.groups) {
    if (first == all) excluded_groups |= second;
    if (second == all) excluded_groups |= first;
  }

  // A group with all other atoms of the model has the meaning of `all`.
  int masks[2] = {0, 0};  // the groups that lack some of these atoms; those that have some
  for (int k = 0; k < list->inum; ++k) {
    const int mask = atom->mask[list->ilist[k]];
    if (mask & excluded_groups) continue;
    masks[0] |= ~mask;
    masks[1] |= mask;
  }
  if (!excluded_.groups.empty() || excluded_.molecules)
    MPI_Allreduce(MPI_IN_PLACE, masks, 2, MPI_INT, MPI_BOR, world);
  const int whole = ~masks[0], some = masks[1];
  if (whole_groups_ == 0 && some) whole_groups_ = whole;
  bool hides_pairs = excluded_.molecules & some;
  for (const auto& [first, second] : excluded_.groups) {
    if (first == all || second == all) continue;
    // Otherwise the energies of lone atoms would come and go.
    if (some && (whole ^ whole_groups_) & (first | second))
      throw std::domain_error(
          "expected groups of neigh_modify exclude that have all atoms of the model in the whole "
          "run or never, got one that changes. Exclude types in place of groups");
    if (first & whole) excluded_groups |= second;
    if (second & whole) excluded_groups |= first;
    hides_pairs |= !((first | second) & whole) && first & some && second & some;
  }

  const auto excludes = [&](int i, int j) {
    const auto& pairs = excluded_.types;
    return model_type_[j] >= 0 && (std::count(pairs.begin(), pairs.end(), std::pair(i, j)) ||
                                   std::count(pairs.begin(), pairs.end(), std::pair(j, i)));
  };
  std::vector<bool> is_excluded(ntypes + 1, true);
  for (int i = 1; i <= ntypes; ++i)
    for (int j = 1; j <= ntypes; ++j)
      if (model_type_[j] >= 0 && !excludes(i, j)) is_excluded[i] = false;
  for (int i = 1; i <= ntypes; ++i)
    for (int j = 1; j <= ntypes; ++j)
      hides_pairs |= model_type_[i] >= 0 && excludes(i, j) && !is_excluded[i] && !is_excluded[j];

  centres_.clear();
  for (int k = 0; k < list->inum; ++k) {
    const int i = list->ilist[k];
    if (!(atom->mask[i] & excluded_groups) && !is_excluded[atom->type[i]]) centres_.push_back(i);
  }
  if (!hides_pairs || warned_of_hidden_) return;
  warned_of_hidden_ = true;
  if (comm->me == 0)
    error->warning(
        FLERR,
        "Pair style calcops: neigh_modify exclude hides pairs from the model, so its energies "
        "lack these pairs");
}

// LAMMPS's list for the model has the atoms that had its types when the list was made.
void PairCalcOps::refuse_new_atoms() const {
  if (neighbor->includegroup) return;  // the list has the atoms of this group
  const auto atoms = std::count_if(atom->type, atom->type + atom->nlocal,
                                   [this](int type) { return model_type_[type] >= 0; });
  if (atoms > list->inum)
    throw std::domain_error(
        fmt::format("expected a new list after a change of types, since {} atoms have types of the "
                    "model, got {} in the old one",
                    atoms, list->inum));
}

void PairCalcOps::compute(int eflag, int vflag) {
  if (!is_initialized_)
    error->all(FLERR,
               "Pair style calcops: expected pair_coeff and a run without `pre no` after "
               "pair_style");
  ev_init(eflag, vflag);
  std::atomic<double> rows = 0, pairs = 0, model = 0, adding = 0;
  operator_seconds = 0;
  // In steps in which LAMMPS needs the energy, such as those of thermo output, and for `fix pair`.
  const bool deviations = models_.size() > 1 && (eflag_global || deviations_wanted_);
  if (!list_step_) {
    refuse_lost_pairs();
    copy_exclusions();
  }
  // LAMMPS may have made a list while `pair_modify compute no` held.
  const bool is_new_list = neighbor->ago == 0 || list_step_ != neighbor->lastcall;
  list_step_ = neighbor->lastcall;
  if (is_new_list && passes_messages()) refuse_few_ghosts();
  // After `set type`, a run with `pre no` starts with the old types of ghosts.
  if (neighbor->ago > 0 && update->ntimestep == update->firststep + 1) comm->forward_comm(this);
  try {
    refuse_new_atoms();
    if (is_new_list) {
      const Stopwatch of_rows(rows);
      build_blocks();
    }
    at::parallel_for(0, blocks_.size(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        Block& block = blocks_[b];
        {
          const Stopwatch of_pairs(pairs);
          find_pairs(block);
        }
        const Stopwatch of_model(model);
        for (size_t k = 0; k < (deviations ? models_.size() : 1); ++k)
          block.results.push_back(
              models_[k](block.types, block.list_neigh, block.Rij, block.edge_order, block.owned));
        block.Rij.reset();
        if (!takes_all_slots()) block.list_neigh.reset();
      }
    });
    for (Block& block : blocks_) warn_of_unlike(block);
    const Stopwatch of_adding(adding);
    const size_t rows_of_atoms = deviations ? atom->nlocal + atom->nghost : 0;
    deviation_.clear();
    forces_.assign(3 * models_.size() * rows_of_atoms, 0.0);
    virials_.assign(9 * models_.size(), 0.0);
    for (Block& block : blocks_) add(block);
  } catch (const c10::Error& e) {
    error->one(FLERR, "Pair style calcops: {}", e.what_without_backtrace());
  } catch (const std::exception& e) {
    error->one(FLERR, "Pair style calcops: {}", e.what());
  }
  if (deviations) add_deviations();
  const double threads = std::clamp<double>(blocks_.size(), 1, at::get_num_threads());
  pvector[kRows] += rows;
  pvector[kPairs] += pairs / threads;
  pvector[kModel] += model / threads;
  pvector[kOperators] += operator_seconds / threads;
  pvector[kAdd] += adding;
  if (passes_messages()) pvector[nextra - 1] = blocks_.empty() ? 0 : blocks_[0].centres;
}

void PairCalcOps::build_blocks() {
  find_centres();
  refuse_weighted_bonds();
  const int64_t n = centres_.size(), nall = atom->nlocal + atom->nghost;
  int64_t slots = 0;
  for (const int i : centres_) slots += list->numneigh[i];
  int64_t count = std::min<int64_t>(n, 1);
  if (!takes_all_slots()) {  // each thread gets the same number of blocks
    const int64_t threads = at::get_num_threads();
    int64_t block_slots = models_[0].block_slots;
    for (const Model& model : models_) block_slots = std::min(block_slots, model.block_slots);
    count = std::min(n, (slots / (kSlotsPerPair * block_slots) / threads + 1) * threads);
  }
  blocks_.clear();
  if (passes_messages()) {
    blocks_.resize(std::min<int64_t>(n, 1));
    return;
  }
  blocks_.resize(count);
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    std::vector<int> number(nall, -1);  // each atom's place in block.atoms
    for (int64_t b = begin; b < end; ++b) {
      Block& block = blocks_[b];
      const int* const first = centres_.data() + n * b / count;
      const int* const last = centres_.data() + n * (b + 1) / count;
      block.centres = last - first;
      block.atoms.assign(first, last);
      for (int i = 0; i < block.centres; ++i) number[first[i]] = i;
      for (const int* i = first; i < last; ++i) {
        for (int s = 0; s < list->numneigh[*i]; ++s) {
          const int j = list->firstneigh[*i][s] & NEIGHMASK;
          if (number[j] < 0) {
            number[j] = block.atoms.size();
            block.atoms.push_back(j);
          }
          block.rows.push_back(number[j]);
        }
        block.ends.push_back(block.rows.size());
      }
      for (const int i : block.atoms) number[i] = -1;
      if (takes_all_slots()) fill_rows(block);
    }
  });
}

void PairCalcOps::fill_rows(Block& block) const {
  int begin = 0;
  for (const int end : block.ends) {
    block.K = std::max<int64_t>(block.K, end - begin);
    begin = end;
  }
  block.list_neigh = at::full({1, block.centres, block.K}, -1, at::kLong);
  int64_t* const slots = block.list_neigh.mutable_data_ptr<int64_t>();
  begin = 0;
  for (int64_t i = 0; i < block.centres; ++i) {
    const int end = block.ends[i];
    std::copy(block.rows.begin() + begin, block.rows.begin() + end, slots + i * block.K);
    begin = end;
  }
  block.list_neigh = block.list_neigh.to(models_[0].device);
  block.named = block.list_neigh.clamp_min(0).flatten();
  find_edge_order(block);
}

void PairCalcOps::find_edge_order(Block& block) const {
  if (!models_[0].takes_order) return;
  const at::Tensor centres = at::arange(block.centres, block.list_neigh.options());
  const at::Tensor edges =
      at::stack({centres.unsqueeze(1).expand({-1, block.K}).flatten(), block.list_neigh.flatten()});
  block.edge_order = calcops::edge_order(edges, block.atoms.size());
}

// In each step, since fixes such as `sgcmc` change types between two lists.
void PairCalcOps::find_types(Block& block) const {
  block.types = at::empty({static_cast<int64_t>(block.atoms.size())}, at::kLong);
  int64_t* type = block.types.mutable_data_ptr<int64_t>();
  for (const int i : block.atoms) {
    *type = model_type_[atom->type[i]];
    if (*type++ < 0)
      throw std::domain_error(
          fmt::format("expected a new list after a change of types, since the model does not get "
                      "type {}, got atom {} in the old one",
                      atom->type[i], atom->tag[i]));
  }
  block.types = block.types.to(models_[0].device);
}

// Subtracts positions in float64, also for a model in float32.
void PairCalcOps::find_pairs(Block& block) const {
  if (passes_messages()) find_graph(block);
  find_types(block);
  if (takes_all_slots()) {
    const at::Tensor atoms = at::tensor(block.atoms, at::kInt);
    const at::Tensor x = at::from_blob(atom->x[0], {atom->nlocal + atom->nghost, 3}, at::kDouble)
                             .index_select(0, atoms)
                             .to(models_[0].device);
    const at::Tensor centres = x.slice(0, 0, block.centres).unsqueeze(1);
    block.Rij = x.index_select(0, block.named)
                    .view({1, block.centres, block.K, 3})
                    .sub_(centres)
                    .to(models_[0].dtype);
    if (neighbor->ago == 0) compare_with_training(block);
  } else if (!passes_messages()) {
    if (models_[0].dtype == at::kDouble)
      find_near_pairs<double>(block);
    else
      find_near_pairs<float>(block);
  }
  for (const Model& model : models_)
    if (model.neighbors && block.K > model.neighbors)
      throw std::length_error(fmt::format(
          "expected at most {} neighbours of an atom, as the model takes, got {} within {}",
          model.neighbors, block.K, takes_all_slots() ? "cutoff and skin" : "the cutoff"));
}

template <class Real>
void PairCalcOps::find_near_pairs(Block& block) const {
  const double limit = models_[0].cutoff * models_[0].cutoff;
  const bool compares = !warned_of_crowded_ || !warned_of_near_;
  std::vector<std::array<double, 3>> x(block.atoms.size());
  for (size_t a = 0; a < x.size(); ++a) std::copy_n(atom->x[block.atoms[a]], 3, x[a].begin());
  std::vector<NearPair> pairs;
  // If an atom has more than K near pairs, a second pass takes the largest number for K.
  for (int64_t longest = block.K;; block.K = longest) {
    block.list_neigh = at::empty({1, block.centres, block.K}, at::kLong);
    block.Rij = at::empty({1, block.centres, block.K, 3}, models_[0].dtype);
    int64_t* slot = block.list_neigh.mutable_data_ptr<int64_t>();
    Real* Rij = block.Rij.mutable_data_ptr<Real>();
    int begin = 0;
    for (int64_t i = 0; i < block.centres; ++i, slot += block.K, Rij += 3 * block.K) {
      const int end = block.ends[i];
      pairs.resize(end - begin + 1);
      int64_t near = 0;
      bool coincide = false;
      // No branch for near pairs: the processor would often predict it wrong. Each pair is written,
      // and the next one overwrites it if it is not near.
      for (int s = begin; s < end; ++s) {
        NearPair& pair = pairs[near];
        pair.j = block.rows[s];
        for (int a = 0; a < 3; ++a) pair.d[a] = x[pair.j][a] - x[i][a];
        const double r2 = pair.d[0] * pair.d[0] + pair.d[1] * pair.d[1] + pair.d[2] * pair.d[2];
        near += r2 < limit;
        coincide |= r2 == 0;
      }
      if (coincide) {
        const auto other = std::find_if(pairs.begin(), pairs.end(), [](const NearPair& pair) {
          return pair.d[0] == 0 && pair.d[1] == 0 && pair.d[2] == 0;
        });
        refuse_coincidence(block.atoms[i], block.atoms[other->j]);
      }
      if (compares) compare_with_training(block, i, pairs.data(), near);
      longest = std::max(longest, near);
      const int64_t fit = std::min(near, block.K);
      for (int64_t s = 0; s < fit; ++s) {
        slot[s] = pairs[s].j;
        for (int a = 0; a < 3; ++a) Rij[3 * s + a] = static_cast<Real>(pairs[s].d[a]);
      }
      std::fill(slot + fit, slot + block.K, -1);
      begin = end;
    }
    if (longest == block.K) return;
  }
}

// Notes in the block if its centre i has more neighbours of a type than sel, or a pair shorter than
// any in training.
void PairCalcOps::compare_with_training(Block& block, int64_t i, const NearPair* pairs,
                                        int64_t near) const {
  const int64_t* const types = block.types.const_data_ptr<int64_t>();
  const int64_t T = models_[0].type_names.size();
  for (int64_t t = 0; t < T && !warned_of_crowded_; ++t) {
    if (near <= sel_[t]) continue;
    const int64_t count = std::count_if(pairs, pairs + near,
                                        [&](const NearPair& pair) { return types[pair.j] == t; });
    if (count > sel_[t]) block.crowded = {block.atoms[i], t, count};
  }
  if (warned_of_near_) return;
  for (const NearPair* pair = pairs; pair < pairs + near; ++pair) {
    const double shortest = shortest_[types[i] * T + types[pair->j]];
    const double r2 = pair->d[0] * pair->d[0] + pair->d[1] * pair->d[1] + pair->d[2] * pair->d[2];
    if (r2 < shortest * shortest * (1 - kRounding))
      block.near = {block.atoms[i], block.atoms[pair->j], std::sqrt(r2)};
  }
}

// The same for a block whose pairs are on a GPU.
void PairCalcOps::compare_with_training(Block& block) const {
  const int64_t T = models_[0].type_names.size();
  const at::Tensor r2 = block.Rij.square().sum(-1)[0].to(at::kDouble);
  const at::Tensor filled = block.list_neigh[0].ge(0);
  const at::Tensor kind = block.types.index_select(0, block.named).view({block.centres, block.K});
  const at::Tensor near = filled.logical_and(r2.lt(models_[0].cutoff * models_[0].cutoff));
  for (int64_t t = 0; t < T && !warned_of_crowded_; ++t) {
    const auto [count, row] = near.logical_and(kind.eq(t)).sum(1).max(0);
    if (count.item<int64_t>() > sel_[t])
      block.crowded = {block.atoms[row.item<int64_t>()], t, count.item<int64_t>()};
  }
  if (warned_of_near_) return;
  std::vector<double> squares;
  for (const double length : shortest_) squares.push_back(length * length * (1 - kRounding));
  const at::Tensor centre = block.types.slice(0, 0, block.centres).unsqueeze(1);
  const at::Tensor limit =
      at::tensor(squares, at::kDouble).to(r2.device()).view({T, T}).index({centre, kind});
  const at::Tensor shorter = near.logical_and(r2.lt(limit)).nonzero();
  if (shorter.size(0) == 0) return;
  const int64_t i = shorter[0][0].item<int64_t>(), s = shorter[0][1].item<int64_t>();
  const int64_t j = block.list_neigh[0][i][s].item<int64_t>();
  block.near = {block.atoms[i], block.atoms[j], std::sqrt(r2[i][s].item<double>())};
}

void PairCalcOps::warn_of_unlike(Block& block) {
  const Model& model = models_[0];
  if (block.crowded.atom >= 0 && !warned_of_crowded_) {
    warned_of_crowded_ = true;
    error->warning(
        FLERR,
        "Pair style calcops: atom {} has {} neighbours {} within the cutoff, and the model's sel "
        "is {}. It takes the nearest, so that energies jump and forces are not their derivatives. "
        "Train with a larger sel",
        atom->tag[block.crowded.atom], block.crowded.count, model.type_names[block.crowded.type],
        sel_[block.crowded.type]);
  }
  if (block.near.i >= 0 && !warned_of_near_) {
    warned_of_near_ = true;
    const int64_t first = model_type_[atom->type[block.near.i]];
    const int64_t second = model_type_[atom->type[block.near.j]];
    const double seen = shortest_[first * model.type_names.size() + second];
    error->warning(
        FLERR,
        "Pair style calcops: atoms {} and {} are {:.3g} apart. In the model's training there was "
        "none{} of such pairs ({}-{}), so its energy is extrapolated",
        atom->tag[block.near.i], atom->tag[block.near.j], block.near.length,
        seen < model.cutoff * (1 - kRounding) ? fmt::format(" below {:.3g}", seen) : "",
        model.type_names[first], model.type_names[second]);
  }
}

// Finds the rows of this rank's own atoms, then the rows of all atoms within the cutoff of those,
// and so on, `layers` times in all. A message to one of its own atoms passes only these atoms.
// Pairs in the skin are left out, since the model would take time for them.
void PairCalcOps::find_graph(Block& block) const {
  const double limit = models_[0].cutoff * models_[0].cutoff;
  std::vector<int> number(atom->nlocal + atom->nghost, -1);
  std::vector<double> vectors;
  block.atoms = centres_;
  for (size_t i = 0; i < centres_.size(); ++i) number[centres_[i]] = i;
  block.rows.clear();
  block.ends.clear();
  block.K = 1;
  block.centres = 0;
  for (int layer = 0; layer < models_[0].layers; ++layer)
    for (const int64_t end = block.atoms.size(); block.centres < end; ++block.centres) {
      const int i = block.atoms[block.centres];
      const size_t begin = block.rows.size();
      for (int s = 0; s < list->numneigh[i]; ++s) {
        const int j = list->firstneigh[i][s] & NEIGHMASK;
        std::array<double, 3> d;
        for (int a = 0; a < 3; ++a) d[a] = atom->x[j][a] - atom->x[i][a];
        const double r2 = d[0] * d[0] + d[1] * d[1] + d[2] * d[2];
        if (r2 == 0) refuse_coincidence(i, j);
        if (r2 >= limit) continue;
        if (number[j] < 0) {
          number[j] = block.atoms.size();
          block.atoms.push_back(j);
        }
        block.rows.push_back(number[j]);
        vectors.insert(vectors.end(), d.begin(), d.end());
      }
      block.ends.push_back(block.rows.size());
      block.K = std::max<int64_t>(block.K, block.rows.size() - begin);
    }

  const int64_t n = block.centres, K = block.K;
  block.list_neigh = at::full({1, n, K}, -1, at::kLong);
  block.Rij = at::zeros({1, n, K, 3}, at::kDouble);
  for (int64_t i = 0, s = 0; i < n; ++i) {
    const int count = block.ends[i] - s;
    std::copy_n(&block.rows[s], count, block.list_neigh.mutable_data_ptr<int64_t>() + i * K);
    std::copy_n(&vectors[3 * s], 3 * count, block.Rij.mutable_data_ptr<double>() + 3 * i * K);
    s += count;
  }
  const at::Device device = models_[0].device;
  block.list_neigh = block.list_neigh.to(device);
  block.Rij = block.Rij.to(device, models_[0].dtype);
  block.owned = at::arange(n, block.list_neigh.options()).lt(static_cast<int64_t>(centres_.size()));
  find_edge_order(block);
}

void PairCalcOps::refuse_coincidence(int i, int j) const {
  throw std::domain_error(
      fmt::format("expected atoms apart from each other, got {} and {} at the same place",
                  atom->tag[i], atom->tag[j]));
}

void PairCalcOps::refuse_infinite(const Block& block, const at::Tensor& force) const {
  const double* x = force.const_data_ptr<double>();
  for (const int i : block.atoms)
    for (int a = 0; a < 3; ++a, ++x)
      if (!std::isfinite(*x))
        throw std::domain_error(fmt::format(
            "expected finite forces of the model, got {} on atom {}", *x, atom->tag[i]));
}

// Adds a block's results to LAMMPS's arrays. Later, LAMMPS's reverse communication adds the rows of
// ghosts to those of the atoms on their own ranks.
void PairCalcOps::add(Block& block) {
  const auto of_result = [&](int i, size_t model = 0) {
    return block.results[model][i][0].to(at::kCPU, at::kDouble).contiguous();
  };
  // Adds the columns `order` of x to the rows of the block's atoms.
  const auto add_to = [&](double* const* rows, const at::Tensor& x, std::vector<int> order) {
    const double* row = x.const_data_ptr<double>();
    const int64_t width = x.numel() / x.size(0);
    for (int64_t a = 0; a < x.size(0); ++a, row += width)
      for (size_t c = 0; c < order.size(); ++c) rows[block.atoms[a]][c] += row[order[c]];
  };
  // The model has W[a][b] = (force on j)[a] (r_j - r_i)[b] at 3a + b. LAMMPS has the vector's
  // component first, in the order xx, yy, zz, xy, xz, yz, yx, zx, zy.
  static const std::vector<int> six{0, 4, 8, 3, 6, 7}, nine{0, 4, 8, 3, 6, 7, 1, 2, 5};

  const double energy = block.results[0][0].item<double>();
  if (!std::isfinite(energy))
    throw std::domain_error(fmt::format("expected a finite energy of the model, got {}", energy));
  for (size_t k = 0; k < block.results.size(); ++k) refuse_infinite(block, of_result(2, k));
  if (eflag_global) eng_vdwl += energy;
  add_to(atom->f, of_result(2), {0, 1, 2});
  if (eflag_atom) {
    const at::Tensor energies = of_result(1);
    for (int64_t i = 0; i < block.centres; ++i)
      eatom[block.atoms[i]] += energies.const_data_ptr<double>()[i];
  }
  if (vflag_global) {
    const at::Tensor W = of_result(3);
    for (size_t c = 0; c < six.size(); ++c) virial[c] += W.const_data_ptr<double>()[six[c]];
  }
  if (vflag_atom) add_to(vatom, of_result(4), six);
  if (cvflag_atom) add_to(cvatom, of_result(4), nine);
  for (size_t k = 0, models = models_.size(); !forces_.empty() && k < models; ++k) {
    const at::Tensor force = of_result(2, k), W = of_result(3, k);
    const double* row = force.const_data_ptr<double>();
    for (const int i : block.atoms)
      for (int a = 0; a < 3; ++a) forces_[3 * (models * i + k) + a] += *row++;
    for (int c = 0; c < 9; ++c) virials_[9 * k + c] += W.const_data_ptr<double>()[c];
  }
  block.results.clear();
}

int PairCalcOps::pack_forward_comm(int n, int* atoms, double* buffer, int, int*) {
  for (int k = 0; k < n; ++k) buffer[k] = atom->type[atoms[k]];
  return n;
}

void PairCalcOps::unpack_forward_comm(int n, int first, double* buffer) {
  std::copy_n(buffer, n, &atom->type[first]);
}

int PairCalcOps::pack_reverse_comm(int n, int first, double* buffer) {
  std::copy_n(&forces_[comm_reverse * first], comm_reverse * n, buffer);
  return comm_reverse * n;
}

void PairCalcOps::unpack_reverse_comm(int n, int* atoms, double* buffer) {
  for (int k = 0; k < n; ++k)
    for (int c = 0; c < comm_reverse; ++c) forces_[comm_reverse * atoms[k] + c] += *buffer++;
}

// Computes deviations as DeePMD-kit does:
// https://docs.deepmodeling.com/projects/deepmd/en/stable/test/model-deviation.html
// Here <> is the mean over the models. The deviation of an atom's force is sqrt(<|F - <F>|^2>). The
// deviation of a component of the virial is sqrt(<(W - <W>)^2>) / N for N atoms. The mean over the
// nine components is the root of their mean square.
void PairCalcOps::add_deviations() {
  comm->reverse_comm(this);
  const int models = models_.size();
  // Returns the variance over the models of numbers that lie `stride` apart.
  const auto variance = [models](const double* x, int stride) {
    double mean = 0, squares = 0;
    for (int k = 0; k < models; ++k) mean += x[k * stride] / models;
    for (int k = 0; k < models; ++k) squares += (x[k * stride] - mean) * (x[k * stride] - mean);
    return squares / models;
  };
  deviation_.assign(std::max(1, atom->nlocal), 0.0);  // an empty vector is an error in `fix pair`
  double largest = 0, least = std::numeric_limits<double>::max(), sum = 0;
  for (const int i : centres_) {
    double squares = 0;
    for (int a = 0; a < 3; ++a) squares += variance(&forces_[comm_reverse * i + a], 3);
    deviation_[i] = std::sqrt(squares);
    largest = std::max(largest, deviation_[i]);
    least = std::min(least, deviation_[i]);
    sum += deviation_[i];
  }
  const auto reduce = [this](double* x, int n, MPI_Op op) {
    MPI_Allreduce(MPI_IN_PLACE, x, n, MPI_DOUBLE, op, world);
  };
  double sums[2] = {sum, static_cast<double>(centres_.size())};
  reduce(&largest, 1, MPI_MAX);
  reduce(&least, 1, MPI_MIN);
  reduce(sums, 2, MPI_SUM);
  reduce(virials_.data(), virials_.size(), MPI_SUM);
  if (comm->me != 0 || sums[1] == 0) return;  // `compute pair` adds the ranks' vectors
  std::array<double, 9> virial;
  for (int c = 0; c < 9; ++c) virial[c] = std::sqrt(variance(&virials_[c], 9)) / sums[1];
  double squares = 0;
  for (const double x : virial) squares += x * x / 9;
  const auto [low, high] = std::minmax_element(virial.begin(), virial.end());
  pvector[kVirials] = *high;
  pvector[kVirials + 1] = *low;
  pvector[kVirials + 2] = std::sqrt(squares);
  pvector[kForces] = largest;
  pvector[kForces + 1] = least;
  pvector[kForces + 2] = sums[0] / sums[1];
}

// `fix ID group pair N calcops devi_f 1` sets the flag in every Nth step, then reads the vector.
void* PairCalcOps::extract(const char* name, int& dimensions) {
  dimensions = 0;
  return std::strcmp(name, "devi_f_flag") == 0 ? &deviations_wanted_ : nullptr;
}

void* PairCalcOps::extract_peratom(const char* name, int& columns) {
  columns = 0;
  return std::strcmp(name, "devi_f") == 0 && !deviation_.empty() ? deviation_.data() : nullptr;
}

double PairCalcOps::memory_usage() {
  double bytes = Pair::memory_usage() + sizeof(double) * (forces_.size() + deviation_.size());
  for (const Block& block : blocks_) {
    bytes += sizeof(int) * (block.atoms.size() + block.ends.size() + block.rows.size());
    for (const at::Tensor& x : {block.types, block.list_neigh, block.named, block.edge_order})
      if (x.defined()) bytes += x.nbytes();
  }
  return bytes;
}
