#include "shared_counters.hpp"

#include <unistd.h>

#include <stdexcept>
#include <string>

namespace gradwire {

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

void check_index(const char* what, size_t index, size_t count) {
    if (index < count) return;
    throw std::out_of_range(std::string("no ") + what + " " + std::to_string(index) + ": there are " +
                            std::to_string(count) + ", from 0 on");
}

size_t SharedCounters::bytes(size_t places, size_t ranks) {
    return sizeof(Board) + places * (sizeof(Progress) + ranks * sizeof(uint64_t));
}

SharedCounters::SharedCounters(std::vector<char*> maps, size_t rank, std::vector<Bucket> buckets, size_t places)
    : maps_(std::move(maps)),
      rank_(rank),
      buckets_(std::move(buckets)),
      board_(*reinterpret_cast<Board*>(maps_[0])),
      mine_(places),
      process_(getpid()) {}

SharedCounters::Progress& SharedCounters::progress(size_t place) const {
    return reinterpret_cast<Progress*>(maps_[0] + sizeof(Board))[place];
}

std::atomic<uint64_t>& SharedCounters::arrivals(size_t place, size_t rank) const {
    char* const begin = maps_[0] + sizeof(Board) + mine_.size() * sizeof(Progress);
    return reinterpret_cast<std::atomic<uint64_t>*>(begin)[place * maps_.size() + rank];
}

bool SharedCounters::is_forked() const { return process_ != getpid(); }

bool SharedCounters::come(size_t place) {
    if (is_forked()) throw std::runtime_error("a process that was forked off cannot take part for its parent");
    arrivals(place, rank_).store(++mine_[place]);
    return progress(place).arrived.fetch_add(1) + 1 == mine_[place] * maps_.size();
}

double SharedCounters::since(size_t place) const {
    check(place);
    return static_cast<double>(progress(place).since.load()) / NANOSECONDS;
}

std::vector<size_t> SharedCounters::missing(size_t place) const {
    check(place);
    std::vector<size_t> ranks;
    for (size_t rank = 0; rank < maps_.size(); ++rank)
        if (arrivals(place, rank).load() < mine_[place]) ranks.push_back(rank);
    return ranks;
}

bool SharedCounters::gives_up() {
    if (is_forked() || gave_up_.exchange(true)) return false;
    uint32_t nobody = 0;
    board_.given_up.compare_exchange_strong(nobody, static_cast<uint32_t>(rank_) + 1);
    signal();
    return true;
}

int64_t SharedCounters::given_up() const { return static_cast<int64_t>(board_.given_up.load()) - 1; }

void SharedCounters::signal() {
    board_.events.fetch_add(1);
    rouse(board_.events);
}

}  // namespace gradwire
