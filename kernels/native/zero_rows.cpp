// Rows of parameters in a flat buffer: which have an element other than zero, and zeros for the others.
#include <cstring>

#include "operations.hpp"

namespace gradwire {

namespace {

template <class Bits>
bool any(const char* values, int64_t numel) {
    constexpr Bits MAGNITUDE = static_cast<Bits>(~Bits{0}) >> (sizeof(Bits) > 1);  // a float's zero may have a sign
    const Bits* bits = reinterpret_cast<const Bits*>(values);
    for (int64_t i = 0; i < numel; ++i)
        if (bits[i] & MAGNITUDE) return true;
    return false;
}

// Calls `work` with the first byte of each row that is not used, the row's mark, and its elements.
template <class Work>
void each_unused(const RowsJob& job, const Work& work) {
    for (const Rows* block = job.blocks; block != job.blocks + job.count; ++block)
        for (int64_t row = 0; row < block->rows; ++row)
            if (uint8_t& used = job.used[block->number + row]; !used)
                work(job.values + (block->start + row * block->size) * job.size, used, block->size);
}

}  // namespace

void mark_rows(const RowsJob& job) {
    const auto found = job.size == 4 ? any<uint32_t> : job.size == 2 ? any<uint16_t> : any<uint8_t>;
    each_unused(job, [=](const char* row, uint8_t& used, int64_t size) { used = found(row, size); });
}

void clear_rows(const RowsJob& job) {
    each_unused(job, [&](char* row, uint8_t&, int64_t size) { std::memset(row, 0, size * job.size); });
}

}  // namespace gradwire
