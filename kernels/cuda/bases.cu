// Orthonormal bases of all factors of a bucket at once: Cholesky QR, twice, with Gram-Schmidt for those it cannot do.
//
// basis_gram    the products of all pairs of vectors (Gram matrix), and their triangle R: P = Q R
// basis_solve   Q = P R^-1, and the same of Q
// basis_finish  again Q R^-1: orthonormal to rounding; or Gram-Schmidt, where a triangle was ill-conditioned
//
// Each thread block has a chunk of one factor's rows, and the last one of a factor adds up what all have found, in order:
// the result depends on the factor alone. Products are summed in double precision. There, squares of float32 neither
// overflow nor vanish, and conditions up to about 1e5 leave a triangle, so that no shift of the diagonal is needed.
#include "gram_schmidt.cuh"

constexpr int WARPS = THREADS / WARP;
constexpr int PRODUCTS = TILE * TILE;
constexpr int ROUNDS = 2;
// Of vectors of length 1: the least square of what the vectors before leave of one, for Cholesky to be good enough.
constexpr double LEAST_FIRST = 1e-10;
constexpr double LEAST_SECOND = 0.5;

struct Factor {
    Index offset;
    Index rows;
    Index rank;
    Index first_chunk;
    Index chunks;
    Index chunk_rows;
};

struct Triangle {
    double shrink[LARGEST_RANK];  // one over the length of each vector; R is that of vectors of length 1
    float entries[LARGEST_RANK * LARGEST_RANK];
    float reciprocals[LARGEST_RANK];  // of the diagonal
    Index state;
};
static_assert(sizeof(Triangle) == 4488, "the memory that the launcher takes for one");

struct Bases {
    float* p;
    const Factor* factors;
    const Index* owners;  // the factor of each chunk
    double* products;     // of each chunk, tile by tile
    Index products_size;
    Triangle* triangles;
    unsigned* finished;  // of each factor, ROUNDS counters; zeros at first
};

__device__ inline Chunk chunk_of(const Bases& work) {
    const Index owner = work.owners[blockIdx.x];
    const Factor& factor = work.factors[owner];
    const Index begin = (blockIdx.x - factor.first_chunk) * factor.chunk_rows;
    const Index end = min(begin + factor.chunk_rows, factor.rows);
    return {owner, work.p + factor.offset, factor.rows, static_cast<int>(factor.rank), begin, end};
}

__device__ inline void multiply_tiles(const Chunk& chunk, int left, int right, double (&products)[PRODUCTS]) {
    for (Index row = chunk.begin + threadIdx.x; row < chunk.end; row += THREADS) {
        double lefts[TILE], rights[TILE];
        load_tile(chunk, left, row, lefts);
        load_tile(chunk, right, row, rights);
#pragma unroll
        for (int i = 0; i < PRODUCTS; i++) products[i] = fma(lefts[i / TILE], rights[i % TILE], products[i]);
    }
}

// Sum each of 16 numbers over the warp; lane i is left with the sum of number i / 2 in `products[0]`.
template <int HALF = PRODUCTS / 2>
__device__ void fold(double (&products)[PRODUCTS]) {
    const bool upper = (lane() & 2 * HALF) != 0;  // which half of the numbers this lane goes on with
#pragma unroll
    for (int i = 0; i < HALF; i++) {
        const double given = upper ? products[i] : products[i + HALF];
        const double kept = upper ? products[i + HALF] : products[i];
        products[i] = kept + __shfl_xor_sync(ALL_LANES, given, 2 * HALF);
    }
    if constexpr (HALF > 1)
        fold<HALF / 2>(products);
    else
        products[0] += __shfl_xor_sync(ALL_LANES, products[0], 1);
}

