// The k elements of largest magnitude of each row, exactly, by their bits as three digits of 12, 10 and 9 bits.
//
// select_add      adds gradient and residual, and counts the first digit of all magnitudes
// select_collect  keeps the places of those whose first digit reaches the threshold's, and counts the second of its equals
// select_refine   counts the third digit of those that equal the threshold in two
// select_count    counts above and at the threshold in each segment, and adds up over the segments before
// select_write    writes what is selected, in order of index, and what rounding leaves of it
//
// The last thread block of a row to come finds the next digit of the row's threshold. Each warp has whole segments, whose
// survivors lie in order in memory of the segment's own: nothing depends on which thread block comes first.
#include "digits.cuh"

template <typename Number>
__device__ void select_add(const Selection& work) {
    __shared__ unsigned histogram[BINS[0]];
    clear<0>(histogram);
    const Place place = place_of(work);
    for (Index segment = place.warp; segment < work.segments; segment += place.warps) {
        const Index begin = place.first + segment * work.segment;
        const Index end = min(begin + work.segment, place.first + place.length);
        for (Index at = begin; at < end; at += BATCH * WARP) {
            float values[BATCH];
            add<Number>(work, at, end, values);
#pragma unroll
            for (int item = 0; item < BATCH; item++) count<0>(histogram, key_of(values[item]));
        }
    }
    finish_digit<0>(work, place, histogram);
}

// The places in a segment whose first digit is the threshold's or above, in order; returns their number.
template <typename Number>
__device__ unsigned collect_segment(
    const Selection& work, Index begin, Index end, unsigned digit, unsigned (&histogram)[BINS[1]]) {
    unsigned found = 0;
    for (Index at = begin; at < end; at += BATCH * WARP) {
        float values[BATCH];
        load_corrected<Number>(work, at, end, values);
#pragma unroll
        for (int item = 0; item < BATCH; item++) {
            const Index mine = at + item * WARP + lane();
            const unsigned key = key_of(values[item]), own = key >> SHIFT[0];
            const bool survives = mine < end && own >= digit;
            const unsigned votes = __ballot_sync(ALL_LANES, survives);
            if (survives)
                work.survivors[begin + found + votes_below(votes)] = static_cast<unsigned short>(mine - begin);
            if (survives && own == digit) count<1>(histogram, key);
            found += __popc(votes);
        }
    }
    return found;
}

template <typename Number>
__device__ void select_collect(const Selection& work) {
    __shared__ unsigned histogram[BINS[1]];
    clear<1>(histogram);
    const Place place = place_of(work);
    const unsigned digit = work.rows[place.row].threshold >> SHIFT[0];
    for (Index segment = place.warp; segment < work.segments; segment += place.warps) {
        const Index begin = place.first + segment * work.segment;
        const Index end = min(begin + work.segment, place.first + place.length);
        const unsigned found = collect_segment<Number>(work, begin, end, digit, histogram);
        if (lane() == 0) work.counts[place.row * work.segments + segment].survivors = found;
    }
    finish_digit<1>(work, place, histogram);
}

// Call `use(inside, element of the row, value)` for the survivors of a segment in order, on all lanes of the warp at once.
template <typename Number, typename Use>
__device__ void each_survivor(const Selection& work, const Place& place, Index segment, Use use) {
    const unsigned found = work.counts[place.row * work.segments + segment].survivors;
    const Index begin = segment * work.segment;
    const unsigned short* places = work.survivors + place.first + begin;
    for (unsigned base = 0; base < found; base += BATCH * WARP) {
        Index at[BATCH];
        float values[BATCH];
#pragma unroll
        for (int item = 0; item < BATCH; item++) {
            const unsigned mine = base + item * WARP + lane();
            at[item] = begin + (mine < found ? places[mine] : 0);
            values[item] = mine < found ? corrected<Number>(work, place.first + at[item]) : 0.0f;
        }
#pragma unroll
        for (int item = 0; item < BATCH; item++)
            if (base + item * WARP < found) use(base + item * WARP + lane() < found, at[item], values[item]);
    }
}

template <typename Number>
__device__ void select_refine(const Selection& work) {
    __shared__ unsigned histogram[BINS[2]];
    clear<2>(histogram);
    const Place place = place_of(work);
    const unsigned digits = work.rows[place.row].threshold >> SHIFT[1];
    for (Index segment = place.warp; segment < work.segments; segment += place.warps)
        each_survivor<Number>(work, place, segment, [&](bool inside, Index, float value) {
            const unsigned key = key_of(value);
            if (inside && key >> SHIFT[1] == digits) count<2>(histogram, key);
        });
    finish_digit<2>(work, place, histogram);
}

// Both counts of a segment in one number: above the threshold in the high half, ties in the low one.
__device__ inline unsigned long long both_of(const Segment& segment) {
    return static_cast<unsigned long long>(segment.above) << 32 | segment.ties;
}

