// The inner loops for AVX-512 (F, BW, CD, DQ, VL): more registers, and masks. The baseline's where there is no x86-64.
#include "level.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>
#include <type_traits>

#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512cd,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512cd,avx512dq,avx512vl")
#endif
#define GRADWIRE_LEVEL avx512
#define GRADWIRE_AVX2 1
#include "loops.hpp"
#if defined(__clang__)
#pragma clang attribute pop
#endif

const gradwire::Level& gradwire::avx512_level() { return avx512::LOOPS; }
#else
const gradwire::Level& gradwire::avx512_level() { return baseline_level(); }
#endif
