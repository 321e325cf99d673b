// Working memory of steps, and lazily provided pages for tables.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <type_traits>
#include <utility>

namespace sparsestep {

// Working memory of a step. A few blocks are kept from step to step, because asking the system
// again each time would fault every page in again; very large ones are given back.
class Scratch {
public:
    Scratch() = default;
    ~Scratch();
    void reserve(size_t bytes);  // once; throws std::bad_alloc
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    void* data() const { return data_; }

private:
    void* data_ = nullptr;
    size_t bytes_ = 0;
};

// Zeroed pages, straight from the operating system: it provides each one when it is first written.
//
// At least `bytes` zeroed bytes, page-aligned, on huge pages where the system has them. Throws
// std::bad_alloc. Release them with free_pages() and the same size.
void* allocate_pages(size_t bytes);
void free_pages(void* pages, size_t bytes) noexcept;

// A zero-initialized array on such pages: for tables with random access.
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
