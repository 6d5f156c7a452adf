// CUDA kernels of the force operators.
//
// Forward: the slots that name one atom form its row. Integer atomics count the slots of each row
// and collect them. The order of the collected slots differs from run to run. So a warp sorts each
// row before it is summed, and the bits do not depend on the order of blocks. The rows of a
// neighbor_index are sorted already.
//
// Each pair is read twice, for its neighbour's row and for its centre's. If the list keeps near
// atoms together, these reads are close in time and one of them comes from L2. Another way would be
// to write g for each slot and to gather it. It would move as many bytes: g has 24 bytes, but
// memory is read in sectors of 32.
//
// Four lanes share a pair: lane c holds dE[c] and Ri_d[c], in the backward also row c of U. So a
// warp reads whole sectors of eight pairs, and no array needs more than its type's alignment.
#include <calcops/launch.h>

#include <algorithm>
#include <limits>
#include <type_traits>

#include "force/force.h"
#include "force/force_math.h"

namespace calcops::ops::force {
namespace {

constexpr unsigned kThreads = 256, kWarps = kThreads / 32;
constexpr unsigned kAllLanes = 0xffffffff;
// Blocks whose shares of the virial are summed together, before those of all groups are.
constexpr unsigned kGroup = 64;
// Slots that fit into a warp's list in shared memory. A longer row is read from device memory.
constexpr unsigned kListed = 512;
constexpr uint32_t kNoSlot = 0xffffffff;
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

struct Workspace {
  double* virials;           // [frames][row_tiles + row_groups][9], shares of blocks and groups
  unsigned long long* ends;  // [frames][n+m], the end of each row in `slots`
  unsigned long long* used;  // length of `slots` so far; zero at first, like the next two
  uint32_t* counts;          // [frames][n+m], pairs in each row
  uint32_t* tickets;  // [frames][row_groups + 1], blocks of each group, and groups, that have
                      // written their share
  uint32_t* slots;    // the rows in any order; slots are numbered within their frame
  int64_t bytes = 0;
  int64_t row_tiles;   // blocks of kWarps rows in a frame; at least one, which writes the virial
  int64_t row_groups;  // groups of kGroup such blocks
  int64_t slot_tiles;  // blocks of kThreads slots in a frame

  template <class Real, class Index>
  Workspace(void* memory, const ForceInputs<Real, Index>& in) {
    const int64_t rows = in.natoms + in.nghost, frame_slots = in.natoms * in.neighbors;
    const int64_t unsorted = in.neighbor_index ? 0 : in.frames;  // frames to be sorted
    row_tiles = std::max<int64_t>(blocks_for(rows, kWarps), 1);
    row_groups = blocks_for(row_tiles, kGroup);
    slot_tiles = blocks_for(frame_slots, kThreads);
    const auto take = [&](auto*& array, int64_t count) {
      using Array = std::remove_reference_t<decltype(array)>;
      array = reinterpret_cast<Array>(reinterpret_cast<uintptr_t>(memory) + bytes);
      bytes += count * int64_t(sizeof(*array));
    };
    take(virials, in.frames * (row_tiles + row_groups) * 9);
    take(ends, unsorted * rows);
    take(used, 1);
    take(counts, unsorted * rows);
    take(tickets, in.frames * (row_groups + 1));
    take(slots, unsorted * frame_slots);
  }

