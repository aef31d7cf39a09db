// 1-bit payloads: signs by ballot, block scales, and what both leave over.
//
// A warp keeps up to 1024 elements in registers between reading them and writing what is left of them. A block of up to
// that many elements is one warp's, one of up to 8192 a thread block's: both take a single pass over memory. Longer blocks
// are cut into chunks, and a second pass takes the scale off the residual.
#include "common.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
constexpr int ITEMS = 32;             // elements of a lane
constexpr int PART = ITEMS * WARP;    // elements of a warp
constexpr int CHUNK = WARPS * PART;   // elements of a thread block

// A block's first element in the vector, and how many it has.
struct Span {
    Index first, count;
};

struct Signs {
    const void* grad;
    const float* before;  // what is held back before and after: both null, or the same memory, or apart
    float* after;
    float* scales;
    Index scales_stride;  // elements from row to row
    unsigned char* bits;
    Index bits_stride;  // bytes from row to row
    Index numel;
    Index blocks;  // of all rows
    Index row_blocks;
    Index block;   // elements of a block
    float* sums;   // of the magnitudes in each chunk
    Index chunks;  // of a block
    const Span* table;  // of the blocks of a period, where they do not lie one behind the other
    Index period;  // blocks of the table
    Index stride;  // elements from period to period
};

// Up to PART consecutive elements of a block.
struct Part {
    Index block;  // its number, counted over all rows
    Index begin;  // the first element, counted from the block's first
    Index first;  // the same in the vector
    int count;
    int inside;  // how many of them lie inside the vector
};

__device__ inline int clamped(Index value, int limit) {
    return static_cast<int>(max(Index(0), min(value, Index(limit))));
}

__device__ inline Span span_of(const Signs& work, Index block) {
    if (work.table == nullptr) return {block * work.block, min(work.block, work.numel - block * work.block)};
    const Span& span = work.table[block % work.period];
    return {span.first + block / work.period * work.stride, span.count};
}

__device__ inline Part part_of(const Signs& work, Index block, Index begin) {
    const Span span = span_of(work, block);
    const int count = clamped(work.block - begin, PART);
    return {block, begin, span.first + begin, count, clamped(span.count - begin, count)};
}

// The part's elements of `grad` + `residual`, zeros past the end.
template <typename Number>
__device__ void read(const Signs& work, const Part& part, float (&values)[ITEMS]) {
    load_strip(static_cast<const Number*>(work.grad) + part.first, part.inside, values);
    if (work.before == nullptr) return;
    float held[ITEMS];
    load_strip(work.before + part.first, part.inside, held);
#pragma unroll
    for (int item = 0; item < ITEMS; item++) values[item] += held[item];
}

__device__ inline float magnitude(const float (&values)[ITEMS]) {
    float sum = 0;
#pragma unroll
    for (int item = 0; item < ITEMS; item++) sum += fabsf(values[item]);
    return sum;
}

// Lane i writes the bits of the part's elements 32 i to 32 i + 31.
__device__ inline void write_bits(const Signs& work, const Part& part, const float (&values)[ITEMS]) {
    unsigned word = 0;
#pragma unroll
    for (int item = 0; item < ITEMS; item++) {
        const unsigned votes = __ballot_sync(ALL_LANES, values[item] >= 0.0f);
        if (lane() == item) word = votes;
    }
    const Index row = part.block / work.row_blocks, column = part.block % work.row_blocks;
    unsigned char* bytes = work.bits + row * work.bits_stride + (column * work.block + part.begin) / 8 + 4 * lane();
    const int size = part.count / 8 - 4 * lane();
    if (size >= 4 && reinterpret_cast<size_t>(bytes) % 4 == 0) {  // the scales before the bits may end anywhere
        *reinterpret_cast<unsigned*>(bytes) = word;
        return;
    }
    for (int byte = 0; byte < min(size, 4); byte++) bytes[byte] = static_cast<unsigned char>(word >> 8 * byte);
}

__device__ inline float& scale_of(const Signs& work, Index block) {
    return work.scales[block / work.row_blocks * work.scales_stride + block % work.row_blocks];
}

// The mean over the elements of the block that lie inside the vector.
__device__ inline float mean(const Signs& work, Index block, float sum) {
    return sum / static_cast<float>(max(Index(1), span_of(work, block).count));
}

// What `scale` times the signs leaves; a scale of 0 leaves all.
__device__ inline void write_rest(const Signs& work, const Part& part, float (&values)[ITEMS], float scale) {
    if (work.after == nullptr) return;
#pragma unroll
    for (int item = 0; item < ITEMS; item++) values[item] -= values[item] >= 0.0f ? scale : -scale;
    store_strip(work.after + part.first, part.inside, values);
}

// A block of up to PART elements for each warp.
template <typename Number>
__device__ void sign_pack_warp(const Signs& work) {
    const Index block = Index(blockIdx.x) * WARPS + warp();
    if (block >= work.blocks) return;
    const Part part = part_of(work, block, 0);
    float values[ITEMS];
    read<Number>(work, part, values);
    write_bits(work, part, values);
    const float scale = mean(work, block, warp_sum(magnitude(values)));
    if (lane() == 0) scale_of(work, block) = scale;
    write_rest(work, part, values, scale);
}

// A block of up to CHUNK elements for each thread block.
template <typename Number>
__device__ void sign_pack_block(const Signs& work) {
    const Index block = blockIdx.x;
    const Part part = part_of(work, block, Index(warp()) * PART);
    float values[ITEMS];
    read<Number>(work, part, values);
    write_bits(work, part, values);
    const float scale = mean(work, block, block_sum<THREADS>(magnitude(values)));
    if (threadIdx.x == 0) scale_of(work, block) = scale;
    write_rest(work, part, values, scale);
}

__device__ inline Part part_of_chunk(const Signs& work) {
    const Index block = blockIdx.x / work.chunks, chunk = blockIdx.x % work.chunks;
    return part_of(work, block, chunk * CHUNK + Index(warp()) * PART);
}

// A chunk of a longer block for each thread block: all but the scale.
template <typename Number>
__device__ void sign_pack_chunk(const Signs& work) {
    const Part part = part_of_chunk(work);
    float values[ITEMS];
    read<Number>(work, part, values);
    write_bits(work, part, values);
    const float sum = block_sum<THREADS>(magnitude(values));
    if (threadIdx.x == 0) work.sums[blockIdx.x] = sum;
    write_rest(work, part, values, 0.0f);
}

FOR_EACH_FORMAT(sign_pack_warp, Signs)
FOR_EACH_FORMAT(sign_pack_block, Signs)
FOR_EACH_FORMAT(sign_pack_chunk, Signs)

// The scale of a longer block for each thread block.
extern "C" __global__ void __launch_bounds__(THREADS) sign_pack_scale(const __grid_constant__ Signs work) {
    const float* sums = work.sums + blockIdx.x * work.chunks;
    double sum = 0;
    for (Index chunk = threadIdx.x; chunk < work.chunks; chunk += THREADS) sum += sums[chunk];
    sum = block_sum<THREADS>(sum);
    if (threadIdx.x == 0) scale_of(work, blockIdx.x) = mean(work, blockIdx.x, static_cast<float>(sum));
}

// What the signs and the scale leave of a chunk, for each thread block.
extern "C" __global__ void __launch_bounds__(THREADS) sign_pack_rest(const __grid_constant__ Signs work) {
    const Part part = part_of_chunk(work);
    float values[ITEMS];
    load_strip(work.after + part.first, part.inside, values);
    write_rest(work, part, values, scale_of(work, part.block));
}
