// CUDA's device language on the CPU, for tests without a GPU: thread blocks run one after another, the threads of a block as
// fibers that take turns at barriers and at exchanges within a warp. Shared memory holds garbage when a block begins. The
// order of blocks and of threads can be turned round: where a barrier is missing, the result then changes.
#pragma once

#include <link.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

namespace emulator {

constexpr int WARP = 32;
constexpr size_t STACK = 1 << 16;

struct Point {
    unsigned x;
};

// Threads wait until all that are still running have come.
struct Barrier {
    int expected = 0;
    int arrived = 0;
    unsigned round = 0;

    bool complete() {
        if (arrived < expected) return false;
        arrived = 0;
        round++;
        return true;
    }
};

struct Warp {
    Barrier barrier;
    unsigned long long slots[2][WARP];  // two sets: a lane may publish again while others still read
    const char* operations[2][WARP];
};

struct Fiber {
    ucontext_t start;
    jmp_buf position;
    std::unique_ptr<char[]> stack{new char[STACK]};
    bool begun = false, done = false;
    Barrier* waits_for = nullptr;
    unsigned round = 0;  // of the barrier it waits for
    int exchanges = 0;

    bool ready() const { return !done && (waits_for == nullptr || waits_for->round != round); }
};

struct Block {
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<Warp> warps;
    Barrier barrier;
    Fiber* running = nullptr;
    jmp_buf scheduler;
    void (*kernel)(const void*);
    const void* arguments;
};

static Block block;  // static, so that each library has its own
static Point thread_index, block_index, block_size, grid_size;

[[noreturn]] inline void fail(const char* what) {
    std::fprintf(stderr, "emulator: block %u, thread %u: %s\n", block_index.x, thread_index.x, what);
    std::abort();
}

inline void wait(Barrier& barrier) {
    const unsigned round = barrier.round;
    barrier.arrived++;
    if (barrier.complete()) return;
    Fiber& fiber = *block.running;
    fiber.waits_for = &barrier;
    fiber.round = round;
    if (_setjmp(fiber.position) == 0) _longjmp(block.scheduler, 1);
    fiber.waits_for = nullptr;
}

inline Warp& warp() { return block.warps[thread_index.x / WARP]; }

// All lanes publish a value, then see those of all; `operation` has to be the same on all lanes.
template <typename Value>
const unsigned long long* exchange(Value value, const char* operation) {
    static_assert(sizeof(Value) <= 8);
    const int set = block.running->exchanges++ % 2, lane = thread_index.x % WARP;
    Warp& mine = warp();
    std::memcpy(&mine.slots[set][lane], &value, sizeof(Value));
    mine.operations[set][lane] = operation;
    wait(mine.barrier);
    for (const char* other : mine.operations[set])
        if (other == nullptr || std::strcmp(other, operation) != 0) fail("the lanes of a warp are at different operations");
    return mine.slots[set];
}

template <typename Value>
Value taken(const unsigned long long* slots, int lane) {
    Value value;
    std::memcpy(&value, &slots[lane], sizeof(Value));
    return value;
}

// What a fiber does all its life: a thread of one block after another.
inline void run_fiber() {
    for (;;) {
        block.kernel(block.arguments);
        Fiber& fiber = *block.running;
        fiber.done = true;
        for (Barrier* barrier : {&warp().barrier, &block.barrier}) {  // threads that have ended hold up no others
            barrier->expected--;
            if (barrier->arrived > 0) barrier->complete();
        }
        if (_setjmp(fiber.position) == 0) _longjmp(block.scheduler, 1);
    }
}

inline void resume(unsigned thread) {
    Fiber& fiber = *block.fibers[thread];
    block.running = &fiber;
    thread_index.x = thread;
    if (_setjmp(block.scheduler) != 0) return;
    if (fiber.begun) _longjmp(fiber.position, 1);
    fiber.begun = true;
    setcontext(&fiber.start);
}

inline std::unique_ptr<Fiber> new_fiber() {
    auto fiber = std::make_unique<Fiber>();
    getcontext(&fiber->start);
    fiber->start.uc_stack.ss_sp = fiber->stack.get();
    fiber->start.uc_stack.ss_size = STACK;
    fiber->start.uc_link = nullptr;
    makecontext(&fiber->start, run_fiber, 0);
    return fiber;
}

inline void prepare(unsigned threads) {
    while (block.fibers.size() < threads) block.fibers.push_back(new_fiber());
    block.warps.assign(threads / WARP, Warp());
    for (Warp& warp : block.warps) warp.barrier.expected = WARP;
    block.barrier = Barrier();
    block.barrier.expected = static_cast<int>(threads);
    for (unsigned thread = 0; thread < threads; thread++) {
        Fiber& fiber = *block.fibers[thread];
        fiber.done = false;
        fiber.waits_for = nullptr;
        fiber.exchanges = 0;
    }
}

// Shared memory is what is thread-local: a library keeps all of that in one place.
inline void spoil_shared_memory() {
    const auto spoil = [](dl_phdr_info* library, size_t, void*) {
        const ElfW(Phdr)*segment = library->dlpi_phdr, *end = segment + library->dlpi_phnum;
        char* memory = nullptr;
        size_t size = 0;
        bool mine = false;
        for (; segment != end; segment++) {
            const uintptr_t begin = library->dlpi_addr + segment->p_vaddr, at = reinterpret_cast<uintptr_t>(&block);
            if (segment->p_type == PT_LOAD && begin <= at && at < begin + segment->p_memsz) mine = true;
            if (segment->p_type == PT_TLS) memory = static_cast<char*>(library->dlpi_tls_data), size = segment->p_memsz;
        }
        if (mine && memory != nullptr) std::memset(memory, 0xa5, size);
        return mine ? 1 : 0;
    };
    dl_iterate_phdr(spoil, nullptr);
}

// Run the threads in turn, the other way round if `reversed`, until all have ended.
inline void run_block(unsigned threads, bool reversed) {
    spoil_shared_memory();
    prepare(threads);
    for (bool progress = true; progress;) {
        progress = false;
        for (unsigned turn = 0; turn < threads; turn++) {
            const unsigned thread = reversed ? threads - 1 - turn : turn;
            if (!block.fibers[thread]->ready()) continue;
            resume(thread);
            progress = true;
        }
    }
    for (unsigned thread = 0; thread < threads; thread++) {
        thread_index.x = thread;
        if (!block.fibers[thread]->done) fail("waits for threads that never come");
    }
}

inline void run_grid(void (*kernel)(const void*), const void* arguments, unsigned blocks, unsigned threads, bool reversed) {
    block.kernel = kernel;
    block.arguments = arguments;
    grid_size.x = blocks;
    block_size.x = threads;
    for (unsigned turn = 0; turn < blocks; turn++) {
        block_index.x = reversed ? blocks - 1 - turn : turn;
        run_block(threads, reversed);
    }
}

}  // namespace emulator

