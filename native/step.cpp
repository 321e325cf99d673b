#include "step.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "scratch.h"
#include "team.h"
#include "unique.h"

namespace sparsestep {
namespace {

// Below this much memory traffic, waking a second thread costs more than it brings.
constexpr int64_t serial_bytes = 1 << 18;

// How much a task holds: enough to be worth fetching, little enough to share out evenly.
constexpr int64_t piece_elements = 1 << 16;
constexpr int64_t least_entries = 32;
constexpr int64_t pieces_per_thread = 16;

// A chain as long as this, and a good part of the whole gradient, is summed by several threads.
constexpr int64_t heavy_chain = 4096;

constexpr int64_t cache_line = 64;

int64_t element_bytes(Dtype dtype) {
    return dtype == Dtype::float64 ? 8 : dtype == Dtype::float32 ? 4 : 2;
}

int64_t traffic(const Job& job) {
    return job.entries * (job.block * element_bytes(job.param.dtype) * 6 + 64);
}

using Extent = std::pair<const char*, const char*>;

Extent extent(const Job& job) {
    const View& view = job.param;
    const char* begin = static_cast<const char*>(view.data);
    const int64_t last = (job.slots - 1) * view.slot_stride + (job.block - 1) * view.element_stride;
    return {begin, begin + (last + 1) * element_bytes(view.dtype)};
}

// Parameters that share memory (views of one tensor) must be updated one after the other.
bool params_overlap(const Job* jobs, int64_t count) {
    std::vector<Extent> extents;
    for (int64_t j = 0; j < count; ++j) {
        const bool writes = jobs[j].param.data && jobs[j].slots > 0 && jobs[j].block > 0;
        if (writes) extents.push_back(extent(jobs[j]));
    }
    std::sort(extents.begin(), extents.end());
    for (size_t i = 1; i < extents.size(); ++i) {
        if (extents[i].first < extents[i - 1].second) return true;
    }
    return false;
}

class Step {
public:
    Step(Job* jobs, int64_t count, int threads) : jobs_(jobs), threads_(threads) {
        int64_t bytes = 0;
        for (int64_t j = 0; j < count; ++j) bytes += traffic(jobs[j]);
        if (bytes < serial_bytes) threads_ = 1;
        uniques_.reserve(size_t(count));
        for (int64_t j = 0; j < count; ++j) uniques_.emplace_back(jobs[j]);
    }

    std::optional<BadEntry> check() {
        for_all(&Unique::chunks, &Unique::inspect, [](const Unique&) { return true; });
        for (size_t j = 0; j < uniques_.size(); ++j) {
            const int64_t entry = uniques_[j].first_bad_entry();
            if (entry >= 0) return BadEntry{int64_t(j), entry, jobs_[j].positions[entry]};
        }
        return std::nullopt;
    }

    // Allocates what the step needs and finds the chains; the last that may fail.
    void prepare() {
        int64_t words = 0;
        for (const Unique& unique : uniques_) {
            if (!unique.ascending()) words += unique.scratch_words();
        }
        scratch_.reserve(size_t(words) * sizeof(uint64_t));
        uint64_t* at = static_cast<uint64_t*>(scratch_.data());
        for (Unique& unique : uniques_) {
            if (unique.ascending()) continue;
            unique.use_scratch(at);
            at += unique.scratch_words();
        }
        const auto chained = [](const Unique& unique) { return !unique.ascending(); };
        const auto dealt = [](const Unique& unique) {
            return !unique.ascending() && unique.is_dealt();
        };
        for_all(&Unique::chunks, &Unique::count, dealt);
        for (Unique& unique : uniques_) {
            if (dealt(unique)) unique.place_buckets();
        }
        for_all(&Unique::chunks, &Unique::deal, dealt);
        for_all(&Unique::buckets, &Unique::link, chained);
        for (size_t j = 0; j < uniques_.size(); ++j) {
            jobs_[j].links = uniques_[j].links();
            add_pieces(int64_t(j));
        }
    }

    void apply() {
        if (params_overlap(jobs_, int64_t(uniques_.size()))) {
            // Pieces stand in the order of their jobs.
            for (size_t begin = 0, end = 0; begin < pieces_.size(); begin = end) {
                while (end < pieces_.size() && pieces_[end].first == pieces_[begin].first) ++end;
                apply(begin, end);
            }
        } else {
            apply(0, pieces_.size());
        }
    }

private:
    template <class Which>
    void for_all(int64_t (Unique::*count)() const, void (Unique::*run)(int64_t), Which which) {
        tasks_.clear();
        for (Unique& unique : uniques_) {
            if (!which(unique)) continue;
            for (int64_t i = 0; i < (unique.*count)(); ++i) tasks_.emplace_back(&unique, i);
        }
        parallel(threads_, int64_t(tasks_.size()),
                 [&](int64_t t) { (tasks_[size_t(t)].first->*run)(tasks_[size_t(t)].second); });
    }

    void add_pieces(int64_t j) {
        const Job& job = jobs_[j];
        if (job.whole && job.slots == 1 && !job.by_slot) {
            for (int64_t column = 0; column < job.block; column += piece_elements) {
                const int64_t end = std::min(job.block, column + piece_elements);
                pieces_.push_back({j, {0, 1, column, end}});
            }
            return;
        }
        // Long chains first, so that none is begun when all else has ended.
        if (job.links && threads_ > 1 && !job.by_slot) {
            const int64_t length = std::max(heavy_chain, job.entries / (8 * threads_));
            for (int64_t entry : uniques_[size_t(j)].take_heavy(length)) add_heavy(j, entry);
        }
        const int64_t fair = std::max(least_entries, job.entries / (pieces_per_thread * threads_));
        const int64_t most = piece_elements / std::max<int64_t>(1, job.block);
        const int64_t entries = std::max<int64_t>(1, std::min(fair, most));
        for (int64_t begin = 0; begin < job.entries; begin += entries) {
            pieces_.push_back({j, {begin, std::min(job.entries, begin + entries), 0, job.block}});
        }
    }

    // Each column is summed by one thread, from first to last: the bits stay the same.
    void add_heavy(int64_t j, int64_t entry) {
        const Job& job = jobs_[j];
        const int64_t line = cache_line / element_bytes(job.values.dtype);
        const int64_t share = (job.block + threads_ - 1) / threads_;
        const int64_t columns = (share + line - 1) / line * line;
        for (int64_t column = 0; column < job.block; column += columns) {
            const int64_t end = std::min(job.block, column + columns);
            pieces_.push_back({j, {entry, heavy_piece, column, end}});
        }
    }

    void apply(size_t begin, size_t end) {
        parallel(threads_, int64_t(end - begin), [&](int64_t t) {
            const auto& [job, piece] = pieces_[begin + size_t(t)];
            jobs_[job].apply(jobs_[job], piece);
        });
    }

    Job* jobs_;
    int threads_;
    std::vector<Unique> uniques_;
    std::vector<std::pair<Unique*, int64_t>> tasks_;
    std::vector<std::pair<int64_t, Piece>> pieces_;
    Scratch scratch_;
};

}  // namespace

std::optional<BadEntry> step(Job* jobs, int64_t count, int threads) {
    Step step(jobs, count, threads);
    if (const std::optional<BadEntry> bad = step.check()) return bad;
    step.prepare();
    step.apply();
    return std::nullopt;
}

}  // namespace sparsestep
