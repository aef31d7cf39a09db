// Orthonormal bases of what Cholesky QR cannot do, a factor for each thread block: Gram-Schmidt, vector after vector, with
// what rounding left of the vectors before taken off again.
#pragma once

#include "common.cuh"

constexpr int THREADS = 256;
constexpr int LARGEST_RANK = 32;
constexpr int TILE = 4;  // vectors at a time
// Of a vector of length 1: what the vectors before leave of it by rounding alone.
constexpr double DEPENDENT = 4.8e-7;
constexpr int PASSES = 6;

enum State { GOOD, ILL_CONDITIONED, ZERO, NOT_FINITE };

// Where a thread block works: some rows of a factor, whose vectors lie one behind the other.
struct Chunk {
    Index owner;
    float* p;
    Index rows;
    int rank;
    Index begin;
    Index end;
};

// Four vectors' elements of one row, zeros past the last vector.
__device__ inline void load_tile(const Chunk& chunk, int tile, Index row, double (&values)[TILE]) {
#pragma unroll
    for (int i = 0; i < TILE; i++) {
        const int vector = tile * TILE + i;
        values[i] = vector < chunk.rank ? chunk.p[vector * chunk.rows + row] : 0.0f;
    }
}

__device__ inline void scale(float* vector, Index rows, double factor) {
    for (Index row = threadIdx.x; row < rows; row += THREADS) vector[row] = static_cast<float>(vector[row] * factor);
}

__device__ inline double length_of(const float* vector, Index rows) {
    double square = 0;
    for (Index row = threadIdx.x; row < rows; row += THREADS) square += double(vector[row]) * vector[row];
    return sqrt(block_sum<THREADS>(square));
}

// The products of a vector with those before it.
__device__ inline void project(const Chunk& factor, int vector, double (&shares)[LARGEST_RANK]) {
    const float* own = factor.p + vector * factor.rows;
    for (int tile = 0; tile * TILE < vector; tile++) {
        double sums[TILE] = {};
        for (Index row = threadIdx.x; row < factor.rows; row += THREADS) {
            double others[TILE];
            load_tile(factor, tile, row, others);
#pragma unroll
            for (int i = 0; i < TILE; i++) sums[i] = fma(double(own[row]), others[i], sums[i]);
        }
#pragma unroll
        for (int i = 0; i < TILE; i++) {
            const double share = block_sum<THREADS>(sums[i]);
            if (threadIdx.x == 0) shares[tile * TILE + i] = share;
        }
    }
    __syncthreads();
}

// Take the vectors before it off a vector; returns the length of what is left.
__device__ inline double reduce(const Chunk& factor, int vector) {
    __shared__ double shares[LARGEST_RANK];
    float* own = factor.p + vector * factor.rows;
    project(factor, vector, shares);
    for (Index row = threadIdx.x; row < factor.rows; row += THREADS) {
        double value = own[row];
        for (int other = 0; other < vector; other++)
            value = fma(-shares[other], double(factor.p[other * factor.rows + row]), value);
        own[row] = static_cast<float>(value);
    }
    return length_of(own, factor.rows);
}

// The lower of two candidates, of equal ones that with the lower row.
struct Candidate {
    double weight;
    Index row;
};

__device__ inline Candidate lower(Candidate first, Candidate second) {
    const bool other = second.weight < first.weight || (second.weight == first.weight && second.row < first.row);
    return other ? second : first;
}

__device__ inline Candidate block_lowest(Candidate mine) {
    __shared__ Candidate candidates[THREADS];
    __syncthreads();  // those of an earlier call have been read
    candidates[threadIdx.x] = mine;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
            candidates[threadIdx.x] = lower(candidates[threadIdx.x], candidates[threadIdx.x + half]);
    }
    __syncthreads();
    return candidates[0];
}

// A unit vector along the axis that the vectors before it span the least of: most of it is new.
__device__ inline void complete(const Chunk& factor, int vector) {
    Candidate best = {1e300, factor.rows};
    for (Index row = threadIdx.x; row < factor.rows; row += THREADS) {
        double weight = 0;
        for (int other = 0; other < vector; other++) {
            const double value = factor.p[other * factor.rows + row];
            weight = fma(value, value, weight);
        }
        best = lower(best, {weight, row});
    }
    const Index axis = block_lowest(best).row;
    for (Index row = threadIdx.x; row < factor.rows; row += THREADS)
        factor.p[vector * factor.rows + row] = row == axis ? 1.0f : 0.0f;
}

// Make a vector orthonormal to those before it.
__device__ inline void orthonormalize(const Chunk& factor, int vector) {
    float* own = factor.p + vector * factor.rows;
    double length = length_of(own, factor.rows), left = 1;
    for (int pass = 0; pass < PASSES; pass++) {
        if (length > 0) scale(own, factor.rows, 1 / length);
        if (length == 0 || left <= DEPENDENT) {
            complete(factor, vector);
            left = 1;
        }
        __syncthreads();
        length = reduce(factor, vector);
        left *= length;
        if (length > 0.5 && left > DEPENDENT) break;  // little was taken off, so little of its rounding errors is left
    }
    scale(own, factor.rows, 1 / length);
    __syncthreads();
}

// What no triangle can do. A factor of zeros, as of parameters that are not used, becomes unit vectors at once.
__device__ inline void repair(const Chunk& factor, Index state) {
    if (state == ILL_CONDITIONED) {
        for (int vector = 0; vector < factor.rank; vector++) orthonormalize(factor, vector);
        return;
    }
    const float everywhere = state == ZERO ? 0.0f : __uint_as_float(0x7fc00000);
    for (Index at = threadIdx.x; at < factor.rank * factor.rows; at += THREADS) factor.p[at] = everywhere;
    __syncthreads();
    if (state == ZERO && threadIdx.x < factor.rank) factor.p[threadIdx.x * factor.rows + threadIdx.x] = 1.0f;
}
