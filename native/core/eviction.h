// A priority queue of entries whose keys grow all the time: finds the entry with the smallest key.
//
// A key that grows costs nothing. The queue scans all entries once, and sorts the share with the
// smallest keys. Keys only grow, so the smallest one is in this share until the share is used up;
// an entry whose key has grown since is reinserted. New entries below the bound of the share join
// it. So the result is exact, and its amortized cost does not depend on the number of entries. All
// memory is allocated in advance: nothing can fail.
//
// A held entry is not found until all entries are released. The key no_key means that there is no
// entry.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

namespace sparsestep {

constexpr uint64_t no_key = std::numeric_limits<uint64_t>::max();

class EvictionQueue {
public:
    // Of at most so many entries.
    explicit EvictionQueue(size_t entries) : share_(std::max<size_t>(64, entries / 32)) {
        if (!entries) return;
        queue_.reserve(2 * share_);
        later_.reserve(share_);
        aside_.reserve(share_);
    }

    // Forget everything; to be called where keys became smaller.
    void clear() {
        queue_.clear();
        later_.clear();
        aside_.clear();
        bound_ = {0, 0};
    }

    // No entry is held any more.
    void release() {
        if (left_out_) clear();
        for (const Entry& entry : aside_) push(entry.key, entry.index);
        aside_.clear();
        left_out_ = exhausted_ = false;
    }

    // Take note of a new entry, which is held.
    void add(uint64_t key, uint32_t index) { put_aside({key, index}); }

    // The entry of [first, end) with the smallest key, of equal ones the first; -1 where all are
    // held. key_of(index) is its key now, is_held(index) whether it may not be taken.
    template <class KeyOf, class IsHeld>
    int64_t pop(uint32_t first, uint32_t end, const KeyOf& key_of, const IsHeld& is_held) {
        while (!exhausted_) {
            if (queue_.empty() && later_.empty()) {
                refill(first, end, key_of, is_held);
                exhausted_ = queue_.empty();
                continue;
            }
            const Entry entry = take();
            const uint64_t key = key_of(entry.index);
            if (key != entry.key) {
                if (key > entry.key) push(key, entry.index);  // else it was added again
            } else if (is_held(entry.index)) {
                put_aside(entry);
            } else {
                return entry.index;
            }
        }
        return -1;
    }

private:
    struct Entry {
        uint64_t key;
        uint32_t index;
        bool operator<(const Entry& other) const {
            return key != other.key ? key < other.key : index < other.index;
        }
        bool operator>(const Entry& other) const { return other < *this; }
    };

    void put_aside(const Entry& entry) {
        if (!(entry < bound_)) return;
        if (aside_.size() < share_) {
            aside_.push_back(entry);
        } else {
            left_out_ = true;
        }
    }

    void push(uint64_t key, uint32_t index) {
        const Entry entry{key, index};
        if (!(entry < bound_)) return;
        if (later_.size() == share_) {  // they are searched again when one is needed
            queue_.clear();
            later_.clear();
            bound_ = {0, 0};
            return;
        }
        later_.push_back(entry);
        std::push_heap(later_.begin(), later_.end(), std::greater<Entry>());
    }

    Entry take() {
        if (!queue_.empty() && (later_.empty() || queue_.back() < later_.front())) {
            const Entry entry = queue_.back();
            queue_.pop_back();
            return entry;
        }
        std::pop_heap(later_.begin(), later_.end(), std::greater<Entry>());
        const Entry entry = later_.back();
        later_.pop_back();
        return entry;
    }

    template <class KeyOf, class IsHeld>
    void refill(uint32_t first, uint32_t end, const KeyOf& key_of, const IsHeld& is_held) {
        bound_ = {no_key, 0};
        Entry held = bound_;  // the smallest
        aside_.clear();       // they are looked at again, too
        for (uint32_t index = first; index < end; ++index) {
            const Entry entry{key_of(index), index};
            if (!(entry < bound_)) continue;
            if (is_held(index)) {
                held = std::min(held, entry);
                continue;
            }
            queue_.push_back(entry);
            if (queue_.size() == 2 * share_) cut();
        }
        if (queue_.size() > share_) cut();
        left_out_ = left_out_ || held < bound_;
        std::sort(queue_.begin(), queue_.end(), std::greater<Entry>());
    }

    void cut() {
        const auto middle = queue_.begin() + std::ptrdiff_t(share_);
        std::nth_element(queue_.begin(), middle, queue_.end());
        bound_ = *middle;
        queue_.erase(middle, queue_.end());
    }

    size_t share_;
    std::vector<Entry> queue_;  // the share, the smallest last
    std::vector<Entry> later_;  // a heap of entries that joined it
    std::vector<Entry> aside_;  // below the bound, but held
    Entry bound_{0, 0};         // a lower bound of all other entries
    bool left_out_ = false;     // but for some that are held
    bool exhausted_ = false;    // all are held
};

}  // namespace sparsestep
