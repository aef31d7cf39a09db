// 1-bit payloads. A block is read once from memory and stays in the nearest cache until its residual is written.
namespace gradwire::GRADWIRE_LEVEL {

constexpr int64_t SUM_RUN = 4096;  // elements summed in float32 before the sum goes on in float64
constexpr int GROUPS = 8;          // vectors whose sign bits are one word of 64

// The signs that the bits of a byte stand for, lowest bit first.
struct Signs {
    float of[256][LANES];
};

constexpr Signs all_signs() {
    Signs signs{};
    for (int byte = 0; byte < 256; ++byte)
        for (int bit = 0; bit < LANES; ++bit) signs.of[byte][bit] = (byte >> bit & 1) != 0 ? 1.0f : -1.0f;
    return signs;
}

alignas(64) constexpr Signs SIGNS = all_signs();

// Writes sign bits, and the sum of gradient and residual to the residual after, unless that is to be written around the
// caches; returns the mean magnitude.
template <class Element, bool HAS_RESIDUAL>
float pack_signs(const Element* grad, Residual residual, uint8_t* bits, int64_t count) {
    double total = 0;
    for (int64_t start = 0; start < count; start += SUM_RUN) {
        F8 sums[4] = {};
        over_lanes<4>(start, start + SUM_RUN < count ? start + SUM_RUN : count,
                      [&](int64_t at, auto lanes, int turn) GRADWIRE_LAMBDA {
                          F8 value = load(grad + at, lanes);
                          if (HAS_RESIDUAL) {
                              value += load(residual.before + at, lanes);
                              if (!residual.streams) store(residual.after + at, value, lanes);
                          }
                          bits[at / 8] = static_cast<uint8_t>(mask(value >= 0.0f));
                          sums[turn] += absolute(value);
                      });
        total += sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    }
    return static_cast<float>(total / static_cast<double>(count > 0 ? count : 1));
}

// Takes `scale * sign` away from a block of the residual.
inline void keep_rest(float* residual, float scale, int64_t count) {
    const F8 positive = broadcast(scale), negative = -positive;
    over_lanes<1>(0, count, [&](int64_t at, auto lanes, int) GRADWIRE_LAMBDA {
        const F8 value = load(residual + at, lanes);
        store(residual + at, value - (value >= 0.0f ? positive : negative), lanes);
    });
}

// The same from the gradient and the residual before, which the nearest cache holds, around the caches.
template <class Element>
void stream_rest(const Element* grad, Residual residual, float scale, int64_t count) {
    const F8 positive = broadcast(scale), negative = -positive;
    over_lanes<1>(0, count, [&](int64_t at, auto lanes, int) GRADWIRE_LAMBDA {
        const F8 value = load(grad + at, lanes) + load(residual.before + at, lanes);
        write(residual.after + at, value - (value >= 0.0f ? positive : negative), lanes, true);
    });
}

template <class Element>
void pack_blocks(const PackJob& job, int64_t first_block, int64_t last_block) {
    for (int64_t index = first_block; index < last_block; ++index) {
        const int64_t row = index / job.blocks, column = index % job.blocks;
        const auto [start, count] = job.places.of(index, job.block, job.numel);
        const Element* grad = static_cast<const Element*>(job.grad) + start;
        const Residual residual = job.residual.from(start);
        uint8_t* bits = job.bits + row * job.bit_stride + column * (job.block / 8);
        const float scale = residual ? pack_signs<Element, true>(grad, residual, bits, count)
                                     : pack_signs<Element, false>(grad, residual, bits, count);
        const int64_t written = (count + 7) / 8;
        std::memset(bits + written, 0xff, static_cast<size_t>(job.block / 8 - written));
        job.scales[row * job.scale_stride + column] = scale;
        if (residual.streams) stream_rest(grad, residual, scale, count);
        else if (residual) keep_rest(residual.after, scale, count);
    }
    if (job.residual.streams) end_stream();
}

inline void pack(const PackJob& job, int64_t first_block, int64_t last_block) {
    with_element(job.format, [&](auto* element) {
        pack_blocks<std::remove_pointer_t<decltype(element)>>(job, first_block, last_block);
    });
}

// A block of the votes: where the scales and the bits of the first voter lie.
struct Votes {
    const float* scales;
    const uint8_t* bits;
};

// The sum over voters, in their order, of `scale * sign` of COUNT vectors; a product with a sign is exact.
template <int COUNT>
GRADWIRE_INLINE void sum_votes(const UnpackJob& job, const Votes& votes, int64_t at, F8 (&total)[COUNT]) {
    for (int j = 0; j < COUNT; ++j) total[j] = broadcast(-0.0f);  // plus x it is x, the sign of zero included
    const uint8_t* bits = votes.bits + at / 8;
    for (int64_t voter = 0; voter < job.voters; ++voter) {
        uint64_t word = 0;
        std::memcpy(&word, bits + voter * job.bit_voter_stride, COUNT);
        const F8 scale = broadcast(votes.scales[voter * job.scale_voter_stride]);
        for (int j = 0; j < COUNT; ++j)
            total[j] = multiply_add(scale, load(SIGNS.of[word >> (8 * j) & 0xff]), total[j]);
    }
}

// EXACT: the inverse of the number of voters, a power of two, loses nothing.
template <bool EXACT>
GRADWIRE_INLINE F8 mean(F8 total, float voters) {
    return EXACT ? total * (1.0f / voters) : total / voters;
}

template <bool STREAMS, bool EXACT, class Element>
void unpack_block(const UnpackJob& job, const Votes& votes, Element* out, float* residual, int64_t count) {
    const float voters = static_cast<float>(job.voters);
    int64_t at = 0;
    for (; at + GROUPS * LANES <= count; at += GROUPS * LANES) {
        F8 total[GROUPS];
        sum_votes(job, votes, at, total);
        for (int j = 0; j < GROUPS; ++j) {
            const F8 value = mean<EXACT>(total[j], voters);
            if (residual) hold_back<Element>(residual + at + j * LANES, value, Whole{});
            if (STREAMS) stream(out + at + j * LANES, value);
            else store(out + at + j * LANES, value);
        }
    }
    over_lanes<1>(at, count, [&](int64_t place, auto lanes, int) GRADWIRE_LAMBDA {
        F8 total[1];
        sum_votes(job, votes, place, total);
        const F8 value = mean<EXACT>(total[0], voters);
        if (residual) hold_back<Element>(residual + place, value, lanes);
        store(out + place, value, lanes);
    });
}

template <bool EXACT, class Element>
void unpack_blocks(const UnpackJob& job, int64_t first_block, int64_t last_block) {
    for (int64_t index = first_block; index < last_block; ++index) {
        const int64_t row = index / job.blocks, column = index % job.blocks;
        const auto [start, count] = job.places.of(index, job.block, job.numel);
        const Votes votes{job.scales + row * job.scale_stride + column,
                          job.bits + row * job.bit_stride + column * (job.block / 8)};
        Element* out = static_cast<Element*>(job.out) + start;
        float* residual = job.residual ? job.residual + start : nullptr;
        if (job.streams && unaligned(out, 1) == 0) unpack_block<true, EXACT>(job, votes, out, residual, count);
        else unpack_block<false, EXACT>(job, votes, out, residual, count);
    }
    if (job.streams) end_stream();
}

inline void unpack(const UnpackJob& job, int64_t first_block, int64_t last_block) {
    with_element(job.format, [&](auto* element) {
        using Element = std::remove_pointer_t<decltype(element)>;
        if ((job.voters & (job.voters - 1)) == 0) unpack_blocks<true, Element>(job, first_block, last_block);
        else unpack_blocks<false, Element>(job, first_block, last_block);
    });
}

}  // namespace gradwire::GRADWIRE_LEVEL
