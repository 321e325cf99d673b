#include "core/team.h"

#include <dlfcn.h>
#include <pthread.h>

#include <system_error>
#include <thread>
#include <vector>

namespace sparsestep {
namespace {

// GCC's entry point for a parallel region. LLVM's and Intel's runtimes offer it as well.
using OpenMpParallel = void (*)(void (*)(void*), void*, unsigned threads, unsigned flags);

std::atomic<bool> forked{false};

OpenMpParallel torch_openmp() {
    static const OpenMpParallel found = []() -> OpenMpParallel {
        // The lookup goes through libtorch's own dependencies, so it finds the runtime that torch
        // uses, even where another library has brought a second one.
        void* torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
        if (!torch) return nullptr;
        return reinterpret_cast<OpenMpParallel>(dlsym(torch, "GOMP_parallel"));
    }();
    return forked ? nullptr : found;
}

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

}  // namespace

void on_team(int threads, void (*run)(void*), void* context) {
    if (const OpenMpParallel borrowed = torch_openmp()) {
        borrowed(run, context, unsigned(threads), 0);
    } else {
        on_short_lived_threads(threads, run, context);
    }
}

void watch_forks() {
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
}

const char* team_kind() { return torch_openmp() ? "openmp (torch's)" : "short-lived"; }

}  // namespace sparsestep
