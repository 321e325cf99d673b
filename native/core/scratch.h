// Working memory of a step. A few blocks are kept from step to step, because asking the system anew
// each time would fault every page in again; very large ones are given back.
#pragma once

#include <cstddef>

namespace sparsestep {

class Scratch {
public:
    Scratch() = default;
    ~Scratch();
    void reserve(size_t bytes);  // once; throws std::bad_alloc
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    void* data() const { return data_; }

private:
    void* data_ = nullptr;
    size_t bytes_ = 0;
};

}  // namespace sparsestep
