// Exact selection of the largest magnitudes: a threshold from a sample, one pass that adds and collects candidates, and
// a partial sort of these alone.
#include <cmath>
#include <functional>
#include <memory>
#include <utility>

#include "operations.hpp"
#include "threads.hpp"

namespace gradwire {

namespace {

constexpr int64_t LARGEST_SAMPLE = 16384;
constexpr uint32_t NO_MAGNITUDE = 0x7fffffff;  // more than that of any number
constexpr int64_t TILE = 4096;                 // elements between two looks at the room for candidates

// The k-th largest magnitude; reorders what it is given.
uint32_t kth_largest(uint32_t* magnitudes, int64_t count, int64_t k) {
    std::nth_element(magnitudes, magnitudes + (k - 1), magnitudes + count, std::greater<uint32_t>());
    return magnitudes[k - 1];
}

// Candidates of one thread, by ascending index. Where they are more than there is room for, all but the k largest are
// dropped. `capacity`: the room of all pools that it is merged with, its own included.
class Pool {
  public:
    Pool(int64_t room, int64_t capacity) : room_(room), candidates_(new Candidate[capacity]) {}

    int64_t count() const { return count_; }
    const Candidate* candidates() const { return candidates_.get(); }

    // Takes those of [first, last), which come after all before them, that reach the threshold.
    void collect(const Row& row, bool add, int64_t first, int64_t last, uint32_t threshold, int64_t k) {
        lowest_ = std::max(lowest_, threshold);
        for (int64_t start = first; start < last; start += TILE) {
            if (room_ - count_ < TILE) lowest_ = std::max(lowest_, keep_largest(k) + 1);
            count_ += level().scan(row, add, start, std::min(start + TILE, last), lowest_, candidates_.get() + count_);
        }
    }

    void merge(const Pool& other) {
        Candidate* const end = std::copy_n(other.candidates(), other.count_, candidates_.get() + count_);
        std::inplace_merge(candidates_.get(), candidates_.get() + count_, end,
                           [](const Candidate& a, const Candidate& b) { return a.index < b.index; });
        count_ += other.count_;
    }

    // Keeps the k largest, of equal ones those of lower index; returns the smallest magnitude kept.
    uint32_t keep_largest(int64_t k) {
        std::vector<uint32_t> sorted(static_cast<size_t>(count_));
        std::transform(candidates_.get(), candidates_.get() + count_, sorted.begin(),
                       [](const Candidate& each) { return each.magnitude; });
        const uint32_t smallest = kth_largest(sorted.data(), count_, k);
        int64_t ties = k - std::count_if(sorted.begin(), sorted.begin() + k, [=](uint32_t m) { return m > smallest; });
        const auto dropped = [&](const Candidate& each) {
            return each.magnitude < smallest || (each.magnitude == smallest && ties-- <= 0);
        };
        count_ = std::remove_if(candidates_.get(), candidates_.get() + count_, dropped) - candidates_.get();
        return smallest;
    }

  private:
    int64_t room_, count_ = 0;
    uint32_t lowest_ = 0;
    std::unique_ptr<Candidate[]> candidates_;
};

// A number that looks random, the same for the same `index`.
uint64_t scrambled(uint64_t index) {
    index = (index + 1) * 0x9e3779b97f4a7c15u;
    return (index ^ (index >> 29)) * 0xbf58476d1ce4e5b9u >> 32;
}

// A magnitude that rather more than k elements reach; 0 where a row is too short for an estimate.
uint32_t estimated_threshold(const Row& row, int64_t k) {
    const int64_t count = std::min(LARGEST_SAMPLE, row.numel / 8);
    const double part = std::max(1.3 * static_cast<double>(k) / static_cast<double>(row.numel), 1.0 / 256);
    const double expected = part * static_cast<double>(count);
    const int64_t place = static_cast<int64_t>(expected + 3 * std::sqrt(expected)) + 1;
    if (count < 64 || place > count) return 0;
    std::vector<int64_t> indices(static_cast<size_t>(count));
    std::vector<uint32_t> magnitudes(static_cast<size_t>(count));
    const int64_t stride = row.numel / count;
    for (int64_t i = 0; i < count; ++i)  // one place at random in each stride, so that no pattern of the data repeats
        indices[i] = i * stride + static_cast<int64_t>(scrambled(i) % static_cast<uint64_t>(stride));
    level().sample(row, indices.data(), count, magnitudes.data());
    return kth_largest(magnitudes.data(), count, place);
}

// One pool with the candidates of all threads; with a sum, the gradient goes into the residual on the way.
Pool collected(const Row& row, bool add, uint32_t threshold, int64_t k, int64_t threads) {
    const Shares shares(threads, row.numel);
    const int64_t room = std::min(row.numel, 2 * k + row.numel / 64) + 2 * TILE;
    std::vector<Pool> pools;
    for (int64_t worker = 0; worker < shares.threads; ++worker)
        pools.emplace_back(room, worker ? room : shares.threads * room);
    share(shares, [&](int64_t part, int64_t worker) {
        pools[worker].collect(row, add, cut(row.numel, shares.parts, part, LINE),
                              cut(row.numel, shares.parts, part + 1, LINE), threshold, k);
    });
    for (int64_t worker = 1; worker < shares.threads; ++worker) pools[0].merge(pools[worker]);
    return std::move(pools[0]);
}

// The pool that holds the chosen elements, k or all there are.
Pool chosen(const Row& row, int64_t k, int64_t threads) {
    const uint32_t threshold = k == 0 ? NO_MAGNITUDE : k < row.numel ? estimated_threshold(row, k) : 0;
    Pool pool = collected(row, static_cast<bool>(row.residual), threshold, k, threads);
    if (pool.count() < std::min(k, row.numel)) pool = collected(row, false, 0, k, threads);
    if (pool.count() > k) pool.keep_largest(k);
    return pool;
}

template <class Index>
void write_row(const Pool& pool, int64_t k, Index* indices) {
    for (int64_t i = 0; i < pool.count(); ++i) indices[i] = static_cast<Index>(pool.candidates()[i].index);
    std::fill(indices + pool.count(), indices + k, Index{0});
}

void select_row(const SelectJob& job, int64_t row_index, int64_t threads) {
    const int64_t start = row_index * job.length, left = std::max<int64_t>(job.numel - start, 0);
    const int64_t numel = std::min(left, job.length), offset = numel ? start : 0;
    const Row row{static_cast<const char*>(job.grad) + offset * size_of(job.format), job.format,
                  job.residual.from(offset), numel};
    const Pool pool = chosen(row, job.k, threads);
    const int64_t width = size_of(job.value_format);
    char* values = static_cast<char*>(job.values) + row_index * job.value_stride * width;
    if (job.long_indices) write_row(pool, job.k, static_cast<int64_t*>(job.indices) + row_index * job.index_stride);
    else write_row(pool, job.k, static_cast<int32_t*>(job.indices) + row_index * job.index_stride);
    level().take(row, pool.candidates(), pool.count(), values, job.value_format);
    std::fill(values + pool.count() * width, values + job.k * width, '\0');
}

}  // namespace

void select_largest(SelectJob job, int64_t threads) {
    job.residual = around_caches(job.residual, job.numel);
    const bool long_rows = Shares(threads, job.length).threads > 1;
    const Shares shares(long_rows ? 1 : threads, job.numel, job.rows);
    share(shares, [&](int64_t part, int64_t) {
        for (int64_t row = cut(job.rows, shares.parts, part); row < cut(job.rows, shares.parts, part + 1); ++row)
            select_row(job, row, long_rows ? threads : 1);
    });
}

}  // namespace gradwire
