#include "core/pages.h"

#include <new>

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <sys/mman.h>
#endif

namespace sparsestep {

#if defined(_WIN32)

void* allocate_pages(size_t bytes) {
    void* const pages = VirtualAlloc(nullptr, bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
    if (!pages) throw std::bad_alloc();
    return pages;
}

void free_pages(void* pages, size_t) noexcept { VirtualFree(pages, 0, MEM_RELEASE); }

#else

void* allocate_pages(size_t bytes) {
    void* const pages =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    if (bytes >= size_t(4) << 20) madvise(pages, bytes, MADV_HUGEPAGE);
#endif
    return pages;
}

void free_pages(void* pages, size_t bytes) noexcept { munmap(pages, bytes); }

#endif

}  // namespace sparsestep
