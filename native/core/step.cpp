#include "core/step.h"

#include <algorithm>
#include <cstring>

#include "core/threads.h"

namespace sparsestep {
namespace {

// Below this much memory traffic, waking a second thread costs more than it brings.
constexpr int64_t serial_bytes = 1 << 18;

// How much a task holds: enough to be worth fetching, little enough to share out evenly.
constexpr int64_t piece_elements = 1 << 16;
constexpr int64_t least_entries = 32;
constexpr int64_t pieces_per_thread = 16;

// A group as large as this, and a good part of the whole gradient, is summed by several threads.
constexpr int64_t heavy_group = 4096;

constexpr int64_t cache_line = 64;

int64_t element_bytes(Dtype dtype) {
    return dtype == Dtype::float64 ? 8 : dtype == Dtype::float32 ? 4 : 2;
}

int64_t traffic(const Job& job) {
    return job.entries * (job.block * element_bytes(job.param.dtype) * 6 + 64);
}

// Memory from the first byte to behind the last.
struct Extent {
    const char *begin, *end;
    bool operator<(const Extent& other) const { return begin < other.begin; }
};

Extent extent(const View& view, int64_t rows, int64_t columns) {
    const char* begin = static_cast<const char*>(view.data);
    if (!begin || rows <= 0 || columns <= 0) return {begin, begin};
    const int64_t last = (rows - 1) * view.slot_stride + (columns - 1) * view.element_stride;
    return {begin, begin + (last + 1) * element_bytes(view.dtype)};
}

template <class T>
Extent extent(const T* begin, int64_t count) {
    const char* first = reinterpret_cast<const char*>(begin);
    return {first, begin ? first + count * int64_t(sizeof(T)) : first};
}

// Rows of values that a job may read.
int64_t value_rows(const Job& job) { return job.source ? job.rows : job.entries; }

// The rows of values of all entries one after the other.
std::unique_ptr<char[]> gathered_values(const Job& job) {
    const size_t item = size_t(element_bytes(job.values.dtype)), row = size_t(job.block) * item;
    auto copy = std::make_unique<char[]>(size_t(job.entries) * row);
    const char* const from = static_cast<const char*>(job.values.data);
    for (int64_t i = 0; i < job.entries; ++i) {
        std::memcpy(copy.get() + size_t(i) * row, from + job.source[i] * int64_t(item), row);
    }
    return copy;
}

// Calls visit(extent) for everything that the job writes.
template <class Visit>
void for_each_written(const Job& job, const Visit& visit) {
    if (!job.param.data) return;  // only norms are asked for
    visit(extent(job.param, job.slots, job.block));
    for (const View& state : job.state) visit(extent(state, job.slots, job.block));
    for (const View& state : job.slot_state) visit(extent(state, job.slots, 1));
}

// Calls add(begin, end) for parts of the range that have about as many entries each.
template <class Add>
void split_evenly(const Unique::Range& range, int64_t entries, const Add& add) {
    const int64_t count = range.end - range.begin;
    const int64_t parts = std::min(count, (range.entries + entries - 1) / entries);
    for (int64_t i = 0; i < parts; ++i) {
        add(range.begin + count * i / parts, range.begin + count * (i + 1) / parts);
    }
}

}  // namespace

Step::Step(Job* jobs, int64_t count, int threads) : jobs_(jobs), count_(count), threads_(threads) {
    int64_t bytes = 0;
    for (int64_t j = 0; j < count; ++j) bytes += traffic(jobs[j]);
    if (bytes < serial_bytes) threads_ = 1;
    uniques_.reserve(size_t(count));
    for (int64_t j = 0; j < count; ++j) uniques_.emplace_back(jobs[j]);
}

std::optional<BadEntry> Step::prepare() {
    if (const std::optional<BadEntry> bad = first_bad_entry()) return bad;
    find_overlaps();
    find_groups();
    return std::nullopt;
}

void Step::apply() noexcept {
    if (!params_overlap_) return apply(0, pieces_.size());
    // One after the other. Pieces stand in the order of their jobs.
    for (size_t begin = 0, end = 0; begin < pieces_.size(); begin = end) {
        while (end < pieces_.size() && pieces_[end].first == pieces_[begin].first) ++end;
        apply(begin, end);
    }
}

std::optional<BadEntry> Step::first_bad_entry() {
    for_all(&Unique::chunks, &Unique::inspect, [](const Unique&) { return true; });
    for (size_t j = 0; j < uniques_.size(); ++j) {
        const int64_t entry = uniques_[j].first_bad_entry();
        if (entry >= 0) return BadEntry{int64_t(j), entry, jobs_[j].positions[entry]};
    }
    return std::nullopt;
}

// Parameters that share memory (views of one tensor) must be updated one after the other, and what
// the step reads must not be what it writes.
void Step::find_overlaps() {
    std::vector<Extent> written;
    const auto add = [&](const Extent& each) {
        if (each.begin != each.end) written.push_back(each);
    };
    for (int64_t j = 0; j < count_; ++j) for_each_written(jobs_[j], add);
    std::sort(written.begin(), written.end());
    const char* reached = nullptr;
    for (const Extent& each : written) {
        params_overlap_ |= each.begin < reached;
        reached = std::max(reached, each.end);
    }
    // From here on, whatever lies between two of them may be told by the one before it alone.
    if (params_overlap_) {
        reached = nullptr;
        for (Extent& each : written) each.end = reached = std::max(reached, each.end);
    }
    const auto is_written = [&](const Extent& read) {
        if (read.begin == read.end) return false;
        const auto after =
            std::lower_bound(written.begin(), written.end(), Extent{read.end, read.end});
        return after != written.begin() && std::prev(after)->end > read.begin;
    };
    for (int64_t j = 0; j < count_; ++j) {
        copy_if(jobs_[j], is_written);
        uniques_[size_t(j)].use_positions(jobs_[j].positions);
    }
}

template <class IsWritten>
void Step::copy_if(Job& job, const IsWritten& is_written) {
    const auto copied = [&](const Extent& read) -> char* {
        const size_t bytes = size_t(read.end - read.begin);
        copies_.push_back(std::make_unique<char[]>(bytes));
        return static_cast<char*>(std::memcpy(copies_.back().get(), read.begin, bytes));
    };
    const Extent positions = extent(job.positions, job.entries);
    const Extent source = extent(job.source, job.entries);
    const Extent scale = extent(job.scale, job.entries, 1);
    const Extent held = extent(job.held, value_rows(job) * job.block);
    const bool same = job.positions == job.source;
    if (job.value_parts) {
        bool any = false;
        for (int64_t i = 0; i < job.value_part_count; ++i) {
            const Memory& part = job.value_parts[i];
            any |= is_written(extent(static_cast<const char*>(part.data), part.bytes));
        }
        if (any) {
            copies_.push_back(gathered_values(job));
            job.values = {copies_.back().get(), job.values.dtype, job.block, 1};
            job.source = nullptr;
        }
    } else {
        const Extent values = extent(job.values, value_rows(job), job.block);
        if (is_written(values)) job.values.data = copied(values);
    }
    if (is_written(positions)) {
        job.positions = reinterpret_cast<const int64_t*>(copied(positions));
        if (same) job.source = job.positions;
    }
    if (job.source && !same && is_written(source)) {
        job.source = reinterpret_cast<const int64_t*>(copied(source));
    }
    if (is_written(scale)) job.scale.data = copied(scale);
    if (is_written(held)) job.held = reinterpret_cast<const bool*>(copied(held));
}

void Step::find_groups() {
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
    const auto grouped = [](const Unique& unique) { return !unique.ascending(); };
    const auto scattered = [](const Unique& unique) {
        return !unique.ascending() && unique.has_buckets();
    };
    for_all(&Unique::chunks, &Unique::count, scattered);
    for (Unique& unique : uniques_) {
        if (scattered(unique)) unique.place_buckets();
    }
    for_all(&Unique::chunks, &Unique::scatter, scattered);
    for_all(&Unique::buckets, &Unique::group, grouped);
    for (size_t j = 0; j < uniques_.size(); ++j) {
        const Unique& unique = uniques_[j];
        if (grouped(unique) && unique.repeats()) {
            jobs_[j].alone = unique.alone();
            jobs_[j].groups = unique.groups();
            jobs_[j].members = unique.members();
        }
        add_pieces(int64_t(j));
    }
}

template <class Which>
void Step::for_all(int64_t (Unique::*count)() const, void (Unique::*run)(int64_t), Which which) {
    tasks_.clear();
    for (Unique& unique : uniques_) {
        if (!which(unique)) continue;
        for (int64_t i = 0; i < (unique.*count)(); ++i) tasks_.emplace_back(&unique, i);
    }
    parallel(threads_, int64_t(tasks_.size()),
             [&](int64_t t) { (tasks_[size_t(t)].first->*run)(tasks_[size_t(t)].second); });
}

void Step::add_pieces(int64_t j) {
    const Job& job = jobs_[j];
    if (job.whole && job.slots == 1 && !job.by_slot) {
        for (int64_t column = 0; column < job.block; column += piece_elements) {
            const int64_t end = std::min(job.block, column + piece_elements);
            pieces_.push_back({j, {0, 1, column, end}});
        }
        return;
    }
    const int64_t fair = std::max(least_entries, job.entries / (pieces_per_thread * threads_));
    const int64_t most = piece_elements / std::max<int64_t>(1, job.block);
    // Each piece has to wait for its first rows: one thread gets everything in one.
    const int64_t entries = threads_ == 1 ? std::max<int64_t>(1, job.entries)
                                          : std::max<int64_t>(1, std::min(fair, most));
    const auto add = [&](int64_t begin, int64_t end) {
        pieces_.push_back({j, {begin, end, 0, job.block}});
    };
    if (!job.groups) return split_evenly({0, job.entries, job.entries}, entries, add);
    Unique& unique = uniques_[size_t(j)];
    const int64_t span = unique.span_of_alone();
    if (threads_ == 1 && unique.buckets() == 1) {
        const Unique::Range range = unique.range(0);
        return pieces_.push_back({j, {0, span, 0, job.block, range.begin, range.end}});
    }
    // Large groups first, so that none is begun when all else has ended.
    if (threads_ > 1 && !job.by_slot) {
        const int64_t length = std::max(heavy_group, job.entries / (8 * threads_));
        for (int64_t group : unique.take_heavy(length)) add_heavy(j, group);
    }
    for (int64_t bucket = 0; bucket < unique.buckets(); ++bucket) {
        split_evenly(unique.range(bucket), entries, [&](int64_t begin, int64_t end) {
            pieces_.push_back({j, {0, 0, 0, job.block, begin, end}});
        });
    }
    split_evenly({0, span, span}, entries, add);
}

// Each column is summed by one thread, from first to last: the bits stay the same.
void Step::add_heavy(int64_t j, int64_t group) {
    const Job& job = jobs_[j];
    const int64_t line = cache_line / element_bytes(job.values.dtype);
    const int64_t share = (job.block + threads_ - 1) / threads_;
    const int64_t columns = (share + line - 1) / line * line;
    for (int64_t column = 0; column < job.block; column += columns) {
        const int64_t end = std::min(job.block, column + columns);
        pieces_.push_back({j, {0, 0, column, end, group, group + 1}});
    }
}

void Step::apply(size_t begin, size_t end) {
    parallel(threads_, int64_t(end - begin), [&](int64_t t) {
        auto& [j, piece] = pieces_[begin + size_t(t)];
        const Job& job = jobs_[j];
        if (job.alone) piece.end = uniques_[size_t(j)].list_alone(piece.begin, piece.end);
        job.apply(job, piece);
    });
}

std::optional<BadEntry> step(Job* jobs, int64_t count, int threads) {
    Step step(jobs, count, threads);
    if (const std::optional<BadEntry> bad = step.prepare()) return bad;
    step.apply();
    return std::nullopt;
}

}  // namespace sparsestep
