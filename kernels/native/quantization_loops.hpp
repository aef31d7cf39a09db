// Payloads of 8, 4 and 2 bits. A block is read twice, the second time from the nearest cache.
namespace gradwire::GRADWIRE_LEVEL {

constexpr int DRAWN = 4 * LANES;  // random numbers in one go

// The 64 bits of each lane's product with `factor`, by halves.
GRADWIRE_INLINE void multiply_wide(U8 value, uint32_t factor, U8& high, U8& low) {
#if GRADWIRE_AVX2
    const __m256i lanes = bit_cast<__m256i>(value), factors = _mm256_set1_epi32(static_cast<int>(factor));
    const __m256i even = _mm256_mul_epu32(lanes, factors);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(lanes, 32), factors);
    high = bit_cast<U8>(_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa));
    low = bit_cast<U8>(_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa));
#else
    for (int lane = 0; lane < LANES; ++lane) {
        const uint64_t product = uint64_t{value[lane]} * factor;
        high[lane] = static_cast<uint32_t>(product >> 32);
        low[lane] = static_cast<uint32_t>(product);
    }
#endif
}

// Philox4x32-10: numbers from [0, 1), multiples of 2^-24, four for each of LANES counters from `counter` on.
inline void draw_uniform(uint64_t key, uint64_t counter, float* numbers) {
    U8 words[4] = {}, high, other_high, low, other_low;
    for (int lane = 0; lane < LANES; ++lane) {
        words[0][lane] = static_cast<uint32_t>(counter + static_cast<uint64_t>(lane));
        words[1][lane] = static_cast<uint32_t>((counter + static_cast<uint64_t>(lane)) >> 32);
    }
    uint32_t first_key = static_cast<uint32_t>(key), second_key = static_cast<uint32_t>(key >> 32);
    for (int round = 0; round < 10; ++round, first_key += 0x9E3779B9u, second_key += 0xBB67AE85u) {
        multiply_wide(words[0], 0xD2511F53u, high, low);
        multiply_wide(words[2], 0xCD9E8D57u, other_high, other_low);
        words[0] = other_high ^ words[1] ^ first_key;
        words[2] = high ^ words[3] ^ second_key;
        words[1] = other_low;
        words[3] = low;
    }
    for (int word = 0; word < 4; ++word) {
        float uniform[LANES];
        store(uniform, __builtin_convertvector(bit_cast<I8>(words[word] >> 8), F8) * 0x1p-24f);
        for (int lane = 0; lane < LANES; ++lane) numbers[4 * lane + word] = uniform[lane];
    }
}

// To nearest, ties to even, below 2^22: what is added leaves no bits behind the point.
GRADWIRE_INLINE F8 rounded(F8 value) { return (value + 0x1.8p23f) - 0x1.8p23f; }

GRADWIRE_INLINE F8 floored(F8 value) {
    const F8 near = rounded(value);
    return near - bit_cast<F8>((near > value) & bit_cast<I8>(broadcast(1.0f)));
}

GRADWIRE_INLINE F8 limited(F8 value, float limit) {
    const F8 most = broadcast(limit), above = value > most ? most : value;
    return above < -most ? -most : above;
}

template <class Element>
GRADWIRE_INLINE int32_t largest_magnitude(const Element* grad, Residual residual, int64_t count) {
    I8 largest[4] = {};
    over_lanes<4>(0, count, [&](int64_t at, auto lanes, int turn) GRADWIRE_LAMBDA {
        F8 value = load(grad + at, lanes);
        if (residual) value += load(residual.before + at, lanes);
        const I8 size = magnitude(value);
        largest[turn] = size > largest[turn] ? size : largest[turn];
    });
    int32_t found = 0;
    for (const I8& each : largest)
        for (int lane = 0; lane < LANES; ++lane) found = each[lane] > found ? each[lane] : found;
    return found;  // NaN is larger than infinity
}