// Replace the segments' counts by those of all segments before. A thread has some that follow one another.
__device__ inline void add_up(Segment* counts, Index segments) {
    unsigned long long before = 0;
    for (Index base = 0; base < segments; base += THREADS * BATCH) {
        const Index first = base + Index(threadIdx.x) * BATCH;
        unsigned long long both[BATCH], mine = 0, total;
#pragma unroll
        for (int item = 0; item < BATCH; item++) {
            both[item] = first + item < segments ? both_of(counts[first + item]) : 0;
            mine += both[item];
        }
        unsigned long long sum = before + sum_before(mine, total);
#pragma unroll
        for (int item = 0; item < BATCH; item++) {
            if (first + item < segments) {
                counts[first + item].above = static_cast<unsigned>(sum >> 32);
                counts[first + item].ties = static_cast<unsigned>(sum);
            }
            sum += both[item];
        }
        before += total;
    }
}

template <typename Number>
__device__ void select_count(const Selection& work) {
    const Place place = place_of(work);
    Row& row = work.rows[place.row];
    const unsigned threshold = row.threshold;
    Segment* counts = work.counts + place.row * work.segments;
    for (Index segment = place.warp; segment < work.segments; segment += place.warps) {
        unsigned above = 0, ties = 0;
        each_survivor<Number>(work, place, segment, [&](bool inside, Index, float value) {
            const unsigned key = key_of(value);
            above += inside && key > threshold;
            ties += inside && key == threshold;
        });
        above = warp_sum(above);
        ties = warp_sum(ties);
        if (lane() == 0) counts[segment].above = above;
        if (lane() == 0) counts[segment].ties = ties;
    }
    if (last_to_come(&row.finished[STAGES - 1], static_cast<unsigned>(work.parts))) add_up(counts, work.segments);
}

// Finite numbers beyond the range of the format become its largest; infinities and NaN stay what they are.
__device__ inline float within(float value, float limit) {
    return fabsf(value) > limit && fabsf(value) <= 3.402823466e38f ? copysignf(limit, value) : value;
}

// Write a selected value in its format; returns what it then is.
__device__ inline float write_value(const Selection& work, Index at, float value) {
    if (work.value_format == 1) {
        const bfloat16 narrow = narrow_to_bfloat16(within(value, __uint_as_float(0x7f7f0000)));
        static_cast<bfloat16*>(work.values)[at] = narrow;
        return widen(narrow);
    }
    if (work.value_format == 2) {
        const float16 narrow = narrow_to_float16(within(value, 65504.0f));
        static_cast<float16*>(work.values)[at] = narrow;
        return widen(narrow);
    }
    static_cast<float*>(work.values)[at] = value;
    return value;
}

__device__ inline void write_index(const Selection& work, Index at, Index index) {
    if (work.wide_indices)
        static_cast<Index*>(work.indices)[at] = index;
    else
        static_cast<int*>(work.indices)[at] = static_cast<int>(index);
}

__device__ inline void write_selected(const Selection& work, Index row, Index slot, Index index, float value) {
    write_index(work, row * work.indices_stride + slot, index);
    const float sent = write_value(work, row * work.values_stride + slot, value);
    if (work.after != nullptr) work.after[row * work.length + index] = value - sent;
}

template <typename Number>
__device__ void write_segment(const Selection& work, const Place& place, Index segment, const Row& row) {
    const Segment& before = work.counts[place.row * work.segments + segment];
    unsigned ties = before.ties, slot = before.above + min(ties, row.wanted);
    each_survivor<Number>(work, place, segment, [&](bool inside, Index index, float value) {
        const unsigned key = key_of(value);
        const bool tie = inside && key == row.threshold;
        const unsigned ties_here = __ballot_sync(ALL_LANES, tie);
        const bool taken = tie ? ties + votes_below(ties_here) < row.wanted : inside && key > row.threshold;
        const unsigned taken_here = __ballot_sync(ALL_LANES, taken);
        if (taken) write_selected(work, place.row, slot + votes_below(taken_here), index, value);
        ties += __popc(ties_here);
        slot += __popc(taken_here);
    });
}

template <typename Number>
__device__ void select_write(const Selection& work) {
    const Place place = place_of(work);
    const Row row = work.rows[place.row];
    for (Index segment = place.warp; segment < work.segments; segment += place.warps)
        write_segment<Number>(work, place, segment, row);
    const Index threads = work.parts * THREADS, mine = blockIdx.x % work.parts * THREADS + threadIdx.x;
    for (Index slot = selected_of(work, place) + mine; slot < work.k; slot += threads) {  // the row is too short
        write_index(work, place.row * work.indices_stride + slot, 0);
        write_value(work, place.row * work.values_stride + slot, 0.0f);
    }
}

FOR_EACH_FORMAT(select_add, Selection)
FOR_EACH_FORMAT(select_collect, Selection)
FOR_EACH_FORMAT(select_refine, Selection)
FOR_EACH_FORMAT(select_count, Selection)
FOR_EACH_FORMAT(select_write, Selection)
