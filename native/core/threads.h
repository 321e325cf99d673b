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

// How many of `threads` to use now: all of them, or one while other processes keep the cores busy.
//
// A parallel part ends when its last thread arrives. A thread that the scheduler has set aside for
// another process costs a time slice, several times the work of a small step. So each part compares
// its duration with an estimate of what one thread would have needed; where parts lose time, the
// calling thread works alone for a multiple of the loss, and then tries again.
int available_threads(int threads);

using Clock = std::chrono::steady_clock;

// One parallel part, as its caller has seen it.
struct ParallelPart {
    Clock::time_point began, caller_ended, ended;
    int64_t tasks, caller_tasks;
};
void record(const ParallelPart& part);

// Differs between threads.
inline const void* this_thread() {
    static thread_local char here;
    return &here;
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
        const void* caller;
        std::atomic<int64_t> next{0};
        ParallelPart part;
    } shared;
    shared.body = &body;
    shared.caller = this_thread();
    shared.part.tasks = tasks;
    shared.part.began = Clock::now();
    run_on_threads(
        threads,
        [](void* context) {
            Shared& work = *static_cast<Shared*>(context);
            int64_t done = 0;
            for (;; ++done) {
                const int64_t task = work.next.fetch_add(1, std::memory_order_relaxed);
                if (task >= work.part.tasks) break;
                (*work.body)(task);
            }
            if (this_thread() == work.caller) {
                work.part.caller_ended = Clock::now();
                work.part.caller_tasks = done;
            }
        },
        &shared);
    shared.part.ended = Clock::now();
    record(shared.part);
}

}  // namespace sparsestep
