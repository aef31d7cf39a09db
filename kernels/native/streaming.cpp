// Operations that go over their buffers in order: casts and signs.
#include "operations.hpp"
#include "threads.hpp"

namespace gradwire {

namespace {

int64_t size_of(Format format) { return format == Format::float32 ? 4 : 2; }

}  // namespace

void cast_scaled(const void* source, Format from, void* out, Format to, int64_t numel, float scale, int64_t threads) {
    threads = useful_threads(threads, numel);
    on_threads(threads, [&](int64_t thread) {
        const int64_t first = cut(numel, threads, thread), last = cut(numel, threads, thread + 1);
        level().cast(static_cast<const char*>(source) + first * size_of(from), from,
                     static_cast<char*>(out) + first * size_of(to), to, last - first, scale);
    });
}

void sign_pack(const PackJob& job, int64_t rows, int64_t threads) {
    const int64_t blocks = rows * job.blocks;
    threads = std::min(useful_threads(threads, job.numel), std::max<int64_t>(blocks, 1));
    on_threads(threads, [&](int64_t thread) {
        level().pack(job, cut(blocks, threads, thread), cut(blocks, threads, thread + 1));
    });
}

void sign_unpack_mean(const UnpackJob& job, int64_t threads) {
    const int64_t blocks = (job.numel + job.block - 1) / job.block;
    threads = std::min(useful_threads(threads, job.numel), std::max<int64_t>(blocks, 1));
    on_threads(threads, [&](int64_t thread) {
        level().unpack(job, cut(blocks, threads, thread), cut(blocks, threads, thread + 1));
    });
}

}  // namespace gradwire
