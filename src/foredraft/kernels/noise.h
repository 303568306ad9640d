/* The noise of sampling/noise.py, bit for bit: the same exactly rounded operations in the same order, which
 * -ffp-contract=off leaves alone. */
#ifndef FD_NOISE_H
#define FD_NOISE_H

#include "simd.h"

#include <math.h>

#define LOG_TERMS 12
#define NOISE_BITS 52

INLINE uint64_t hash(uint64_t key, uint64_t id) {
    uint64_t z = id * 0x9E3779B97F4A7C15u + key;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

INLINE double double_of_bits(uint64_t bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* The logarithm of a positive normal number. No calls and no branches: loops over many are made of vectors. */
INLINE double exact_log(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    double mantissa = double_of_bits((bits & 0xFFFFFFFFFFFFFu) | 0x3FE0000000000000u); /* from 0.5 to 1 */
    int is_low = mantissa < 0x1.6a09e667f3bcdp-1; /* sqrt(0.5) */
    int32_t exponent = (int32_t)(bits >> 52) - 1022 - is_low;
    mantissa = is_low ? mantissa * 2 : mantissa;
    double s = (mantissa - 1) / (mantissa + 1), square = s * s, series = 1.0 / (2 * LOG_TERMS + 1);
    FOR(i, LOG_TERMS) series = series * square + 1.0 / (2 * (LOG_TERMS - 1 - i) + 1);
    return exponent * 0x1.62e42fefa39efp-1 + series * (s * 2); /* log(2) */
}

INLINE double gumbel(uint64_t noise) {
    double whole = double_of_bits((noise >> (64 - NOISE_BITS)) | 0x4330000000000000u) - 0x1p52; /* as a number */
    return -exact_log(-exact_log((whole + 0.5) * 0x1p-52));
}

#endif
