// Operations that go over their buffers in order: casts, the look for what is not finite, and signs.
#include <atomic>

#include "operations.hpp"
#include "threads.hpp"

namespace gradwire {

namespace {

constexpr int64_t LINE = 64;  // elements of whole cache lines in every format

}  // namespace

void cast_scaled(const CastJob& job, int64_t numel, int64_t threads) {
    const Shares shares(threads, numel);
    share(shares, [&](int64_t part, int64_t) {
        level().cast(job, cut(numel, shares.parts, part, LINE), cut(numel, shares.parts, part + 1, LINE));
    });
}

void gather_scaled(const std::vector<Piece>& pieces, Format format, float scale, int64_t threads) {
    int64_t total = 0;
    for (const Piece& piece : pieces) total += piece.numel;
    const bool around = streams(format, total);
    const Shares shares(threads, total);
    share(shares, [&](int64_t part, int64_t) {
        const int64_t begin = cut(total, shares.parts, part, LINE), end = cut(total, shares.parts, part + 1, LINE);
        int64_t start = 0;  // of a piece, among the elements of all
        for (const Piece& piece : pieces) {
            const int64_t first = std::max<int64_t>(begin - start, 0), last = std::min(end - start, piece.numel);
            if (first < last) level().cast({piece.source, format, piece.out, format, scale, around}, first, last);
            start += piece.numel;
        }
    });
}

bool all_finite(const void* source, Format format, int64_t numel, int64_t threads) {
    const Shares shares(threads, numel);
    std::atomic<bool> finite{true};
    share(shares, [&](int64_t part, int64_t) {
        const int64_t first = cut(numel, shares.parts, part, LINE), last = cut(numel, shares.parts, part + 1, LINE);
        if (finite.load(std::memory_order_relaxed) && !level().finite(source, format, first, last)) finite.store(false);
    });
    return finite.load();
}

void sign_pack(const PackJob& job, int64_t rows, int64_t threads) {
    const int64_t blocks = rows * job.blocks;
    const Shares shares(threads, job.numel, blocks);
    share(shares, [&](int64_t part, int64_t) {
        level().pack(job, cut(blocks, shares.parts, part), cut(blocks, shares.parts, part + 1));
    });
}

void sign_unpack_mean(const UnpackJob& job, int64_t threads) {
    const int64_t blocks = (job.numel + job.block - 1) / job.block;
    const Shares shares(threads, job.numel, blocks);
    share(shares, [&](int64_t part, int64_t) {
        level().unpack(job, cut(blocks, shares.parts, part), cut(blocks, shares.parts, part + 1));
    });
}

}  // namespace gradwire
