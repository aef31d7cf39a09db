// The look for what is not finite, on several threads.
#include <atomic>

#include "operations.hpp"
#include "threads.hpp"

namespace gradwire {

bool all_finite(const void* source, Format format, int64_t numel, int64_t threads) {
    const Shares shares(threads, numel);
    std::atomic<bool> finite{true};
    share(shares, [&](int64_t part, int64_t) {
        const int64_t first = cut(numel, shares.parts, part, LINE), last = cut(numel, shares.parts, part + 1, LINE);
        if (finite.load(std::memory_order_relaxed) && !level().finite(source, format, first, last)) finite.store(false);
    });
    return finite.load();
}

}  // namespace gradwire