// The sums of the products over the thread block.
__device__ inline void write_sums(double (&products)[PRODUCTS], double* out) {
    __shared__ double sums[WARPS][PRODUCTS];
    fold<>(products);
    __syncthreads();  // the sums of an earlier call have been read
    if (lane() % 2 == 0) sums[warp()][lane() / 2] = products[0];
    __syncthreads();
    if (threadIdx.x >= PRODUCTS) return;
    double total = 0;
    for (int other = 0; other < WARPS; other++) total += sums[other][threadIdx.x];
    out[threadIdx.x] = total;
}

// The products of all pairs of vectors over the chunk's rows, tile by tile; those below the diagonal are left out.
__device__ inline void write_products(const Bases& work, const Chunk& chunk) {
    double* out = work.products + blockIdx.x * work.products_size;
    const int tiles = (chunk.rank + TILE - 1) / TILE;
    for (int left = 0; left < tiles; left++) {
        for (int right = left; right < tiles; right++) {
            double products[PRODUCTS] = {};
            multiply_tiles(chunk, left, right, products);
            write_sums(products, out);
            out += PRODUCTS;
        }
    }
}

using Square = double[LARGEST_RANK][LARGEST_RANK + 1];  // padded: a column then lies in different banks

// Where write_products puts the product of vectors i <= j.
__device__ inline int place_of(int rank, int i, int j) {
    const int tiles = (rank + TILE - 1) / TILE, left = i / TILE, right = j / TILE;
    const int tile = left * tiles - left * (left - 1) / 2 + right - left;
    return tile * PRODUCTS + i % TILE * TILE + j % TILE;
}

// The sums over all chunks, in order.
__device__ inline void add_products(const Bases& work, const Factor& factor, Square& gram) {
    const int rank = static_cast<int>(factor.rank);
    for (int entry = threadIdx.x; entry < rank * rank; entry += THREADS) {
        const int i = entry / rank, j = entry % rank;
        if (i > j) continue;
        const double* products = work.products + factor.first_chunk * work.products_size + place_of(rank, i, j);
        double sum = 0;
#pragma unroll 8
        for (Index chunk = 0; chunk < factor.chunks; chunk++) sum += products[chunk * work.products_size];
        gram[i][j] = sum;
    }
    __syncthreads();
}

// Divide by the lengths of the vectors, whose inverses go to `shrink`. Not finite: so is an element of the factor.
__device__ inline State normalize(Square& gram, int rank, double* shrink) {
    int zeros = 0;
    for (int i = 0; i < rank; i++) {
        const double square = gram[i][i];
        if (!(square - square == 0)) return NOT_FINITE;
        if (square == 0) zeros++;
    }
    if (zeros > 0) return zeros == rank ? ZERO : ILL_CONDITIONED;
    if (threadIdx.x < rank) shrink[threadIdx.x] = 1 / sqrt(gram[threadIdx.x][threadIdx.x]);
    __syncthreads();
    for (int entry = threadIdx.x; entry < rank * rank; entry += THREADS) {
        const int i = entry / rank, j = entry % rank;
        if (i <= j) gram[i][j] *= shrink[i] * shrink[j];
    }
    return GOOD;
}

// Replace the Gram matrix by its Cholesky factor R, upper, `gram` = R^T R; false where a pivot falls below `least`.
__device__ inline bool cholesky(Square& gram, int rank, double least) {
    for (int pivot = 0; pivot < rank; pivot++) {
        __syncthreads();
        const double square = gram[pivot][pivot];
        if (!(square > least)) return false;
        const double reciprocal = 1 / sqrt(square);
        __syncthreads();
        if (threadIdx.x < rank - pivot) gram[pivot][pivot + threadIdx.x] *= reciprocal;
        __syncthreads();
        for (int entry = threadIdx.x; entry < rank * rank; entry += THREADS) {
            const int i = entry / rank, j = entry % rank;
            if (pivot < i && i <= j) gram[i][j] -= gram[pivot][i] * gram[pivot][j];
        }
    }
    __syncthreads();
    return true;
}

