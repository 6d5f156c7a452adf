// Runs kernels on the CPU, up to kMostResident blocks at a time, in random order. A thread of a
// block is a fiber, which runs until it waits for other threads. The next fiber is chosen by rank;
// a block draws new ranks for its threads at each barrier. Tensors get guarded memory. An error
// ends the process with a line that names its place (README.md).
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

constexpr unsigned kMostThreads = 1024, kWarp = 32, kMostResident = 3;
constexpr size_t kPage = 4096, kStack = 32 * kPage, kSpread = 8 * kPage;

struct Block;

struct Fiber {
  char* stack = nullptr;
  void* pointer;
  Block* block;
  unsigned thread;
  uint32_t rank;
  bool done;
  Meeting waits;
  // Its values in this exchange and in the previous one, which other lanes may still have to read.
  uint64_t values[2];
  unsigned exchanges;
};

// The threads of a warp, or of the whole block.
struct Group {
  unsigned first, last;
  unsigned waiting, returned;
};

// A running block, with its shared memory.
struct Block {
  unsigned index;
  std::vector<Fiber> fibers{kMostThreads};
  std::array<Group, kMostThreads / kWarp> warps;
  Group whole;
  std::map<const void*, std::vector<uint64_t>> shared;
  int votes;
};

bool enabled = false;
int active_fault = 0;
std::mt19937 random_numbers(1);
std::set<std::string> entered;
const char* kernel_name = "no kernel";

std::array<Block, kMostResident> resident;
// The fibers that can run, as a heap ordered by rank, and at random for equal ranks.
std::vector<std::pair<uint64_t, Fiber*>> ready;
std::vector<Block*> ended;
Fiber* current;
unsigned threads;
bool in_kernel = false;
void* scheduler;
const std::function<void()>* body;

void make_ready(Fiber& fiber) {
  ready.emplace_back(uint64_t(fiber.rank) << 32 | random_numbers(), &fiber);
  std::push_heap(ready.begin(), ready.end());
}

// Continues with the first fiber that can run, or with the scheduler if there is none or a block
// has ended.
void run_another(void** from) {
  if (ready.empty() || !ended.empty()) return cuda_on_cpu_switch(from, scheduler);
  std::pop_heap(ready.begin(), ready.end());
  current = ready.back().second;
  ready.pop_back();
  blockIdx.x = current->block->index;
  threadIdx.x = current->thread;
  if (&current->pointer != from) cuda_on_cpu_switch(from, current->pointer);
}

// Draws which threads of a block run ahead until its next barrier: none, some warps or some
// threads. A uniform choice at each step would let all of them advance together.
void draw_ranks(Block& block) {
  const unsigned kinds[] = {kMostThreads, kMostThreads, kMostThreads, kWarp, 1};
  const unsigned alike = kinds[random_numbers() % 5];
  uint32_t rank = 0;
  for (unsigned t = 0; t < threads; ++t) {
    if (t % alike == 0) rank = random_numbers();
    block.fibers[t].rank = rank;
  }
}

void run_fiber();

void start_fiber(Block& block, unsigned thread) {
  Fiber& fiber = block.fibers[thread];
  if (!fiber.stack) {  // a guard page, then the stack
    void* memory =
        mmap(nullptr, kPage + kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, kPage, PROT_NONE) != 0) fail("has no stack");
    fiber.stack = static_cast<char*>(memory) + kPage;
  }
  // cuda_on_cpu_switch leaves six registers and the return address on a stack. At the beginning of
  // a function, the stack pointer is 8 bytes off a multiple of 16.
  // The tops have different offsets in their pages: else all stacks would share a few cache lines.
  void** top =
      reinterpret_cast<void**>(fiber.stack + kStack - thread % 256 * 13 * 64 % kSpread) - 2;
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(&run_fiber);
  fiber.pointer = top - 6;
  fiber.block = &block;
  fiber.thread = thread;
  fiber.done = false;
  fiber.exchanges = 0;
  make_ready(fiber);
}

bool of_block(Meeting kind) { return kind == Meeting::kBlock || kind == Meeting::kBlockVote; }

// Lets the threads continue once all that have not returned wait at a meeting of the same kind.
void release_if_complete(Block& block, Group& group) {
  if (group.waiting == 0 || group.waiting + group.returned < group.last - group.first) return;
  if (&group == &block.whole) draw_ranks(block);
  Meeting kind = Meeting::kNone;
  for (unsigned t = group.first; t < group.last; ++t) {
    Fiber& fiber = block.fibers[t];
    if (fiber.done) continue;
    if (kind != Meeting::kNone && kind != fiber.waits) {
      threadIdx.x = t;
      fail("meets the others at another kind of barrier than they");
    }
    kind = fiber.waits;
    make_ready(fiber);
  }
  if (group.returned > 0 && (kind == Meeting::kShuffle || kind == Meeting::kVote))
    fail("exchanges values with a lane that has returned");
  group.waiting = 0;
}

