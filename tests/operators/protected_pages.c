// Preloaded into a process, this library puts each new tensor at a page that may not be accessed:
// the tensor ends where that page begins, or begins where it ends.
#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

// Systems have pages of 4 to 64 KiB.
enum { kPage = 1 << 16, kPages = 1 << 22 };
static char* region;               // only tensors' pages of it may be accessed
static uint32_t pages_at[kPages];  // of the tensor whose first page this is
static atomic_size_t next_page = 1;
int tensors_end_at_pages = 1;  // otherwise they begin there

void* __libc_memalign(size_t alignment, size_t size);
void __libc_free(void* data);

__attribute__((constructor)) static void reserve(void) {
  void* memory = mmap(0, (size_t)kPages * kPage, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) abort();
  region = memory;
}

// PyTorch allocates each CPU tensor by this function, with an alignment of 64. A tensor that ends
// at a page is aligned to its numbers alone, as a view may be.
int posix_memalign(void** result, size_t alignment, size_t size) {
  if (!region || alignment != 64 || size == 0) {
    *result = __libc_memalign(alignment, size);
    return *result ? 0 : ENOMEM;
  }
  const size_t pages = (size + kPage - 1) / kPage;
  const size_t first = atomic_fetch_add(&next_page, pages + 1);
  if (first + pages >= kPages) abort();
  char* begin = region + first * kPage;
  if (mprotect(begin, pages * kPage, PROT_READ | PROT_WRITE)) abort();
  pages_at[first] = (uint32_t)pages;
  *result = tensors_end_at_pages ? begin + pages * kPage - size : begin;
  return 0;
}

// No page is used twice. So a use of a tensor that has been freed is found, too.
void free(void* data) {
  const size_t first = (uintptr_t)((char*)data - region) / kPage;
  if (!region || first >= kPages) {
    __libc_free(data);
    return;
  }
  mmap(region + first * kPage, (size_t)pages_at[first] * kPage, PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}
