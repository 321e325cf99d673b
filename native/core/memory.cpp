#include "core/memory.h"

#include <atomic>
#include <cstdlib>
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

namespace {

// As many steps as may well run at once, each on a thread of its own.
constexpr int spare_blocks = 8;
constexpr size_t kept_at_most = size_t(64) << 20;  // together

struct Block {
    void* data;
    size_t bytes;
};

// Taking a spare block leaves null in its place, so steps on several threads never share one.
std::atomic<Block*> spare[spare_blocks];
std::atomic<size_t> kept_bytes{0};

}  // namespace

void Scratch::reserve(size_t bytes) {
    if (bytes == 0) return;
    for (std::atomic<Block*>& place : spare) {
        Block* block = place.exchange(nullptr);
        if (!block) continue;
        const Block found = *block;
        delete block;
        kept_bytes -= found.bytes;
        if (found.bytes >= bytes) {
            data_ = found.data;
            bytes_ = found.bytes;
            return;
        }
        std::free(found.data);
    }
    bytes_ = bytes + bytes / 4;
    data_ = std::malloc(bytes_);
    if (!data_) throw std::bad_alloc();
}

Scratch::~Scratch() {
    if (!data_) return;
    if (kept_bytes.fetch_add(bytes_) + bytes_ <= kept_at_most) {
        if (Block* block = new (std::nothrow) Block{data_, bytes_}) {
            for (std::atomic<Block*>& place : spare) {
                Block* empty = nullptr;
                if (place.compare_exchange_strong(empty, block)) return;
            }
            delete block;
        }
    }
    kept_bytes -= bytes_;
    std::free(data_);
}

}  // namespace sparsestep