void run_fiber() {
  (*body)();
  Fiber& self = *current;
  Block& block = *self.block;
  Group& warp = block.warps[self.thread / kWarp];
  self.done = true;
  ++warp.returned;
  ++block.whole.returned;
  release_if_complete(block, warp);
  release_if_complete(block, block.whole);
  if (block.whole.returned == threads) ended.push_back(&block);
  run_another(&self.pointer);
}

void start_block(Block& block, unsigned index) {
  block.index = index;
  block.shared.clear();
  block.whole = {0, threads, 0, 0};
  for (unsigned first = 0; first < threads; first += kWarp)
    block.warps[first / kWarp] = {first, std::min(first + kWarp, threads), 0, 0};
  draw_ranks(block);
  for (unsigned t = 0; t < threads; ++t) start_fiber(block, t);
}

[[noreturn]] void fail_for_those_that_wait() {
  for (const Block& block : resident) {
    if (block.whole.returned == threads) continue;
    blockIdx.x = block.index;
    for (threadIdx.x = 0; block.fibers[threadIdx.x].done;) ++threadIdx.x;
    break;
  }
  fail("waits for ever at a barrier to which not all come");
}

void run_blocks(const std::vector<unsigned>& order) {
  ready.clear();
  ended.clear();
  for (Block& block : resident) block.whole.returned = threads;
  const size_t most = 1 + random_numbers() % kMostResident;
  size_t started = 0, done = 0;
  while (started < std::min(most, order.size())) {
    start_block(resident[started], order[started]);
    ++started;
  }
  while (done < order.size()) {
    run_another(&scheduler);
    if (ended.empty()) fail_for_those_that_wait();
    Block& block = *ended.back();
    ended.pop_back();
    ++done;
    if (started < order.size()) start_block(block, order[started++]);
  }
}

// Exchanges the values of the threads of a warp. All of them have to call this.
template <class Read>
auto exchange_values(Meeting kind, uint64_t value, Read read) {
  Fiber& self = *current;
  const unsigned turn = self.exchanges++ % 2;
  self.values[turn] = value;
  meet(kind);
  return read(&self.block->fibers[self.thread / kWarp * kWarp], turn);
}

unsigned lanes_of_warp() { return std::min(kWarp, threads - current->thread / kWarp * kWarp); }

// ---- memory -------------------------------------------------------------------------------------

// Memory between two guard pages, at the end or at the start of the space between them. The rest of
// the space is filled with a byte that must be unchanged at the end.
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

// The memory begins at a multiple of `alignment`. With `at_end` it ends as near to the guard page
// as that allows.
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

// New memory is filled with different bytes in each run, so that results that depend on it differ.
unsigned char any_filling() { return random_numbers() % 2 ? 0xa5 : 0x7f; }

class Allocator : public at::Allocator {
 public:
  explicit Allocator(at::Allocator* usual) : usual_(usual) {}
  at::DataPtr allocate(size_t bytes) override {
    if (!enabled || bytes == 0) return usual_->allocate(bytes);
    // 8: the first array of a workspace has 64-bit numbers.
    return cuda_on_cpu::allocate(bytes, 8, random_numbers() % 2, any_filling());
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

 private:
  at::Allocator* usual_;
};

// Returns a copy with the same strides, which ends or begins exactly at a guard page.
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
  std::signal(SIGSEGV, SIG_DFL);  // not a guard page: the repeated instruction ends the process
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
  Fiber& self = *current;
  Block& block = *self.block;
  self.waits = kind;
  Group& group = of_block(kind) ? block.whole : block.warps[self.thread / kWarp];
  ++group.waiting;
  release_if_complete(block, group);
  run_another(&self.pointer);
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
  int& votes = current->block->votes;
  meet(Meeting::kBlockVote);
  votes = 0;
  meet(Meeting::kBlockVote);
  votes += vote;
  meet(Meeting::kBlockVote);
  const int result = votes;
  meet(Meeting::kBlockVote);
  return result;
}

void* shared_memory(const void* variable, size_t bytes) {
  std::vector<uint64_t>& memory = current->block->shared[variable];
  if (memory.empty()) memory.assign(bytes / 8 + 1, 0xa5a5a5a5a5a5a5a5);
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
  run_blocks(order);
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
