// Payloads of 1, 2, 4 and 8 bits, with a scale a block, and rotations of blocks, on several threads.
#include "operations.hpp"
#include "threads.hpp"

namespace gradwire {

namespace {

template <class Job>
using Loop = void (*Level::*)(const Job& job, int64_t first_block, int64_t last_block);

// All of so many blocks by one of a level's loops.
template <class Job>
void over_blocks(Loop<Job> loop, const Job& job, int64_t numel, int64_t blocks, int64_t threads) {
    const Shares shares(threads, numel, blocks);
    share(shares, [&](int64_t part, int64_t) {
        (level().*loop)(job, cut(blocks, shares.parts, part), cut(blocks, shares.parts, part + 1));
    });
}

template <class Job>
void encode(Loop<Job> loop, Job job, int64_t rows, int64_t threads) {
    job.residual = around_caches(job.residual, job.numel);
    over_blocks(loop, job, job.numel, rows * job.blocks, threads);
}

template <class Job>
void decode(Loop<Job> loop, const Job& job, int64_t rows, int64_t threads) {
    over_blocks(loop, job, job.numel, job.places.table ? rows * job.blocks : (job.numel + job.block - 1) / job.block, threads);
}

}  // namespace

void sign_pack(const PackJob& job, int64_t rows, int64_t threads) { encode(&Level::pack, job, rows, threads); }

void sign_unpack_mean(const UnpackJob& job, int64_t rows, int64_t threads) {
    decode(&Level::unpack, job, rows, threads);
}

void quantize_blocks(const QuantizeJob& job, int64_t rows, int64_t threads) {
    encode(&Level::quantize, job, rows, threads);
}

void dequantize_mean(const DequantizeJob& job, int64_t rows, int64_t threads) {
    decode(&Level::dequantize, job, rows, threads);
}

void rotate_blocks(RotateJob job, int64_t numel, int64_t blocks_in_places, int64_t threads) {
    job.factor = rotation_factor(job.block);
    if (job.places.table) return over_blocks(&Level::rotate, job, numel, blocks_in_places, threads);
    for (; numel; job.block /= 2) {
        const int64_t blocks = numel / job.block, rotated = blocks * job.block;
        job.factor = rotation_factor(job.block);
        if (blocks) over_blocks(&Level::rotate, job, rotated, blocks, threads);
        job.values += rotated;
        numel -= rotated;
    }
}

}  // namespace gradwire
