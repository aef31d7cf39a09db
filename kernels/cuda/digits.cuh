// Where a selection is in its work: its arguments, its elements, and the digits of the thresholds found so far.
#pragma once

#include "common.cuh"

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / WARP;
constexpr int BATCH = 8;   // loads of a lane in flight
constexpr int STAGES = 4;  // kernels with something to do for whoever comes last
constexpr unsigned LARGEST = 0x7f800000;  // infinity; NaN counts as that
constexpr unsigned NOTHING = 0xffffffff;  // a threshold that no magnitude reaches

struct Row {
    unsigned threshold;         // the bits of the k-th largest magnitude, as far as they are known
    unsigned wanted;            // how many of the elements equal to it so far are selected
    unsigned finished[STAGES];  // thread blocks that have come
};

struct Segment {
    unsigned survivors;
    unsigned above;  // survivors above the threshold, and at it; after select_count: in all segments before
    unsigned ties;
};

struct Selection {
    const void* grad;
    const float* before;  // what is held back before and after: both null, or the same memory, or apart
    float* after;
    void* indices;
    Index wide_indices;    // 1: 64 bits, 0: 32
    Index indices_stride;  // elements from row to row
    void* values;
    Index value_format;
    Index values_stride;
    Index numel;
    Index length;  // elements of a row
    Index k;
    Index segment;              // elements of a segment
    Index segments;             // of a row
    Index parts;                // thread blocks of a row
    Row* rows;                  // zeros at first
    unsigned* histograms;       // of each row, digit by digit; zeros at first
    Segment* counts;
    unsigned short* survivors;  // places within the segment
};

// The digits, the highest first. Few elements share all 12 bits of the first one with the threshold.
constexpr int SHIFT[] = {19, 9, 0};
constexpr int BINS[] = {4096, 1024, 512};
constexpr int FIRST_BIN[] = {0, 4096, 5120};  // in a row's histograms
constexpr int ROW_BINS = 5632;

// The magnitude as a number of 31 bits in the same order.
__device__ inline unsigned key_of(float value) { return min(__float_as_uint(value) & 0x7fffffff, LARGEST); }

// Where a thread block works.
struct Place {
    Index row;
    Index first;   // element of the row
    Index length;  // of the row, inside the vector
    Index warp;    // this warp among those of the row
    Index warps;
};

__device__ inline Place place_of(const Selection& work) {
    const Index row = blockIdx.x / work.parts, part = blockIdx.x % work.parts;
    const Index first = row * work.length;
    const Index length = max(Index(0), min(work.length, work.numel - first));
    return {row, first, length, part * WARPS + warp(), work.parts * WARPS};
}

__device__ inline unsigned selected_of(const Selection& work, const Place& place) {
    return static_cast<unsigned>(min(work.k, place.length));
}

// Number `at` of `grad` + `before` once select_add has run.
template <typename Number>
__device__ float corrected(const Selection& work, Index at) {
    return work.after != nullptr ? work.after[at] : widen(static_cast<const Number*>(work.grad)[at]);
}

template <typename Number>
__device__ void load_corrected(const Selection& work, Index at, Index end, float (&values)[BATCH]) {
    if (work.after != nullptr)
        load_strip(work.after + at, end - at, values);
    else
        load_strip(static_cast<const Number*>(work.grad) + at, end - at, values);
}

// `grad` + `before`, which `after` keeps.
template <typename Number>
__device__ void add(const Selection& work, Index at, Index end, float (&values)[BATCH]) {
    load_strip(static_cast<const Number*>(work.grad) + at, end - at, values);
    if (work.after == nullptr) return;
    float held[BATCH];
    load_strip(work.before + at, end - at, held);
#pragma unroll
    for (int item = 0; item < BATCH; item++) values[item] += held[item];
    store_strip(work.after + at, end - at, values);
}

template <int DIGIT>
__device__ void clear(unsigned (&histogram)[BINS[DIGIT]]) {
    for (int bin = threadIdx.x; bin < BINS[DIGIT]; bin += THREADS) histogram[bin] = 0;
    __syncthreads();
}

// Zeros, often the most, are not counted: what no other bin reaches is in the lowest.
template <int DIGIT>
__device__ void count(unsigned (&histogram)[BINS[DIGIT]], unsigned key) {
    const unsigned bin = key >> SHIFT[DIGIT] & (BINS[DIGIT] - 1);
    if (bin != 0) atomicAdd(&histogram[bin], 1u);
}

// The sum over the threads before this one; `total` is that over all.
template <typename Number>
__device__ Number sum_before(Number value, Number& total) {
    __shared__ Number sums[WARPS];
    Number upto = value;
    for (int distance = 1; distance < WARP; distance *= 2) {
        const Number other = __shfl_up_sync(ALL_LANES, upto, distance);
        if (lane() >= distance) upto += other;
    }
    __syncthreads();  // the sums of an earlier call have been read
    if (lane() == WARP - 1) sums[warp()] = upto;
    __syncthreads();
    Number before = upto - value;
    total = 0;
    for (int other = 0; other < WARPS; other++) {
        if (other < warp()) before += sums[other];
        total += sums[other];
    }
    return before;
}

// The next digit of the row's threshold: the bin in which the wanted number, counted from the highest bin on, is reached.
template <int DIGIT>
__device__ void find_digit(Row& row, unsigned wanted, const unsigned* histogram) {
    constexpr int EACH = BINS[DIGIT] / THREADS;
    const int highest = BINS[DIGIT] - 1 - static_cast<int>(threadIdx.x) * EACH;
    unsigned mine = 0, total;
    for (int bin = highest; bin > highest - EACH; bin--) mine += histogram[bin];
    unsigned before = sum_before(mine, total);
    const bool lowest = threadIdx.x == THREADS - 1;
    if (before >= wanted || (wanted > before + mine && !lowest)) return;
    int bin = highest;
    for (; bin > highest - EACH + 1 && before + histogram[bin] < wanted; bin--) before += histogram[bin];
    row.threshold |= static_cast<unsigned>(bin) << SHIFT[DIGIT];
    row.wanted = wanted - before;
}

// Add a thread block's counts to the row's; the last one finds the digit.
template <int DIGIT>
__device__ void finish_digit(const Selection& work, const Place& place, const unsigned (&counted)[BINS[DIGIT]]) {
    unsigned* histogram = work.histograms + place.row * ROW_BINS + FIRST_BIN[DIGIT];
    __syncthreads();
    for (int bin = threadIdx.x; bin < BINS[DIGIT]; bin += THREADS)
        if (counted[bin] != 0) atomicAdd(&histogram[bin], counted[bin]);
    Row& row = work.rows[place.row];
    if (!last_to_come(&row.finished[DIGIT], static_cast<unsigned>(work.parts))) return;
    const unsigned wanted = DIGIT == 0 ? selected_of(work, place) : row.wanted;
    if (DIGIT == 0 && wanted == 0 && threadIdx.x == 0) row.threshold = NOTHING;
    find_digit<DIGIT>(row, wanted, histogram);
}
