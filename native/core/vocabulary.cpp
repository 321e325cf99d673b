#include "core/vocabulary.h"

#include <algorithm>
#include <atomic>
#include <numeric>

#include "core/splitmix.h"
#include "core/threads.h"

namespace sparsestep {
namespace {

constexpr int64_t ahead = 32;       // how many ids are looked up side by side
constexpr int64_t piece = 1 << 14;  // for one thread
constexpr uint32_t most_counted = std::numeric_limits<uint32_t>::max();

uint64_t folded_product(uint64_t a, uint64_t b) {
    const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
    return uint64_t(product) ^ uint64_t(product >> 64);
}

}  // namespace

struct Vocabulary::New {
    int64_t id, times, row;
};

Vocabulary::Vocabulary(const VocabularyOptions& options)
    : options_(options),
      // Filled to 7 tenths at most.
      slots_count_(uint64_t(options.rows - options.shared + options.candidates) * 10 / 7 + 8),
      slots_(slots_count_),
      records_(size_t(options.rows)),
      candidates_(size_t(options.candidates)),
      used_(options.shared),
      victims_(options.eviction == Eviction::none ? 0 : size_t(options.rows)),
      candidate_victims_(size_t(options.candidates)) {
    spare_candidates_.reserve(size_t(options.candidates));
}

uint32_t Vocabulary::tag_of(int64_t id) const {
    const uint64_t once = folded_product(uint64_t(id) ^ options_.keys[0], options_.keys[1]);
    return uint32_t(folded_product(once, 0x9e3779b97f4a7c15) >> 32);
}

int64_t Vocabulary::shared_row(int64_t id) const {
    if (options_.shared == 1) return 0;
    return int64_t(splitmix(uint64_t(id)) % uint64_t(options_.shared));
}

int64_t Vocabulary::id_of(uint32_t number) const {
    const int64_t index = int64_t(number) - 1;
    return index < options_.rows ? records_[size_t(index)].id
                                 : candidates_[size_t(index - options_.rows)].id;
}

int64_t Vocabulary::slot_of(int64_t id, uint32_t tag) const {
    for (int64_t at = home_of(tag);; at = at + 1 == int64_t(slots_count_) ? 0 : at + 1) {
        const Slot slot = slots_[size_t(at)];
        if (!slot.number) return -1;
        if (slot.tag == tag && id_of(slot.number) == id) return at;
    }
}

void Vocabulary::insert(int64_t id, uint32_t number) {
    const uint32_t tag = tag_of(id);
    size_t at = size_t(home_of(tag));
    while (slots_[at].number) at = at + 1 == slots_count_ ? 0 : at + 1;
    slots_[at] = {tag, number};
}

// The slots after it move up, so that no lookup finds a gap before its id.
void Vocabulary::erase(int64_t id) {
    const auto next = [this](int64_t at) { return at + 1 == int64_t(slots_count_) ? 0 : at + 1; };
    int64_t gap = slot_of(id, tag_of(id));
    for (int64_t at = next(gap); slots_[size_t(at)].number; at = next(at)) {
        const int64_t home = home_of(slots_[size_t(at)].tag);
        // Whether its home lies in (gap, at], around the end: then it stays.
        const bool stays = gap < at ? gap < home && home <= at : gap < home || home <= at;
        if (stays) continue;
        slots_[size_t(gap)] = slots_[size_t(at)];
        gap = at;
    }
    slots_[size_t(gap)] = {0, 0};
}

// All slots are asked for, then all records, then all ids are compared. known(i) is called for
// those that have a row, while their record is at hand.
template <class Known>
void Vocabulary::find_some(const int64_t* ids, int64_t count, int64_t* rows,
                           const Known& known) const {
    uint32_t tags[ahead], numbers[ahead];
    for (int64_t i = 0; i < count; ++i) {
        tags[i] = tag_of(ids[i]);
        __builtin_prefetch(slots_.at(size_t(home_of(tags[i]))));
    }
    for (int64_t i = 0; i < count; ++i) {
        size_t at = size_t(home_of(tags[i]));
        while (slots_[at].number && slots_[at].tag != tags[i]) {
            at = at + 1 == slots_count_ ? 0 : at + 1;
        }
        numbers[i] = slots_[at].number;
        if (numbers[i] && int64_t(numbers[i]) <= options_.rows) {
            __builtin_prefetch(records_.at(numbers[i] - 1), 1);
        }
    }
    for (int64_t i = 0; i < count; ++i) {
        uint32_t number = numbers[i];
        if (number && id_of(number) != ids[i]) {  // another id with the same tag came first
            const int64_t at = slot_of(ids[i], tags[i]);
            number = at < 0 ? 0 : slots_[size_t(at)].number;
        }
        const bool has_row = number && int64_t(number) <= options_.rows;
        rows[i] = has_row ? int64_t(number) - 1 : shared_row(ids[i]);
        if (has_row) known(i);
    }
}

int64_t Vocabulary::find(const int64_t* ids, int64_t count, int64_t* rows, int threads) const {
    std::atomic<int64_t> without{0};
    parallel(threads, (count + piece - 1) / piece, [&](int64_t task) {
        const int64_t end = std::min(count, (task + 1) * piece);
        int64_t few = 0;
        for (int64_t at = task * piece; at < end; at += ahead) {
            const int64_t some = std::min(ahead, end - at);
            find_some(ids + at, some, rows + at, [](int64_t) {});
            for (int64_t i = at; i < at + some; ++i) few += rows[i] < options_.shared;
        }
        without += few;
    });
    return without;
}

void Vocabulary::count_one(int64_t row, uint32_t now) {
    Record& record = records_[size_t(row)];
    pending_.counted.push_back({uint32_t(row), record.count, record.seen});
    record.seen = now;
    record.count += record.count != most_counted;
}

// find(), and count the ids that have a row.
int64_t Vocabulary::count_known(const int64_t* ids, int64_t count, uint32_t now, int64_t* rows,
                                int threads) {
    if (threads > 1 && count > piece) {  // an id may come in several pieces
        const int64_t without = find(ids, count, rows, threads);
        for (int64_t i = 0; i < count; ++i) {
            if (i + ahead < count) __builtin_prefetch(records_.at(size_t(rows[i + ahead])), 1);
            if (rows[i] >= options_.shared) count_one(rows[i], now);
        }
        return without;
    }
    for (int64_t at = 0; at < count; at += ahead) {
        find_some(ids + at, std::min(ahead, count - at), rows + at,
                  [&](int64_t i) { count_one(rows[at + i], now); });
    }
    return count - int64_t(pending_.counted.size());
}

Vocabulary::Claim Vocabulary::claim(const int64_t* ids, int64_t count, int64_t now, int64_t* rows,
                                    int64_t* taken, int threads) {
    rollback();
    pending_.counted.reserve(size_t(count));
    pending_.count = count;
    pending_.used = used_;
    pending_.next_candidate = next_candidate_;
    pending_.latest = latest_;
    pending_.serial = serial_;
    pending_.batch_serial = batch_serial_;
    pending_.is_claimed = true;
    try {
        const int64_t without = count_known(ids, count, uint32_t(now), rows, threads);
        return {without, admit(ids, count, uint32_t(now), rows, taken, without)};
    } catch (...) {  // out of memory
        rollback();
        throw;
    }
}

void Vocabulary::commit() noexcept {
    if (!pending_.is_claimed) return;
    sightings_ += pending_.count;
    if (options_.eviction == Eviction::lfu && sightings_ >= options_.fades_after) fade();
    close();
}

void Vocabulary::rollback() noexcept {
    if (!pending_.is_claimed) return;
    for (size_t i = pending_.undos.size(); i-- > 0;) undo(pending_.undos[i]);
    for (size_t i = pending_.counted.size(); i-- > 0;) {  // an id that occurs twice: its first last
        const Counted& was = pending_.counted[i];
        records_[was.row].count = was.count;
        records_[was.row].seen = was.seen;
    }
    used_ = pending_.used;
    next_candidate_ = pending_.next_candidate;
    latest_ = pending_.latest;
    serial_ = pending_.serial;
    batch_serial_ = pending_.batch_serial;
    for (EvictionQueue* victims : {&victims_, &candidate_victims_}) {  // keys became smaller
        victims->clear();
        victims->release();
    }
    close();
}

// Memory of ordinary batches is kept for the next one.
void Vocabulary::close() noexcept {
    pending_.is_claimed = false;
    pending_.counted.clear();
    pending_.undos.clear();
    if (pending_.counted.capacity() > size_t(piece)) std::vector<Counted>().swap(pending_.counted);
    if (pending_.undos.capacity() > size_t(piece)) std::vector<Undo>().swap(pending_.undos);
}

void Vocabulary::undo(const Undo& undo) {
    const size_t index = undo.index;
    const uint32_t candidate_number = uint32_t(options_.rows) + undo.index + 1;
    switch (undo.change) {
        case Change::row_assigned:
            erase(records_[index].id);
            records_[index] = {0, 0, 0};
            break;
        case Change::row_evicted:
            erase(records_[index].id);
            records_[index] = undo.record;
            insert(undo.record.id, undo.index + 1);
            break;
        case Change::candidate_removed:
            spare_candidates_.pop_back();
            candidates_[index] = undo.candidate;
            insert(undo.candidate.id, candidate_number);
            break;
        case Change::candidate_counted: candidates_[index] = undo.candidate; break;
        case Change::candidate_evicted:
            erase(candidates_[index].id);
            candidates_[index] = undo.candidate;
            insert(undo.candidate.id, candidate_number);
            break;
        case Change::candidate_from_spare: spare_candidates_.push_back(undo.index); [[fallthrough]];
        case Change::candidate_appended:
            erase(candidates_[index].id);
            candidates_[index] = {0, 0, 0};
            break;
    }
}

// The distinct ids without a row, in order of appearance, and the number of each entry's id.
std::vector<Vocabulary::New> Vocabulary::distinct(const int64_t* ids, const int64_t* rows,
                                                  int64_t count,
                                                  std::vector<int32_t>& which) const {
    size_t size = 16;
    while (size < 2 * which.size()) size *= 2;
    std::vector<int32_t> table(size, -1);
    std::vector<New> found;
    found.reserve(which.size());
    size_t entry = 0;
    for (int64_t i = 0; i < count; ++i) {
        if (rows[i] >= options_.shared) continue;
        size_t at = size_t(tag_of(ids[i])) & (size - 1);
        while (table[at] >= 0 && found[size_t(table[at])].id != ids[i]) at = (at + 1) & (size - 1);
        if (table[at] < 0) {
            table[at] = int32_t(found.size());
            found.push_back({ids[i], 0, rows[i]});
        }
        ++found[size_t(table[at])].times;
        which[entry++] = table[at];
    }
    return found;
}

int64_t Vocabulary::admit(const int64_t* ids, int64_t count, uint32_t now, int64_t* rows,
                          int64_t* taken, int64_t without) {
    // What needs memory comes first.
    std::vector<int32_t> which(static_cast<size_t>(without));
    std::vector<New> found;
    if (without) found = distinct(ids, rows, count, which);
    pending_.undos.reserve(2 * found.size());
    if (now != latest_) {
        latest_ = now;
        victims_.release();
    }
    candidate_victims_.release();
    batch_serial_ = serial_;
    int64_t* end = taken;
    for (New& id : found) place(id, now, end);
    for (size_t i = 0, entry = 0; entry < which.size(); ++i) {
        if (rows[i] < options_.shared) rows[i] = found[size_t(which[entry++])].row;
    }
    return end - taken;
}

void Vocabulary::place(New& id, uint32_t now, int64_t*& taken) {
    int64_t known = -1;  // as a candidate
    int64_t count = id.times;
    if (options_.candidates) {
        const int64_t at = slot_of(id.id, tag_of(id.id));
        if (at >= 0) {
            known = int64_t(slots_[size_t(at)].number) - 1 - options_.rows;
            count += int64_t(candidates_[size_t(known)].count);
        }
    }
    const bool is_free = used_ < options_.rows;
    const int64_t row = count < options_.admit ? -1 : free_row(now);
    if (row < 0) {
        id.times = count;
        remember(id, known);
        return;
    }
    if (known >= 0) {
        const Candidate was = candidates_[size_t(known)];
        pending_.undos.push_back({Change::candidate_removed, uint32_t(known), {}, was});
        erase(id.id);
        candidates_[size_t(known)] = {0, 0, 0};
        spare_candidates_.push_back(uint32_t(known));
    }
    Record& record = records_[size_t(row)];
    const Change change = is_free ? Change::row_assigned : Change::row_evicted;
    pending_.undos.push_back({change, uint32_t(row), record, {}});
    if (!is_free) {
        erase(record.id);
        *taken++ = row;
    }
    record = {id.id, uint32_t(std::min<int64_t>(count, most_counted)), now};
    insert(id.id, uint32_t(row) + 1);
    if (options_.eviction != Eviction::none) victims_.add(key_of(uint32_t(row)), uint32_t(row));
    id.row = row;
}

int64_t Vocabulary::free_row(uint32_t now) {
    if (used_ < options_.rows) return used_++;
    if (options_.eviction == Eviction::none) return -1;
    return victims_.pop(
        uint32_t(options_.shared), uint32_t(options_.rows),
        [this](uint32_t index) { return key_of(index); },
        [this, now](uint32_t index) { return records_[index].seen == now; });
}

uint64_t Vocabulary::key_of(uint32_t row) const {
    const Record& record = records_[row];
    return options_.eviction == Eviction::lru ? record.seen
                                              : uint64_t(record.count) << 32 | record.seen;
}

// Count an id that gets no row now, in the place of the one that was not seen for longest.
void Vocabulary::remember(const New& id, int64_t known) {
    if (!options_.candidates) return;
    const bool is_new = known < 0;
    Change change = Change::candidate_counted;
    if (is_new && !spare_candidates_.empty()) {
        change = Change::candidate_from_spare;
        known = spare_candidates_.back();
        spare_candidates_.pop_back();
    } else if (is_new && next_candidate_ < options_.candidates) {
        change = Change::candidate_appended;
        known = next_candidate_++;
    } else if (is_new) {
        change = Change::candidate_evicted;
        known = candidate_victims_.pop(
            0, uint32_t(next_candidate_),
            [this](uint32_t index) {
                const uint64_t serial = candidates_[index].serial;
                return serial ? serial : no_key;
            },
            [this](uint32_t index) { return candidates_[index].serial > batch_serial_; });
        if (known < 0) return;
    }
    Candidate& candidate = candidates_[size_t(known)];
    pending_.undos.push_back({change, uint32_t(known), {}, candidate});
    if (change == Change::candidate_evicted) erase(candidate.id);
    candidate.id = id.id;
    candidate.count = std::min<uint64_t>(uint64_t(id.times), most_counted_candidate);
    candidate.serial = ++serial_;
    if (!is_new) return;
    insert(id.id, uint32_t(options_.rows + known) + 1);
    candidate_victims_.add(candidate.serial, uint32_t(known));
}

// What was popular once must not stay for ever.
void Vocabulary::fade() {
    for (int64_t row = options_.shared; row < used_; ++row) records_[size_t(row)].count /= 2;
    victims_.clear();
    sightings_ = 0;
}

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
