// Work on a few threads; the caller's is one of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace gradwire {

constexpr int64_t ELEMENTS_A_THREAD = 1 << 16;  // fewer are done before another thread has begun

inline int64_t useful_threads(int64_t threads, int64_t elements) {
    return std::clamp<int64_t>(elements / ELEMENTS_A_THREAD, 1, std::max<int64_t>(threads, 1));
}

// Part `index` of [0, total) cut into `parts` equal ranges.
inline int64_t cut(int64_t total, int64_t parts, int64_t index) {
    return total / parts * index + std::min(index, total % parts);
}

// Calls `work(thread)` for every thread at once; it must not throw.
template <class Work>
void on_threads(int64_t threads, const Work& work) {
    std::vector<std::thread> others;
    others.reserve(static_cast<size_t>(threads - 1));
    for (int64_t thread = 1; thread < threads; ++thread) {
        try {
            others.emplace_back([&work, thread] { work(thread); });
        } catch (const std::system_error&) {  // the system grants no more threads: this one does their part
            work(thread);
        }
    }
    work(0);
    for (std::thread& other : others) other.join();
}

}  // namespace gradwire
