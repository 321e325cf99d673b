// The norm of every slot of a gradient: what clipping needs, without writing out a single sum.
//
// Included by kernels.cpp alone; everything has internal linkage (see types.h for the reason).
#pragma once

#include "core/types.h"
#include "kernels/grads.h"
#include "rules/math.h"

namespace sparsestep {
namespace {

template <class T, class Rows>
class NormLoop : Gradients<T, Rows, false> {
public:
    NormLoop(const Job& job, const Piece& piece) : Gradients<T, Rows, false>(job, piece) {}

    void run() {
        this->for_each_slot(
            [](int64_t) {},
            [this](const Touch& touch) { this->job_.norms[touch.first] = norm(touch); });
    }

private:
    // In double, so that no square overflows; in as many lanes on every machine, since the order of
    // a sum decides its last bits.
    static constexpr int lanes_count = 8;

    double norm(const Touch& touch) {
        double lanes[lanes_count] = {};
        for (int64_t offset = 0; offset < this->columns_; offset += tile_size) {
            const int64_t rest = this->columns_ - offset;
            const int64_t n = rest < tile_size ? rest : tile_size;
            const T* grad = this->gradient(touch, offset, n, nullptr);
            switch (this->job_.order) {
                case Norm::sum: add(lanes, grad, n, [](double x) { return magnitude(x); }); break;
                case Norm::squares: add(lanes, grad, n, [](double x) { return x * x; }); break;
                case Norm::largest: raise(lanes, grad, n); break;
            }
        }
        double total = lanes[0];
        for (int lane = 1; lane < lanes_count; ++lane) {
            total = this->job_.order == Norm::largest ? larger(total, lanes[lane])
                                                      : total + lanes[lane];
        }
        return this->job_.order == Norm::squares ? square_root(total) : total;
    }

    template <class Of>
    SPARSESTEP_INLINE static void add(double* __restrict lanes, const T* __restrict grad, int64_t n,
                                      const Of& of) {
        int64_t j = 0;
        for (; j + lanes_count <= n; j += lanes_count) {
            for (int lane = 0; lane < lanes_count; ++lane)
                lanes[lane] += of(double(grad[j + lane]));
        }
        for (int lane = 0; j < n; ++j, ++lane) lanes[lane] += of(double(grad[j]));
    }

    static void raise(double* lanes, const T* grad, int64_t n) {
        for (int64_t j = 0; j < n; ++j) lanes[0] = larger(lanes[0], magnitude(double(grad[j])));
    }

    // NaN if one of them is.
    static double larger(double a, double b) { return a != a || a > b ? a : b; }
};

template <class T>
void norms(const Job& job, const Piece& piece) {
    if (is_stored_as<T>(job.values)) return NormLoop<T, StoredRows<T, 0>>(job, piece).run();
    return NormLoop<T, ConvertedRows<T>>(job, piece).run();
}

}  // namespace
}  // namespace sparsestep