  cudaError_t clear(cudaStream_t stream) const {
    const auto zeros = reinterpret_cast<uintptr_t>(slots) - reinterpret_cast<uintptr_t>(used);
    cudaMemsetAsync(used, 0, zeros, stream);
    return cudaGetLastError();
  }
};

__device__ inline bool names_atom(int64_t entry, int64_t rows) {
  return uint64_t(entry) < uint64_t(rows);
}
// Return whether an entry is neither an atom nor -1. As an unsigned number, -1 + 1 is 0.
__device__ inline bool is_wrong(int64_t entry, int64_t rows) {
  return uint64_t(entry) + 1 > uint64_t(rows);
}

// Call visit(row, slot) for the pairs among this block's slots. Each thread has one slot.
template <class Real, class Index, class Visit>
__device__ inline void visit_pairs(const ForceInputs<Real, Index>& in, const Workspace& work,
                                   Visit visit) {
  const unsigned tiles = unsigned(work.slot_tiles);
  const int64_t frame = blockIdx.x / tiles;
  const int64_t rows = in.natoms + in.nghost, slots = in.natoms * in.neighbors;
  const int64_t slot = int64_t(blockIdx.x % tiles) * kThreads + threadIdx.x;
  if (slot >= slots) return;
  const int64_t j = in.list_neigh[frame * slots + slot];
  if (names_atom(j, rows)) visit(frame * rows + j, uint32_t(slot));
}

template <class Real, class Index>
__global__ void count_rows(ForceInputs<Real, Index> in, Workspace work) {
  visit_pairs(in, work, [&](int64_t row, uint32_t) { atomicAdd(work.counts + row, 1u); });
}

// Set where each row begins in `slots`. The 32 rows of a warp follow each other. The warps' groups
// of rows are in the order in which the warps run.
__global__ void place_rows(Workspace work, int64_t rows) {
  const int64_t row = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const unsigned lane = threadIdx.x % 32;
  const unsigned long long count = row < rows ? work.counts[row] : 0;
  unsigned long long end = count;
  for (unsigned step = 1; step < 32; step *= 2) {
    const unsigned long long before = __shfl_up_sync(kAllLanes, end, step);
    if (lane >= step) end += before;
  }
  unsigned long long begin = lane == 31 ? atomicAdd(work.used, end) : 0;
  begin = __shfl_sync(kAllLanes, begin, 31);
  // The beginning; fill_rows increments it to the end.
  if (row < rows) work.ends[row] = begin + end - count;
}

template <class Real, class Index>
__global__ void fill_rows(ForceInputs<Real, Index> in, Workspace work) {
  visit_pairs(in, work, [&](int64_t row, uint32_t slot) {
    work.slots[atomicAdd(work.ends + row, 1ull)] = slot;
  });
}

// Bitonic sorts by one warp. Every comparison puts the smaller value first (Knuth, The Art of
// Computer Programming 3, 5.3.4). So places from `length` to the next power of two may be taken for
// infinities, which never move.
//
// Sort in registers. Value 32 q + lane is v[q] of that lane.
template <int kEach>
__device__ inline void sort_in_registers(uint32_t* slots, uint32_t length, unsigned lane) {
  uint32_t v[kEach], others[kEach];
#pragma unroll
  for (int q = 0; q < kEach; ++q) v[q] = 32 * q + lane < length ? slots[32 * q + lane] : kNoSlot;
#pragma unroll
  for (int level = 0; 1 << level < 32 * kEach; ++level) {
#pragma unroll
    for (int bit = level; bit >= 0; --bit) {
      const int half = 1 << bit, step = bit == level ? 2 * half - 1 : half;
#pragma unroll
      for (int q = 0; q < kEach; ++q) {
        others[q] = v[q ^ (step / 32)];
        if (step % 32 != 0) others[q] = __shfl_xor_sync(kAllLanes, others[q], step % 32);
      }
#pragma unroll
      for (int q = 0; q < kEach; ++q) {
        const bool low = half < 32 ? (lane & half) == 0 : (q & (half / 32)) == 0;
        v[q] = low ? min(v[q], others[q]) : max(v[q], others[q]);
      }
    }
  }
#pragma unroll
  for (int q = 0; q < kEach; ++q)
    if (32 * q + lane < length) slots[32 * q + lane] = v[q];
}

// Sort in device memory. A comparison with a place beyond the end is skipped.
__device__ inline void sort_in_memory(uint32_t* slots, uint32_t length, unsigned lane) {
  const int levels = 32 - __clz(int(length - 1));
  for (int level = 0; level < levels; ++level) {
    for (int bit = level; bit >= 0; --bit) {
      const uint32_t half = 1u << bit;
      for (uint32_t pair = lane; pair < 1u << (levels - 1); pair += 32) {
        const uint32_t low = 2 * pair - (pair & (half - 1));
        const uint32_t high = bit == level ? low ^ (2 * half - 1) : low + half;
        if (high >= length) continue;
        const uint32_t a = slots[low], b = slots[high];
        if (a <= b) continue;
        slots[low] = b;
        slots[high] = a;
      }
      __syncwarp();
    }
  }
}

// A warp per row.
__global__ void __launch_bounds__(kThreads) sort_rows(Workspace work, int64_t rows) {
  const int64_t row = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= rows) return;
  const unsigned lane = threadIdx.x % 32;
  const uint32_t length = work.counts[row];
  uint32_t* slots = work.slots + (work.ends[row] - length);
  if (length <= 1) return;
  if (length <= 32) return sort_in_registers<1>(slots, length, lane);
  if (length <= 64) return sort_in_registers<2>(slots, length, lane);
  if (length <= 128) return sort_in_registers<4>(slots, length, lane);
  if (length <= 256) return sort_in_registers<8>(slots, length, lane);
  if (length <= 512) return sort_in_registers<16>(slots, length, lane);
  sort_in_memory(slots, length, lane);
}

template <class Real>
__device__ inline void load_r4(const Real* Rij, Row& r4) {
  r4 = {double(Rij[0]), double(Rij[1]), double(Rij[2]), 1.0};
}
template <class Real>
__device__ inline void load_r4(const Real*, Numbers<1>& r4) {
  r4[0] = 1;
}

// Add this lane's terms of g (x) R4 for kPairs pairs: those at slots[lane / 4], and every 8 further
// on. All are loaded before the first is used, without a branch in between. A slot of another
// list's neighbor_index may be too large, so it is limited to the last slot.
template <int kPairs, int kColumns, class Real, class Index>
__device__ inline void add_pairs(const ForceInputs<Real, Index>& in, int64_t frame_slots,
                                 const uint32_t* slots, unsigned lane, Numbers<kColumns>* sum) {
  const unsigned c = lane % 4;
  const uint32_t last_slot = uint32_t(in.natoms * in.neighbors - 1);
  Real dE[kPairs], Ri_d[kPairs][3], Rij[kPairs][3];
#pragma unroll
  for (int p = 0; p < kPairs; ++p) {
    const int64_t slot = frame_slots + min(slots[8 * p + lane / 4], last_slot);
    dE[p] = in.dE[4 * slot + c];
    for (int a = 0; a < 3; ++a) Ri_d[p][a] = in.Ri_d[12 * slot + 3 * c + a];
    if constexpr (kColumns > 1)
      for (int a = 0; a < 3; ++a) Rij[p][a] = in.Rij[3 * slot + a];
  }
#pragma unroll
  for (int p = 0; p < kPairs; ++p) {
    Numbers<kColumns> r4;
    load_r4(Rij[p], r4);
    add_pair(row_times_matrix<1>(dE + p, Ri_d[p]), r4, sum);
  }
}

// The same for all pairs at slots[0..count).
template <int kColumns, class Real, class Index>
__device__ inline void sum_pairs(const ForceInputs<Real, Index>& in, int64_t frame_slots,
                                 const uint32_t* slots, uint32_t count, unsigned lane,
                                 Numbers<kColumns>* sum) {
  uint32_t k = 0;
  for (; k + 32 <= count; k += 32) add_pairs<4>(in, frame_slots, slots + k, lane, sum);
  for (; k + lane / 4 < count; k += 8) add_pairs<1>(in, frame_slots, slots + k, lane, sum);
}

// Return the slots that name atom j, in rising order, and their number. If they fit, they are
// copied to the warp's list.
template <class Real, class Index>
__device__ inline const uint32_t* row_of(const ForceInputs<Real, Index>& in, const Workspace& work,
                                         int64_t frame, int64_t j, uint32_t* list,
                                         uint32_t& count) {
  const int64_t rows = in.natoms + in.nghost, frame_slots = in.natoms * in.neighbors;
  const uint32_t* slots;
  if (in.neighbor_index) {
    // The index of another list must not lead out of bounds.
    const int32_t* ends = in.neighbor_index + frame * (rows + frame_slots);
    const int64_t end = min(max(int64_t(ends[j]), int64_t(0)), frame_slots);
    const int64_t begin = j > 0 ? min(max(int64_t(ends[j - 1]), int64_t(0)), end) : 0;
    slots = reinterpret_cast<const uint32_t*>(ends + rows + begin);
    count = uint32_t(end - begin);
  } else {
    count = work.counts[frame * rows + j];
    slots = work.slots + (work.ends[frame * rows + j] - count);
  }
  if (count > kListed) return slots;
  for (uint32_t k = threadIdx.x % 32; k < count; k += 32) list[k] = slots[k];
  __syncwarp();
  return list;
}

// Sum the row of atom j by one warp. Every lane gets the sum. `list` has room for kListed slots.
template <int kColumns, class Real, class Index>
__device__ inline void sum_row(const ForceInputs<Real, Index>& in, const Workspace& work,
                               int64_t frame, int64_t j, uint32_t* list, Numbers<kColumns>* sum) {
  const unsigned lane = threadIdx.x % 32;
  const int64_t rows = in.natoms + in.nghost;
  const int64_t frame_slots = frame * in.natoms * in.neighbors;
  uint32_t count;
  const uint32_t* slots = row_of(in, work, frame, j, list, count);
  sum_pairs<kColumns>(in, frame_slots, slots, count, lane, sum);

  bool bad = false;
  Numbers<1> center[3] = {};
  const int64_t own_slots = j < in.natoms ? in.neighbors : 0;
  const Index* own = in.list_neigh + frame_slots + j * in.neighbors;
  for (int64_t begin = 0; begin < own_slots; begin += kListed) {
    __syncwarp();  // all lanes have read the list
    const int64_t end = min(begin + kListed, own_slots);
    uint32_t live = 0;         // filled slots in the list
    constexpr int kLoads = 4;  // at once
    for (int64_t s = begin; s < end; s += 32 * kLoads) {
      int64_t entries[kLoads];
      for (int k = 0; k < kLoads; ++k)
        entries[k] = s + 32 * k + lane < end ? int64_t(own[s + 32 * k + lane]) : -1;
      for (int k = 0; k < kLoads; ++k) {
        const bool is_filled = names_atom(entries[k], rows);
        bad |= is_wrong(entries[k], rows);
        const unsigned lanes = __ballot_sync(kAllLanes, is_filled);
        if (is_filled)
          list[live + __popc(lanes & ((1u << lane) - 1))] =
              uint32_t(j * in.neighbors + s + 32 * k + lane);
        live += __popc(lanes);
      }
    }
    __syncwarp();
    if (in.center) sum_pairs<1>(in, frame_slots, list, live, lane, center);
  }
  bad = __any_sync(kAllLanes, bad);
  for (int a = 0; a < 3; ++a) {
    sum[a][kColumns - 1] -= center[a][0];
    for (int b = 0; b < kColumns; ++b) {
      sum[a][b] = sum_of_lanes(sum[a][b]);
      if (bad) sum[a][b] = kNaN;
    }
  }
}

// Return whether all other blocks of a group have taken their ticket. The last of them sees what
// the others have written.
__device__ inline bool is_last_of(unsigned blocks, uint32_t* tickets) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(tickets, 1u) == blocks - 1;
    __threadfence();
  }
  __syncthreads();
  return last;
}

