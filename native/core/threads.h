// The threads that share a step's work.
//
// Where torch runs on OpenMP, its own team is borrowed: the threads that have just run torch's
// kernels run ours, so no second pool competes with them for the cores. Elsewhere, and in a child
// process after fork (where a borrowed team is gone), threads live for one call. Nothing is started
// and nothing spins between steps on our account.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace sparsestep {

// Calls run(context) on up to `threads` threads at once, including the caller.
void run_on_threads(int threads, void (*run)(void*), void* context);

// Call once before any fork. A forked child must not use torch's OpenMP threads: it would deadlock.
void install_fork_handler();

// Whose threads on_team() uses: "openmp (torch's)" or "short-lived".
const char* thread_source();

// The number of threads to use now: `threads`, or 1 while more threads lose time.
//
// A parallel part ends when its last thread arrives. A thread that waits for a core arrives a time
// slice late, which is several times the work of a small step; waking one takes time, too. So each
// part is compared with the time that a single thread would need for the same work. After a loss
// the calling thread works alone for a while, longer each time the next attempt fails too.
int available_threads(int threads);

// Measures one parallel part.
class PartTimer {
public:
    using Duration = std::chrono::nanoseconds;
    PartTimer();
    static Duration cpu_time();  // of this thread
    // Call on each thread when it has done its tasks; `began` is its CPU time before them.
    void end(Duration began) { worked_ += (cpu_time() - began).count(); }
    // Call on the calling thread when all threads have arrived.
    void finish() const;

private:
    std::chrono::steady_clock::time_point began_;
    std::atomic<Duration::rep> worked_{0};  // by all threads
};

// Runs body(task) for every task in [0, tasks). Any thread may run any task, so the results must
// not depend on the assignment.
template <class Body>
void parallel(int threads, int64_t tasks, const Body& body) {
    if (threads <= 1 || tasks <= 1 || available_threads(threads) == 1) {
        for (int64_t task = 0; task < tasks; ++task) body(task);
        return;
    }
    struct Shared {
        const Body* body;
        int64_t tasks;
        std::atomic<int64_t> next{0};
        PartTimer timer{};
    } shared{&body, tasks};
    run_on_threads(
        threads,
        [](void* context) {
            Shared& work = *static_cast<Shared*>(context);
            const auto began = PartTimer::cpu_time();
            for (;;) {
                const int64_t task = work.next.fetch_add(1, std::memory_order_relaxed);
                if (task >= work.tasks) break;
                (*work.body)(task);
            }
            work.timer.end(began);
        },
        &shared);
    shared.timer.finish();
}

}  // namespace sparsestep
