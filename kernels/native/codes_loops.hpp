// What a payload says of an element: whole numbers of 8, 4 and 2 bits, which lie as kernels/quantization.py says.
namespace gradwire::GRADWIRE_LEVEL {

// What code 0 stands for: with 2 bits no code stands for zero.
template <int BITS>
constexpr float OFFSET = BITS == 2 ? 0.5f : 0.0f;

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

}  // namespace gradwire::GRADWIRE_LEVEL
