#include "core/threads.h"

#if !defined(_WIN32)
#include <dlfcn.h>
#include <pthread.h>
#include <time.h>
#endif

#include <system_error>
#include <thread>
#include <vector>

#include "core/thread_balance.h"

namespace sparsestep {
namespace {

// GCC's entry point for a parallel region. LLVM's and Intel's runtimes offer it as well.
using OpenMpParallel = void (*)(void (*)(void*), void*, unsigned threads, unsigned flags);

std::atomic<bool> forked{false};

#if defined(_WIN32)
// The runtime that torch has there does not offer it.
OpenMpParallel torch_openmp() { return nullptr; }
#else
#if defined(__APPLE__)
constexpr const char* torch_library = "@rpath/libtorch_cpu.dylib";
#else
constexpr const char* torch_library = "libtorch_cpu.so";
#endif

OpenMpParallel torch_openmp() {
    static const OpenMpParallel found = []() -> OpenMpParallel {
        // The lookup goes through libtorch's own dependencies, so it finds the runtime that torch
        // uses, even where another library has brought a second one.
        void* torch = dlopen(torch_library, RTLD_LAZY | RTLD_NOLOAD);
        if (!torch) return nullptr;
        return reinterpret_cast<OpenMpParallel>(dlsym(torch, "GOMP_parallel"));
    }();
    return forked ? nullptr : found;
}
#endif

void on_short_lived_threads(int threads, void (*run)(void*), void* context) {
    std::vector<std::thread> helpers;
    helpers.reserve(size_t(threads - 1));
    try {
        for (int i = 1; i < threads; ++i) helpers.emplace_back(run, context);
    } catch (const std::system_error&) {
        // The system gives no more threads: those that there are share the work.
    }
    run(context);
    for (std::thread& helper : helpers) helper.join();
}

thread_local ThreadBalance balance;

}  // namespace

int available_threads(int threads) {
    return balance.has_lost() && balance.is_alone(ThreadBalance::Clock::now()) ? 1 : threads;
}

PartTimer::PartTimer() : began_(ThreadBalance::Clock::now()) {}

// Time for which this thread has had a core.
PartTimer::Duration PartTimer::cpu_time() {
#if defined(_WIN32)
    return ThreadBalance::Clock::now().time_since_epoch();
#else
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return std::chrono::seconds(now.tv_sec) + Duration(now.tv_nsec);
#endif
}

void PartTimer::finish() const {
    const auto now = ThreadBalance::Clock::now();
    balance.add(Duration(worked_.load()) - (now - began_), now);
}

void run_on_threads(int threads, void (*run)(void*), void* context) {
    if (const OpenMpParallel borrowed = torch_openmp()) {
        borrowed(run, context, unsigned(threads), 0);
    } else {
        on_short_lived_threads(threads, run, context);
    }
}

void install_fork_handler() {
#if !defined(_WIN32)  // which has no fork
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
#endif
}

const char* thread_source() { return torch_openmp() ? "openmp (torch's)" : "short-lived"; }

}  // namespace sparsestep
