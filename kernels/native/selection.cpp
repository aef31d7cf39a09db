// Exact selection of the largest magnitudes: a threshold from a sample, one pass that adds and collects candidates, and
// a partial sort of these alone.
#include <cmath>
#include <functional>
#include <memory>
#include <stdexcept>

#include "operations.hpp"
#include "threads.hpp"

namespace gradwire {

namespace {

constexpr int64_t LARGEST_SAMPLE = 16384;
constexpr int64_t TILE = 4096;  // elements between two looks at the room for candidates

// The k-th largest magnitude; reorders what it is given.
uint32_t kth_largest(uint32_t* magnitudes, int64_t count, int64_t k) {
    std::nth_element(magnitudes, magnitudes + (k - 1), magnitudes + count, std::greater<uint32_t>());
    return magnitudes[k - 1];
}

// Candidates of one thread. Where they are more than there is room for, all but the k largest are dropped.
class Pool {
  public:
    explicit Pool(int64_t room) : room_(room), indices_(new int64_t[room]), magnitudes_(new uint32_t[room]) {}

    int64_t count() const { return count_; }
    const int64_t* indices() const { return indices_.get(); }

    void collect(const Row& row, bool add, int64_t first, int64_t last, uint32_t threshold, int64_t k) {
        count_ = 0;
        for (int64_t start = first; start < last; start += TILE) {
            if (room_ - count_ < TILE) threshold = std::max(threshold, keep_largest(k) + 1);
            const Candidates free{indices_.get() + count_, magnitudes_.get() + count_};
            count_ += level().scan(row, add, start, std::min(start + TILE, last), threshold, free);
        }
    }

    void append(const Pool& other) {
        std::copy_n(other.indices_.get(), other.count_, indices_.get() + count_);
        std::copy_n(other.magnitudes_.get(), other.count_, magnitudes_.get() + count_);
        count_ += other.count_;
    }

    // Keeps the k largest, of equal ones those of lower index; returns the smallest magnitude kept.
    uint32_t keep_largest(int64_t k) {
        std::unique_ptr<uint32_t[]> sorted(new uint32_t[count_]);
        std::copy_n(magnitudes_.get(), count_, sorted.get());
        const uint32_t smallest = kth_largest(sorted.get(), count_, k);
        int64_t ties = k - std::count_if(sorted.get(), sorted.get() + k, [=](uint32_t m) { return m > smallest; });
        int64_t kept = 0;
        for (int64_t i = 0; i < count_; ++i) {
            const uint32_t size = magnitudes_[i];
            if (size < smallest || (size == smallest && ties-- <= 0)) continue;
            indices_[kept] = indices_[i];
            magnitudes_[kept++] = size;
        }
        count_ = kept;
        return smallest;
    }

