// The inner loops for AVX2, FMA and F16C. The baseline's where there is no x86-64.
#include "level.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>
#include <type_traits>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#define GRADWIRE_LEVEL avx2
#define GRADWIRE_AVX2 1
#include "loops.hpp"
#if defined(__clang__)
#pragma clang attribute pop
#endif

const gradwire::Level& gradwire::avx2_level() { return avx2::LOOPS; }
#else
const gradwire::Level& gradwire::avx2_level() { return baseline_level(); }
#endif
