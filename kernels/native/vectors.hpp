// Eight floats at a time, in the instruction set of the file that includes this: conversions, masks, partial vectors.
#include <cstdint>
#include <cstring>
#include <type_traits>
#if GRADWIRE_AVX2
#include <immintrin.h>
#endif

#define GRADWIRE_LAMBDA __attribute__((always_inline))
#define GRADWIRE_INLINE inline GRADWIRE_LAMBDA

namespace gradwire::GRADWIRE_LEVEL {

using F8 = float __attribute__((vector_size(32)));
using I8 = int32_t __attribute__((vector_size(32)));
using U8 = uint32_t __attribute__((vector_size(32)));
using H8 = uint16_t __attribute__((vector_size(16)));

constexpr int64_t LANES = 8;

// How many lanes of a vector are meant: all, or the first few, from 1 to LANES - 1.
struct Whole {};
struct Part {
    int64_t count;
};

template <class Element>
GRADWIRE_INLINE size_t bytes_of(Part part) {
    if (part.count < 1 || part.count >= LANES) __builtin_unreachable();
    return static_cast<size_t>(part.count) * sizeof(Element);
}

GRADWIRE_INLINE int64_t size_of(Whole) { return LANES; }
GRADWIRE_INLINE int64_t size_of(Part part) { return part.count; }

// Bits of the lanes that are meant, as `mask` gives them.
GRADWIRE_INLINE uint32_t all_of(Whole) { return (1u << LANES) - 1u; }
GRADWIRE_INLINE uint32_t all_of(Part part) { return (1u << part.count) - 1u; }

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

// The `sum` of each of four vectors.
GRADWIRE_INLINE void sums_of_four(const F8* vectors, float* sums) {
#if GRADWIRE_AVX2
    __m128 folded[4];
    for (int i = 0; i < 4; ++i) {
        const __m256 wide = bit_cast<__m256>(vectors[i]);
        folded[i] = _mm_add_ps(_mm256_castps256_ps128(wide), _mm256_extractf128_ps(wide, 1));
    }
    _mm_storeu_ps(sums, _mm_hadd_ps(_mm_hadd_ps(folded[0], folded[1]), _mm_hadd_ps(folded[2], folded[3])));
#else
    for (int i = 0; i < 4; ++i) sums[i] = sum(vectors[i]);
#endif
}

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

template <class Element>
GRADWIRE_INLINE F8 load(const Element* from, Whole) {
    return load(from);
}

template <class Element>
GRADWIRE_INLINE void store(Element* to, F8 value, Whole) {
    store(to, value);
}

// The lanes past the part are zero.
template <class Element>
GRADWIRE_INLINE F8 load(const Element* from, Part part) {
    Element lanes[LANES] = {};
    std::memcpy(lanes, from, bytes_of<Element>(part));
    return load(lanes);
}

// Writes nothing past the part.
template <class Element>
GRADWIRE_INLINE void store(Element* to, F8 value, Part part) {
    Element lanes[LANES];
    store(lanes, value);
    std::memcpy(to, lanes, bytes_of<Element>(part));
}

// Writes around the caches, for what is too large for them: memory is then not read first. `to` is aligned to its
// vector.
GRADWIRE_INLINE void stream(float* to, F8 value) {
#if GRADWIRE_AVX2
    _mm256_stream_ps(to, bit_cast<__m256>(value));
#else
    store(to, value);
#endif
}

template <class Element>
GRADWIRE_INLINE void stream(Element* to, F8 value) {
#if GRADWIRE_AVX2
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), bit_cast<__m128i>(narrowed(value, Element{})));
#else
    store(to, value);
#endif
}

// Writes around the caches where `streams`, which wants `to` aligned to its vector; parts of vectors never.
GRADWIRE_INLINE void write(float* to, F8 value, Whole, bool streams) {
    if (streams) stream(to, value);
    else store(to, value);
}

GRADWIRE_INLINE void write(float* to, F8 value, Part part, bool) { store(to, value, part); }

// Adds what elements of a type cannot hold of numbers to `residual`.
template <class Element, class Lanes>
GRADWIRE_INLINE void hold_back(float* residual, F8 value, Lanes lanes) {
    if constexpr (!std::is_same_v<Element, float>) {
        const F8 lost = value - widened(narrowed(value, Element{}), Element{});
        store(residual, load(residual, lanes) + lost, lanes);
    }
}

// Once after the last `stream` of a thread.
GRADWIRE_INLINE void end_stream() {
#if GRADWIRE_AVX2
    _mm_sfence();
#endif
}

// Elements before the first that is aligned to its vector, `limit` at most.
template <class Element>
GRADWIRE_INLINE int64_t unaligned(const Element* from, int64_t limit) {
    const auto beyond = reinterpret_cast<uintptr_t>(from) % (LANES * sizeof(Element)) / sizeof(Element);
    const int64_t before = beyond ? LANES - static_cast<int64_t>(beyond) : 0;
    return before < limit ? before : limit;
}

// `factor * other + value`, rounded once where the instruction set can.
GRADWIRE_INLINE F8 multiply_add(F8 factor, F8 other, F8 value) {
#if GRADWIRE_AVX2
    return bit_cast<F8>(_mm256_fmadd_ps(bit_cast<__m256>(factor), bit_cast<__m256>(other), bit_cast<__m256>(value)));
#else
    return factor * other + value;
#endif
}

// Calls `step(place, lanes, turn)` for one vector of [first, last) after the other; `lanes` is Whole, for the last
// perhaps Part; `turn` goes round from 0 to UNROLLED - 1, so that as many sums may be under way.
template <int UNROLLED, class Step>
GRADWIRE_INLINE void over_lanes(int64_t first, int64_t last, const Step& step) {
    int64_t at = first;
    for (; at + UNROLLED * LANES <= last; at += UNROLLED * LANES)
        for (int turn = 0; turn < UNROLLED; ++turn) step(at + turn * LANES, Whole{}, turn);
    if (UNROLLED > 1)
        for (; at + LANES <= last; at += LANES) step(at, Whole{}, 0);
    if (at < last) step(at, Part{last - at}, 0);
}

}  // namespace gradwire::GRADWIRE_LEVEL
