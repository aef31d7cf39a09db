// The inner loops, once for each instruction set, and what is handed to them.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

namespace gradwire {

struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};
enum class Format : int { float32, bfloat16, float16 };

// Calls `function` with a null pointer to the element type of `format`.
template <class Function>
auto with_element(Format format, Function function) {
    switch (format) {
        case Format::bfloat16: return function(static_cast<BFloat16*>(nullptr));
        case Format::float16: return function(static_cast<Float16*>(nullptr));
        default: return function(static_cast<float*>(nullptr));
    }
}

// What is held back before a step and after it: null where nothing is. Both may be the same memory.
struct Residual {
    const float* before;
    float* after;
    bool streams;  // `after` is written around the caches, and begins where vectors do

    explicit operator bool() const { return after != nullptr; }
    Residual from(int64_t place) const {
        if (!after) return *this;
        constexpr uintptr_t VECTOR = 32;  // bytes
        const bool aligned = reinterpret_cast<uintptr_t>(after + place) % VECTOR == 0;
        return {before + place, after + place, streams && aligned};
    }
};

// A block's number of elements, and the first of them in the flat vector.
struct Span {
    int64_t first, count;
};

// The places of blocks: by a table, which holds for each `period` blocks `stride` elements further on, or without one, of
// `block` elements one behind the other up to `numel`.
struct Places {
    const Span* table;
    int64_t period, stride;

    Span of(int64_t index, int64_t block, int64_t numel) const {
        if (table) return {table[index % period].first + index / period * stride, table[index % period].count};
        const int64_t first = index * block, left = numel - first;
        return {left > 0 ? first : 0, left < 0 ? 0 : left < block ? left : block};
    }
};

struct CastJob {
    const void* source;
    Format from;
    void* out;
    Format to;
    float scale;
    float* residual;  // null, or to it is added what `to` rounds away
    bool streams;     // the result is written around the caches
};

// Strides are in elements. Block `i` of the payload lies in row `i / blocks`.
struct PackJob {
    const void* grad;
    Format format;
    Residual residual;
    float* scales;
    int64_t scale_stride;
    uint8_t* bits;
    int64_t bit_stride;
    int64_t numel, blocks, block;
    Places places;
};

struct UnpackJob {
    const float* scales;
    int64_t scale_voter_stride, scale_stride;
    const uint8_t* bits;
    int64_t bit_voter_stride, bit_stride;
    void* out;
    Format format;
    float* residual;  // null, or to it is added what `format` rounds away
    int64_t voters, numel, blocks, block;
    Places places;
    bool streams;
};

// As above; codes have 8, 4 or 2 `bits`; `steps` scales are the largest magnitude, `limit` is the largest that a code
// stands for.
struct QuantizeJob {
    const void* grad;
    Format format;
    Residual residual;
    float* scales;
    int64_t scale_stride;
    uint8_t* codes;
    int64_t code_stride;
    int64_t numel, blocks, block;
    Places places;
    int64_t bits;
    float steps, limit;
    bool random;  // rounded up or down by the words of Philox with the key `seed` from `counter` on
    uint64_t seed, counter;
};

struct DequantizeJob {
    const float* scales;
    int64_t scale_voter_stride, scale_stride;
    const uint8_t* codes;
    int64_t code_voter_stride, code_stride;
    void* out;
    Format format;
    float* residual;
    int64_t voters, numel, blocks, block;
    Places places;
    int64_t bits;
    bool streams;
};

// Blocks of a power of two of elements, and as many signs. Without a table of places all blocks are whole.
struct RotateJob {
    float* values;
    const float* signs;
    int64_t block;
    Places places;
    float factor;  // of what is written
    bool back;     // the signs come last
};

// By which rotated numbers of a block are multiplied.
inline float rotation_factor(int64_t block) { return static_cast<float>(1 / std::sqrt(static_cast<double>(block))); }

// A row to select from.
struct Row {
    const void* grad;
    Format format;
    Residual residual;
    int64_t numel;
};

// A candidate for selection; its magnitude is the bits of its absolute value, NaN being infinite.
struct Candidate {
    int64_t index;
    uint32_t magnitude;
};

// Elements of one voter's row.
struct Chosen {
    const void* indices;
    bool long_indices;
    const void* values;
    Format format;
    int64_t count;
};

struct Matrix {
    int64_t offset, rows, columns, rank, left_offset, right_offset;
};

// Some of the rows of a matrix, which lies in `grad`.
struct LowRankJob {
    const Matrix* matrix;
    int64_t first, last;
    void* grad;
    Format format;
    Residual residual;
    float* p;
    float* q;
};

struct Level {
    const char* name;
    void (*cast)(const CastJob& job, int64_t first, int64_t last);
    bool (*finite)(const void* source, Format format, int64_t first, int64_t last);
    void (*pack)(const PackJob& job, int64_t first_block, int64_t last_block);
    void (*unpack)(const UnpackJob& job, int64_t first_block, int64_t last_block);
    void (*quantize)(const QuantizeJob& job, int64_t first_block, int64_t last_block);
    void (*dequantize)(const DequantizeJob& job, int64_t first_block, int64_t last_block);
    void (*rotate)(const RotateJob& job, int64_t first_block, int64_t last_block);
    void (*sample)(const Row& row, const int64_t* indices, int64_t count, uint32_t* magnitudes);
    int64_t (*scan)(const Row& row, bool add, int64_t first, int64_t last, uint32_t threshold, Candidate* found);
    void (*take)(const Row& row, const Candidate* chosen, int64_t count, void* values, Format to);
    void (*scatter)(const Chosen& chosen, int64_t start, float weight, float* piece);
    void (*left)(const LowRankJob& job);
    void (*right)(const LowRankJob& job);
    void (*finish)(const LowRankJob& job);
    void (*orthogonalize)(float* vectors, int64_t rank, int64_t rows);
    void (*normalize)(float* vector, const float* previous, int64_t count);
};

const Level& baseline_level();
const Level& avx2_level();

// The levels that this processor runs, the default first.
std::vector<const Level*> levels();

// The level in use: the default, unless another was chosen.
const Level& level();

// For tests: use the level of that name; false where this processor does not run it.
bool choose_level(const std::string& name);

}  // namespace gradwire
