// A zero-initialized array on lazily provided pages: for tables with random access.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <type_traits>
#include <utility>

#include "core/pages.h"

namespace sparsestep {

template <class Item>
class LazyArray {
    static_assert(std::is_trivially_destructible_v<Item>);

public:
    LazyArray() = default;
    explicit LazyArray(size_t count) : bytes_(count * sizeof(Item)) {
        if (count > SIZE_MAX / sizeof(Item)) throw std::bad_alloc();
        if (bytes_) items_ = static_cast<Item*>(allocate_pages(bytes_));
    }
    LazyArray(LazyArray&& other) noexcept { *this = std::move(other); }
    LazyArray& operator=(LazyArray&& other) noexcept {
        std::swap(items_, other.items_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~LazyArray() {
        if (items_) free_pages(items_, bytes_);
    }
    Item& operator[](size_t i) { return items_[i]; }
    const Item& operator[](size_t i) const { return items_[i]; }
    const Item* at(size_t i) const { return items_ + i; }

private:
    Item* items_ = nullptr;
    size_t bytes_ = 0;
};

}  // namespace sparsestep
