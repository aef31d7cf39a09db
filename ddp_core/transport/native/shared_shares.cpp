#include "shared_shares.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "waiting.hpp"

namespace gradwire {

namespace {

constexpr size_t PLACES = 2;         // of a bucket: its gradients, its shares
constexpr size_t BLOCK = 1 << 10;    // elements that stay in the first cache

template <class Element>
void sum_of(const std::vector<char*>& maps, size_t rank, size_t offset, size_t count, double scale) {
    const auto factor = static_cast<Element>(scale);
    Element total[BLOCK];
    for (size_t begin = 0; begin < count; begin += BLOCK) {
        const size_t length = std::min(BLOCK, count - begin);
        const auto of = [&](size_t other) { return reinterpret_cast<Element*>(maps[other] + offset) + begin; };
        const Element* first = of(0);
        for (size_t i = 0; i < length; ++i) total[i] = factor * first[i];
        for (size_t other = 1; other < maps.size(); ++other) {
            const Element* next = of(other);
            for (size_t i = 0; i < length; ++i) total[i] += factor * next[i];
        }
        std::copy_n(total, length, of(rank));
    }
}

}  // namespace

// What any rank may wait for counts `events`.
struct alignas(LINE) SharedShares::Board {
    std::atomic<uint32_t> events;
    std::atomic<uint32_t> given_up;  // 0, or 1 and the rank
};

struct alignas(LINE) SharedShares::Progress {
    std::atomic<uint64_t> arrived;
    std::atomic<int64_t> since;
};

size_t SharedShares::header_bytes(size_t buckets, size_t ranks) {
    return sizeof(Board) + PLACES * buckets * (sizeof(Progress) + ranks * sizeof(uint64_t));
}

SharedShares::SharedShares(std::vector<char*> maps, size_t rank, std::vector<Bucket> buckets)
    : maps_(std::move(maps)),
      rank_(rank),
      buckets_(std::move(buckets)),
      board_(*reinterpret_cast<Board*>(maps_[0])),
      mine_(PLACES * buckets_.size()),
      process_(getpid()) {}

SharedShares::~SharedShares() { give_up(); }  // whoever still waits for this rank would wait in vain

SharedShares::Progress& SharedShares::progress(size_t place) const {
    return reinterpret_cast<Progress*>(maps_[0] + sizeof(Board))[place];
}

std::atomic<uint64_t>& SharedShares::arrivals(size_t place, size_t rank) const {
    char* const begin = maps_[0] + sizeof(Board) + mine_.size() * sizeof(Progress);
    return reinterpret_cast<std::atomic<uint64_t>*>(begin)[place * maps_.size() + rank];
}

void SharedShares::arrive(size_t place) {
    if (process_ != getpid()) throw std::runtime_error("a process that was forked off cannot take part for its parent");
    arrivals(place, rank_).store(++mine_[place]);
    Progress& state = progress(place);
    state.since.store(now());
    if (state.arrived.fetch_add(1) + 1 == mine_[place] * maps_.size()) signal();
}

bool SharedShares::is_there(size_t place) const {
    return progress(place).arrived.load() >= mine_[place] * maps_.size();
}

bool SharedShares::wait(size_t place, double seconds) {
    const int64_t deadline = now() + static_cast<int64_t>(seconds * NANOSECONDS);
    while (!is_there(place)) {
        const uint32_t seen = board_.events.load();
        const int64_t left = deadline - now();
        if (is_there(place) || left <= 0 || given_up() >= 0) break;
        doze(board_.events, seen, left);
    }
    return is_there(place);
}

double SharedShares::since(size_t place) const {
    return static_cast<double>(progress(place).since.load()) / NANOSECONDS;
}

std::vector<size_t> SharedShares::missing(size_t place) const {
    std::vector<size_t> ranks;
    for (size_t rank = 0; rank < maps_.size(); ++rank)
        if (arrivals(place, rank).load() < mine_[place]) ranks.push_back(rank);
    return ranks;
}

void SharedShares::sum(size_t bucket, size_t first, size_t count, double scale) const {
    const Arithmetic usual;
    const Bucket& all = buckets_[bucket];
    if (first + count > all.numel) throw std::out_of_range("a share ends with its bucket");
    const size_t offset = all.offset + first * all.element_size;
    (all.element_size == sizeof(float) ? sum_of<float> : sum_of<double>)(maps_, rank_, offset, count, scale);
}

void SharedShares::share(size_t bucket, size_t first, size_t count) const {
    const Bucket& all = buckets_[bucket];
    if (first + count > all.numel) throw std::out_of_range("a share ends with its bucket");
    const size_t offset = all.offset + first * all.element_size;
    for (size_t step = 1; step < maps_.size(); ++step)
        std::memcpy(maps_[(rank_ + step) % maps_.size()] + offset, maps_[rank_] + offset, count * all.element_size);
}

void SharedShares::give_up() {
    if (process_ != getpid() || gave_up_.exchange(true)) return;
    uint32_t nobody = 0;
    board_.given_up.compare_exchange_strong(nobody, static_cast<uint32_t>(rank_) + 1);
    signal();
}

int64_t SharedShares::given_up() const { return static_cast<int64_t>(board_.given_up.load()) - 1; }

void SharedShares::signal() {
    board_.events.fetch_add(1);
    rouse(board_.events);
}

}  // namespace gradwire
