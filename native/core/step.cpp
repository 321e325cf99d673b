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
    return job.entries * (job.slot_size * element_bytes(job.param.dtype) * 6 + 64);
}

// Memory from the first byte to behind the last.
struct Extent {
    const char *begin, *end;
    bool operator<(const Extent& other) const { return begin < other.begin; }
};

Extent extent(const TensorView& view, int64_t rows, int64_t columns) {
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

bool is_packed(const Job& job) { return job.packed.words != nullptr; }

// Elements of a slot in parameter and values: of a single slot of kept elements, also the others.
int64_t stored_size(const Job& job) {
    return is_packed(job) && job.all_slots ? job.packed.numel : job.slot_size;
}

// Rows of values that a job may read.
int64_t value_rows(const Job& job) { return job.value_index ? job.rows : job.entries; }

// The rows of values of all entries one after the other.
std::unique_ptr<char[]> gathered_values(const Job& job) {
    const size_t item = size_t(element_bytes(job.values.dtype)), row = size_t(job.slot_size) * item;
    auto copy = std::make_unique<char[]>(size_t(job.entries) * row);
    const char* const from = static_cast<const char*>(job.values.data);
    for (int64_t i = 0; i < job.entries; ++i) {
        std::memcpy(copy.get() + size_t(i) * row, from + job.value_index[i] * int64_t(item), row);
    }
    return copy;
}

// Calls visit(extent) for everything that the job writes.
template <class Visit>
void for_each_written(const Job& job, const Visit& visit) {
    if (!job.param.data) return;  // only norms are asked for
    const int64_t state_slots = is_packed(job) && !job.all_slots ? job.packed.kept : job.num_slots;
    const int64_t state_size = job.expands_state ? 1 : job.slot_size;
    visit(extent(job.param, job.num_slots, stored_size(job)));
    for (const TensorView& state : job.state) visit(extent(state, state_slots, state_size));
    for (const TensorView& state : job.slot_state) visit(extent(state, job.num_slots, 1));
}

// Calls add(begin, end) for parts of the range that have about as many entries each.
template <class Add>
void split_evenly(const Dedup::Range& range, int64_t entries, const Add& add) {
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
    threads_ = bytes < serial_bytes ? 1 : available_threads(threads_);
    dedups_.reserve(size_t(count));
    for (int64_t j = 0; j < count; ++j) dedups_.emplace_back(jobs[j]);
}

std::optional<OutOfRange> Step::prepare() {
    if (const std::optional<OutOfRange> bad = first_out_of_range()) return bad;
    find_overlaps();
    find_groups();
    find_lazy_state();
    return std::nullopt;
}

void Step::apply() noexcept {
    if (!params_overlap_) return apply(0, slices_.size());
    // One after the other. Slices stand in the order of their jobs.
    for (size_t begin = 0, end = 0; begin < slices_.size(); begin = end) {
        while (end < slices_.size() && slices_[end].first == slices_[begin].first) ++end;
        apply(begin, end);
    }
}

std::optional<OutOfRange> Step::first_out_of_range() {
    for_all(&Dedup::chunks, &Dedup::scan, [](const Dedup&) { return true; });
    for (size_t j = 0; j < dedups_.size(); ++j) {
        const int64_t entry = dedups_[j].first_out_of_range();
        if (entry >= 0) return OutOfRange{int64_t(j), entry, jobs_[j].indices[entry]};
    }
    return std::nullopt;
}

// Parameters that share memory (views of one tensor) must be updated one after the other, and the
// memory that a step reads must not overlap the memory that it writes.
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
    // From here on, overlaps show between neighbors.
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
        dedups_[size_t(j)].set_indices(jobs_[j].indices);
    }
}

