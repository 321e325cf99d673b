// A vocabulary to tensors and back.
#include <algorithm>

#include "core/vocabulary.h"

namespace sparsestep {

void Vocabulary::save(const VocabularyArrays& to) const {
    for (int64_t row = options_.shared; row < used_; ++row) {
        const Record& record = records_[size_t(row)];
        to.ids[row] = record.id;
        to.counts[row] = record.count;
        to.seen[row] = record.seen;
    }
    std::vector<uint32_t> order;
    for (uint32_t i = 0; i < uint32_t(next_candidate_); ++i) {
        if (candidates_[i].serial) order.push_back(i);
    }
    std::sort(order.begin(), order.end(), [this](uint32_t a, uint32_t b) {
        return candidates_[a].serial < candidates_[b].serial;
    });
    for (size_t i = 0; i < order.size(); ++i) {
        to.candidate_ids[i] = candidates_[order[i]].id;
        to.candidate_counts[i] = int64_t(candidates_[order[i]].count);
    }
}

bool Vocabulary::load(const VocabularyArrays& from, const VocabularySizes& sizes, int64_t now) {
    Vocabulary loaded(options_);
    const auto add = [&loaded](int64_t id, uint32_t number) {
        if (loaded.slot_of(id, loaded.tag_of(id)) >= 0) return false;
        loaded.insert(id, number);
        return true;
    };
    for (int64_t row = options_.shared; row < sizes.used; ++row) {
        loaded.records_[size_t(row)] = {from.ids[row], uint32_t(from.counts[row]),
                                        uint32_t(from.seen[row])};
        if (!add(from.ids[row], uint32_t(row) + 1)) return false;
    }
    for (int64_t i = 0; i < sizes.candidates; ++i) {
        Candidate& candidate = loaded.candidates_[size_t(i)];
        candidate.id = from.candidate_ids[i];
        candidate.count = uint64_t(from.candidate_counts[i]) & most_counted_candidate;
        candidate.serial = ++loaded.serial_;
        if (!add(candidate.id, uint32_t(options_.rows + i) + 1)) return false;
    }
    loaded.used_ = sizes.used;
    loaded.next_candidate_ = sizes.candidates;
    loaded.sightings_ = sizes.sightings;
    loaded.latest_ = now;
    *this = std::move(loaded);
    return true;
}

int64_t Vocabulary::bytes() const {
    const int64_t victims = options_.eviction == Eviction::none ? 0 : options_.rows / 32 * 4 * 16;
    const int64_t candidates = options_.candidates * (16 + 4 + 2);
    return int64_t(slots_count_ * sizeof(Slot)) + options_.rows * 16 + candidates + victims;
}

}  // namespace sparsestep
