#include "scratch.h"

#include <atomic>
#include <cstdlib>
#include <new>

namespace sparsestep {
namespace {

constexpr size_t kept_at_most = size_t(64) << 20;

struct Block {
    void* data;
    size_t bytes;
};

// Whoever takes the kept block leaves null behind, so steps on several threads never share one.
std::atomic<Block*> kept{nullptr};

}  // namespace

void Scratch::reserve(size_t bytes) {
    if (bytes == 0) return;
    if (Block* block = kept.exchange(nullptr)) {
        const Block found = *block;
        delete block;
        if (found.bytes >= bytes) {
            data_ = found.data;
            bytes_ = found.bytes;
            return;
        }
        std::free(found.data);
    }
    bytes_ = bytes + bytes / 4;
    data_ = std::malloc(bytes_);
    if (!data_) throw std::bad_alloc();
}

Scratch::~Scratch() {
    if (!data_) return;
    if (bytes_ <= kept_at_most) {
        if (Block* block = new (std::nothrow) Block{data_, bytes_}) {
            Block* empty = nullptr;
            if (kept.compare_exchange_strong(empty, block)) return;
            delete block;
        }
    }
    std::free(data_);
}

}  // namespace sparsestep
