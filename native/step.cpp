#include "step.h"

#include <algorithm>
#include <vector>

#include "scratch.h"
#include "team.h"
#include "unique.h"

namespace sparsestep {
namespace {

// Below this much memory traffic, waking a second thread costs more than it brings.
constexpr int64_t serial_bytes = 1 << 18;

// A dense gradient is cut into pieces of this many elements.
constexpr int64_t dense_piece = 1 << 14;

int64_t element_bytes(Dtype dtype) {
    return dtype == Dtype::float64 ? 8 : dtype == Dtype::float32 ? 4 : 2;
}

int64_t traffic(const Job& job) {
    const int64_t per_row = job.block * element_bytes(job.param.dtype) + 16;
    return job.entries * per_row * 6;
}

std::pair<const char*, const char*> extent(const Job& job) {
    const View& view = job.param;
    const int64_t size = element_bytes(view.dtype);
    const char* begin = static_cast<const char*>(view.data);
    const char* end = begin + size * ((job.slots - 1) * view.slot_stride +
                                      (job.block - 1) * view.element_stride + 1);
    return {begin, end};
}

// Parameters that share memory (views of one tensor) must be updated one after the other.
bool params_overlap(const Job* jobs, int64_t count) {
    if (count < 2) return false;
    std::vector<std::pair<const char*, const char*>> extents;
    for (int64_t j = 0; j < count; ++j) {
        if (jobs[j].slots > 0 && jobs[j].block > 0) extents.push_back(extent(jobs[j]));
    }
    std::sort(extents.begin(), extents.end());
    for (size_t i = 1; i < extents.size(); ++i) {
        if (extents[i].first < extents[i - 1].second) return true;
    }
    return false;
}

struct Task {
    int64_t job;
    int64_t part;
    int64_t size;
};

class Step {
public:
    Step(Job* jobs, int64_t count, int threads) : jobs_(jobs), count_(count), threads_(threads) {
        int64_t bytes = 0;
        for (int64_t j = 0; j < count; ++j) bytes += traffic(jobs[j]);
        if (bytes < serial_bytes) threads_ = 1;
        partitions_.reserve(size_t(count));
        for (int64_t j = 0; j < count; ++j) {
            partitions_.emplace_back(jobs[j]);
            jobs[j].entry_bits = partitions_.back().entry_bits();
        }
    }

    std::optional<BadEntry> check() {
        for_chunks([](const Partition&) { return true; },
                   [](Partition& partition, int64_t chunk) { partition.inspect(chunk); });
        for (int64_t j = 0; j < count_; ++j) {
            const int64_t entry = partitions_[size_t(j)].first_bad_entry();
            if (entry >= 0) return BadEntry{j, entry, jobs_[j].positions[entry]};
        }
        return std::nullopt;
    }

    void apply() {
        int64_t words = 0;
        for (const Partition& partition : partitions_) words += partition.scratch_words();
        Scratch scratch(size_t(words) * sizeof(uint64_t));
        uint64_t* at = static_cast<uint64_t*>(scratch.data());
        for (Partition& partition : partitions_) {
            const int64_t need = partition.scratch_words();
            if (need == 0) continue;
            partition.use_scratch(at);
            at += need;
        }
        const auto dealt = [](const Partition& partition) { return partition.is_dealt(); };
        for_chunks(dealt, [](Partition& partition, int64_t chunk) { partition.count(chunk); });
        for (Partition& partition : partitions_) {
            if (dealt(partition)) partition.choose_buckets(threads_);
        }
        for_chunks(dealt, [](Partition& partition, int64_t chunk) { partition.deal(chunk); });
        if (params_overlap(jobs_, count_)) {
            for (int64_t j = 0; j < count_; ++j) apply_jobs(j, j + 1);
        } else {
            apply_jobs(0, count_);
        }
    }

private:
    template <class Which, class Body>
    void for_chunks(Which which, Body body) {
        tasks_.clear();
        for (int64_t j = 0; j < count_; ++j) {
            const Partition& partition = partitions_[size_t(j)];
            if (!jobs_[j].positions || !which(partition)) continue;
            for (int64_t c = 0; c < partition.chunks(); ++c) tasks_.push_back({j, c, 0});
        }
        parallel(threads_, int64_t(tasks_.size()), [&](int64_t t) {
            const Task& task = tasks_[size_t(t)];
            body(partitions_[size_t(task.job)], task.part);
        });
    }

    void apply_jobs(int64_t begin, int64_t end) {
        tasks_.clear();
        int64_t total = 0;
        for (int64_t j = begin; j < end; ++j) {
            const Job& job = jobs_[j];
            const Partition& partition = partitions_[size_t(j)];
            const int64_t parts =
                job.positions ? partition.pieces() : (job.block + dense_piece - 1) / dense_piece;
            for (int64_t part = 0; part < parts; ++part) {
                const int64_t size =
                    job.positions ? partition.piece_size(part) * job.block : dense_piece;
                tasks_.push_back({j, part, size});
                total += size;
            }
        }
        // The large pieces first, so that none is begun when the others have ended.
        const int64_t large = total / std::max<int64_t>(1, 8 * threads_);
        std::stable_partition(tasks_.begin(), tasks_.end(),
                              [&](const Task& task) { return task.size > large; });
        parallel(threads_, int64_t(tasks_.size()), [&](int64_t t) {
            const Task& task = tasks_[size_t(t)];
            const Job& job = jobs_[task.job];
            if (job.positions) {
                job.apply(job, partitions_[size_t(task.job)].entries(task.part), 0, job.block);
            } else {
                const int64_t from = task.part * dense_piece;
                job.apply(job, {nullptr, 0, job.entries}, from,
                          std::min(job.block, from + dense_piece));
            }
        });
    }

    Job* jobs_;
    int64_t count_;
    int threads_;
    std::vector<Partition> partitions_;
    std::vector<Task> tasks_;
};

}  // namespace

std::optional<BadEntry> step(Job* jobs, int64_t count, int threads) {
    Step step(jobs, count, threads);
    if (const std::optional<BadEntry> bad = step.check()) return bad;
    step.apply();
    return std::nullopt;
}

}  // namespace sparsestep
