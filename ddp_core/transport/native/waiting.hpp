// How processes that share memory wait for each other, and arithmetic that is the same on all their threads.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cfenv>
#include <climits>
#include <cstdint>
#include <ctime>

namespace gradwire {

constexpr size_t LINE = 64;  // bytes
constexpr int64_t NANOSECONDS = 1'000'000'000;

inline int64_t now() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * NANOSECONDS + time.tv_nsec;
}

// Until `word` is no longer `seen`, or some other process says so, or the time is over.
inline void doze(std::atomic<uint32_t>& word, uint32_t seen, int64_t nanoseconds) {
    const timespec limit{nanoseconds / NANOSECONDS, nanoseconds % NANOSECONDS};
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &limit, nullptr, 0);
}

inline void rouse(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// The usual rounding, with the smallest numbers kept, whatever thread this is: the bits must not depend on who adds up.
class Arithmetic {
public:
    Arithmetic() {
        std::fegetenv(&before_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~Arithmetic() { std::fesetenv(&before_); }
    Arithmetic(const Arithmetic&) = delete;
    Arithmetic& operator=(const Arithmetic&) = delete;

private:
    std::fenv_t before_{};
};

}  // namespace gradwire
