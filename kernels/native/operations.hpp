// The operations on whole buffers, on several threads.
#pragma once

#include "level.hpp"

namespace gradwire {

inline int64_t size_of(Format format) { return format == Format::float32 ? 4 : 2; }

// Whether a result is too large to be still in the caches when it is used: it is then written around them.
inline bool streams(Format format, int64_t numel) { return numel * size_of(format) >= int64_t{8} << 20; }

// The same residual. What is written over has been read, so that it is in the caches; what is written beside it may go
// around them.
inline Residual around_caches(Residual residual, int64_t numel) {
    residual.streams = residual.before != residual.after && streams(Format::float32, numel);
    return residual.from(0);
}

// Rows of `length` elements of a flat vector, k of each selected into rows of indices and values.
struct SelectJob {
    const void* grad;
    Format format;
    Residual residual;
    void* indices;
    bool long_indices;
    int64_t index_stride;
    void* values;
    Format value_format;
    int64_t value_stride;
    int64_t numel, length, rows, k;
};

struct ScatterJob {
    const void* indices;
    bool long_indices;
    int64_t index_voter_stride, index_stride;
    const void* values;
    Format value_format;
    int64_t value_voter_stride, value_stride;
    float* out;
    int64_t voters, rows, k, numel, length;
};

// One of many buffers that are cast in one go.
struct Piece {
    const void* source;
    void* out;
    int64_t numel;
};

// Rows of `size` elements from `start` on, `number` that of the first.
struct Rows {
    int64_t start, rows, size, number;
};

struct RowsJob {
    char* values;
    int64_t size;  // bytes of a value: a float's, or 1 of a code
    uint8_t* used;
    const Rows* blocks;
    int64_t count;
};

struct LowRankBuffers {
    const Matrix* matrices;
    int64_t count;
    void* grad;
    Format format;
    Residual residual;
    float* p;
    float* q;
};

void cast_scaled(const CastJob& job, int64_t numel, int64_t threads);
void gather_scaled(const std::vector<Piece>& pieces, Format format, float scale, int64_t threads);
bool all_finite(const void* source, Format format, int64_t numel, int64_t threads);
void sign_pack(const PackJob& job, int64_t rows, int64_t threads);
void sign_unpack_mean(const UnpackJob& job, int64_t rows, int64_t threads);
void quantize_blocks(const QuantizeJob& job, int64_t rows, int64_t threads);
void dequantize_mean(const DequantizeJob& job, int64_t rows, int64_t threads);

// Whole blocks, then what is left in smaller powers of two, by the first signs; or so many blocks in their places.
void rotate_blocks(RotateJob job, int64_t numel, int64_t blocks_in_places, int64_t threads);

// Marks the rows that have an element other than zero; puts zeros into those that are not marked.
void mark_rows(const RowsJob& job);
void clear_rows(const RowsJob& job);

void select_largest(SelectJob job, int64_t threads);

// Throws std::out_of_range where an index is negative.
void scatter_mean(const ScatterJob& job, int64_t threads);

void low_rank_left(LowRankBuffers buffers, int64_t threads);
void low_rank_right(LowRankBuffers buffers, int64_t threads);
void low_rank_finish(LowRankBuffers buffers, int64_t threads);
void orthogonalize(const Matrix* matrices, int64_t count, float* p, int64_t threads);

// `previous` may be null.
void normalize(const Matrix* matrices, int64_t count, float* q, const float* previous, int64_t threads);

}  // namespace gradwire
