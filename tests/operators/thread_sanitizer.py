"""Run a CPU kernel under ThreadSanitizer.

The program runs without PyTorch. PyTorch's OpenMP is not instrumented and gives many false reports.
So a replacement of <calcops/parallel.h> starts threads with std::thread.
"""

import os
import pathlib
import shutil
import subprocess

import pytest

OPS = pathlib.Path(__file__).resolve().parents[2] / "ops"
HEADERS = OPS.parent / "contracts" / "include"
PARALLEL = """
#pragma once
#include <algorithm>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>
namespace calcops {
constexpr int64_t kThreads = 4, kNone = -1;
// kNone is the largest unsigned number, so it comes last.
inline int64_t first_of(int64_t a, int64_t b) { return int64_t(std::min(uint64_t(a), uint64_t(b))); }
template <class F>
void parallel_for(int64_t count, int64_t, const F& f) {
  const int64_t share = (count + kThreads - 1) / kThreads;
  std::vector<std::thread> threads;
  for (int64_t begin = 0; begin < count; begin += share)
    threads.emplace_back([=, &f] { f(begin, std::min(count, begin + share)); });
  for (std::thread& thread : threads) thread.join();
}
template <class F>
int64_t parallel_first(int64_t count, int64_t grain, const F& f) {
  std::mutex one_at_a_time;
  int64_t first = kNone;
  parallel_for(count, grain, [&](int64_t begin, int64_t end) {
    const int64_t found = f(begin, end);
    const std::lock_guard lock(one_at_a_time);
    first = first_of(first, found);
  });
  return first;
}
}  // namespace calcops
"""


def run(folder, program, *kernels):
    """Build and run `program` with kernel files under ops/. Fail if there is a data race."""
    (folder / "calcops").mkdir()
    (folder / "calcops" / "parallel.h").write_text(PARALLEL)
    (folder / "main.cpp").write_text(program)
    flags = [
        "-std=c++17",
        "-O1",
        "-g",
        "-fsanitize=thread",
        '-DCALCOPS_NO_CUDA=""',
        f"-I{folder}",
        f"-I{OPS}",
        f"-I{HEADERS}",
    ]
    sources = [str(folder / "main.cpp"), *(str(OPS / kernel) for kernel in kernels)]
    command = [shutil.which("c++"), *flags, *sources, "-o", str(folder / "main")]
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    built = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if "cannot find" in built.stderr and "tsan" in built.stderr:
        pytest.skip("the compiler has no ThreadSanitizer")
    assert built.returncode == 0, built.stderr
    # setarch -R: newer Linux kernels randomise addresses in a wider range than older sanitizers
    # support.
    ran = subprocess.run(
        ["setarch", "-R", str(folder / "main")],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[:4000]
    assert "ThreadSanitizer" not in ran.stderr, ran.stderr[:4000]
