// 1-bit payloads. A block is read once from memory and stays in the nearest cache until its residual is written.
namespace gradwire::GRADWIRE_LEVEL {

constexpr int64_t SUM_RUN = 4096;  // elements summed in float32 before the sum goes on in float64

// Adds the gradient to the residual, writes sign bits, returns the magnitudes; of `count` elements, at most LANES.
template <class Element>
GRADWIRE_INLINE F8 pack_lanes(const Element* grad, float* residual, uint8_t* bits, int64_t count) {
    const bool full = count == LANES;
    F8 value = full ? load(grad) : load(grad, count);
    if (residual) {
        value += full ? load(residual) : load(residual, count);
        full ? store(residual, value) : store(residual, value, count);
    }
    *bits = static_cast<uint8_t>(mask(value >= 0.0f));
    return absolute(value);
}

template <class Element, bool HAS_RESIDUAL>
float pack_signs(const Element* grad, float* residual, uint8_t* bits, int64_t count) {
    double total = 0;
    for (int64_t start = 0; start < count; start += SUM_RUN) {
        const int64_t end = start + SUM_RUN < count ? start + SUM_RUN : count;
        F8 sums[4] = {};
        int64_t i = start;
        for (; i + 4 * LANES <= end; i += 4 * LANES)
            for (int j = 0; j < 4; ++j) {
                const int64_t at = i + j * LANES;
                sums[j] += pack_lanes(grad + at, HAS_RESIDUAL ? residual + at : nullptr, bits + at / 8, LANES);
            }
        for (; i < end; i += LANES)
            sums[0] += pack_lanes(grad + i, HAS_RESIDUAL ? residual + i : nullptr, bits + i / 8,
                                  end - i < LANES ? end - i : LANES);
        total += sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    }
    return static_cast<float>(total / static_cast<double>(count > 0 ? count : 1));
}

// Takes `scale * sign` away from a block of the residual.
inline void keep_rest(float* residual, float scale, int64_t count) {
    const F8 positive = broadcast(scale), negative = -positive;
    const auto rest = [&](F8 value) __attribute__((always_inline)) {
        return value - (value >= 0.0f ? positive : negative);
    };
    const int64_t whole = count / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) store(residual + i, rest(load(residual + i)));
    if (whole < count) store(residual + whole, rest(load(residual + whole, count - whole)), count - whole);
}

template <class Element>
void pack_blocks(const PackJob& job, int64_t first_block, int64_t last_block) {
    for (int64_t index = first_block; index < last_block; ++index) {
        const int64_t row = index / job.blocks, column = index % job.blocks, start = index * job.block;
        const int64_t left = job.numel - start;
        const int64_t count = left < 0 ? 0 : left < job.block ? left : job.block;
        const Element* grad = static_cast<const Element*>(job.grad) + (count ? start : 0);
        float* residual = job.residual ? job.residual + (count ? start : 0) : nullptr;
        uint8_t* bits = job.bits + row * job.bit_stride + column * (job.block / 8);
        const float scale = residual ? pack_signs<Element, true>(grad, residual, bits, count)
                                     : pack_signs<Element, false>(grad, residual, bits, count);
        const int64_t written = (count + 7) / 8;
        std::memset(bits + written, 0xff, static_cast<size_t>(job.block / 8 - written));
        job.scales[row * job.scale_stride + column] = scale;
        if (residual) keep_rest(residual, scale, count);
    }
}

inline void pack(const PackJob& job, int64_t first_block, int64_t last_block) {
    with_element(job.format, [&](auto* element) {
        pack_blocks<std::remove_pointer_t<decltype(element)>>(job, first_block, last_block);
    });
}

// `scale` with the signs that eight bits of `word` tell, from bit `8 * group` on.
GRADWIRE_INLINE F8 signed_scale(U8 word, int group, F8 positive, F8 negative) {
#if GRADWIRE_AVX2
    const U8 on_top = word << (U8{31, 30, 29, 28, 27, 26, 25, 24} - static_cast<uint32_t>(8 * group));
    return bit_cast<F8>(
        _mm256_blendv_ps(bit_cast<__m256>(negative), bit_cast<__m256>(positive), bit_cast<__m256>(on_top)));
#else
    const U8 place = U8{1, 2, 4, 8, 16, 32, 64, 128} << (8 * group);
    return (word & place) == place ? positive : negative;
#endif
}

// The mean over voters of `8 * GROUPS` elements of one block.
template <int GROUPS, class Element>
GRADWIRE_INLINE void unpack_lanes(const UnpackJob& job, const float* scales, const uint8_t* bits, Element* out,
                                  float divisor, float factor, int64_t count) {
    F8 total[GROUPS];
    for (int j = 0; j < GROUPS; ++j) total[j] = broadcast(-0.0f);  // plus x it is x, the sign of zero included
    for (int64_t voter = 0; voter < job.voters; ++voter) {
        uint32_t packed = 0;
        std::memcpy(&packed, bits + voter * job.bit_voter_stride, GROUPS);
        const U8 word = U8{} + packed;
        const F8 scale = broadcast(scales[voter * job.scale_voter_stride]);
        for (int j = 0; j < GROUPS; ++j) total[j] += signed_scale(word, j, scale, -scale);
    }
    for (int j = 0; j < GROUPS; ++j) {
        const F8 mean = factor != 0.0f ? total[j] * factor : total[j] / divisor;
        count == GROUPS * LANES ? store(out + j * LANES, mean) : store(out + j * LANES, mean, count);
    }
}

template <class Element>
void unpack_blocks(const UnpackJob& job, int64_t first_block, int64_t last_block) {
    const float divisor = static_cast<float>(job.voters);
    const bool exact = (job.voters & (job.voters - 1)) == 0;  // the inverse of a power of two loses nothing
    const float factor = exact ? 1.0f / divisor : 0.0f;
    for (int64_t index = first_block; index < last_block; ++index) {
        const int64_t row = index / job.blocks, column = index % job.blocks, start = index * job.block;
        const int64_t left = job.numel - start, count = left < job.block ? left : job.block;
        if (count <= 0) return;
        const float* scales = job.scales + row * job.scale_stride + column;
        const uint8_t* bits = job.bits + row * job.bit_stride + column * (job.block / 8);
        Element* out = static_cast<Element*>(job.out) + start;
        int64_t i = 0;
        for (; i + 4 * LANES <= count; i += 4 * LANES)
            unpack_lanes<4>(job, scales, bits + i / 8, out + i, divisor, factor, 4 * LANES);
        for (; i < count; i += LANES)
            unpack_lanes<1>(job, scales, bits + i / 8, out + i, divisor, factor,
                            count - i < LANES ? count - i : LANES);
    }
}

inline void unpack(const UnpackJob& job, int64_t first_block, int64_t last_block) {
    with_element(job.format, [&](auto* element) {
        unpack_blocks<std::remove_pointer_t<decltype(element)>>(job, first_block, last_block);
    });
}

}  // namespace gradwire::GRADWIRE_LEVEL
