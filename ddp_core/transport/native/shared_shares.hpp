// A reduce-scatter and an all-gather over processes of one machine, in memory that all of them have mapped.
//
// Each rank has its buckets in a mapping of its own, laid out alike. Of each bucket a rank sums the share that is its own, from
// all mappings into its own one; later it writes what has become of its share to all others. Nobody else touches a rank's
// share in between, so ranks wait twice only: for all gradients, and for all shares.
//
// All that ranks tell each other are counters in the mapping of the first rank, which only grow.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "shared_sums.hpp"

namespace gradwire {

class SharedShares {
public:
    // Bytes at the beginning of each mapping that are not for buckets.
    static size_t header_bytes(size_t buckets, size_t ranks);

    // `maps`: of all ranks, in order, zeros when they are new; they are to live longer than this.
    SharedShares(std::vector<char*> maps, size_t rank, std::vector<Bucket> buckets);
    ~SharedShares();
    SharedShares(const SharedShares&) = delete;
    SharedShares& operator=(const SharedShares&) = delete;

    // What ranks wait for has a place: 2 b are the gradients of bucket b, 2 b + 1 its shares. Those of this rank are there.
    // Throws in a process that was forked off.
    void arrive(size_t place);

    // Until those of all ranks are there, for some seconds at most, and not after anyone has given up.
    bool wait(size_t place, double seconds);

    // Seconds by the monotonic clock when the last rank's were there.
    double since(size_t place) const;

    // The ranks that a place waits for.
    std::vector<size_t> missing(size_t place) const;

    // The sum over ranks of some elements of a bucket, each times `scale`, in this rank's mapping.
    void sum(size_t bucket, size_t first, size_t count, double scale) const;

    // Write some elements of this rank's bucket to all others.
    void share(size_t bucket, size_t first, size_t count) const;

    // No rank shall wait for this one any more.
    void give_up();

    // The rank that was the first to; else -1.
    int64_t given_up() const;

private:
    struct Board;
    struct Progress;

    Progress& progress(size_t place) const;
    std::atomic<uint64_t>& arrivals(size_t place, size_t rank) const;
    bool is_there(size_t place) const;
    void signal();

    const std::vector<char*> maps_;
    const size_t rank_;
    const std::vector<Bucket> buckets_;
    Board& board_;
    std::vector<uint64_t> mine_;  // how often this rank has arrived at each place
    std::atomic<bool> gave_up_{false};
    const int64_t process_;
};

}  // namespace gradwire
