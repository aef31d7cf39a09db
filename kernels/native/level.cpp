// The choice of the instruction set, at run time.
#include "level.hpp"

#include <atomic>

namespace gradwire {

std::vector<const Level*> levels() {
    std::vector<const Level*> found;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        found.push_back(&avx2_level());
#endif
    found.push_back(&baseline_level());
    return found;
}

namespace {

// Chosen when the library is loaded: a process that is forked while another thread is in its first choice would wait
// for that thread, which it does not have.
std::atomic<const Level*> in_use{levels().front()};

}  // namespace

const Level& level() { return *in_use.load(std::memory_order_relaxed); }

bool choose_level(const std::string& name) {
    for (const Level* each : levels())
        if (name == each->name) {
            in_use.store(each, std::memory_order_relaxed);
            return true;
        }
    return false;
}

}  // namespace gradwire
