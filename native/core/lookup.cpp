#include "core/lookup.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "core/threads.h"

namespace sparsestep {
namespace {

// Below this many elements, a second thread does not pay off.
constexpr int64_t serial_elements = 1 << 15;

// Elements per task: enough to hide the latency of its first rows.
constexpr int64_t task_elements = 1 << 17;

struct Task {
    int64_t work, first, last;
    LookedUp done;
};

void add_tasks(std::vector<Task>& tasks, const LookupWork& work, int64_t index) {
    const int64_t elements = (work.id_count + work.bags) * std::max<int64_t>(1, work.columns);
    const int64_t count = std::clamp<int64_t>(elements / task_elements, 1, work.bags);
    for (int64_t t = 0; t < count; ++t) {
        tasks.push_back({index, work.bags * t / count, work.bags * (t + 1) / count, {}});
    }
}

}  // namespace

bool look_up(const LookupWork* works, int64_t count, Lookup run, int threads, int64_t* counted) {
    std::vector<Task> tasks;
    int64_t elements = 0;
    for (int64_t i = 0; i < count; ++i) {
        add_tasks(tasks, works[i], i);
        elements += works[i].id_count * works[i].columns;
        counted[i] = 0;
    }
    std::atomic<bool> good{true};
    parallel(elements < serial_elements ? 1 : threads, int64_t(tasks.size()), [&](int64_t t) {
        if (!good.load(std::memory_order_relaxed)) return;
        Task& task = tasks[size_t(t)];
        task.done = run(works[task.work], task.first, task.last);
        if (task.done.counted < 0) good = false;
    });
    if (!good) return false;
    for (const Task& task : tasks) {
        const LookupWork& work = works[task.work];
        const auto& [begin, kept] = task.done;
        int64_t& at = counted[task.work];
        if (at > begin) return false;  // only if the starts change meanwhile
        if (at < begin) {
            const size_t bytes = size_t(kept) * sizeof(int64_t);
            std::memmove(work.indices + at, work.indices + begin, bytes);
            if (work.value_index)
                std::memmove(work.value_index + at, work.value_index + begin, bytes);
        }
        at += kept;
    }
    return true;
}

}  // namespace sparsestep
