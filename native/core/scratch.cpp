#include "core/scratch.h"

#include <atomic>
#include <cstdlib>
#include <new>

namespace sparsestep {
namespace {

// As many steps as may well run at once, each on a thread of its own.
constexpr int spare_blocks = 8;
constexpr size_t kept_at_most = size_t(64) << 20;  // together

struct Block {
    void* data;
    size_t bytes;
};

// Whoever takes a spare block leaves null behind, so steps on several threads never share one.
std::atomic<Block*> spare[spare_blocks];
std::atomic<size_t> kept_bytes{0};

}  // namespace

void Scratch::reserve(size_t bytes) {
    if (bytes == 0) return;
    for (std::atomic<Block*>& place : spare) {
        Block* block = place.exchange(nullptr);
        if (!block) continue;
        const Block found = *block;
        delete block;
        kept_bytes -= found.bytes;
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
    if (kept_bytes.fetch_add(bytes_) + bytes_ <= kept_at_most) {
        if (Block* block = new (std::nothrow) Block{data_, bytes_}) {
            for (std::atomic<Block*>& place : spare) {
                Block* empty = nullptr;
                if (place.compare_exchange_strong(empty, block)) return;
            }
            delete block;
        }
    }
    kept_bytes -= bytes_;
    std::free(data_);
}

}  // namespace sparsestep
