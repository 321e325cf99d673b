// When steps use one thread because other processes keep the cores busy.
#include <thread>

#include "core/thread_balance.h"
#include "core/threads.h"
#include "testing.h"

namespace sparsestep::testing {
namespace {

using Duration = ThreadBalance::Duration;
using std::chrono::microseconds;
using std::chrono::milliseconds;

// Steps of 1 ms alone and 0.6 ms in parallel; a stall adds 4 ms to a parallel one.
struct Simulation {
    ThreadBalance balance;
    ThreadBalance::Clock::time_point now{std::chrono::hours(1)};

    // The time that `steps` take.
    Duration run(int steps, bool stalls) {
        const auto began = now;
        for (int i = 0; i < steps; ++i) {
            if (balance.is_alone(now)) {
                now += milliseconds(1);
                continue;
            }
            const Duration took = microseconds(600) + (stalls ? milliseconds(4) : milliseconds(0));
            now += took;
            balance.add(milliseconds(1) - took, now);
        }
        return now - began;
    }
};

void test_balance() {
    Simulation quiet;
    check(quiet.run(1000, false) == milliseconds(600), "threads: a quiet machine uses all of them");
    check(!quiet.balance.has_lost(), "threads: nothing lost");

    Simulation busy;
    busy.run(500, true);
    check(busy.run(2000, true) < milliseconds(2100), "threads: attempts cost at most a twentieth");
    busy.run(300, false);
    check(busy.run(1000, false) == milliseconds(600), "threads: all again when it is quiet");

    Simulation turns;  // every 50 ms, another process has just left
    for (int turn = 0; turn < 20; ++turn) {
        turns.run(1, true);
        turns.run(50, false);
    }
    const auto began = turns.now;
    turns.run(1, true);
    turns.run(50, false);
    check(turns.now - began < milliseconds(50), "threads: one stall does not cost a whole turn");

    Simulation rare;
    rare.run(100, false);
    rare.balance.add(milliseconds(-1), rare.now);
    check(rare.run(100, false) == milliseconds(60), "threads: a short stall changes nothing");
}

void test_parallel() {
    for (int64_t tasks : {0, 1, 2, 1000}) {
        std::vector<int> done(size_t(tasks), 0);
        parallel(3, tasks, [&](int64_t task) { ++done[size_t(task)]; });
        check(done == std::vector<int>(size_t(tasks), 1), "threads: every task once");
    }
}

// Tasks that wait keep threads from a core, whichever thread has them.
void test_loss() {
    std::thread([] {
        parallel(2, 2, [](int64_t) { std::this_thread::sleep_for(milliseconds(200)); });
        check(available_threads(2) == 1, "threads: alone after a part that waited");
    }).join();
    // This thread may have lost in other tests, on a machine that is busy.
    std::thread([] {
        check(available_threads(2) == 2, "threads: each calling thread decides for itself");
    }).join();
}

}  // namespace

void test_threads() {
    test_balance();
    test_loss();
    test_parallel();
}

}  // namespace sparsestep::testing
