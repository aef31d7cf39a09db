// What the kernels share: number formats, where a thread is, and sums over a warp and a thread block.
#pragma once

using Index = long long;  // a bucket may hold more than 2^31 elements

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

struct bfloat16 {
    unsigned short bits;
};
struct float16 {
    unsigned short bits;
};

__device__ inline int lane() { return threadIdx.x % WARP; }
__device__ inline int warp() { return threadIdx.x / WARP; }

// How many of the lanes below this one have their bit in `votes`.
__device__ inline unsigned votes_below(unsigned votes) { return __popc(votes & ((1u << lane()) - 1)); }

__device__ inline float widen(float number) { return number; }
__device__ inline float widen(bfloat16 number) { return __uint_as_float(unsigned(number.bits) << 16); }

#ifdef __CUDACC__  // the tests' emulator brings its own
__device__ inline float widen(float16 number) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(number.bits));
    return wide;
}

__device__ inline float16 narrow_to_float16(float number) {
    float16 narrow;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(number));
    return narrow;
}
#endif

// To nearest, ties to even.
__device__ inline bfloat16 narrow_to_bfloat16(float number) {
    const unsigned bits = __float_as_uint(number);
    if (number != number) return {static_cast<unsigned short>(bits >> 16 | 0x40)};  // rounding up could end a NaN
    return {static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

// A strip is up to 32 * ITEMS consecutive numbers, of which each lane has every 32nd: loads of a warp are then contiguous,
// and a ballot's bits are in order. Whole strips go without conditions, so that all loads are under way at once.

// This lane's numbers of a strip, zeros from number `count` on.
template <int ITEMS, typename Number>
__device__ void load_strip(const Number* numbers, Index count, float (&values)[ITEMS]) {
    if (count >= ITEMS * WARP) {
#pragma unroll
        for (int item = 0; item < ITEMS; item++) values[item] = widen(numbers[item * WARP + lane()]);
        return;
    }
#pragma unroll
    for (int item = 0; item < ITEMS; item++) {
        const int at = item * WARP + lane();
        values[item] = at < count ? widen(numbers[at]) : 0.0f;
    }
}

template <int ITEMS>
__device__ void store_strip(float* numbers, Index count, const float (&values)[ITEMS]) {
    if (count >= ITEMS * WARP) {
#pragma unroll
        for (int item = 0; item < ITEMS; item++) numbers[item * WARP + lane()] = values[item];
        return;
    }
#pragma unroll
    for (int item = 0; item < ITEMS; item++) {
        const int at = item * WARP + lane();
        if (at < count) numbers[at] = values[item];
    }
}

template <typename Number>
__device__ Number warp_sum(Number value) {
    for (int distance = WARP / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(ALL_LANES, value, distance);
    return value;
}

// The sum over all threads of the block, in all of them, always added in the same order.
template <int THREADS, typename Number>
__device__ Number block_sum(Number value) {
    __shared__ Number sums[THREADS / WARP];
    value = warp_sum(value);
    __syncthreads();  // the sums of an earlier call have been read
    if (lane() == 0) sums[warp()] = value;
    __syncthreads();
    Number total = 0;
    for (int other = 0; other < THREADS / WARP; other++) total += sums[other];
    return total;
}

// Whether this thread block is the last of `blocks` that come here; it then sees what all of them have written.
__device__ inline bool last_to_come(unsigned* finished, unsigned blocks) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(finished, 1u) == blocks - 1;
    __syncthreads();
    __threadfence();
    return last;
}

// Kernels of a template, one for each format of the gradient.
#define FOR_EACH_FORMAT(NAME, WORK)                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME##_float32(const __grid_constant__ WORK work) {       \
        NAME<float>(work);                                                                                          \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME##_bfloat16(const __grid_constant__ WORK work) {      \
        NAME<bfloat16>(work);                                                                                       \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME##_float16(const __grid_constant__ WORK work) {       \
        NAME<float16>(work);                                                                                        \
    }
