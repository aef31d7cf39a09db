// float16 in integer arithmetic, as the conversions of the GPU do it; included after the type is known.
#pragma once

inline float widen(float16 number) {
    const unsigned sign = (number.bits & 0x8000u) << 16, exponent = number.bits >> 10 & 31, fraction = number.bits & 1023;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
    const float magnitude =
        exponent == 0 ? std::ldexp(float(fraction), -24) : std::ldexp(float(fraction + 1024), int(exponent) - 25);
    return sign ? -magnitude : magnitude;
}

inline float16 narrow_to_float16(float number) {
    const unsigned short sign = static_cast<unsigned short>(__float_as_uint(number) >> 16 & 0x8000);
    const float magnitude = std::fabs(number);
    if (number != number) return {0x7e00};
    if (magnitude >= 65520.0f) return {static_cast<unsigned short>(sign | 0x7c00)};
    int exponent = magnitude == 0 ? -14 : std::max(std::ilogb(magnitude), -14);
    const int steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));  // ties to even
    return {static_cast<unsigned short>(sign | (((exponent + 14) << 10) + steps))};
}