// Return the sum of number `thread` of all shares [count][9], for threads below 9.
__device__ inline double sum_shares(const double* shares, int64_t count, double* parts) {
  constexpr unsigned kStride = kThreads / 9 * 9;
  const unsigned thread = threadIdx.x;
  double total = 0;
  if (thread < kStride) {
#pragma unroll 8
    for (int64_t k = thread; k < count * 9; k += kStride) total += __ldcg(shares + k);
  }
  parts[thread] = total;
  __syncthreads();
  total = 0;
  if (thread < 9)
    for (unsigned k = thread; k < kStride; k += 9) total += parts[k];
  return total;
}

// Write a frame's virial: the sum of its atoms' virials. The last block of a group to come here
// adds the shares of the group's blocks, and the last group those of all groups, in their order.
// One block alone would have to read 49 MB for five million atoms. `sum` is the sum of the row that
// the thread's warp has computed.
template <class Real>
__device__ inline void sum_virial(const Workspace& work, int64_t frame, const Row* sum,
                                  Real* virial) {
  __shared__ double parts[kThreads];
  const unsigned thread = threadIdx.x, tiles = unsigned(work.row_tiles);
  const unsigned groups = unsigned(work.row_groups);
  const unsigned tile = blockIdx.x % tiles, group = tile / kGroup;
  const unsigned first = group * kGroup, in_group = min(kGroup, tiles - first);
  double* const shares = work.virials + frame * (work.row_tiles + groups) * 9;
  double* const of_groups = shares + work.row_tiles * 9;
  uint32_t* const tickets = work.tickets + frame * (work.row_groups + 1);
  if (thread % 32 == 0)
    for (int a = 0; a < 3; ++a)
      for (int b = 0; b < 3; ++b) parts[thread / 32 * 9 + 3 * a + b] = sum[a][b];
  __syncthreads();
  double total = 0;
  if (thread < 9) {
    for (unsigned k = thread; k < 9 * kWarps; k += 9) total += parts[k];
    shares[int64_t(tile) * 9 + thread] = total;
  }
  if (!is_last_of(in_group, tickets + group)) return;
  total = sum_shares(shares + int64_t(first) * 9, in_group, parts);
  if (thread < 9) of_groups[int64_t(group) * 9 + thread] = total;
  if (!is_last_of(groups, tickets + groups)) return;
  total = sum_shares(of_groups, groups, parts);
  if (thread < 9) virial[frame * 9 + thread] = Real(total);
}

