// Payloads of 8, 4 and 2 bits, on several threads.
#include "operations.hpp"
#include "threads.hpp"

namespace gradwire {

void quantize_blocks(QuantizeJob job, int64_t rows, int64_t threads) {
    job.residual = around_caches(job.residual, job.numel);
    const int64_t blocks = rows * job.blocks;
    const Shares shares(threads, job.numel, blocks);
    share(shares, [&](int64_t part, int64_t) {
        level().quantize(job, cut(blocks, shares.parts, part), cut(blocks, shares.parts, part + 1));
    });
}

void dequantize_mean(const DequantizeJob& job, int64_t threads) {
    const int64_t blocks = (job.numel + job.block - 1) / job.block;
    const Shares shares(threads, job.numel, blocks);
    share(shares, [&](int64_t part, int64_t) {
        level().dequantize(job, cut(blocks, shares.parts, part), cut(blocks, shares.parts, part + 1));
    });
}

}  // namespace gradwire
