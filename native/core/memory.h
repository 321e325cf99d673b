// Working memory of steps, and lazily provided pages for tables.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
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

// Zeroed memory for state, of which the system provides a page when it is first touched; and which
// pages have been.
//
// A page that is read before it is written is faulted in twice, and the second fault interrupts the
// threads that run beside: ten times the cost of a write. Steps read state first, so they have new
// pages written before.
class LazyState {
public:
    explicit LazyState(size_t bytes);  // throws std::bad_alloc
    ~LazyState();
    LazyState(const LazyState&) = delete;
    LazyState& operator=(const LazyState&) = delete;
    void* data() const { return data_; }

    // The state whose memory begins at this address, or null. It must outlive its use.
    static LazyState* find(const void* data);

    // Whether a step should look for new pages. While they are few, most steps need not.
    bool begin_step();

    // Allocates the pages of [offset, offset + bytes); their contents do not change.
    void touch(int64_t offset, int64_t bytes) {
        const int64_t last = (offset + bytes - 1) >> page_bits;
        for (int64_t page = offset >> page_bits; page <= last; ++page) {
            const uint64_t bit = uint64_t(1) << (page & 63);
            std::atomic<uint64_t>& word = touched_[size_t(page >> 6)];
            if (!(word.load(std::memory_order_relaxed) & bit)) touch_new(page, word, bit);
        }
    }

private:
    static constexpr int page_bits = 12;
    static constexpr int64_t few_pages = 64;
    void touch_new(int64_t page, std::atomic<uint64_t>& word, uint64_t bit);

    void* data_;
    size_t bytes_;
    std::unique_ptr<std::atomic<uint64_t>[]> touched_;
    std::atomic<int64_t> pages_left_, new_pages_{few_pages};
    std::atomic<int> steps_to_skip_{0};
};

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