// A block's elements from the first on, its bytes, and where its random numbers begin.
template <class Element>
struct Block {
    const Element* grad;
    Residual residual;
    uint8_t* codes;
    int64_t count;
    uint64_t counter;
};

// A code for each of `levels`, at random with the numbers at `random`, which may be null; what the codes stand for.
template <int BITS, bool RANDOM>
GRADWIRE_INLINE F8 write_nearest(const QuantizeJob& job, F8 levels, const float* random, uint8_t* codes) {
    levels -= OFFSET<BITS>;
    if constexpr (RANDOM) levels = floored(levels + load(random));
    else levels = rounded(levels);
    if constexpr (OFFSET<BITS> != 0) levels += OFFSET<BITS>;
    levels = limited(levels, job.limit);
    write_codes<BITS>(codes, levels - OFFSET<BITS>);
    return levels;
}

template <int BITS, bool RANDOM, class Element>
float quantize_block(const QuantizeJob& job, const Block<Element>& block) {
    const int32_t bits = largest_magnitude(block.grad, block.residual, block.count);
    const float largest = bit_cast<float>(bits), scale = largest / job.steps;
    const F8 divisor = broadcast(bits ? largest : 1.0f), finite = broadcast(bits < 0x7f800000 ? 1.0f : 0.0f);
    alignas(32) float random[DRAWN];
    over_lanes<1>(0, block.count, [&](int64_t at, auto lanes, int) GRADWIRE_LAMBDA {
        F8 value = load(block.grad + at, lanes);
        if (block.residual) value += load(block.residual.before + at, lanes);
        const int64_t within = at % DRAWN;
        if (RANDOM && within == 0) draw_uniform(job.seed, block.counter + static_cast<uint64_t>(at / 4), random);
        F8 levels = finite > 0.0f ? value / divisor * job.steps : broadcast(0.0f);
        levels = write_nearest<BITS, RANDOM>(job, levels, random + within, block.codes + at * BITS / 8);
        if (block.residual) write(block.residual.after + at, value - levels * scale, lanes, block.residual.streams);
    });
    return scale;
}

template <int BITS, bool RANDOM, class Element>
void quantize_blocks_of(const QuantizeJob& job, int64_t first_block, int64_t last_block) {
    const int64_t bytes = job.block * BITS / 8;
    for (int64_t index = first_block; index < last_block; ++index) {
        const int64_t row = index / job.blocks, column = index % job.blocks;
        const auto [from, count] = job.places.of(index, job.block, job.numel);
        uint8_t* codes = job.codes + row * job.code_stride + column * bytes;
        const Block<Element> block{static_cast<const Element*>(job.grad) + from, job.residual.from(from), codes, count,
                                   job.counter + static_cast<uint64_t>(index * job.block / 4)};
        job.scales[row * job.scale_stride + column] = quantize_block<BITS, RANDOM>(job, block);
        const int64_t bits = count * BITS, written = (bits + 7) / 8;
        std::memset(codes + written, 0, static_cast<size_t>(bytes - written));
        if (bits % 8) codes[written - 1] &= static_cast<uint8_t>((1 << bits % 8) - 1);  // at random it need not be zero
    }
    if (job.residual.streams) end_stream();
}

// Calls `function` with the number of bits as a constant.
template <class Function>
void with_bits(int64_t bits, Function function) {
    if (bits == 8) function(std::integral_constant<int, 8>{});
    else if (bits == 4) function(std::integral_constant<int, 4>{});
    else function(std::integral_constant<int, 2>{});
}

inline void quantize(const QuantizeJob& job, int64_t first_block, int64_t last_block) {
    with_element(job.format, [&](auto* element) {
        using Element = std::remove_pointer_t<decltype(element)>;
        with_bits(job.bits, [&](auto bits) {
            constexpr int BITS = decltype(bits)::value;
            if (job.random) quantize_blocks_of<BITS, true, Element>(job, first_block, last_block);
            else quantize_blocks_of<BITS, false, Element>(job, first_block, last_block);
        });
    });
}

