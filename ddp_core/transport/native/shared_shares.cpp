#include "shared_shares.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <type_traits>

namespace gradwire {

namespace {

constexpr size_t PLACES = 2;         // of a bucket: its gradients, its shares

// A line of all ranks at a time: taking longer parts of one rank after the other, each begins with waits for memory.
template <class Element>
void sum_of(const std::vector<char*>& maps, size_t rank, size_t offset, size_t count, double scale) {
    constexpr size_t ROW = LINE / sizeof(Element);
    const auto factor = static_cast<Element>(scale);
    const size_t ranks = maps.size();
    const auto of = [&](size_t other) { return reinterpret_cast<Element*>(maps[other] + offset); };
    const auto add = [&](size_t begin, auto length) {
        Element total[length()];
        for (size_t other = 0; other < ranks; ++other) {
            const Element* next = of(other) + begin;
            for (size_t i = 0; i < length; ++i) total[i] = other ? total[i] + factor * next[i] : factor * next[i];
        }
        std::copy_n(total, length(), of(rank) + begin);
    };
    const size_t whole = count / ROW * ROW;
    for (size_t begin = 0; begin < whole; begin += ROW) add(begin, std::integral_constant<size_t, ROW>());
    for (size_t begin = whole; begin < count; ++begin) add(begin, std::integral_constant<size_t, 1>());
}

}  // namespace

size_t SharedShares::header_bytes(size_t buckets, size_t ranks) { return bytes(PLACES * buckets, ranks); }

SharedShares::SharedShares(std::vector<char*> maps, size_t rank, std::vector<Bucket> buckets)
    : SharedCounters(std::move(maps), rank, buckets, PLACES * buckets.size()) {}

SharedShares::~SharedShares() { give_up(); }  // whoever still waits for this rank would wait in vain

void SharedShares::arrive(size_t place) {
    check(place);
    progress(place).since.store(now());
    if (come(place)) signal();
}

bool SharedShares::wait(size_t place, double seconds) {
    check(place);
    const int64_t deadline = now() + static_cast<int64_t>(seconds * NANOSECONDS);
    while (!all_came(place)) {
        const uint32_t seen = board_.events.load();
        const int64_t left = deadline - now();
        if (all_came(place) || left <= 0 || given_up() >= 0) break;
        doze(board_.events, seen, left);
    }
    return all_came(place);
}

const Bucket& SharedShares::bucket_with(size_t bucket, size_t first, size_t count) const {
    check_index("bucket", bucket, buckets_.size());
    const Bucket& all = buckets_[bucket];
    if (first > all.numel || count > all.numel - first) throw std::out_of_range("a share ends with its bucket");
    return all;
}

void SharedShares::sum(size_t bucket, size_t first, size_t count, double scale) const {
    const Arithmetic usual;
    const Bucket& all = bucket_with(bucket, first, count);
    const size_t offset = all.offset + first * all.element_size;
    (all.element_size == sizeof(float) ? sum_of<float> : sum_of<double>)(maps_, rank_, offset, count, scale);
}

void SharedShares::share(size_t bucket, size_t first, size_t count) const {
    const Bucket& all = bucket_with(bucket, first, count);
    const size_t offset = all.offset + first * all.element_size;
    for (size_t step = 1; step < maps_.size(); ++step)
        std::memcpy(maps_[(rank_ + step) % maps_.size()] + offset, maps_[rank_] + offset, count * all.element_size);
}

void SharedShares::give_up() { gives_up(); }

}  // namespace gradwire