template <class IsWritten>
void Step::copy_if(Job& job, const IsWritten& is_written) {
    const auto copied = [&](const Extent& read) -> char* {
        const size_t bytes = size_t(read.end - read.begin);
        copies_.push_back(std::make_unique<char[]>(bytes));
        return static_cast<char*>(std::memcpy(copies_.back().get(), read.begin, bytes));
    };
    const Extent indices = extent(job.indices, job.entries);
    const Extent value_index = extent(job.value_index, job.entries);
    const Extent scale = extent(job.scale, job.entries, 1);
    const Extent element_mask = extent(job.element_mask, value_rows(job) * job.slot_size);
    const bool same = job.indices == job.value_index;
    if (job.value_parts) {
        bool any = false;
        for (int64_t i = 0; i < job.value_part_count; ++i) {
            const Memory& part = job.value_parts[i];
            any |= is_written(extent(static_cast<const char*>(part.data), part.bytes));
        }
        if (any) {
            copies_.push_back(gathered_values(job));
            job.values = {copies_.back().get(), job.values.dtype, job.slot_size, 1};
            job.value_index = nullptr;
        }
    } else {
        const Extent values = extent(job.values, value_rows(job), stored_size(job));
        if (is_written(values)) job.values.data = copied(values);
    }
    if (is_written(indices)) {
        job.indices = reinterpret_cast<const int64_t*>(copied(indices));
        if (same) job.value_index = job.indices;
    }
    if (job.value_index && !same && is_written(value_index)) {
        job.value_index = reinterpret_cast<const int64_t*>(copied(value_index));
    }
    if (is_written(scale)) job.scale.data = copied(scale);
    if (is_written(element_mask))
        job.element_mask = reinterpret_cast<const bool*>(copied(element_mask));
}

void Step::find_groups() {
    int64_t words = 0;
    for (const Dedup& unique : dedups_) {
        if (!unique.ascending()) words += unique.scratch_words();
    }
    scratch_.reserve(size_t(words) * sizeof(uint64_t));
    uint64_t* at = static_cast<uint64_t*>(scratch_.data());
    for (Dedup& unique : dedups_) {
        if (unique.ascending()) continue;
        unique.set_scratch(at);
        at += unique.scratch_words();
    }
    const auto grouped = [](const Dedup& unique) { return !unique.ascending(); };
    const auto scattered = [](const Dedup& unique) {
        return !unique.ascending() && unique.has_buckets();
    };
    for_all(&Dedup::chunks, &Dedup::count, scattered);
    for (Dedup& unique : dedups_) {
        if (scattered(unique)) unique.place_buckets();
    }
    for_all(&Dedup::chunks, &Dedup::scatter, scattered);
    for_all(&Dedup::buckets, &Dedup::group, grouped);
    for (size_t j = 0; j < dedups_.size(); ++j) {
        const Dedup& unique = dedups_[j];
        if (grouped(unique) && unique.repeats()) {
            jobs_[j].unique_entries = unique.unique_entries();
            jobs_[j].groups = unique.groups();
            jobs_[j].duplicate_entries = unique.duplicate_entries();
        }
        add_slices(int64_t(j));
    }
}

template <class Which>
void Step::for_all(int64_t (Dedup::*count)() const, void (Dedup::*run)(int64_t), Which which) {
    tasks_.clear();
    for (Dedup& unique : dedups_) {
        if (!which(unique)) continue;
        for (int64_t i = 0; i < (unique.*count)(); ++i) tasks_.emplace_back(&unique, i);
    }
    parallel(threads_, int64_t(tasks_.size()),
             [&](int64_t t) { (tasks_[size_t(t)].first->*run)(tasks_[size_t(t)].second); });
}

