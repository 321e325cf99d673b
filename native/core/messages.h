// Messages to and from all processes. A message concatenates the sections of one process; it may
// begin anywhere in a buffer. Outside of messages, each section is one array over all
// processes.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

namespace sparsestep {

struct Section {
    char* data;
    int64_t bytes;
};

// The bytes of every section, for each process: [world, sections].
struct SectionSizes {
    const int64_t* data;
    int64_t world, sections;

    int64_t at(int64_t process, int64_t section) const {
        return data[process * sections + section];
    }
    // The sum over all processes of each section; -1 if a size is invalid.
    std::vector<int64_t> totals() const {
        std::vector<int64_t> sums(static_cast<size_t>(sections), 0);
        for (int64_t process = 0; process < world; ++process) {
            for (int64_t section = 0; section < sections; ++section) {
                const int64_t size = at(process, section);
                int64_t& sum = sums[size_t(section)];
                sum = sum < 0 || size < 0 || size > INT64_MAX - sum ? -1 : sum + size;
            }
        }
        return sums;
    }
};

// Which bytes of its sections each process gets. A section that is as long as all of its sizes
// together is split; one that is as long as each goes to every process.
class SectionSplit {
public:
    SectionSplit(const std::vector<Section>& sections, const SectionSizes& sizes)
        : sections_(sections), sizes_(sizes) {
        const std::vector<int64_t> totals = sizes.totals();
        for (size_t s = 0; s < totals.size(); ++s) {
            const int64_t total = totals[s], bytes = sections[s].bytes;
            if (total < 0) is_valid_ = false;
            if (total != 0) used_.push_back({s, 0, total != bytes});
            if (total == bytes) continue;
            for (int64_t p = 0; p < sizes.world; ++p) is_valid_ &= sizes.at(p, int64_t(s)) == bytes;
        }
    }

    bool is_valid() const { return is_valid_; }

    // Processes have to be visited in their order.
    template <class Visit>
    void for_each_section(int64_t process, const Visit& visit) {
        for (Used& each : used_) {
            const int64_t size = sizes_.at(process, int64_t(each.section));
            if (size) visit(each.section, sections_[each.section].data + each.begin, size_t(size));
            if (!each.is_whole) each.begin += size;
        }
    }

private:
    // A non-empty section, and the offset of the next process's part.
    struct Used {
        size_t section;
        int64_t begin;
        bool is_whole;
    };

    const std::vector<Section>& sections_;
    const SectionSizes sizes_;
    std::vector<Used> used_;
    bool is_valid_ = true;
};

// Whether messages of these sizes fit a buffer without the message of `own` (-1: with all).
inline bool fits_buffer(const SectionSizes& sizes, const int64_t* begins, int64_t own,
                        int64_t bytes) {
    for (int64_t p = 0; p < sizes.world; ++p) {
        if (p == own) continue;
        int64_t left = bytes - begins[p];
        if (begins[p] < 0 || left < 0) return false;
        for (int64_t s = 0; s < sizes.sections; ++s) {
            left -= sizes.at(p, s);
            if (left < 0) return false;
        }
    }
    return true;
}

inline void pack_messages(SectionSplit from, int64_t world, int64_t own, const int64_t* begins,
                          char* buffer) {
    for (int64_t p = 0; p < world; ++p) {
        char* to = buffer + begins[p];
        from.for_each_section(p, [&](size_t, const char* data, size_t size) {
            if (p == own) return;
            std::memcpy(to, data, size);
            to += size;
        });
    }
}

// The reverse. What a process sends itself is not in the buffer: it is copied from `mine`.
inline void unpack_messages(const char* buffer, int64_t world, int64_t own, const int64_t* begins,
                            SectionSplit to, SectionSplit mine) {
    std::vector<const char*> kept;
    for (int64_t p = 0; p <= own; ++p) {
        mine.for_each_section(p, [&](size_t s, const char* data, size_t) {
            if (p != own) return;
            kept.resize(s + 1);
            kept[s] = data;
        });
    }
    for (int64_t p = 0; p < world; ++p) {
        const char* from = buffer + begins[p];
        to.for_each_section(p, [&](size_t s, char* data, size_t size) {
            std::memcpy(data, p == own ? kept[s] : from, size);
            if (p != own) from += size;
        });
    }
}

// Copies pieces of one buffer to another. False, and nothing done, where one does not fit.
inline bool copy_pieces(const char* from, int64_t from_bytes, char* to, int64_t to_bytes,
                        const int64_t* sources, const int64_t* targets, const int64_t* sizes,
                        int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        const bool is_valid = sizes[i] >= 0 && sources[i] >= 0 && targets[i] >= 0;
        if (!is_valid || sources[i] > from_bytes - sizes[i] || targets[i] > to_bytes - sizes[i]) {
            return false;
        }
    }
    for (int64_t i = 0; i < count; ++i) {
        if (sizes[i]) std::memcpy(to + targets[i], from + sources[i], size_t(sizes[i]));
    }
    return true;
}

}  // namespace sparsestep
