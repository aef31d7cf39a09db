// What a payload says of an element: whole numbers of 8, 4 and 2 bits, those of 2 bits and a half, and floats of 8.
namespace gradwire::GRADWIRE_LEVEL {

constexpr int HALVES = -1;  // in place of an exponent's bits: codes stand for whole numbers and a half

using C8 = int8_t __attribute__((vector_size(8)));

GRADWIRE_INLINE C8 to_bytes(I8 codes) {
#if GRADWIRE_AVX2
    const __m128i places = _mm_set1_epi32(0x0c080400);  // the lowest byte of each of four
    const __m256i wide = bit_cast<__m256i>(codes);
    const __m128i low = _mm_shuffle_epi8(_mm256_castsi256_si128(wide), places);
    const __m128i high = _mm_shuffle_epi8(_mm256_extracti128_si256(wide, 1), places);
    return bit_cast<C8>(_mm_cvtsi128_si64(_mm_unpacklo_epi32(low, high)));
#else
    return __builtin_convertvector(codes, C8);
#endif
}

GRADWIRE_INLINE I8 from_bytes(C8 bytes) {
#if GRADWIRE_AVX2
    return bit_cast<I8>(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bit_cast<int64_t>(bytes))));
#else
    return __builtin_convertvector(bytes, I8);
#endif
}

GRADWIRE_INLINE H8 to_halves(C8 bytes) {
#if GRADWIRE_AVX2
    return bit_cast<H8>(_mm_cvtepi8_epi16(_mm_cvtsi64_si128(bit_cast<int64_t>(bytes))));
#else
    using S8 = int16_t __attribute__((vector_size(16)));
    return bit_cast<H8>(__builtin_convertvector(bytes, S8));
#endif
}

// A whole number for each lane in so many bits, two's complements, the first lane's lowest: LANES * BITS / 8 bytes.
template <int BITS>
GRADWIRE_INLINE void write_codes(uint8_t* to, F8 levels) {
    const I8 codes = __builtin_convertvector(levels, I8);
    if constexpr (BITS == 8) {
        const C8 narrow = to_bytes(codes);
        std::memcpy(to, &narrow, sizeof(narrow));
    } else {
        const I8 places = I8{0, 1, 2, 3, 4, 5, 6, 7} * BITS;
        using I4 = int32_t __attribute__((vector_size(16)));
        const I8 fields = (codes & ((1 << BITS) - 1)) << places;
        I4 halves[2];
        std::memcpy(halves, &fields, sizeof(halves));
        const I4 four = halves[0] | halves[1];
        const int32_t word = (four[0] | four[1]) | (four[2] | four[3]);
        std::memcpy(to, &word, BITS);
    }
}

template <int BITS>
GRADWIRE_INLINE F8 read_codes(const uint8_t* from) {
    if constexpr (BITS == 8) {
        C8 narrow;
        std::memcpy(&narrow, from, sizeof(narrow));
        return __builtin_convertvector(from_bytes(narrow), F8);
    } else {
        int32_t word = 0;
        std::memcpy(&word, from, BITS);
        const I8 places = 32 - BITS - I8{0, 1, 2, 3, 4, 5, 6, 7} * BITS;
        const I8 all = {word, word, word, word, word, word, word, word};
        return __builtin_convertvector((all << places) >> (32 - BITS), F8);
    }
}

// Floats of 8 bits, so many of them EXPONENT; powers of two with 7. The smallest one with a mantissa is 2^LEAST. Zero is
// never negative.
template <int EXPONENT>
struct Floats {
    static constexpr int MANTISSA = 7 - EXPONENT, LEAST = EXPONENT == 4 ? -6 : EXPONENT == 5 ? -14 : -126;
    static constexpr int32_t ONE = 1 << 23, BIAS = 127;  // of float32: its exponent counts by ONE from -BIAS on

    // What lies between neighbours of each value, as float32 bits: a power of two.
    static GRADWIRE_INLINE I8 distance(F8 value) {
        const I8 power = bit_cast<I8>(value) & (0xff * ONE), least = I8{} + (LEAST + BIAS) * ONE;
        return (power > least ? power : least) - MANTISSA * ONE;
    }

    // So many distances, a whole number: 0 only where they are the least.
    static GRADWIRE_INLINE void write(uint8_t* to, F8 count, I8 distance) {
        const I8 powers = (distance >> (23 - MANTISSA)) - ((LEAST - MANTISSA + BIAS) << MANTISSA);
        const I8 sign = (bit_cast<I8>(count) >> 24) & 0x80;
        const C8 narrow = to_bytes((__builtin_convertvector(absolute(count), I8) + powers) | sign);
        std::memcpy(to, &narrow, sizeof(narrow));
    }

    // What codes stand for over SCALE: e4m3 is read as float16, whose exponents are 8 less.
    static constexpr float SCALE = EXPONENT == 4 ? 256.0f : 1.0f;
    static GRADWIRE_INLINE F8 read(const uint8_t* from) {
        C8 bytes;
        std::memcpy(&bytes, from, sizeof(bytes));
        if constexpr (EXPONENT == 7) {
            const I8 bits = from_bytes(bytes);
            return bit_cast<F8>(((bits & 0x7f) << 23) | (bits & INT32_MIN));
        } else {
            constexpr uint16_t SIGN_AND_SIZE = EXPONENT == 4 ? 0xbf80 : 0xff00;
            return widened((to_halves(bytes) << (10 - MANTISSA)) & SIGN_AND_SIZE, Float16{});
        }
    }
};

}  // namespace gradwire::GRADWIRE_LEVEL