// The triangle of a factor whose chunks are all there.
__device__ inline void factorize(const Bases& work, Index owner, double least) {
    __shared__ Square gram;
    const Factor& factor = work.factors[owner];
    Triangle& triangle = work.triangles[owner];
    const int rank = static_cast<int>(factor.rank);
    add_products(work, factor, gram);
    State state = normalize(gram, rank, triangle.shrink);
    if (state == GOOD && !cholesky(gram, rank, least)) state = ILL_CONDITIONED;
    if (threadIdx.x == 0) triangle.state = state;
    if (state != GOOD) return;
    for (int entry = threadIdx.x; entry < rank * rank; entry += THREADS) {
        const int i = entry / rank, j = entry % rank;
        if (i < j) triangle.entries[i * LARGEST_RANK + j] = static_cast<float>(gram[i][j]);
        if (i == j) triangle.reciprocals[i] = static_cast<float>(1 / gram[i][i]);
    }
}

// One round of a chunk; the last chunk of a factor makes its triangle.
__device__ inline void finish_round(const Bases& work, const Chunk& chunk, int round, double least) {
    write_products(work, chunk);
    const unsigned chunks = static_cast<unsigned>(work.factors[chunk.owner].chunks);
    if (last_to_come(&work.finished[chunk.owner * ROUNDS + round], chunks)) factorize(work, chunk.owner, least);
}

// One row of Q from one of P: by substitution, which rounds relative to P whatever the condition of R.
template <int RANK>
__device__ void substitute(const Triangle& triangle, int rank, float (&row)[RANK]) {
#pragma unroll
    for (int j = 0; j < RANK; j++) {
        if (j < rank) {
            float value = static_cast<float>(row[j] * triangle.shrink[j]);
#pragma unroll
            for (int i = 0; i < j; i++) value = fmaf(-triangle.entries[i * LARGEST_RANK + j], row[i], value);
            row[j] = value * triangle.reciprocals[j];
        }
    }
}

// Q = P R^-1 in place of P, for the chunk's rows.
template <int RANK>
__device__ void solve(const Bases& work, const Chunk& chunk) {
    __shared__ Triangle triangle;
    const int words = sizeof(Triangle) / sizeof(unsigned);
    const unsigned* source = reinterpret_cast<const unsigned*>(work.triangles + chunk.owner);
    for (int word = threadIdx.x; word < words; word += THREADS) reinterpret_cast<unsigned*>(&triangle)[word] = source[word];
    __syncthreads();
    for (Index row = chunk.begin + threadIdx.x; row < chunk.end; row += THREADS) {
        float values[RANK];
#pragma unroll
        for (int i = 0; i < RANK; i++) values[i] = i < chunk.rank ? chunk.p[i * chunk.rows + row] : 0.0f;
        substitute(triangle, chunk.rank, values);
#pragma unroll
        for (int i = 0; i < RANK; i++)
            if (i < chunk.rank) chunk.p[i * chunk.rows + row] = values[i];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) basis_gram(const __grid_constant__ Bases work) {
    finish_round(work, chunk_of(work), 0, LEAST_FIRST);
}

template <int RANK>
__device__ void basis_solve(const Bases& work) {
    const Chunk chunk = chunk_of(work);
    if (work.triangles[chunk.owner].state != GOOD) return;
    solve<RANK>(work, chunk);
    finish_round(work, chunk, 1, LEAST_SECOND);
}

template <int RANK>
__device__ void basis_finish(const Bases& work) {
    const Chunk chunk = chunk_of(work);
    const Index state = work.triangles[chunk.owner].state;
    if (state == GOOD) solve<RANK>(work, chunk);
    else if (chunk.begin == 0) repair(chunk, state);
}

// By the largest rank among the factors: smaller ones would waste registers.
#define FOR_RANK(RANK)                                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS) basis_solve_##RANK(const __grid_constant__ Bases work) {    \
        basis_solve<RANK>(work);                                                                                      \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS) basis_finish_##RANK(const __grid_constant__ Bases work) {   \
        basis_finish<RANK>(work);                                                                                     \
    }

FOR_RANK(4)
FOR_RANK(8)
FOR_RANK(16)
FOR_RANK(32)
