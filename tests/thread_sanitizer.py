"""Runs a CPU kernel under ThreadSanitizer, without PyTorch: its OpenMP is not instrumented and would drown
real races in false ones. ATen/Parallel.h is all that kernels use of it; here it is std::thread."""

import os
import pathlib
import shutil
import subprocess

import pytest

OPS = pathlib.Path(__file__).resolve().parent.parent / "ops"
PARALLEL = """
#pragma once
#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>
namespace at {
constexpr int kThreads = 4;
inline int get_num_threads() { return kThreads; }
template <class F>
void parallel_for(int64_t begin, int64_t end, int64_t, const F& f) {
  const int64_t share = (end - begin + kThreads - 1) / kThreads;
  std::vector<std::thread> threads;
  for (int64_t first = begin; first < end; first += share)
    threads.emplace_back([=, &f] { f(first, std::min(end, first + share)); });
  for (std::thread& thread : threads) thread.join();
}
template <class T, class F, class G>
T parallel_reduce(int64_t begin, int64_t end, int64_t, T identity, const F& f, const G& combine) {
  const int64_t share = (end - begin + kThreads - 1) / kThreads;
  std::vector<T> results(kThreads, identity);
  parallel_for(begin, end, 1, [&](int64_t first, int64_t last) {
    results[(first - begin) / share] = f(first, last, identity);
  });
  for (const T& result : results) identity = combine(identity, result);
  return identity;
}
}  // namespace at
"""


def run(folder, program, *kernels):
    """Builds `program` with kernel files under ops/ and runs it; a data race fails."""
    compiler = shutil.which("c++")
    (folder / "ATen").mkdir()
    (folder / "ATen" / "Parallel.h").write_text(PARALLEL)
    (folder / "main.cpp").write_text(program)
    flags = ["-std=c++17", "-O1", "-g", "-fsanitize=thread", '-DCALCOPS_NO_CUDA=""', f"-I{folder}", f"-I{OPS}"]
    command = [
        compiler,
        *flags,
        str(folder / "main.cpp"),
        *(str(OPS / kernel) for kernel in kernels),
        "-o",
        str(folder / "main"),
    ]
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    built = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if "cannot find" in built.stderr and "tsan" in built.stderr:
        pytest.skip("the compiler has no ThreadSanitizer")
    assert built.returncode == 0, built.stderr
    # Address randomisation of newer kernels is too wide for older sanitizers.
    ran = subprocess.run(
        ["setarch", "-R", str(folder / "main")], capture_output=True, text=True, env=environment, check=False
    )
    assert ran.returncode == 0 and "ThreadSanitizer" not in ran.stderr, ran.stderr[:4000]
