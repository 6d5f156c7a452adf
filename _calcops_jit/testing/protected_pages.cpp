// Puts new CPU tensors at pages that may not be accessed: a tensor ends where such a page begins,
// or begins where such a page ends. A kernel that leaves its tensors, or uses a freed one, crashes.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>

namespace {

constexpr size_t kRegion = size_t(1) << 38;  // bytes of addresses, without memory

struct Block {
  char* begin;
  size_t bytes;
};

void release(void* context) {
  const Block* block = static_cast<Block*>(context);
  mmap(block->begin, block->bytes, PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  delete block;
}

class Pages final : public c10::Allocator {
 public:
  bool at_end = true;

  Pages() : page_(size_t(sysconf(_SC_PAGESIZE))) {
    void* memory =
        mmap(nullptr, kRegion, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(memory != MAP_FAILED, "calcops_jit: no addresses for protected pages");
    region_ = static_cast<char*>(memory);
  }

  // An address is used again after all others, so that most uses of a freed tensor are found.
  c10::DataPtr allocate(size_t size) override {
    const size_t bytes = (size + page_ - 1) / page_ * page_;
    const size_t places = kRegion - bytes - page_;
    const size_t place = page_ + next_.fetch_add(bytes + page_) % places / page_ * page_;
    char* begin = region_ + place;
    TORCH_CHECK(!bytes || !mprotect(begin, bytes, PROT_READ | PROT_WRITE),
                "calcops_jit: no memory for protected pages");
    std::memset(begin, 0x55, bytes);
    char* data = at_end ? begin + bytes - size : begin;
    const auto device = c10::Device(c10::DeviceType::CPU);
    return {data, new Block{begin, bytes}, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }

 private:
  size_t page_;
  char* region_;
  std::atomic<size_t> next_{0};
};

}  // namespace

// 0: PyTorch's own allocator again. 1: tensors end at such a page. 2: they begin at one.
extern "C" __attribute__((visibility("default"))) void protect(int mode) {
  static auto* pages = new Pages;
  static c10::Allocator* former = c10::GetCPUAllocator();
  pages->at_end = mode == 1;
  c10::SetCPUAllocator(mode ? pages : former);
}
