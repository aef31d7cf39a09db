// What processes of one machine tell each other about memory that all of them have mapped: counters, which only grow.
//
// Each rank has its buckets in a mapping of its own, laid out alike; the counters lie in the mapping of the first rank. What
// ranks wait for has a place: a bucket, or one of the things that befall it. What becomes of it when all have arrived is up
// to what this is the base of.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "waiting.hpp"

namespace gradwire {

// Some of the numbers in a mapping: `offset` in bytes.
struct Bucket {
    size_t offset, numel, element_size;
};

// Throws std::out_of_range where there is no such thing.
void check_index(const char* what, size_t index, size_t count);

// What is called with a place, or a bucket, that there is not throws std::out_of_range.
class SharedCounters {
public:
    SharedCounters(const SharedCounters&) = delete;
    SharedCounters& operator=(const SharedCounters&) = delete;

    // Seconds by the monotonic clock when what a place waits for was last there.
    double since(size_t place) const;

    // The ranks that a place waits for.
    std::vector<size_t> missing(size_t place) const;

    // The rank that was the first to give up; else -1.
    int64_t given_up() const;

protected:
    // What any rank may wait for counts `events`.
    struct alignas(LINE) Board {
        std::atomic<uint32_t> events;
        std::atomic<uint32_t> given_up;  // 0, or 1 and the rank
        std::atomic<int64_t> inside;     // threads that may write
    };

    // Of a place, since it was made: ranks that arrived, and work that was taken and is done.
    struct alignas(LINE) Progress {
        std::atomic<uint64_t> arrived, taken, done;
        std::atomic<int64_t> since;
    };

    // `maps`: of all ranks, in order, zeros when they are new; they are to live longer than this.
    SharedCounters(std::vector<char*> maps, size_t rank, std::vector<Bucket> buckets, size_t places);
    ~SharedCounters() = default;

    // Bytes at the beginning of each mapping that are not for buckets.
    static size_t bytes(size_t places, size_t ranks);

    Progress& progress(size_t place) const;

    void check(size_t place) const { check_index("place", place, mine_.size()); }

    // This rank comes to a place; whether it is the last one. Throws in a process that was forked off.
    bool come(size_t place);

    // Whether all ranks have come to a place as often as this one.
    bool all_came(size_t place) const { return progress(place).arrived.load() >= mine_[place] * maps_.size(); }

    // Whether this rank, in the process that made it, had not given up before, which it now has.
    bool gives_up();

    void signal();
    bool is_forked() const;

    const std::vector<char*> maps_;
    const size_t rank_;
    const std::vector<Bucket> buckets_;
    Board& board_;
    std::vector<uint64_t> mine_;  // how often this rank has come to each place

private:
    std::atomic<uint64_t>& arrivals(size_t place, size_t rank) const;

    std::atomic<bool> gave_up_{false};
    const int64_t process_;
};

}  // namespace gradwire