#define threadIdx emulator::thread_index
#define blockIdx emulator::block_index
#define blockDim emulator::block_size
#define gridDim emulator::grid_size
#define __global__
#define __device__
#define __grid_constant__
#define __launch_bounds__(threads)
#define __shared__ static thread_local

using std::max;
using std::min;

inline void __syncthreads() { emulator::wait(emulator::block.barrier); }
inline void __threadfence() {}

inline void check_mask(unsigned mask) {
    if (mask != 0xffffffffu) emulator::fail("only whole warps exchange values here");
}

inline unsigned __ballot_sync(unsigned mask, bool vote) {
    check_mask(mask);
    const unsigned long long* votes = emulator::exchange(vote ? 1ull : 0ull, "ballot");
    unsigned bits = 0;
    for (int lane = 0; lane < emulator::WARP; lane++) bits |= static_cast<unsigned>(votes[lane]) << lane;
    return bits;
}

template <typename Value>
Value __shfl_xor_sync(unsigned mask, Value value, int distance) {
    check_mask(mask);
    const unsigned long long* slots = emulator::exchange(value, "shuffle xor");
    return emulator::taken<Value>(slots, (threadIdx.x % emulator::WARP) ^ distance);
}

template <typename Value>
Value __shfl_up_sync(unsigned mask, Value value, unsigned distance) {
    check_mask(mask);
    const unsigned long long* slots = emulator::exchange(value, "shuffle up");
    const unsigned lane = threadIdx.x % emulator::WARP;
    return emulator::taken<Value>(slots, lane < distance ? lane : lane - distance);
}

inline unsigned atomicAdd(unsigned* address, unsigned value) {
    const unsigned before = *address;
    *address += value;
    return before;
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

inline float __uint_as_float(unsigned bits) {
    float number;
    std::memcpy(&number, &bits, sizeof bits);
    return number;
}

inline unsigned __float_as_uint(float number) {
    unsigned bits;
    std::memcpy(&bits, &number, sizeof bits);
    return bits;
}
