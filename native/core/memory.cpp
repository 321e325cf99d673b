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

void* allocate_lazily(size_t bytes) { return allocate_pages(bytes); }

void free_pages(void* pages, size_t) noexcept { VirtualFree(pages, 0, MEM_RELEASE); }

#else

#if !defined(MAP_NORESERVE)
#define MAP_NORESERVE 0
#endif

void* map_pages(size_t bytes, int flags) {
    void* const pages =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
    if (pages == MAP_FAILED) throw std::bad_alloc();
    return pages;
}

// The system is not asked to hold memory ready for pages that may never be touched: it would refuse
// more than it has.
void* allocate_lazily(size_t bytes) { return map_pages(bytes, MAP_NORESERVE); }

void* allocate_pages(size_t bytes) {
    void* const pages = map_pages(bytes, 0);
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

// All lazy states, by address. No locks: a child process might inherit one that is held.
struct Registered {
    std::atomic<const void*> data{nullptr};
    std::atomic<LazyState*> state{nullptr};
};
constexpr size_t max_registered = 4096;
Registered registry[max_registered];
std::atomic<size_t> registered{0};

size_t place_of(const void* data) { return (uintptr_t(data) >> 12) * 0x9e3779b1u % max_registered; }

// Calls use(entry) for the places where an address may stand, until it returns true.
template <class Use>
void probe(const void* data, const Use& use) {
    for (size_t i = 0, place = place_of(data); i < 16; ++i, place = (place + 1) % max_registered) {
        if (use(registry[place])) return;
    }
}

}  // namespace

LazyState::LazyState(size_t bytes) : bytes_(bytes) {
    const size_t pages = (bytes >> page_bits) + 1;
    touched_.reset(new std::atomic<uint64_t>[pages / 64 + 1]());
    pages_left_ = int64_t(pages);
    data_ = allocate_lazily(bytes);
    probe(data_, [&](Registered& entry) {  // where all places are taken, steps are slower at first
        const void* empty = nullptr;
        if (!entry.data.compare_exchange_strong(empty, data_)) return false;
        entry.state = this;
        ++registered;
        return true;
    });
}

LazyState::~LazyState() {
    probe(data_, [&](Registered& entry) {
        if (entry.data != data_) return false;
        entry.state = nullptr;
        entry.data = nullptr;
        --registered;
        return true;
    });
    free_pages(data_, bytes_);
}

LazyState* LazyState::find(const void* data) {
    LazyState* found = nullptr;
    if (registered.load(std::memory_order_relaxed) == 0) return found;
    probe(data, [&](Registered& entry) {
        if (entry.data.load(std::memory_order_relaxed) != data) return false;
        found = entry.state;
        return true;
    });
    return found;
}

bool LazyState::begin_step() {
    constexpr int skipped = 7;
    if (pages_left_.load(std::memory_order_relaxed) <= 0) return false;
    if (steps_to_skip_.load(std::memory_order_relaxed) > 0) {
        steps_to_skip_.fetch_sub(1, std::memory_order_relaxed);
        return false;
    }
    if (new_pages_.exchange(0, std::memory_order_relaxed) < few_pages) {
        steps_to_skip_.store(skipped, std::memory_order_relaxed);
    }
    return true;
}

void LazyState::touch_new(int64_t page, std::atomic<uint64_t>& word, uint64_t bit) {
    // Writes without reading first, as far as the system can tell.
    reinterpret_cast<std::atomic<char>*>(static_cast<char*>(data_) + (page << page_bits))
        ->fetch_or(0, std::memory_order_relaxed);
    if (word.fetch_or(bit, std::memory_order_relaxed) & bit) return;
    pages_left_.fetch_sub(1, std::memory_order_relaxed);
    new_pages_.fetch_add(1, std::memory_order_relaxed);
}

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
