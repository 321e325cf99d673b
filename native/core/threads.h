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

// Calls run(context) on up to `threads` threads at once, the caller being one of them.
void run_on_threads(int threads, void (*run)(void*), void* context);

// Call once before any fork. A forked child must not use torch's OpenMP threads: it would deadlock.
void install_fork_handler();

// Whose threads on_team() uses: "openmp (torch's)" or "short-lived".
const char* thread_source();

// The number of threads to use now: `threads`, or 1 while other processes keep the cores busy.
//
// A parallel part ends when its last thread arrives, and a thread that waits for a core arrives a
// time slice late: several times the work of a small step. Waking a thread may take as long as such
// a step, too. So the calling thread compares what each part took with an estimate of working
// alone. After a loss it works alone for a while, longer each time the next attempt fails too.
int available_threads(int threads);

// Measures one parallel part on the calling thread.
class PartTimer {
public:
    PartTimer();
    // Call on the calling thread when it finds no more tasks.
    void caller_done(int64_t tasks);
    // Call when all threads have arrived; `tasks`: of all threads.
    void finish(int64_t tasks) const;

private:
    using Clock = std::chrono::steady_clock;
    Clock::time_point began_;
    Clock::duration cpu_began_, cpu_used_{};
    int64_t caller_tasks_ = 0;
};

// Differs between threads.
inline const void* this_thread() {
    static thread_local char address;
    return &address;
}

// Runs body(task) for every task in [0, tasks). Which thread runs which task is not fixed, so what
// a task writes must not depend on it.
template <class Body>
void parallel(int threads, int64_t tasks, const Body& body) {
    if (threads <= 1 || tasks <= 1 || available_threads(threads) == 1) {
        for (int64_t task = 0; task < tasks; ++task) body(task);
        return;
    }
    struct Shared {
        const Body* body;
        int64_t tasks;
        const void* caller;
        PartTimer timer;
        std::atomic<int64_t> next{0};
    } shared{&body, tasks, this_thread(), {}};
    run_on_threads(
        threads,
        [](void* context) {
            Shared& work = *static_cast<Shared*>(context);
            int64_t done = 0;
            for (;; ++done) {
                const int64_t task = work.next.fetch_add(1, std::memory_order_relaxed);
                if (task >= work.tasks) break;
                (*work.body)(task);
            }
            if (this_thread() == work.caller) work.timer.caller_done(done);
        },
        &shared);
    shared.timer.finish(tasks);
}

}  // namespace sparsestep
