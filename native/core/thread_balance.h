// Decides whether parallel parts pay while other processes want the cores.
#pragma once

#include <algorithm>
#include <chrono>

namespace sparsestep {

// Adds up what parallel parts have gained or lost against working alone. After a loss, its duration
// times a backoff is spent alone. The backoff doubles with every loss and halves whenever as much
// has been gained: beside a process that stays, attempts cost about one part in `longest_backoff`;
// one that comes and goes costs little more than the stall itself.
class ThreadBalance {
public:
    using Clock = std::chrono::steady_clock;
    using Duration = Clock::duration;

    static constexpr int shortest_backoff = 2, longest_backoff = 64;
    // Gains outweigh later losses up to this duration: a rare short stall changes nothing.
    static constexpr Duration most_credit = std::chrono::milliseconds(2);

    bool has_lost() const { return last_loss_ != Duration{}; }
    bool is_alone(Clock::time_point now) const { return now < alone_until_; }

    // A part that ended `now` was faster than working alone by `gain`, or slower if negative.
    void add(Duration gain, Clock::time_point now) {
        credit_ = std::min(credit_ + gain, most_credit);
        if (credit_ < Duration{}) {
            last_loss_ = -credit_;
            alone_until_ = now + last_loss_ * backoff_;
            backoff_ = std::min(2 * backoff_, longest_backoff);
            credit_ = gained_ = Duration{};
        } else if (backoff_ > shortest_backoff) {
            gained_ += std::max(gain, Duration{});
            if (gained_ < last_loss_) return;
            backoff_ /= 2;
            gained_ = Duration{};
        }
    }

private:
    Duration credit_{}, gained_{}, last_loss_{};
    Clock::time_point alone_until_{};
    int backoff_ = shortest_backoff;
};

}  // namespace sparsestep