// Write the results of all atoms, a warp for each. With three blocks on a multiprocessor, a thread
// has 80 registers, enough to load four pairs at once.
template <int kColumns, class Real, class Index>
__global__ void __launch_bounds__(kThreads, 3)
    sum_rows(ForceInputs<Real, Index> in, ForceOutputs<Real> out, Workspace work) {
  __shared__ uint32_t lists[kWarps][kListed];
  const unsigned warp = threadIdx.x / 32, tiles = unsigned(work.row_tiles);
  const int64_t rows = in.natoms + in.nghost, frame = blockIdx.x / tiles;
  const int64_t j = int64_t(blockIdx.x % tiles) * kWarps + warp;
  Numbers<kColumns> sum[3] = {};
  if (j < rows) {
    sum_row<kColumns>(in, work, frame, j, lists[warp], sum);
    if (threadIdx.x % 32 == 0) {
      for (int a = 0; a < 3; ++a) {
        out.force[3 * (frame * rows + j) + a] = Real(sum[a][kColumns - 1]);
        for (int b = 0; b + 1 < kColumns; ++b)
          out.atom_virial[9 * (frame * rows + j) + 3 * a + b] = Real(sum[a][b]);
      }
    }
  }
  if constexpr (kColumns > 1) sum_virial(work, frame, sum, out.virial);
}