void Step::add_slices(int64_t j) {
    const Job& job = jobs_[j];
    if (job.all_slots && job.num_slots == 1 && !job.needs_whole_slots) {
        for (int64_t column = 0; column < job.slot_size; column += piece_elements) {
            const int64_t end = std::min(job.slot_size, column + piece_elements);
            slices_.push_back({j, {0, 1, column, end}});
        }
        return;
    }
    const int64_t fair = std::max(least_entries, job.entries / (pieces_per_thread * threads_));
    const int64_t most = piece_elements / std::max<int64_t>(1, job.slot_size);
    // Each slice has to wait for its first rows: one thread gets everything in one.
    const int64_t entries = threads_ == 1 ? std::max<int64_t>(1, job.entries)
                                          : std::max<int64_t>(1, std::min(fair, most));
    const auto add = [&](int64_t begin, int64_t end) {
        slices_.push_back({j, {begin, end, 0, job.slot_size}});
    };
    if (!job.groups) return split_evenly({0, job.entries, job.entries}, entries, add);
    Dedup& unique = dedups_[size_t(j)];
    const int64_t span = unique.unique_span();
    if (threads_ == 1 && unique.buckets() == 1) {
        const Dedup::Range range = unique.range(0);
        return slices_.push_back({j, {0, span, 0, job.slot_size, range.begin, range.end}});
    }
    // Large groups first, so that none is begun when all else has ended.
    if (threads_ > 1 && !job.needs_whole_slots) {
        const int64_t length = std::max(heavy_group, job.entries / (8 * threads_));
        for (int64_t group : unique.take_large_groups(length)) add_large_group(j, group);
    }
    for (int64_t bucket = 0; bucket < unique.buckets(); ++bucket) {
        split_evenly(unique.range(bucket), entries, [&](int64_t begin, int64_t end) {
            slices_.push_back({j, {0, 0, 0, job.slot_size, begin, end}});
        });
    }
    split_evenly({0, span, span}, entries, add);
}

// Each column is summed by one thread, from first to last: the bits stay the same.
void Step::add_large_group(int64_t j, int64_t group) {
    const Job& job = jobs_[j];
    const int64_t line = cache_line / element_bytes(job.values.dtype);
    const int64_t share = (job.slot_size + threads_ - 1) / threads_;
    const int64_t columns = (share + line - 1) / line * line;
    for (int64_t column = 0; column < job.slot_size; column += columns) {
        const int64_t end = std::min(job.slot_size, column + columns);
        slices_.push_back({j, {0, 0, column, end, group, group + 1}});
    }
}

void Step::find_lazy_state() {
    for (int64_t j = 0; j < count_; ++j) {
        const Job& job = jobs_[j];
        if (job.all_slots || is_packed(job)) continue;  // pages are written as they come
        const auto add = [&](const void* data, int64_t stride, int64_t bytes) {
            LazyState* const found = data ? LazyState::find(data) : nullptr;
            if (found && found->begin_step()) lazy_rows_.push_back({j, found, stride, bytes});
        };
        for (const TensorView& view : job.state) {
            const int64_t item = element_bytes(view.dtype);
            if (view.element_stride == 1) {
                add(view.data, view.slot_stride * item, job.slot_size * item);
            }
        }
        for (const Int8View& view : job.int8_state) add(view.data, view.stride, job.slot_size);
    }
}

void Step::touch_state(int64_t j, const JobSlice& slice) const {
    const Job& job = jobs_[j];
    for (const LazyRows& rows : lazy_rows_) {
        if (rows.job != j) continue;
        const auto touch = [&](int64_t slot) { rows.state->touch(slot * rows.stride, rows.bytes); };
        for (int64_t i = slice.begin; i < slice.end; ++i) {
            touch(job.indices[job.unique_entries ? int64_t(job.unique_entries[i]) : i]);
        }
        for (int64_t g = slice.first_group; g < slice.last_group; ++g) touch(job.groups[g].slot);
    }
}

void Step::apply(size_t begin, size_t end) {
    parallel(threads_, int64_t(end - begin), [&](int64_t t) {
        auto& [j, slice] = slices_[begin + size_t(t)];
        const Job& job = jobs_[j];
        if (job.unique_entries) slice.end = dedups_[size_t(j)].list_unique(slice.begin, slice.end);
        if (!lazy_rows_.empty()) touch_state(j, slice);
        job.apply(job, slice);
    });
}

std::optional<OutOfRange> step(Job* jobs, int64_t count, int threads) {
    Step step(jobs, count, threads);
    if (const std::optional<OutOfRange> bad = step.prepare()) return bad;
    step.apply();
    return std::nullopt;
}

}  // namespace sparsestep
