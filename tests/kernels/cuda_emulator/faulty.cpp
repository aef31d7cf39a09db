// Kernels with the faults that the emulator is to show, beside one without.
#include "emulator.hpp"

template <bool BARRIER>
void exchange_across_warps(const void* out) {
    __shared__ unsigned numbers[64];
    numbers[threadIdx.x] = threadIdx.x;
    if (BARRIER) __syncthreads();
    static_cast<unsigned*>(const_cast<void*>(out))[threadIdx.x] = numbers[threadIdx.x ^ 33];
}

void part_of_a_warp(const void*) {
    if (threadIdx.x < 8)
        __ballot_sync(0xffffffffu, true);
    else
        __syncthreads();
}

void lanes_apart(const void*) {
    if (threadIdx.x % 2)
        __ballot_sync(0xffffffffu, true);
    else
        __shfl_xor_sync(0xffffffffu, 1, 1);
}

extern "C" void run(int kernel, const void* out, int reversed) {
    void (*const kernels[])(const void*) = {
        exchange_across_warps<true>, exchange_across_warps<false>, part_of_a_warp, lanes_apart};
    emulator::run_grid(kernels[kernel], out, 1, 64, reversed != 0);
}
