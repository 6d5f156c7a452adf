// Memory of the CPU kernels: scratch for one call, and large pages.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <memory>
#include <new>

namespace calcops {

// Uninitialised memory of one call. The C library keeps such a block from call to call (to 32 MiB),
// and of a larger one maps what is touched.
constexpr std::align_val_t kCacheLine{64};
struct Free {
  void operator()(void* memory) const { ::operator delete(memory, kCacheLine); }
};
template <class Item>
using Scratch = std::unique_ptr<Item[], Free>;

template <class Item>
Scratch<Item> scratch(int64_t count) {
  return Scratch<Item>(static_cast<Item*>(::operator new(count * sizeof(Item), kCacheLine)));
}

// Asks for large pages where a new array is about to be written: mapping it 4 KiB at a time takes
// longer than computing what goes there. It is advice; where the system has no such pages, or the
// pages are there already, nothing happens.
template <class Item>
void prefer_large_pages(Item* array, int64_t count) {
  if (!array) return;
  constexpr uintptr_t kPage = 2 << 20, kLeast = 2 * kPage;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(array) + kPage - 1) & ~(kPage - 1);
  const uintptr_t end = reinterpret_cast<uintptr_t>(array + count) & ~(kPage - 1);
  if (begin + kLeast <= end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace calcops
