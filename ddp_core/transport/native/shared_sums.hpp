// Sums over processes of one machine, of memory that all of them have mapped.
//
// When all ranks have said that a bucket's numbers are there, it falls into chunks, and whoever has nothing better to do takes
// the next one: it reads the chunk of all ranks and writes the sum to all of them. That is a rank that waits, and a thread of
// each rank beside those that compute. The order in which ranks are added is that of Gloo's ring, and so are the bits.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "shared_counters.hpp"

namespace gradwire {

class SharedSums : public SharedCounters {
public:
    // Bytes at the beginning of each mapping that are not for buckets.
    static size_t header_bytes(size_t buckets, size_t ranks);

    // `maps`: of all ranks, in order, zeros when they are new; they are to live longer than this.
    SharedSums(std::vector<char*> maps, size_t rank, std::vector<Bucket> buckets);
    ~SharedSums();

    // This rank's numbers are there, for one more sum. Throws in a process that was forked off.
    void arrive(size_t bucket);

    // Until the last sum that this rank arrived for is there, for some seconds at most, and not after anyone has given up.
    bool wait(size_t bucket, double seconds);

    bool is_there(size_t bucket) const;

    // No rank shall wait for this one any more, nor touch its numbers once this returns, if it lives.
    void give_up();

private:
    uint64_t chunks(size_t bucket) const;
    bool work();
    bool work_on(size_t bucket);
    void add(size_t bucket, size_t chunk) const;
    void help();

    std::atomic<bool> over_{false};
    std::thread* helper_ = nullptr;  // not to be destroyed by a fork
};

}  // namespace gradwire
