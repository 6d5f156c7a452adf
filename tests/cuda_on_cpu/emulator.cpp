// Runs kernels on the CPU: up to three blocks beside each other, in random order, every thread a
// fiber that runs until it meets others. A schedule says which of them goes on. Gives tensors
// guarded memory. What must not be ends the process with a line that says where (README.md).
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "cuda_language.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

extern "C" void cuda_on_cpu_switch(void** from, void* to);
asm(R"(
.text
.local cuda_on_cpu_switch
cuda_on_cpu_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");

namespace cuda_on_cpu {
namespace {

constexpr unsigned kMostThreads = 1024, kWarp = 32, kMostBlocks = 3;
constexpr unsigned kWarps = kMostThreads / kWarp;
constexpr size_t kPage = 4096, kStack = 32 * kPage, kSpread = 8 * kPage;

struct Fiber {
  char* stack = nullptr;
  void* pointer;
  bool done;
  Meeting waits;
  // What it brings to an exchange; the other one is what it brought to the exchange before, which
  // others may still have to read.
  uint64_t values[2];
  unsigned exchanges;
};

bool enabled = false;
int active_fault = 0;
std::mt19937 random_numbers(1);
std::set<std::string> entered;
const char* kernel_name = "no kernel";

// Threads and warps of all blocks that run beside each other have numbers of their own.
std::vector<Fiber> fibers(kMostBlocks* kMostThreads);
unsigned current, threads;
bool in_kernel = false;
void* scheduler;
const std::function<void()>* body;

Fiber& self() { return fibers[current]; }
unsigned warp_of(unsigned fiber) { return fiber / kWarp; }
unsigned block_of(unsigned fiber) { return fiber / kMostThreads; }

// The block that a number stands for, and its shared memory, by what declares it.
struct Block {
  unsigned index;
  std::map<const void*, std::vector<std::max_align_t>> shared;
};
std::array<Block, kMostBlocks> blocks;

void enter_fiber(unsigned fiber) {
  current = fiber;
  threadIdx.x = fiber % kMostThreads;
  blockIdx.x = blocks[block_of(fiber)].index;
}

// The fibers that can run, in two lists for each warp. In a quarter of all launches a random fiber
// goes on. In the others a random one of the list of the highest rank does, so that some warps and
// blocks run as far ahead of others as barriers let them; the lanes in the second lists, the same
// ones in all warps, come after all others. Now and then a list gets another rank. (Burckhardt,
// Kothari, Musuvathi, Nagarakatte, ASPLOS 2010: few priorities find most orderings.)
class Schedule {
 public:
  void begin() {
    is_ranked_ = random_numbers() % 4;
    blocks_are_ranked_ = random_numbers() % 2;
    late_lanes_ = uint32_t(random_numbers()) & (random_numbers() % 4 ? ~0u : 0u);
    rank_anew();
  }

  void add(unsigned fiber) {
    ready_[list_of(fiber)].push_back(fiber);
    ++count_;
  }

  // Other ranks for all, since those who have not come to a barrier yet have the lowest ones.
  void rank_anew() {
    for (uint32_t& rank : block_ranks_) rank = random_numbers() % 4;
    for (size_t list = 0; list < ranks_.size(); ++list) rank(list);
  }

  bool is_empty() const { return count_ == 0; }

  unsigned take() {
    const size_t list = is_ranked_ ? highest() : any();
    std::vector<unsigned>& fibers = ready_[list];
    const size_t chosen = below(fibers.size());
    const unsigned fiber = fibers[chosen];
    fibers[chosen] = fibers.back();
    fibers.pop_back();
    --count_;
    return fiber;
  }

 private:
  static constexpr size_t kLists = kMostBlocks * kWarps;  // of each of the two kinds

  static size_t below(size_t count) { return (uint64_t(random_numbers()) * count) >> 32; }

  size_t list_of(unsigned fiber) const {
    return warp_of(fiber) + (late_lanes_ >> fiber % kWarp & 1 ? kLists : 0);
  }

  // Second lists have ranks below those of first lists. Where blocks are ranked, a block's lists
  // are above or below those of another one together.
  void rank(size_t list) {
    const uint32_t own = uint32_t(random_numbers()) >> 3;
    const uint32_t block = blocks_are_ranked_ ? block_ranks_[list % kLists / kWarps] << 29 : 0;
    ranks_[list] = own | block | (list < kLists ? 1u << 31 : 0u);
  }

  size_t highest() const {
    size_t best = ready_.size();
    for (size_t list = 0; list < ready_.size(); ++list)
      if (!ready_[list].empty() && (best == ready_.size() || ranks_[list] > ranks_[best]))
        best = list;
    return best;
  }

  // A list with the probability of its share of the fibers.
  size_t any() const {
    size_t fiber = below(count_), list = 0;
    while (fiber >= ready_[list].size()) fiber -= ready_[list++].size();
    return list;
  }

  std::array<std::vector<unsigned>, 2 * kLists> ready_;
  std::array<uint32_t, 2 * kLists> ranks_;
  size_t count_ = 0;
  uint32_t late_lanes_ = 0;
  std::array<uint32_t, kMostBlocks> block_ranks_{};
  bool is_ranked_ = false, blocks_are_ranked_ = false;
};
Schedule schedule;

// Goes on with one of those that can run, or with the scheduler where there is none.
void run_another(void** from) {
  if (schedule.is_empty()) return cuda_on_cpu_switch(from, scheduler);
  enter_fiber(schedule.take());
  if (&self().pointer != from) cuda_on_cpu_switch(from, self().pointer);
}

void run_fiber();

void start_fiber(unsigned number) {
  Fiber& fiber = fibers[number];
  if (!fiber.stack) {  // a page that must not be touched, then the stack
    void* memory =
        mmap(nullptr, kPage + kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, kPage, PROT_NONE) != 0) fail("has no stack");
    fiber.stack = static_cast<char*>(memory) + kPage;
  }
  // As cuda_on_cpu_switch leaves a stack: six registers and where to return to. A function begins
  // with its stack 8 bytes off a multiple of 16.
  // Tops at other places within their pages, or all would share a few lines of the cache.
  void** top =
      reinterpret_cast<void**>(fiber.stack + kStack - number % 256 * 13 * 64 % kSpread) - 2;
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(&run_fiber);
  fiber.pointer = top - 6;
  fiber.done = false;
  fiber.exchanges = 0;
  schedule.add(number);
}

bool of_block(Meeting kind) { return kind == Meeting::kBlock || kind == Meeting::kBlockVote; }

// A warp, or the block where `first` is 0 and `last` all of its threads.
struct Group {
  unsigned first, last;
  unsigned waiting, returned;
};
std::array<Group, kMostBlocks * kWarps> warps;
std::array<Group, kMostBlocks> whole_blocks;

// Once all threads that have not returned wait, they go on, if it is for the same.
void release_if_complete(Group& group) {
  if (group.waiting == 0 || group.waiting + group.returned < group.last - group.first) return;
  Meeting kind = Meeting::kNone;
  for (unsigned t = group.first; t < group.last; ++t) {
    Fiber& fiber = fibers[t];
    if (fiber.done) continue;
    if (kind != Meeting::kNone && kind != fiber.waits) {
      enter_fiber(t);
      fail("meets the others at another kind of barrier than they");
    }
    kind = fiber.waits;
    schedule.add(t);
  }
  if (group.returned > 0 && (kind == Meeting::kShuffle || kind == Meeting::kVote))
    fail("exchanges values with a lane that has returned");
  group.waiting = 0;
  if (of_block(kind) && random_numbers() % 2) schedule.rank_anew();
}

void run_fiber() {
  (*body)();
  Group& warp = warps[warp_of(current)];
  Group& block = whole_blocks[block_of(current)];
  self().done = true;
  ++warp.returned;
  ++block.returned;
  release_if_complete(warp);
  release_if_complete(block);
  run_another(&self().pointer);
}

// Runs blocks beside each other.
void run_blocks(const unsigned* indices, unsigned count) {
  for (unsigned b = 0; b < count; ++b) {
    const unsigned begin = b * kMostThreads, end = begin + threads;
    blocks[b] = {indices[b], {}};
    whole_blocks[b] = {begin, end, 0, 0};
    for (unsigned first = begin; first < end; first += kWarp)
      warps[warp_of(first)] = {first, std::min(first + kWarp, end), 0, 0};
    for (unsigned t = begin; t < end; ++t) start_fiber(t);
  }
  run_another(&scheduler);
  for (unsigned b = 0; b < count; ++b)
    for (unsigned t = b * kMostThreads; t < b * kMostThreads + threads; ++t) {
      if (fibers[t].done) continue;
      enter_fiber(t);
      fail("waits for ever at a barrier to which not all come");
    }
}

// What this thread and those of its warp bring; all of them have to come.
template <class Read>
auto exchange_values(Meeting kind, uint64_t value, Read read) {
  const unsigned turn = self().exchanges++ % 2;
  self().values[turn] = value;
  meet(kind);
  return read(&fibers[current / kWarp * kWarp], turn);
}

unsigned lanes_of_warp() {
  return std::min(kWarp, threads - current % kMostThreads / kWarp * kWarp);
}

// ---- memory -------------------------------------------------------------------------------------

// Between two pages that must not be touched, at the end or at the start of what lies between them;
// the rest is filled with a byte that must still be there in the end.
struct Allocation {
  char* pages;
  size_t pages_bytes;
  char* data;
  size_t bytes;
  unsigned char filling;
  const char* last_kernel;
};
std::mutex allocations_mutex;  // tensors are freed by any thread
std::set<Allocation*> allocations;

bool intact(const Allocation& a) {
  for (const char* p = a.pages + kPage; p < a.pages + a.pages_bytes - kPage; ++p)
    if ((p < a.data || p >= a.data + a.bytes) && static_cast<unsigned char>(*p) != a.filling)
      return false;
  return true;
}

void expect_intact() {
  const std::lock_guard<std::mutex> lock(allocations_mutex);
  for (const Allocation* a : allocations)
    if (!intact(*a)) fail("has written beside a tensor");
}

void release_allocation(void* context) {
  auto* a = static_cast<Allocation*>(context);
  {
    const std::lock_guard<std::mutex> lock(allocations_mutex);
    allocations.erase(a);
  }
  munmap(a->pages, a->pages_bytes);
  delete a;
}

// `alignment` of the end of what is allocated, and so of its beginning.
at::DataPtr allocate(size_t bytes, size_t alignment, bool at_end, unsigned char filling) {
  const size_t inside = (bytes + kPage - 1) / kPage * kPage;
  const size_t all = inside + 2 * kPage;
  void* memory = mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(memory != MAP_FAILED, "cuda_on_cpu: no memory");
  char* pages = static_cast<char*>(memory);
  std::memset(pages + kPage, filling, inside);
  mprotect(pages, kPage, PROT_NONE);
  mprotect(pages + all - kPage, kPage, PROT_NONE);
  char* data = pages + kPage + (at_end ? (inside - bytes) / alignment * alignment : 0);
  auto* a = new Allocation{pages, all, data, bytes, filling, kernel_name};
  {
    const std::lock_guard<std::mutex> lock(allocations_mutex);
    allocations.insert(a);
  }
  return {data, a, &release_allocation, at::Device(at::kCPU)};
}

// Filled with other bytes in other runs: what depends on them differs.
unsigned char any_filling() { return random_numbers() % 2 ? 0xa5 : 0x7f; }

class Allocator : public at::Allocator {
 public:
  explicit Allocator(at::Allocator* usual) : usual_(usual) {}
  at::DataPtr allocate(size_t bytes) override {
    if (!enabled || bytes == 0) return usual_->allocate(bytes);
    // 8: a workspace's first array is of 64-bit numbers.
    return cuda_on_cpu::allocate(bytes, 8, random_numbers() % 2, any_filling());
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

 private:
  at::Allocator* usual_;
};

// A copy with the same strides that ends exactly where memory ends, or begins where it begins.
at::Tensor guarded(const at::Tensor& x) {
  if (x.numel() == 0) return x.clone();
  int64_t span = 1;
  for (int64_t d = 0; d < x.dim(); ++d) span += (x.size(d) - 1) * x.stride(d);
  const size_t bytes = span * x.element_size();
  const auto memory = std::make_shared<at::DataPtr>(
      allocate(bytes, x.element_size(), random_numbers() % 2, any_filling()));
  std::memcpy(memory->get(), x.const_data_ptr(), bytes);
  return at::from_blob(memory->get(), x.sizes(), x.strides(), [memory](void*) {}, x.options());
}

void explain_fault(int, siginfo_t* info, void*) {
  const char* address = static_cast<const char*>(info->si_addr);
  for (const Allocation* a : allocations) {  // no lock: this thread may hold it, and no other runs
    if (address < a->pages || address >= a->pages + a->pages_bytes) continue;
    static char text[200];
    const bool behind = address >= a->data;
    std::snprintf(text, sizeof text, "touches memory %zd bytes %s a tensor of %zu bytes",
                  behind ? address - a->data - ssize_t(a->bytes) : a->data - address,
                  behind ? "beyond the end of" : "before the start of", a->bytes);
    fail(text);
  }
  if (in_kernel) fail("touches memory that is no tensor's");
  std::signal(SIGSEGV, SIG_DFL);  // not ours: the instruction is tried again
}

void install_handler() {
  static char stack[64 << 10];
  stack_t alternative = {};
  alternative.ss_sp = stack;
  alternative.ss_size = sizeof stack;
  sigaltstack(&alternative, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = &explain_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaction(SIGSEGV, &action, nullptr);
  sigaction(SIGBUS, &action, nullptr);
}

void enable(bool on) {
  static const bool once = [] {
    static Allocator allocator(c10::GetCPUAllocator());
    c10::SetCPUAllocator(&allocator, 1);
    return true;
  }();
  (void)once;
  install_handler();  // again: pytest's faulthandler installs its own for each test
  enabled = on;
}

}  // namespace

bool is_cpu(bool cpu) { return cpu && !enabled; }
bool is_cuda(bool cpu) { return cpu && enabled; }

void fail(const char* what) {
  std::fprintf(stderr, "cuda_on_cpu: %s, block %u, thread %u: %s\n", kernel_name, blockIdx.x,
               threadIdx.x, what);
  _exit(70);
}

void enter(const char* kernel) {
  if (kernel_name == kernel) return;
  kernel_name = kernel;
  entered.insert(kernel);
}

cudaStream_t current_stream() {
  static char stream;
  return reinterpret_cast<cudaStream_t>(&stream);
}

void check_stream(cudaStream_t stream) {
  if (stream != current_stream()) fail("work is queued on another stream than the current one");
}

bool fault(int number) { return number == active_fault; }

void meet(Meeting kind) {
  self().waits = kind;
  Group& group = of_block(kind) ? whole_blocks[block_of(current)] : warps[warp_of(current)];
  ++group.waiting;
  release_if_complete(group);
  run_another(&self().pointer);
}

uint64_t exchange(uint64_t value, unsigned from) {
  if (from >= lanes_of_warp()) fail("exchanges values with a lane that does not exist");
  return exchange_values(Meeting::kShuffle, value,
                         [&](const Fiber* warp, unsigned turn) { return warp[from].values[turn]; });
}

unsigned equal_lanes(unsigned mask, uint64_t value, uint64_t wanted) {
  expect_all_lanes(mask);
  return exchange_values(Meeting::kVote, value, [&](const Fiber* warp, unsigned turn) {
    unsigned lanes = 0;
    for (unsigned lane = 0; lane < lanes_of_warp(); ++lane)
      lanes |= unsigned(warp[lane].values[turn] == wanted) << lane;
    return lanes;
  });
}

int count_in_block(bool vote) {
  static char here;
  int& count = *static_cast<int*>(shared_memory(&here, sizeof(int)));
  meet(Meeting::kBlockVote);
  count = 0;
  meet(Meeting::kBlockVote);
  count += vote;
  meet(Meeting::kBlockVote);
  const int result = count;
  meet(Meeting::kBlockVote);
  return result;
}

void* shared_memory(const void* declaration, size_t bytes) {
  auto& memory = blocks[block_of(current)].shared[declaration];
  if (memory.empty()) {  // what nobody has written differs from run to run
    memory.resize((bytes + sizeof(std::max_align_t) - 1) / sizeof(std::max_align_t));
    std::memset(memory.data(), any_filling(), bytes);
  }
  return memory.data();
}

void launch(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
            const std::function<void()>& kernel) {
  kernel_name = "a kernel that is being launched";
  blockIdx = threadIdx = {};
  check_stream(stream);
  if (grid.y != 1 || grid.z != 1 || block.y != 1 || block.z != 1)
    fail("has a grid of several dimensions, which is not emulated");
  if (shared_bytes != 0) fail("has dynamic shared memory, which is not emulated");
  if (grid.x == 0 || block.x == 0) fail("has no blocks or no threads: an invalid configuration");
  if (grid.x > unsigned(std::numeric_limits<int32_t>::max()) || block.x > kMostThreads)
    fail("has more blocks or threads than there may be");
  gridDim = grid;
  blockDim = block;
  threads = block.x;
  body = &kernel;
  std::vector<unsigned> order(grid.x);
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), random_numbers);
  in_kernel = true;
  schedule.begin();
  for (size_t first = 0; first < order.size();) {
    const size_t left = order.size() - first, wanted = 1 + random_numbers() % kMostBlocks;
    const size_t beside = std::min(left, wanted);
    run_blocks(&order[first], unsigned(beside));
    first += beside;
  }
  in_kernel = false;
  expect_intact();
}

TORCH_LIBRARY_FRAGMENT(cuda_on_cpu, m) {
  m.def("enable(bool on) -> ()", [](bool on) { enable(on); });
  m.def("seed(int number) -> ()", [](int64_t number) { random_numbers.seed(uint32_t(number)); });
  m.def("put_in_fault(int number) -> ()", [](int64_t number) { active_fault = int(number); });
  m.def("guarded(Tensor x) -> Tensor", [](const at::Tensor& x) { return guarded(x); });
  m.def("entered() -> str[]",
        [] { return std::vector<std::string>(entered.begin(), entered.end()); });
}

}  // namespace cuda_on_cpu
