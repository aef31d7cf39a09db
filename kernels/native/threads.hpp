// Work on several threads: a job is cut into parts, which its caller and the threads of one team take one after
// another.
#pragma once

#include <algorithm>
#include <cstdint>

namespace gradwire {

// Part `index` of [0, total) cut into `parts` almost equal ranges, at multiples of `step`: where it begins.
inline int64_t cut(int64_t total, int64_t parts, int64_t index, int64_t step = 1) {
    const int64_t steps = total / step + (total % step != 0);
    return std::min(total, (steps / parts * index + std::min(index, steps % parts)) * step);
}

constexpr int64_t LINE = 64;  // elements of whole cache lines in every format

// How a job is shared. The parts outnumber the threads: one that comes late, or not at all, leaves its share to the
// others.
struct Shares {
    static constexpr int64_t ELEMENTS_A_THREAD = 1 << 16;  // fewer are done before another thread has begun
    static constexpr int64_t PARTS_A_THREAD = 16;

    int64_t threads, parts;

    Shares(int64_t most_threads, int64_t elements, int64_t most_parts = INT64_MAX)
        : threads(std::clamp<int64_t>(std::min(elements / ELEMENTS_A_THREAD, most_parts), 1,
                                      std::max<int64_t>(most_threads, 1))),
          parts(threads == 1 ? 1 : std::min(threads * PARTS_A_THREAD, most_parts)) {}
};

using Task = void (*)(const void* work, int64_t part, int64_t worker);

void run_parts(const Shares& shares, Task task, const void* work);

// Calls `work(part, worker)` once for each part, and returns when all are done. `worker` is below the number of
// threads, no two threads have the same, and the parts of a worker ascend. An exception ends the job and is thrown
// again here.
template <class Work>
void share(const Shares& shares, const Work& work) {
    const auto task = [](const void* given, int64_t part, int64_t worker) {
        (*static_cast<const Work*>(given))(part, worker);
    };
    run_parts(shares, task, &work);
}

}  // namespace gradwire
