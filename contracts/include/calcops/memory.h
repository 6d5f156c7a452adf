// Memory of the CPU kernels: scratch for one call, and large pages.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <new>

namespace calcops {

// Uninitialised memory for the time of one call. The C library keeps a block of up to 32 MiB from
// call to call. Of a larger block, only the touched pages are mapped. (std::unique_ptr would do as
// well, but <memory> is slow to compile.)
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

// Ask the system for large pages for an array that is about to be written. Mapping it in pages of
// 4 KiB takes longer than computing its numbers. This is advice: it has no effect if the system has
// no large pages or the array is mapped already.
//
// Arrays of less than 32 MiB are left out. The C library keeps them from call to call, so large
// pages would gain nothing. They may even cost time: a virtual machine that has returned its free
// memory may need milliseconds to map one large page.
template <class Item>
void prefer_large_pages(Item* array, int64_t count) {
  if (!array) return;
  constexpr uintptr_t kPage = 2 << 20;
  constexpr uintptr_t kLeast = 32 << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(array) + kPage - 1) & ~(kPage - 1);
  const uintptr_t end = reinterpret_cast<uintptr_t>(array + count) & ~(kPage - 1);
  if (begin + kLeast <= end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace calcops