__device__ inline void sum_of_four_lanes(Triple& values) {
  for (int a = 0; a < 3; ++a)
    for (int lanes = 1; lanes < 4; lanes *= 2)
      values[a] += __shfl_xor_sync(kAllLanes, values[a], lanes);
}

// Write the gradients, a warp for each centre atom.
template <bool kVirial, class Real, class Index>
__global__ void __launch_bounds__(kThreads)
    backward_rows(ForceInputs<Real, Index> in, ForceUpstream<Real> upstream,
                  ForceGradients<Real> out) {
  __shared__ Real staging[kWarps][96];
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, c = lane % 4;
  const int64_t atom = int64_t(blockIdx.x) * kWarps + warp;
  if (atom >= in.frames * in.natoms) return;
  const int64_t frame = atom / in.natoms, i = atom % in.natoms;
  const int64_t rows = in.natoms + in.nghost, first = atom * in.neighbors;
  const Real* gF = upstream.force ? upstream.force + frame * rows * 3 : nullptr;
  const Real* gAV = upstream.atom_virial ? upstream.atom_virial + frame * rows * 9 : nullptr;

  // A wrong entry makes all gradients of the centre atom NaN.
  const Index* list = in.list_neigh + first;
  bool bad = false;
  for (int64_t s = lane; s < in.neighbors; s += 32) bad |= is_wrong(list[s], rows);
  bad = __any_sync(kAllLanes, bad);

  // This lane's row of U (force_math.h): 0 to 2 are the virial's, 3 is the force's. Without a
  // virial there is only the last.
  const unsigned u_row = kVirial ? c : 3;
  Triple center = {}, gV = {};
  for (int a = 0; a < 3; ++a) {
    if (u_row == 3 && gF && in.center) center[a] = gF[3 * i + a];
    if (u_row < 3 && upstream.virial) gV[a] = upstream.virial[9 * frame + 3 * a + u_row];
  }
  const bool wants_Rij = kVirial && out.Rij;
  const double otherwise = bad ? kNaN : 0;

  Index next = lane / 4 < in.neighbors ? list[lane / 4] : Index(-1);

  for (int64_t begin = 0; begin < in.neighbors; begin += 8) {
    const int64_t at = first + begin, s = begin + lane / 4;  // four lanes for each slot
    const bool is_inside = s < in.neighbors;
    const int64_t j = next;
    next = s + 8 < in.neighbors ? list[s + 8] : Index(-1);
    const bool is_live = !bad && j != -1;
    double grad_dE = otherwise, grad_Rij = otherwise;
    double grad_Ri_d[3] = {otherwise, otherwise, otherwise};
    if (__any_sync(kAllLanes, is_live)) {
      Triple u = {}, e = {};
      double dE = 0, Ri_d[3] = {};
      if (is_live) {
        double r = 1;
        if (out.Ri_d || wants_Rij) dE = in.dE[4 * at + lane];
        if (out.dE || wants_Rij)
          for (int a = 0; a < 3; ++a) Ri_d[a] = in.Ri_d[12 * at + 3 * lane + a];
        if (u_row < 3) {
          r = in.Rij[3 * (at + lane / 4) + u_row];
          for (int a = 0; a < 3; ++a) u[a] = gV[a] + (gAV ? double(gAV[9 * j + 3 * a + u_row]) : 0);
        } else if (gF) {
          for (int a = 0; a < 3; ++a) u[a] = gF[3 * j + a];
        }
        e = row_times_matrix<1>(&r, u.x) - center;
      }
      if constexpr (kVirial) sum_of_four_lanes(e);

      Triple g = {};
      if (wants_Rij) {
        g = row_times_matrix<1>(&dE, Ri_d);
        sum_of_four_lanes(g);
      }
      if (is_live) {
        matrix_times_column<1>(Ri_d, e, &grad_dE);
        outer_product<1>(&dE, e, grad_Ri_d);
        matrix_times_column<1>(u.x, g, &grad_Rij);
      }
    }

    if (out.dE && is_inside) out.dE[4 * at + lane] = Real(grad_dE);
    if (out.Ri_d) {
      // By way of shared memory, so that neighbouring lanes write neighbouring numbers.
      for (int a = 0; a < 3; ++a) staging[warp][3 * lane + a] = Real(grad_Ri_d[a]);
      __syncwarp();
      const unsigned numbers = unsigned(min(int64_t(96), 12 * (in.neighbors - begin)));
      for (unsigned k = 0; k < 96; k += 32)
        if (k + lane < numbers) out.Ri_d[12 * at + k + lane] = staging[warp][k + lane];
      __syncwarp();  // all lanes have read staging
    }
    if (out.Rij && is_inside && c < 3) out.Rij[3 * (at + lane / 4) + c] = Real(grad_Rij);
  }
}

}  // namespace

