#include "shared_sums.hpp"

#include <pthread.h>
#include <signal.h>

#include <algorithm>

namespace gradwire {

namespace {

constexpr size_t CHUNK = 1 << 16;          // elements that are taken at once
constexpr size_t BLOCK = 1 << 10;          // elements that stay in the first cache
constexpr size_t GLOO_SEGMENT = 1 << 20;   // bytes: the most that Gloo's ring passes on at once

size_t rounded_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

// How many elements each rank ends with in Gloo's ring.
size_t share_of_ring(const Bucket& bucket, size_t ranks) {
    const size_t bytes = bucket.numel * bucket.element_size;
    const size_t segments = rounded_up(std::max((bytes + GLOO_SEGMENT - 1) / GLOO_SEGMENT, ranks * 2), ranks);
    return segments / ranks * (rounded_up((bytes + segments - 1) / segments, bucket.element_size) / bucket.element_size);
}

// Adds up what lies at `offset` in each mapping, from the rank before `owner` backwards, and writes it to all.
template <class Element>
void add_to_all(const std::vector<char*>& maps, size_t offset, size_t owner, size_t count) {
    const size_t ranks = maps.size();
    const auto of = [&](size_t rank) { return reinterpret_cast<Element*>(maps[rank % ranks] + offset); };
    Element sum[BLOCK];
    for (size_t begin = 0; begin < count; begin += BLOCK) {
        const size_t length = std::min(BLOCK, count - begin);
        const Element* first = of(owner + ranks - 1) + begin;
        const Element* second = of(owner + ranks - 2) + begin;
        for (size_t i = 0; i < length; ++i) sum[i] = second[i] + first[i];
        for (size_t step = 3; step <= ranks; ++step) {
            const Element* next = of(owner + ranks - step) + begin;
            for (size_t i = 0; i < length; ++i) sum[i] = next[i] + sum[i];
        }
        for (size_t rank = 0; rank < ranks; ++rank) std::copy_n(sum, length, of(rank) + begin);
    }
}

}  // namespace

size_t SharedSums::header_bytes(size_t buckets, size_t ranks) { return bytes(buckets, ranks); }

SharedSums::SharedSums(std::vector<char*> maps, size_t rank, std::vector<Bucket> buckets)
    : SharedCounters(std::move(maps), rank, buckets, buckets.size()) {
    sigset_t all, before;  // signals are for Python's threads
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        helper_ = new std::thread([this] { help(); });
    } catch (...) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

SharedSums::~SharedSums() {
    if (is_forked()) return;  // the thread, which is left behind, is the parent's
    give_up();  // whoever still waits for this rank would wait in vain
    over_ = true;
    signal();
    helper_->join();
    delete helper_;
}

uint64_t SharedSums::chunks(size_t bucket) const { return (buckets_[bucket].numel + CHUNK - 1) / CHUNK; }

void SharedSums::arrive(size_t bucket) {
    check(bucket);
    if (come(bucket)) signal();
}

bool SharedSums::wait(size_t bucket, double seconds) {
    const int64_t deadline = now() + static_cast<int64_t>(seconds * NANOSECONDS);
    while (!is_there(bucket)) {
        const uint32_t seen = board_.events.load();
        if (work()) continue;
        const int64_t left = deadline - now();
        if (is_there(bucket) || left <= 0 || given_up() >= 0) break;
        doze(board_.events, seen, left);
    }
    return is_there(bucket);
}

bool SharedSums::is_there(size_t bucket) const {
    check(bucket);
    return progress(bucket).done.load() >= mine_[bucket] * chunks(bucket);
}

void SharedSums::give_up() {
    if (!gives_up()) return;
    for (const int64_t deadline = now() + NANOSECONDS; board_.inside.load() > 0 && now() < deadline;)
        std::this_thread::yield();  // one that died inside stays there
}

// Takes chunks until there are none; whether there were any.
bool SharedSums::work() {
    bool worked = false;
    board_.inside.fetch_add(1);
    for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) worked |= work_on(bucket);
    board_.inside.fetch_sub(1);
    return worked;
}

bool SharedSums::work_on(size_t bucket) {
    Progress& state = progress(bucket);
    const uint64_t each = chunks(bucket);
    bool worked = false;
    while (given_up() < 0) {
        const uint64_t complete = state.arrived.load() / maps_.size();
        uint64_t chunk = state.taken.load();
        if (chunk >= complete * each) break;
        if (!state.taken.compare_exchange_weak(chunk, chunk + 1)) continue;
        add(bucket, chunk % each);
        worked = true;
        state.since.store(now());
        if ((state.done.fetch_add(1) + 1) % each == 0) signal();
    }
    return worked;
}

void SharedSums::add(size_t bucket, size_t chunk) const {
    const Arithmetic usual;
    const Bucket& all = buckets_[bucket];
    const size_t share = share_of_ring(all, maps_.size()), end = std::min(all.numel, (chunk + 1) * CHUNK);
    for (size_t begin = chunk * CHUNK; begin < end;) {
        const size_t owner = begin / share, stop = std::min(end, (owner + 1) * share);
        const size_t offset = all.offset + begin * all.element_size;
        (all.element_size == sizeof(float) ? add_to_all<float> : add_to_all<double>)(maps_, offset, owner, stop - begin);
        begin = stop;
    }
}

void SharedSums::help() {
    while (!over_) {
        const uint32_t seen = board_.events.load();
        if (!work() && !over_) doze(board_.events, seen, NANOSECONDS);
    }
}

}  // namespace gradwire
