// Sums over processes of one machine, of memory that all of them have mapped.
//
// Each rank has its buckets in a mapping of its own, laid out alike. When all ranks have said that a bucket's numbers are
// there, it falls into chunks, and whoever has nothing better to do takes the next one: it reads the chunk of all ranks and
// writes the sum to all of them. That is a rank that waits, and a thread of each rank beside those that compute. The order
// in which ranks are added is that of Gloo's ring, and so are the bits.
//
// All that ranks tell each other are counters in the mapping of rank 0, which only grow.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

namespace gradwire {

// Some of the numbers in a mapping: `offset` in bytes.
struct Bucket {
    size_t offset, numel, element_size;
};

class SharedSums {
public:
    // Bytes at the beginning of each mapping that are not for buckets.
    static size_t header_bytes(size_t buckets, size_t ranks);

    // `maps`: of all ranks, in order, zeros when they are new; they are to live longer than this.
    SharedSums(std::vector<char*> maps, size_t rank, std::vector<Bucket> buckets);
    ~SharedSums();
    SharedSums(const SharedSums&) = delete;
    SharedSums& operator=(const SharedSums&) = delete;

    // This rank's numbers are there, for one more sum. Throws in a process that was forked off.
    void arrive(size_t bucket);

    // Until the last sum that this rank arrived for is there, for some seconds at most, and not after anyone has given up.
    bool wait(size_t bucket, double seconds);

    bool is_there(size_t bucket) const;

    // Seconds by the monotonic clock when the last sum was there.
    double since(size_t bucket) const;

    // The ranks that a sum waits for.
    std::vector<size_t> missing(size_t bucket) const;

    // No rank shall wait for this one any more, nor touch its numbers once this returns, if it lives.
    void give_up();

    // The rank that was the first to; else -1.
    int64_t given_up() const;

private:
    struct Board;
    struct Progress;

    Progress& progress(size_t bucket) const;
    std::atomic<uint64_t>& arrivals(size_t bucket, size_t rank) const;
    uint64_t chunks(size_t bucket) const;
    bool work();
    bool work_on(size_t bucket);
    void add(size_t bucket, size_t chunk) const;
    void signal();
    void help();
    bool is_forked() const;

    const std::vector<char*> maps_;
    const size_t rank_;
    const std::vector<Bucket> buckets_;
    Board& board_;
    std::vector<uint64_t> mine_;  // sums of each bucket that this rank has arrived for
    std::atomic<bool> over_{false}, gave_up_{false};
    const int64_t process_;
    std::thread* helper_ = nullptr;  // not to be destroyed by a fork
};

}  // namespace gradwire
