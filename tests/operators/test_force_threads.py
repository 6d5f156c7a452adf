"""Threads of the CPU kernels: their number, how they share the work, and no data race."""

import os
import shutil
import subprocess
import sys

import pytest
import thread_sanitizer

PROGRAM = """
#include <random>
#include <vector>
#include "force/force.h"
using namespace calcops;
using namespace calcops::ops::force;

template <class Real>
void check() {
  const int64_t B = 3, n = 700, m = 20, K = 50, slots = B * n * K, rows = B * (n + m);
  std::mt19937 random(0);
  std::vector<int64_t> list(slots);
  for (int64_t& j : list) j = int64_t(random() % (n + m + 1)) - 1;
  std::vector<Real> dE(slots * 4, 1), Ri_d(slots * 12, 2), Rij(slots * 3, 3);
  std::vector<Real> F(rows * 3), W(B * 9), atom_W(rows * 9), gE(slots * 4), gRi_d(slots * 12), gRij(slots * 3);
  const ForceInputs<Real, int64_t> in{B, n, m, K, /*center=*/true, /*virial=*/true, list.data(), dE.data(), Ri_d.data(), Rij.data()};
  force_cpu(in, ForceOutputs<Real>{F.data(), W.data(), atom_W.data()});
  force_backward_cpu(in, ForceUpstream<Real>{F.data(), W.data(), atom_W.data()},
                     ForceGradients<Real>{gE.data(), gRi_d.data(), gRij.data()});
}

int main() {
  check<float>();
  check<double>();
}
"""


RACE = """
#include <calcops/parallel.h>
int main() {
  int64_t sum = 0;
  calcops::parallel_for(8, 1, [&](int64_t begin, int64_t) { sum += begin; });
  return sum < 0;
}
"""


# Prints how many threads the process gains when torch's number of threads goes from 1 to 3.
COUNT_THREADS = """
import os, torch, calcops_jit
torch.set_num_threads(1)
list_neigh = torch.zeros(1, 4000, 60, dtype=torch.int32)
dE, Ri_d = torch.ones(1, 4000, 60, 4), torch.ones(1, 4000, 240, 3)
calcops_jit.force(list_neigh, dE, Ri_d)
threads = len(os.listdir("/proc/self/task"))
torch.set_num_threads(3)
calcops_jit.force(list_neigh, dE, Ri_d)
print(len(os.listdir("/proc/self/task")) - threads)
"""


def test_kernels_use_torchs_number_of_threads():
    run = subprocess.run(
        [sys.executable, "-c", COUNT_THREADS], capture_output=True, text=True, check=True
    )
    assert int(run.stdout) == 2


@pytest.mark.long
def test_the_kernels_have_no_data_race(tmp_path):
    thread_sanitizer.run(tmp_path, PROGRAM, "force/force_cpu.cpp", "force/force_backward_cpu.cpp")


@pytest.mark.long
def test_the_thread_sanitizer_finds_a_race_that_is_there(tmp_path):
    with pytest.raises(AssertionError, match="data race"):
        thread_sanitizer.run(tmp_path, RACE)


LOOPS = """
#include <stdexcept>
#include <vector>
#include <calcops/parallel.h>
#undef NDEBUG
#include <cassert>
#ifndef _OPENMP
int omp_get_max_threads() { return 1; }
void omp_set_num_threads(int) {}
#endif
int at::get_num_threads() { return omp_get_max_threads(); }
using namespace calcops;

int main() {
  for (int threads = 1; threads <= 5; ++threads) {
    omp_set_num_threads(threads);
    for (int64_t count = 0; count < 40; ++count)
      for (int64_t grain = 1; grain < 12; ++grain) {
        std::vector<int> seen(count), parts(count + 1);
        parallel_for(count, grain, [&](int64_t begin, int64_t end) {
          ++parts[begin];
          for (int64_t i = begin; i < end; ++i) ++seen[i];
        });
        int number = 0;
        for (int part : parts) number += part;
        for (int times : seen) assert(times == 1);
        assert(number <= omp_get_max_threads());
        assert(number <= (count + grain - 1) / grain);
        // No part for no numbers, and a single part only where the loop must not be divided.
        const bool is_one_part = omp_get_max_threads() == 1 || count <= grain;
        assert(number > 1 || number == (count > 0 && is_one_part));
        const int64_t first = parallel_first(count, grain, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i)
            if (i % 10 == 7) return i;
          return kNone;
        });
        assert(first == (count > 7 ? 7 : kNone));
      }
    bool caught = false;
    try {
      parallel_for(9, 1, [](int64_t begin, int64_t) {
        if (begin > 0 || omp_get_max_threads() == 1) throw std::runtime_error("in a part");
      });
    } catch (const std::runtime_error&) {
      caught = true;
    }
    assert(caught);
    std::vector<int> inner(81);
    parallel_for(9, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        int parts = 0;
        parallel_for(9, 1, [&](int64_t first, int64_t last) {
          ++parts;
          for (int64_t k = first; k < last; ++k) ++inner[9 * i + k];
        });
        assert(parts == 1 || omp_get_max_threads() == 1);
      }
    });
    for (int times : inner) assert(times == 1);
  }
}
"""


@pytest.mark.parametrize(
    "flags", [["-fopenmp"], ["-Wno-unknown-pragmas"]], ids=["OpenMP", "without"]
)
def test_a_parallel_loop_visits_each_number_once_and_rethrows_exceptions(tmp_path, flags):
    (tmp_path / "loops.cpp").write_text(LOOPS)
    options = [
        "-std=c++17",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        *flags,
        f"-I{thread_sanitizer.HEADERS}",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command = [shutil.which("c++"), *options, "loops.cpp", "-o", "loops"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    subprocess.run([tmp_path / "loops"], env=environment, check=True)
