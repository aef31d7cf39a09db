// Eight floats at a time, in the instruction set of the file that includes this: conversions, masks, partial vectors.
#include <cstdint>
#include <cstring>
#if GRADWIRE_AVX2
#include <immintrin.h>
#endif

#define GRADWIRE_INLINE inline __attribute__((always_inline))

namespace gradwire::GRADWIRE_LEVEL {

using F8 = float __attribute__((vector_size(32)));
using I8 = int32_t __attribute__((vector_size(32)));
using U8 = uint32_t __attribute__((vector_size(32)));
using H8 = uint16_t __attribute__((vector_size(16)));

constexpr int64_t LANES = 8;

template <class To, class From>
GRADWIRE_INLINE To bit_cast(const From& value) {
    static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
    To result;
    std::memcpy(&result, &value, sizeof(To));
    return result;
}

GRADWIRE_INLINE F8 broadcast(float v) { return F8{v, v, v, v, v, v, v, v}; }

GRADWIRE_INLINE I8 magnitude(F8 value) { return bit_cast<I8>(value) & 0x7fffffff; }

GRADWIRE_INLINE F8 absolute(F8 value) { return bit_cast<F8>(magnitude(value)); }

GRADWIRE_INLINE float sum(F8 v) { return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7])); }

// Bit i of the result is set where lane i of a comparison holds.
GRADWIRE_INLINE uint32_t mask(I8 comparison) {
#if GRADWIRE_AVX2
    return static_cast<uint32_t>(_mm256_movemask_ps(bit_cast<__m256>(comparison)));
#else
    const I8 places = comparison & I8{1, 2, 4, 8, 16, 32, 64, 128};
    int32_t bits = 0;
    for (int lane = 0; lane < LANES; ++lane) bits |= places[lane];
    return static_cast<uint32_t>(bits);
#endif
}

GRADWIRE_INLINE F8 widened(H8 halves, Float16) {
#if GRADWIRE_AVX2
    return bit_cast<F8>(_mm256_cvtph_ps(bit_cast<__m128i>(halves)));
#else
    const U8 bits = __builtin_convertvector(halves, U8);
    const U8 shifted = (bits & 0x7fffu) << 13;
    const F8 finite = bit_cast<F8>(shifted) * 0x1p112f;  // moves the exponent, denormal numbers included
    const U8 special = (bits & 0x7c00u) == 0x7c00u;
    const U8 size = (special & (shifted | 0x7f800000u)) | (~special & bit_cast<U8>(finite));
    return bit_cast<F8>(size | ((bits & 0x8000u) << 16));
#endif
}

GRADWIRE_INLINE F8 widened(H8 halves, BFloat16) { return bit_cast<F8>(__builtin_convertvector(halves, U8) << 16); }

GRADWIRE_INLINE H8 narrowed(F8 value, Float16) {
#if GRADWIRE_AVX2
    return bit_cast<H8>(_mm256_cvtps_ph(bit_cast<__m256>(value), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    const U8 size = bit_cast<U8>(magnitude(value)), sign = (bit_cast<U8>(value) >> 16) & 0x8000u;
    const U8 normal = (size - 0x38000000u + 0xfffu + ((size >> 13) & 1u)) >> 13;  // half a step up, ties to even
    const U8 tiny = bit_cast<U8>(bit_cast<F8>(size) + 0.5f) - 0x3f000000u;        // the sum rounds at 2^-24
    const U8 is_tiny = size < 0x38800000u, is_huge = size >= 0x47800000u, is_nan = size > 0x7f800000u;
    const U8 special = 0x7c00u | (is_nan & 0x200u);
    const U8 finite = (is_tiny & tiny) | (~is_tiny & normal);
    return __builtin_convertvector((is_huge & special) | (~is_huge & finite) | sign, H8);
#endif
}

GRADWIRE_INLINE H8 narrowed(F8 value, BFloat16) {
    const U8 bits = bit_cast<U8>(value);
    const U8 rounded = bits + 0x7fffu + ((bits >> 16) & 1u);  // half a step up, ties to even
    const U8 is_nan = bit_cast<U8>(value != value);
    return __builtin_convertvector(((is_nan & (bits | 0x400000u)) | (~is_nan & rounded)) >> 16, H8);
}

GRADWIRE_INLINE F8 load(const float* from) {
    F8 value;
    std::memcpy(&value, from, sizeof(value));
    return value;
}

template <class Element>
GRADWIRE_INLINE F8 load(const Element* from) {
    H8 halves;
    std::memcpy(&halves, from, sizeof(halves));
    return widened(halves, Element{});
}

GRADWIRE_INLINE void store(float* to, F8 value) { std::memcpy(to, &value, sizeof(value)); }

template <class Element>
GRADWIRE_INLINE void store(Element* to, F8 value) {
    const H8 halves = narrowed(value, Element{});
    std::memcpy(to, &halves, sizeof(halves));
}

// The first `count` lanes from memory, the others zero.
template <class Element>
GRADWIRE_INLINE F8 load(const Element* from, int64_t count) {
    Element lanes[LANES] = {};
    std::memcpy(lanes, from, static_cast<size_t>(count) * sizeof(Element));
    return load(lanes);
}

// The first `count` lanes to memory, nothing past them.
template <class Element>
GRADWIRE_INLINE void store(Element* to, F8 value, int64_t count) {
    Element lanes[LANES];
    store(lanes, value);
    std::memcpy(to, lanes, static_cast<size_t>(count) * sizeof(Element));
}

}  // namespace gradwire::GRADWIRE_LEVEL
