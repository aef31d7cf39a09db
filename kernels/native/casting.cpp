// Changes of number format, on several threads.
#include "operations.hpp"
#include "threads.hpp"

namespace gradwire {

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
            if (first < last) level().cast({piece.source, format, piece.out, format, scale, nullptr, around}, first, last);
            start += piece.numel;
        }
    });
}

}  // namespace gradwire
