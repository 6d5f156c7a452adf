"""The CPU kernels of the force operators have no data race."""

import subprocess
import sys

import pytest
import thread_sanitizer

PROGRAM = """
#include <random>
#include <vector>
#include "force/force.h"
using namespace calcops;

template <class Real>
void check() {
  const int64_t B = 3, n = 700, m = 20, K = 50, slots = B * n * K, rows = B * (n + m);
  std::mt19937 random(0);
  std::vector<int64_t> list(slots);
  for (int64_t& j : list) j = int64_t(random() % (n + m + 1)) - 1;
  std::vector<Real> dE(slots * 4, 1), Ri_d(slots * 12, 2), Rij(slots * 3, 3);
  std::vector<Real> F(rows * 3), W(B * 9), atom_W(rows * 9), gE(slots * 4), gRi_d(slots * 12), gRij(slots * 3);
  const ForceInputs<Real, int64_t> in{B, n, m, K, true, true, list.data(), dE.data(), Ri_d.data(), Rij.data()};
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
#include "parallel.h"
int main() {
  int64_t sum = 0;
  calcops::parallel_for(8, 1, [&](int64_t begin, int64_t) { sum += begin; });
  return sum < 0;
}
"""


COUNT_THREADS = """
import os, torch, calcops_jit
torch.set_num_threads(1)
list_neigh = torch.zeros(1, 4000, 60, dtype=torch.int32)
dE, Ri_d = torch.ones(1, 4000, 60, 4), torch.ones(1, 4000, 240, 3)
calcops_jit.force(list_neigh, dE, Ri_d)
before = len(os.listdir("/proc/self/task"))
torch.set_num_threads(3)
calcops_jit.force(list_neigh, dE, Ri_d)
print(len(os.listdir("/proc/self/task")) - before)
"""


def test_as_many_threads_work_as_torch_was_told():
    run = subprocess.run([sys.executable, "-c", COUNT_THREADS], capture_output=True, text=True, check=True)
    assert int(run.stdout) == 2


def test_no_two_threads_meet_in_one_number(tmp_path):
    thread_sanitizer.run(tmp_path, PROGRAM, "force/force_cpu.cpp", "force/force_backward_cpu.cpp")


def test_a_race_would_be_seen(tmp_path):
    with pytest.raises(AssertionError, match="data race"):
        thread_sanitizer.run(tmp_path, RACE)
