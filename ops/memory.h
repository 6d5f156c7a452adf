// Memory of the CPU kernels: scratch for one call, and large pages.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <new>

namespace calcops {

// Uninitialised memory of one call. The C library keeps such a block from call to call (to 32 MiB),
// and of a larger one maps what is touched. (std::unique_ptr would do, but <memory> is slow to
// compile.)
template <class Item>
class Scratch {
 public:
  explicit Scratch(int64_t count)
      : items_(static_cast<Item*>(::operator new(count * sizeof(Item), kCacheLine))) {}
  ~Scratch() { ::operator delete(items_, kCacheLine); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  Item* get() const { return items_; }

 private:
  static constexpr std::align_val_t kCacheLine{64};
  Item* items_;
};

// Asks for large pages where a new array is about to be written: mapping it 4 KiB at a time takes
// longer than computing what goes there. It is advice; where the system has no such pages, or the
// pages are there already, nothing happens. The C library keeps smaller arrays from call to call;
// there is nothing to win with them, and a virtual machine that has handed free pages back may take
// milliseconds for each.
template <class Item>
void prefer_large_pages(Item* array, int64_t count) {
  if (!array) return;
  constexpr uintptr_t kPage = 2 << 20, kLeast = 32 << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(array) + kPage - 1) & ~(kPage - 1);
  const uintptr_t end = reinterpret_cast<uintptr_t>(array + count) & ~(kPage - 1);
  if (begin + kLeast <= end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace calcops