// A block of the votes: where the scales and the codes of the first voter lie.
struct Codes {
    const float* scales;
    const uint8_t* codes;
};

// The sum over voters, in their order, of `scale * code`, each rounded, of COUNT vectors.
template <int BITS, int COUNT>
GRADWIRE_INLINE void sum_codes(const DequantizeJob& job, const Codes& votes, int64_t at, F8 (&total)[COUNT]) {
    for (int j = 0; j < COUNT; ++j) total[j] = broadcast(-0.0f);  // plus x it is x, the sign of zero included
    const uint8_t* codes = votes.codes + at * BITS / 8;
    for (int64_t voter = 0; voter < job.voters; ++voter) {
        const uint8_t* from = codes + voter * job.code_voter_stride;
        const float scale = votes.scales[voter * job.scale_voter_stride];
        for (int j = 0; j < COUNT; ++j) {
            F8 levels = read_codes<BITS>(from + j * BITS);
            if constexpr (OFFSET<BITS> != 0) levels += OFFSET<BITS>;
            total[j] += broadcast(scale) * levels;
        }
    }
}

template <int BITS, bool STREAMS, bool EXACT, class Element>
void dequantize_block(const DequantizeJob& job, const Codes& votes, Element* out, float* residual, int64_t count) {
    const float voters = static_cast<float>(job.voters);
    int64_t at = 0;
    for (; at + GROUPS * LANES <= count; at += GROUPS * LANES) {
        F8 total[GROUPS];
        sum_codes<BITS>(job, votes, at, total);
        for (int j = 0; j < GROUPS; ++j) {
            const F8 value = mean<EXACT>(total[j], voters);
            if (residual) hold_back<Element>(residual + at + j * LANES, value, Whole{});
            if (STREAMS) stream(out + at + j * LANES, value);
            else store(out + at + j * LANES, value);
        }
    }
    over_lanes<1>(at, count, [&](int64_t place, auto lanes, int) GRADWIRE_LAMBDA {
        F8 total[1];
        sum_codes<BITS>(job, votes, place, total);
        const F8 value = mean<EXACT>(total[0], voters);
        if (residual) hold_back<Element>(residual + place, value, lanes);
        store(out + place, value, lanes);
    });
}

template <int BITS, bool EXACT, class Element>
void dequantize_blocks(const DequantizeJob& job, int64_t first_block, int64_t last_block) {
    for (int64_t index = first_block; index < last_block; ++index) {
        const int64_t row = index / job.blocks, column = index % job.blocks;
        const auto [start, count] = job.places.of(index, job.block, job.numel);
        const Codes votes{job.scales + row * job.scale_stride + column,
                          job.codes + row * job.code_stride + column * (job.block * BITS / 8)};
        Element* out = static_cast<Element*>(job.out) + start;
        float* residual = job.residual ? job.residual + start : nullptr;
        if (job.streams && unaligned(out, 1) == 0)
            dequantize_block<BITS, true, EXACT>(job, votes, out, residual, count);
        else dequantize_block<BITS, false, EXACT>(job, votes, out, residual, count);
    }
    if (job.streams) end_stream();
}

inline void dequantize(const DequantizeJob& job, int64_t first_block, int64_t last_block) {
    with_element(job.format, [&](auto* element) {
        using Element = std::remove_pointer_t<decltype(element)>;
        with_bits(job.bits, [&](auto bits) {
            constexpr int BITS = decltype(bits)::value;
            if ((job.voters & (job.voters - 1)) == 0)
                dequantize_blocks<BITS, true, Element>(job, first_block, last_block);
            else dequantize_blocks<BITS, false, Element>(job, first_block, last_block);
        });
    });
}

}  // namespace gradwire::GRADWIRE_LEVEL
