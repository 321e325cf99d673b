// What idle rows missed, done at once, beside the same steps one after the other in double.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core/history.h"
#include "testing.h"

using namespace sparsestep;
using namespace sparsestep::testing;

namespace {

constexpr int64_t rows = 70, base = 3, steps = 40;

// The steps since base, as src/sparsestep/deferred keeps them.
struct History {
    std::string idle_update;
    double first, second, eps;
    std::vector<double> inverse_decay, sizes, roots, centers, firsts, seconds, sums;
    int64_t sums_per_step;

    History(const std::string& idle_update, double first, double second, double eps)
        : idle_update(idle_update),
          first(first),
          second(second),
          eps(eps),
          sums_per_step(idle_update == "quotient" ? series_terms + 1 : 1) {
        inverse_decay = {1};
        sizes = roots = {0};
        for (int64_t s = 1; s <= steps; ++s) {
            inverse_decay.push_back(inverse_decay.back() / shrink(s));
            sizes.push_back(0.01 * double(1 + s % 4));
            roots.push_back(1 - 0.5 / double(s + 1));
        }
        for (int64_t k = 0; k <= steps; ++k) {
            firsts.push_back(std::pow(first, double(k)));
            seconds.push_back(std::pow(second, double(k)));
        }
        sums.assign(size_t((steps + 1) * sums_per_step), 0.0);
        if (idle_update == "quotient") {
            add_steps();
            return;
        }
        for (int64_t since = 0; since <= steps; ++since) {
            sums[size_t(since)] = idle_update == "sign_drift" ? drift(since) : sum(since);
        }
    }

    void add_steps() {
        std::vector<double> buffers, root_powers;
        for (int64_t k = steps; k > 0; --k) {
            buffers.push_back(firsts[size_t(k)]);
            root_powers.push_back(std::pow(root_decay(), double(k)));
        }
        centers.assign(size_t(steps + 1), std::pow(root_decay(), 10));
        for (int64_t s = 1; s <= steps; ++s) {
            const double move = sizes[size_t(s)] * inverse_decay[size_t(s)];
            const AdamStep step{centers.data(),
                                buffers.data() + steps - s,
                                root_powers.data() + steps - s,
                                s,
                                move,
                                roots[size_t(s)]};
            add_step_to_series(step, sums.data());
        }
    }

    static double shrink(int64_t step) { return step % 3 ? 0.99 : 1.0; }

    double root_decay() const { return std::sqrt(second); }

    double drift(int64_t until) const {
        double total = 0;
        for (int64_t s = 1; s <= until; ++s) total += sizes[size_t(s)] * inverse_decay[size_t(s)];
        return total;
    }

    double sum(int64_t since) const {
        double total = 0;
        for (int64_t s = since + 1; s <= steps; ++s) {
            total += sizes[size_t(s)] * inverse_decay[size_t(s)] * firsts[size_t(s - since)];
        }
        return total;
    }

    // One idle step after the other.
    void replay(double& param, double& buffer, double& square, int64_t since) const {
        for (int64_t s = since + 1; s <= steps; ++s) {
            const double size = sizes[size_t(s)];
            double move = 0;
            if (idle_update == "sign_drift") move = size * double((buffer > 0) - (buffer < 0));
            buffer *= first;
            square *= second;
            if (idle_update == "geometric") move = size * buffer;
            if (idle_update == "quotient") {
                move = size * buffer / (std::sqrt(square) / roots[size_t(s)] + eps);
            }
            param = param * shrink(s) - move;
        }
    }
};

template <class T>
struct Table {
    int64_t slot_size;
    std::vector<T> param, buffer, square;
    std::vector<int32_t> last;