  private:
    int64_t room_, count_ = 0;
    std::unique_ptr<int64_t[]> indices_;
    std::unique_ptr<uint32_t[]> magnitudes_;
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

void collect_all(const Row& row, bool add, uint32_t threshold, int64_t k, std::vector<Pool>& pools) {
    const int64_t threads = static_cast<int64_t>(pools.size());
    on_threads(threads, [&](int64_t thread) {
        pools[thread].collect(row, add, cut(row.numel, threads, thread), cut(row.numel, threads, thread + 1),
                              threshold, k);
    });
    for (int64_t thread = 1; thread < threads; ++thread) pools[0].append(pools[thread]);
}

// The pool that holds the chosen elements, k or all there are; the gradient goes into the residual on the way.
std::vector<Pool> chosen(const Row& row, int64_t k, int64_t threads) {
    const uint32_t threshold = k < row.numel ? estimated_threshold(row, k) : 0;
    const int64_t room = std::min(row.numel, 2 * k + row.numel / 64) + 2 * TILE;
    std::vector<Pool> pools;
    for (int64_t thread = 0; thread < threads; ++thread) pools.emplace_back(thread ? room : threads * room);
    const bool add = row.residual != nullptr;
    collect_all(row, add, threshold, k, pools);
    if (pools[0].count() < std::min(k, row.numel)) collect_all(row, false, 0, k, pools);
    if (pools[0].count() > k) pools[0].keep_largest(k);
    return pools;
}

template <class Index>
void write_row(const Pool& pool, int64_t k, Index* indices) {
    for (int64_t i = 0; i < pool.count(); ++i) indices[i] = static_cast<Index>(pool.indices()[i]);
    std::fill(indices + pool.count(), indices + k, Index{0});
}

void select_row(const SelectJob& job, int64_t row_index, int64_t threads) {
    const int64_t start = row_index * job.length, left = std::max<int64_t>(job.numel - start, 0);
    const int64_t width = job.format == Format::float32 ? 4 : 2;
    const int64_t value_width = job.value_format == Format::float32 ? 4 : 2;
    const int64_t numel = std::min(left, job.length), offset = numel ? start : 0;
    const Row row{static_cast<const char*>(job.grad) + offset * width, job.format,
                  job.residual ? job.residual + offset : nullptr, numel};
    const std::vector<Pool> pools = chosen(row, job.k, useful_threads(threads, numel));
    const int64_t count = pools[0].count();
    char* values = static_cast<char*>(job.values) + row_index * job.value_stride * value_width;
    if (job.long_indices) write_row(pools[0], job.k, static_cast<int64_t*>(job.indices) + row_index * job.index_stride);
    else write_row(pools[0], job.k, static_cast<int32_t*>(job.indices) + row_index * job.index_stride);
    level().take(row, pools[0].indices(), count, values, job.value_format);
    std::fill(values + count * value_width, values + job.k * value_width, '\0');
}

// Adds one voter's row; places are known early enough to be fetched ahead of their turn.
template <class Index>
void scatter_row(const ScatterJob& job, int64_t row, const Index* indices, const float* values, float weight) {
    constexpr int64_t AHEAD = 24;
    float* out = job.out + row * job.length;
    const int64_t last = job.numel - 1 - row * job.length;
    for (int64_t i = 0; i < job.k; ++i) {
        if (indices[i] < 0) throw std::out_of_range("a negative index: " + std::to_string(indices[i]));
        if (i + AHEAD < job.k) __builtin_prefetch(out + std::min<int64_t>(indices[i + AHEAD], last), 1);
        out[std::min<int64_t>(indices[i], last)] += values[i] * weight;
    }
}

template <class Index>
void scatter_rows(const ScatterJob& job, const Index* indices, std::vector<float>& values) {
    const float weight = static_cast<float>(1.0 / static_cast<double>(job.voters));
    const int64_t width = job.value_format == Format::float32 ? 4 : 2;
    for (int64_t voter = 0; voter < job.voters; ++voter)
        for (int64_t row = 0; row < job.rows; ++row) {
            const int64_t at = (voter * job.value_voter_stride + row * job.value_stride) * width;
            level().cast(static_cast<const char*>(job.values) + at, job.value_format, values.data(), Format::float32,
                         job.k, 1.0f);
            const Index* places = indices + voter * job.index_voter_stride + row * job.index_stride;
            scatter_row(job, row, places, values.data(), weight);
        }
}

}  // namespace

void select_largest(const SelectJob& job, int64_t threads) {
    for (int64_t row = 0; row < job.rows; ++row) select_row(job, row, threads);
}

void scatter_mean(const ScatterJob& job, int64_t threads) {
    threads = useful_threads(threads, job.numel);
    on_threads(threads, [&](int64_t thread) {
        std::fill(job.out + cut(job.numel, threads, thread), job.out + cut(job.numel, threads, thread + 1), 0.0f);
    });
    if (job.numel == 0) return;
    std::vector<float> values(static_cast<size_t>(job.k));
    if (job.long_indices) scatter_rows(job, static_cast<const int64_t*>(job.indices), values);
    else scatter_rows(job, static_cast<const int32_t*>(job.indices), values);
}

}  // namespace gradwire
