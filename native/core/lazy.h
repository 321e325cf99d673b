// An array of zeros that the system provides page by page, in huge pages where it has them: for
// tables that are read here and there.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>
#include <utility>

namespace sparsestep {

template <class Item>
class LazyArray {
public:
    LazyArray() = default;
    explicit LazyArray(size_t count) : bytes_(count * sizeof(Item)) {
        if (!bytes_) return;
        void* const found =
            mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (found == MAP_FAILED) throw std::bad_alloc();
        items_ = static_cast<Item*>(found);
#ifdef MADV_HUGEPAGE
        if (bytes_ >= size_t(4) << 20) madvise(found, bytes_, MADV_HUGEPAGE);
#endif
    }
    LazyArray(LazyArray&& other) noexcept { *this = std::move(other); }
    LazyArray& operator=(LazyArray&& other) noexcept {
        std::swap(items_, other.items_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~LazyArray() {
        if (items_) munmap(items_, bytes_);
    }
    Item& operator[](size_t i) { return items_[i]; }
    const Item& operator[](size_t i) const { return items_[i]; }
    const Item* at(size_t i) const { return items_ + i; }

private:
    Item* items_ = nullptr;
    size_t bytes_ = 0;
};

}  // namespace sparsestep
