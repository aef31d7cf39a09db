// Hadamard matrices times blocks: sums and differences of neighbours, then of pairs, and so on.
namespace gradwire::GRADWIRE_LEVEL {

constexpr int64_t MOST_ROTATED = 8;  // vectors that are held in registers

// The other of each pair of lanes that are WIDTH apart.
template <int WIDTH>
GRADWIRE_INLINE F8 swapped(F8 value) {
#if GRADWIRE_AVX2
    const __m256 lanes = bit_cast<__m256>(value);
    if constexpr (WIDTH == 1) return bit_cast<F8>(_mm256_permute_ps(lanes, 0xb1));
    else if constexpr (WIDTH == 2) return bit_cast<F8>(_mm256_permute_ps(lanes, 0x4e));
    else return bit_cast<F8>(_mm256_permute2f128_ps(lanes, lanes, 1));
#else
    F8 others;
    for (int lane = 0; lane < LANES; ++lane) others[lane] = value[lane ^ WIDTH];
    return others;
#endif
}

// The sum in the first of each pair of lanes, the difference in the second.
template <int WIDTH>
GRADWIRE_INLINE F8 folded(F8 value) {
    constexpr int32_t MINUS = INT32_MIN;
    const I8 lanes = {0, 1, 2, 3, 4, 5, 6, 7};
    const I8 second = (lanes & WIDTH) != 0;
    return swapped<WIDTH>(value) + bit_cast<F8>(bit_cast<I8>(value) ^ (second & MINUS));
}

GRADWIRE_INLINE void fold(F8& first, F8& second) {
    const F8 sum = first + second;
    second = first - second;
    first = sum;
}

// What happens to numbers on their way out of a block's last sums, and before its first ones.
GRADWIRE_INLINE void write_rotated(const RotateJob& job, float* to, int64_t place, F8 value) {
    value *= job.factor;
    store(to, job.back ? value * load(job.signs + place) : value);
}

GRADWIRE_INLINE F8 read_rotated(const RotateJob& job, const float* from, int64_t place) {
    const F8 value = load(from);
    return job.back ? value : value * load(job.signs + place);
}

// COUNT vectors of a block, which begin at `place` of it; the block is no longer where ALL is set.
template <int COUNT, bool ALL>
GRADWIRE_INLINE void rotate_part(const RotateJob& job, float* values, int64_t place) {
    F8 parts[COUNT];
    for (int i = 0; i < COUNT; ++i) {
        const F8 value = read_rotated(job, values + i * LANES, place + i * LANES);
        parts[i] = folded<4>(folded<2>(folded<1>(value)));
    }
    for (int width = 1; width < COUNT; width *= 2)
        for (int i = 0; i < COUNT; ++i)
            if ((i & width) == 0) fold(parts[i], parts[i + width]);
    for (int i = 0; i < COUNT; ++i) {
        float* to = values + i * LANES;
        if (ALL) write_rotated(job, to, place + i * LANES, parts[i]);
        else store(to, parts[i]);
    }
}

// The sums and differences of numbers that are `width` apart, or the last ones of a block.
template <bool LAST>
GRADWIRE_INLINE void fold_apart(const RotateJob& job, float* values, int64_t width) {
    for (int64_t start = 0; start < job.block; start += 2 * width)
        for (int64_t at = start; at < start + width; at += LANES) {
            F8 first = load(values + at), second = load(values + at + width);
            fold(first, second);
            if (LAST) {
                write_rotated(job, values + at, at, first);
                write_rotated(job, values + at + width, at + width, second);
            } else {
                store(values + at, first);
                store(values + at + width, second);
            }
        }
}

inline void rotate_large_block(const RotateJob& job, float* values) {
    for (int64_t place = 0; place < job.block; place += MOST_ROTATED * LANES)
        rotate_part<MOST_ROTATED, false>(job, values + place, place);
    int64_t width = MOST_ROTATED * LANES;
    for (; 2 * width < job.block; width *= 2) fold_apart<false>(job, values, width);
    fold_apart<true>(job, values, width);
}

// A block that is smaller than a vector.
inline void rotate_small_block(const RotateJob& job, float* values) {
    if (!job.back)
        for (int64_t i = 0; i < job.block; ++i) values[i] *= job.signs[i];
    for (int64_t width = 1; width < job.block; width *= 2)
        for (int64_t i = 0; i < job.block; ++i)
            if ((i & width) == 0) {
                const float sum = values[i] + values[i + width];
                values[i + width] = values[i] - values[i + width];
                values[i] = sum;
            }
    for (int64_t i = 0; i < job.block; ++i) values[i] *= job.factor * (job.back ? job.signs[i] : 1.0f);
}

inline void rotate_block(const RotateJob& job, float* values) {
    switch (job.block) {
        case 1: case 2: case 4: rotate_small_block(job, values); break;
        case LANES: rotate_part<1, true>(job, values, 0); break;
        case 2 * LANES: rotate_part<2, true>(job, values, 0); break;
        case 4 * LANES: rotate_part<4, true>(job, values, 0); break;
        case 8 * LANES: rotate_part<8, true>(job, values, 0); break;
        default: rotate_large_block(job, values);
    }
}

// A block with fewer elements is cut into smaller powers of two.
inline void rotate(const RotateJob& job, int64_t first_block, int64_t last_block) {
    for (int64_t index = first_block; index < last_block; ++index) {
        auto [first, left] = job.places.of(index, job.block, INT64_MAX);
        if (left == job.block) {
            rotate_block(job, job.values + first);
            continue;
        }
        for (RotateJob part = job; left; part.block /= 2) {
            if (part.block > left) continue;
            part.factor = rotation_factor(part.block);
            rotate_block(part, job.values + first);
            first += part.block;
            left -= part.block;
        }
    }
}

}  // namespace gradwire::GRADWIRE_LEVEL
