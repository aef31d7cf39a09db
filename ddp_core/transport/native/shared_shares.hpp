// A reduce-scatter and an all-gather over processes of one machine, in memory that all of them have mapped.
//
// Of each bucket a rank sums the share that is its own, from all mappings into its own one; later it writes what has become
// of its share to all others. Nobody else touches a rank's share in between, so ranks wait twice only: for all gradients,
// and for all shares.
#pragma once

#include <cstddef>
#include <vector>

#include "shared_counters.hpp"

namespace gradwire {

class SharedShares : public SharedCounters {
public:
    // Bytes at the beginning of each mapping that are not for buckets.
    static size_t header_bytes(size_t buckets, size_t ranks);

    // `maps`: of all ranks, in order, zeros when they are new; they are to live longer than this.
    SharedShares(std::vector<char*> maps, size_t rank, std::vector<Bucket> buckets);
    ~SharedShares();

    // What ranks wait for has a place: 2 b are the gradients of bucket b, 2 b + 1 its shares. Those of this rank are there.
    // Throws in a process that was forked off.
    void arrive(size_t place);

    // Until those of all ranks are there, for some seconds at most, and not after anyone has given up.
    bool wait(size_t place, double seconds);

    // The sum over ranks of some elements of a bucket, each times `scale`, in this rank's mapping.
    void sum(size_t bucket, size_t first, size_t count, double scale) const;

    // Write some elements of this rank's bucket to all others.
    void share(size_t bucket, size_t first, size_t count) const;

    // No rank shall wait for this one any more.
    void give_up();

private:
    // A bucket that has so many elements from the first on; else throws std::out_of_range.
    const Bucket& bucket_with(size_t bucket, size_t first, size_t count) const;
};

}  // namespace gradwire
