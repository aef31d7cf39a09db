// The operations on whole buffers, on several threads.
#pragma once

#include "level.hpp"

namespace gradwire {

// Rows of `length` elements of a flat vector, k of each selected into rows of indices and values.
struct SelectJob {
    const void* grad;
    Format format;
    float* residual;  // may be null
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

struct LowRankBuffers {
    const Matrix* matrices;
    int64_t count;
    float* grad;
    float* residual;  // may be null
    float* p;
    float* q;
};

void cast_scaled(const void* source, Format from, void* out, Format to, int64_t numel, float scale, int64_t threads);
void sign_pack(const PackJob& job, int64_t rows, int64_t threads);
void sign_unpack_mean(const UnpackJob& job, int64_t threads);
void select_largest(const SelectJob& job, int64_t threads);

// Throws std::out_of_range where an index is negative.
void scatter_mean(const ScatterJob& job, int64_t threads);

void low_rank_left(const LowRankBuffers& buffers, int64_t threads);
void low_rank_right(const LowRankBuffers& buffers, int64_t threads);
void low_rank_finish(const LowRankBuffers& buffers, int64_t threads);

}  // namespace gradwire
