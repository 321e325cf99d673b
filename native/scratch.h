// Working memory of a step. One block is kept from step to step, because asking the system anew each
// time would fault every page in again; very large ones are given back.
#pragma once

#include <cstddef>

namespace sparsestep {

class Scratch {
public:
    explicit Scratch(size_t bytes);  // throws std::bad_alloc
    ~Scratch();
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    void* data() const { return data_; }

private:
    void* data_;
    size_t bytes_;
};

}  // namespace sparsestep