template <class Real, class Index>
int64_t force_cuda_workspace(const ForceInputs<Real, Index>& in) {
  return Workspace(nullptr, in).bytes;
}

template <class Real, class Index>
cudaError_t force_cuda(const ForceInputs<Real, Index>& in, const ForceOutputs<Real>& out,
                       void* workspace, cudaStream_t stream) {
  if (in.frames == 0) return cudaSuccess;
  if (in.natoms * in.neighbors > std::numeric_limits<uint32_t>::max()) return cudaErrorInvalidValue;
  const Workspace work(workspace, in);
  const int64_t rows = in.frames * (in.natoms + in.nghost);
  const auto sum = in.virial ? sum_rows<4, Real, Index> : sum_rows<1, Real, Index>;
  cudaError_t error = work.clear(stream);
  if (!in.neighbor_index) {
    const int64_t tiles = in.frames * work.slot_tiles;
    if (!error) error = launch(count_rows<Real, Index>, tiles, kThreads, stream, in, work);
    if (!error)
      error = launch(place_rows, blocks_for(rows, kThreads), kThreads, stream, work, rows);
    if (!error) error = launch(fill_rows<Real, Index>, tiles, kThreads, stream, in, work);
    if (!error) error = launch(sort_rows, blocks_for(rows, kWarps), kThreads, stream, work, rows);
  }
  if (!error) error = launch(sum, in.frames * work.row_tiles, kThreads, stream, in, out, work);
  return error;
}

template <class Real, class Index>
cudaError_t force_backward_cuda(const ForceInputs<Real, Index>& in,
                                const ForceUpstream<Real>& upstream,
                                const ForceGradients<Real>& out, cudaStream_t stream) {
  const bool virial = in.virial && (upstream.virial || upstream.atom_virial);
  const auto kernel = virial ? backward_rows<true, Real, Index> : backward_rows<false, Real, Index>;
  const int64_t atoms = in.neighbors > 0 ? in.frames * in.natoms : 0;
  return launch(kernel, blocks_for(atoms, kWarps), kThreads, stream, in, upstream, out);
}

#define INSTANTIATE(Real, Index)                                                              \
  template int64_t force_cuda_workspace(const ForceInputs<Real, Index>&);                     \
  template cudaError_t force_cuda(const ForceInputs<Real, Index>&, const ForceOutputs<Real>&, \
                                  void*, cudaStream_t);                                       \
  template cudaError_t force_backward_cuda(const ForceInputs<Real, Index>&,                   \
                                           const ForceUpstream<Real>&,                        \
                                           const ForceGradients<Real>&, cudaStream_t);
INSTANTIATE(float, int32_t)
INSTANTIATE(float, int64_t)
INSTANTIATE(double, int32_t)
INSTANTIATE(double, int64_t)
#undef INSTANTIATE

}  // namespace calcops::ops::force
