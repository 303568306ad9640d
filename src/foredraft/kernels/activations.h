/* Activations as the quantised weights meet them: integers per group of 32 inputs, kept as one or two planes of int8.
 *
 *   one plane   x = scale * code, |code| <= 127 and scale = the group's largest |x| / 127
 *   two planes  x = scale * (256 * high + low), |x / scale| <= 32639 and scale a power of two
 *
 * The rows of a call follow one another, x_stride apart. */
#ifndef FD_ACTIVATIONS_H
#define FD_ACTIVATIONS_H

#include "layout.h"

typedef struct {
    float scale;        /* the first two side by side: read as one by add_dots */
    float sum;          /* of the x */
    int32_t negated[2]; /* minus the sum of the integers of each half: what unsigned codes start from, see dot.h */
    int8_t codes[];     /* [planes][32], the low plane first */
} x_group;

INLINE int x_group_bytes(int planes) { return (int)sizeof(x_group) + planes * GROUP; }
INLINE const x_group *next_x(const x_group *x, int planes) {
    return (const x_group *)((const char *)x + x_group_bytes(planes));
}
/* Bytes of a row. One line more keeps neighbouring rows out of each other's way in the cache. */
INLINE int64_t x_stride(int64_t inputs, int planes) {
    return round_up(inputs / GROUP * x_group_bytes(planes), 64) + 64;
}

INLINE float power_of_two(uint32_t biased_exponent) { return float_of_bits(biased_exponent << 23); }

/* How a group becomes integers; the scale of a broken group is NaN, and so is then everything that it meets. */
typedef struct {
    float scale, inverse;
} x_steps;

/* The bits of the largest |x|: they order like absolute values, infinity and NaN on top. */
INLINE uint32_t largest_bits(const float *x) {
    vu largest = {0};
    FOR_STEP(k, GROUP, LANES) largest = max_u32(largest, load_u32(x + k) & 0x7fffffff);
    return max_lanes_u32(largest);
}

INLINE x_steps group_steps(const float *x, int planes) {
    uint32_t bits = largest_bits(x), exponent = bits >> 23;
    if (exponent == 255) return (x_steps){__builtin_nanf(""), 0.0f};
    if (planes == 1) {
        float largest = float_of_bits(bits);
        if (largest < 0x1p-100f) return (x_steps){0.0f, 0.0f}; /* 127 / largest must not overflow */
        return (x_steps){largest / 127.0f, 127.0f / largest};
    }
    exponent = exponent > 15 ? exponent - 14 : 1;      /* largest / 2**exponent < 32768 */
    exponent += (bits & 0x7fffff) >= 0x7eff00;         /* ... and rounds to 32639 or less */
    return (x_steps){power_of_two(exponent), power_of_two(254 - exponent)};
}

/* The low plane is the low byte as a signed number, the high plane what remains: -127 .. 127. */
INLINE void store_planes(const vi x[GROUP / LANES], int planes, int8_t *codes) {
    FOR(plane, planes) {
#if defined(__aarch64__)
        FOR_STEP(k, GROUP, 8) {
            int16x8_t eight = vcombine_s16(vmovn_s32((int32x4_t)x[k / 4]), vmovn_s32((int32x4_t)x[k / 4 + 1]));
            vst1_s8(codes + plane * GROUP + k, plane ? vrshrn_n_s16(eight, 8) : vmovn_s16(eight));
        }
#else
        FOR(i, GROUP / LANES)
            store_low_bytes(codes + plane * GROUP + i * LANES, plane ? (vi)((vu)x[i] + 128) >> 8 : x[i]);
#endif
    }
}

INLINE void quantise_group(const float *x, x_steps steps, int planes, x_group *group) {
    const float magic = 12582912.0f; /* 1.5 * 2**23: adding it leaves the nearest integer in the low bits */
    vi integers[GROUP / LANES];
    vu totals[2] = {{0}, {0}}; /* unsigned: what a broken group holds may overflow */
    FOR_STEP(k, GROUP, LANES) {
        vu rounded = (vu)(load(x + k) * steps.inverse + magic) - (vu)splat(magic);
        integers[k / LANES] = (vi)rounded;
        totals[k / (GROUP / 2)] += rounded;
    }
    store_planes(integers, planes, group->codes);
    sum_two_i32((vi)(0 - totals[0]), (vi)(0 - totals[1]), group->negated);
    group->scale = steps.scale;
    uint32_t negated = (uint32_t)group->negated[0] + (uint32_t)group->negated[1];
    group->sum = steps.scale * (float)(int32_t)(0 - negated);
}

/* One row. The steps come first: each takes long to arrive, and so they overlap. */
INLINE void quantise_in(int planes, const float *x, int64_t groups, x_group *out) {
    for (int64_t first = 0; first < groups; first += 16) {
        x_steps steps[16];
        int count = groups - first < 16 ? (int)(groups - first) : 16;
        for (int g = 0; g < count; g++) steps[g] = group_steps(x + (first + g) * GROUP, planes);
        for (int g = 0; g < count; g++, out = (x_group *)next_x(out, planes))
            quantise_group(x + (first + g) * GROUP, steps[g], planes, out);
    }
}

static void quantise_row(int planes, const float *x, int64_t groups, x_group *out) {
    if (planes == 1) quantise_in(1, x, groups, out);
    else quantise_in(2, x, groups, out);
}

#endif