    explicit Table(int64_t slot_size) : slot_size(slot_size) {
        std::mt19937 random(5);
        std::normal_distribution<double> normal;
        for (int64_t i = 0; i < rows * slot_size; ++i) {
            param.push_back(T(normal(random)));
            buffer.push_back(T(i % 5 ? normal(random) : 0));
            square.push_back(T(std::pow(10.0, -3 * double(i % 4)) * (i % 7 ? 1 : 0)));
            if (i % 7 == 0) buffer.back() = 0;
        }
        for (int64_t r = 0; r < rows; ++r) {
            const auto step = int32_t(base + r % (steps + 1));
            last.push_back(r % 9 ? step : ~step);
        }
    }

    bool operator==(const Table& other) const {
        return param == other.param && buffer == other.buffer && square == other.square &&
               last == other.last;
    }
};

template <class T>
CatchUpJob work_on(Table<T>& table, const History& history, bool converges) {
    const auto view = [&](std::vector<T>& of) {
        return TensorView{of.data(), sizeof(T) == 4 ? Dtype::float32 : Dtype::float64,
                          table.slot_size, 1};
    };
    CatchUpJob work{};
    work.last = table.last.data();
    work.now = int32_t(base + steps);
    work.base = int32_t(base);
    work.slot_size = table.slot_size;
    work.param = view(table.param);
    work.state[0] = view(table.buffer);
    work.state[1] = view(table.square);
    work.states = 2;
    work.powers[0] = history.firsts.data();
    work.powers[1] = history.seconds.data();
    work.buffer = 0;
    work.square = history.idle_update == "quotient" ? 1 : -1;
    work.buffer_decay = history.first;
    work.square_decay = history.second;
    work.eps = history.eps;
    work.max_error = sizeof(T) == 4 ? 1e-6 : 1e-14;
    work.converges = converges;
    work.horizon = steps;
    work.inverse_decay = history.inverse_decay.data();
    work.sizes = history.sizes.data();
    work.roots = history.roots.data();
    work.centers = history.centers.data();
    work.sums = history.sums.data();
    work.sums_per_step = history.sums_per_step;
    return work;
}

template <class T>
CatchUpKernel catch_up_of(const std::string& idle_update, const InstructionSet& set) {
    const Kernels& kernels = sizeof(T) == 4 ? set.in_float : set.in_double;
    int i = 0;
    while (kernels.idle_updates[i].name != idle_update) ++i;
    return kernels.idle_updates[i].catch_up;
}

// In several parts, as threads would; with rows that come more than once, or all of them.
template <class T>
CatchUpResult catch_up(Table<T>& table, const History& history, bool converges,
                       const InstructionSet& set, int64_t parts,
                       const std::vector<int64_t>& which) {
    CatchUpJob work = work_on(table, history, converges);
    work.rows = which.empty() ? nullptr : which.data();
    CatchUpResult total{};
    for (int64_t part = 0; part < parts; ++part) {
        const CatchUpSlice share{0, which.empty() ? rows : int64_t(which.size()), part, parts};
        const CatchUpKernel run = catch_up_of<T>(history.idle_update, set);
        const CatchUpResult done = run(work, share);
        total.deferred += done.deferred;
        total.stale += done.stale;
    }
    return total;
}

template <class T>
void expect_caught_up(const History& history, bool converges, const std::string& what) {
    const double room = sizeof(T) == 4 ? 2e-5 : 1e-11;
    for (int64_t slot_size : {1, 5, 600}) {
        for (bool all : {true, false}) {
            std::vector<int64_t> which;
            if (!all) which = random_indices(50, rows, 11);
            const Table<T> before(slot_size);
            Table<T> first = before;
            const auto& plainest = instruction_sets()[0];
            const CatchUpResult done = catch_up(first, history, converges, plainest, 1, which);
            int64_t deferred = 0;
            for (int64_t r = 0; r < rows; ++r) {
                const bool asked_for =
                    all || std::find(which.begin(), which.end(), r) != which.end();
                const int32_t last = before.last[size_t(r)];
                const int64_t since = (last < 0 ? ~last : last) - base;
                deferred += asked_for && since < steps;
                const auto now = int32_t(base + steps);
                const int32_t stamp = last >= 0 ? now : ~now;
                check(first.last[size_t(r)] == (asked_for ? stamp : last), what + ": stamp");
                for (int64_t i = r * slot_size; i < (r + 1) * slot_size; ++i) {
                    const auto at = size_t(i);
                    double p = before.param[at], m = before.buffer[at], v = before.square[at];
                    if (asked_for) history.replay(p, m, v, since);
                    const auto near = [&](T ours, double exact, double scale) {
                        return std::abs(double(ours) - exact) <= (asked_for ? room * scale : 0);
                    };
                    check(near(first.param[at], p, 1 + std::abs(p)), what + ": param");
                    check(near(first.buffer[at], m, 1), what + ": buffer");
                    check(near(first.square[at], v, 1), what + ": square");
                }
            }
            check(done.deferred == deferred, what + ": how many were deferred");
            for_each_set([&](const InstructionSet& set) {
                for (int64_t parts : {1, 2, 5}) {
                    Table<T> ours = before;
                    catch_up(ours, history, converges, set, parts, which);
                    check(ours == first, what + ": the same bits with " + set.name);
                }
            });
        }
    }
}

template <class T>
void test_every_way_to_move() {
    expect_caught_up<T>(History("still", 0.9, 0.99, 0), true, "decay alone");
    expect_caught_up<T>(History("geometric", 0.9, 0.99, 0), true, "along a buffer");
    expect_caught_up<T>(History("geometric", 1.0, 0.99, 0), false, "along one that stays");
    expect_caught_up<T>(History("sign_drift", 0.9, 0.99, 0), true, "along a sign");
    expect_caught_up<T>(History("quotient", 0.9, 0.999, 1e-8), true, "a quotient");
    expect_caught_up<T>(History("quotient", 0.9, 0.99, 0.1), true, "one with a large eps");
    expect_caught_up<T>(History("quotient", 0.9, 0.7, 1e-3), true, "one that is not exact");
    expect_caught_up<T>(History("quotient", 0.9, 0.7, 1e-3), false, "one without sums");
}

// FTRL's parameter is where its formula puts it, in rows that missed a step with a learning rate.
template <class T>
void test_recompute() {
    History history("ftrl", 1, 1, 0);
    for (int64_t s = 0; s <= steps; ++s) history.sums[size_t(s)] = double(s / 2);
    const double rate = 8, beta = 0.5, l1 = 0.3, l2 = 0.1;
    for_each_set([&](const InstructionSet& set) {
        const Table<T> before(37);
        Table<T> after = before;
        CatchUpJob work = work_on(after, history, true);
        work.buffer = work.square = -1;
        work.powers[0] = work.powers[1] = nullptr;
        const double options[] = {1 / rate, beta, l1, l2};
        std::copy_n(options, 4, work.options);
        catch_up_of<T>("ftrl", set)(work, {0, rows, 0, 1});
        check(after.buffer == before.buffer && after.square == before.square, "ftrl: state");
        for (size_t i = 0; i < before.param.size(); ++i) {
            const int32_t last = before.last[i / 37];
            const int64_t since = (last < 0 ? ~last : last) - base;
            const double linear = before.buffer[i], root = std::sqrt(double(before.square[i]));
            double wanted = before.param[i];
            if (since / 2 < steps / 2) {
                const double shrunk = std::copysign(std::max(std::abs(linear) - l1, 0.0), linear);
                wanted = -shrunk / ((beta + root) * rate + l2);
            }
            check(std::abs(double(after.param[i]) - wanted) <= 1e-6, "ftrl: param");
        }
    });
}

}  // namespace

void sparsestep::testing::test_idle() {
    if (threads_only) return;  // shares are called one after the other here
    test_every_way_to_move<float>();
    test_every_way_to_move<double>();
    test_recompute<float>();
    test_recompute<double>();
}
