// Fails chosen memory allocations: preload this library (LD_PRELOAD) and arm it.
//
// Counts malloc, calloc, realloc, memalign, posix_memalign, aligned_alloc and mmap of at least
// `min_bytes`, over all threads, and fails the n-th: once, or that and all later ones. glibc only.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

extern void* __libc_malloc(size_t);
extern void* __libc_calloc(size_t, size_t);
extern void* __libc_realloc(void*, size_t);
extern void* __libc_memalign(size_t, size_t);

static atomic_long seen, nth;  // nth == 0: disarmed
static atomic_size_t least;
static atomic_int persistent;

void sparsestep_faults_arm(long n, size_t min_bytes, int keep_failing) {
    atomic_store(&nth, 0);
    atomic_store(&seen, 0);
    atomic_store(&least, min_bytes);
    atomic_store(&persistent, keep_failing);
    atomic_store(&nth, n);
}

// Stop failing; returns the number of allocations counted since it was armed.
long sparsestep_faults_disarm(void) {
    atomic_store(&nth, 0);
    return atomic_load(&seen);
}

static int fails(size_t bytes) {
    long n = atomic_load_explicit(&nth, memory_order_relaxed);
    if (n == 0 || bytes < atomic_load_explicit(&least, memory_order_relaxed)) return 0;
    long now = atomic_fetch_add(&seen, 1) + 1;
    if (now != n && !(now > n && atomic_load(&persistent))) return 0;
    errno = ENOMEM;
    return 1;
}

// backtrace loads libgcc when it is first called, which allocates.
__attribute__((constructor)) static void load_backtrace(void) {
    void* frame;
    backtrace(&frame, 1);
}

// Name the caller if it ends the process without a word of its own: CPython, where a thread that torch
// started asks for the GIL, and gloo's threads, which no exception may leave.
static void name_caller(void) {
    void* frames[32];
    int count = backtrace(frames, 32);
    const char* words = NULL;
    for (int i = 0; i < count; i++) {
        Dl_info found;
        if (!dladdr(frames[i], &found) || !found.dli_sname) continue;
        if (strcmp(found.dli_sname, "PyThreadState_New") == 0) {
            words = "allocations.c: no memory for PyThreadState_New\n";
        } else if (strstr(found.dli_sname, "N4gloo9transport")) {
            words = "allocations.c: no memory for gloo\n";
        }
    }
    if (words && write(2, words, strlen(words)) < 0) return;
}

static void* failure(void) {
    name_caller();
    errno = ENOMEM;
    return NULL;
}

void* malloc(size_t bytes) { return fails(bytes) ? failure() : __libc_malloc(bytes); }

void* calloc(size_t count, size_t each) {
    return fails(count * each) ? failure() : __libc_calloc(count, each);
}

void* realloc(void* old, size_t bytes) {
    return bytes && fails(bytes) ? NULL : __libc_realloc(old, bytes);
}

void* memalign(size_t alignment, size_t bytes) {
    return fails(bytes) ? NULL : __libc_memalign(alignment, bytes);
}

void* aligned_alloc(size_t alignment, size_t bytes) { return memalign(alignment, bytes); }

int posix_memalign(void** result, size_t alignment, size_t bytes) {
    int before = errno;
    void* made = memalign(alignment, bytes);
    errno = before;
    if (!made) return ENOMEM;
    *result = made;
    return 0;
}

void* mmap(void* where, size_t bytes, int access, int flags, int file, off_t offset) {
    if (fails(bytes)) return MAP_FAILED;
    return (void*)syscall(SYS_mmap, where, bytes, access, flags, file, offset);
}

void* mmap64(void* where, size_t bytes, int access, int flags, int file, off_t offset) {
    return mmap(where, bytes, access, flags, file, offset);
}
