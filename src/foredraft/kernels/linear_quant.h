/* Linear layers with 8-bit and 4-bit weights: activations become 16-bit integers per group of 32 inputs, the dot
 * products of a group are exact integers, and the groups are added up in order in float32:
 *
 *   acc = acc + (scale_w * scale_x) * dot      and for q4 then      acc = acc + minimum_w * sum_x
 *
 * scale_x is a power of two, so it rounds nothing away and multiplying by it is exact. */
#ifndef FD_LINEAR_QUANT_H
#define FD_LINEAR_QUANT_H

#include "dot.h"

INLINE float power_of_two(uint32_t biased_exponent) {
    uint32_t bits = biased_exponent << 23;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

/* The exponent of the smallest power of two that makes a group integers of at most 32639 (so that the high plane fits
 * int8), or 0 where the group holds an infinity or NaN. */
INLINE uint32_t group_exponent(const float *x) {
    vu largest = {0}; /* bits that order like absolute values, infinity and NaN on top */
    FOR_STEP(k, GROUP, LANES) {
        vu bits = load_u32(x + k) & 0x7fffffff;
        largest = (vu)pick(bits > largest, (vf)bits, (vf)largest);
    }
    uint32_t bits = max_lanes_u32(largest), exponent = bits >> 23;
    if (exponent == 255) return 0;
    exponent = exponent > 15 ? exponent - 14 : 1;      /* largest / 2**exponent < 32768 */
    return exponent + ((bits & 0x7fffff) >= 0x7eff00); /* ... and rounds to 32639 or less */
}

INLINE void quantise_group(const float *x, uint32_t exponent, x_group *group) {
    const float magic = 12582912.0f; /* 1.5 * 2**23: adding it leaves the nearest integer in the low bits */
    float inverse = power_of_two(254 - exponent);
    vi integers[GROUP / LANES], total = {0};
    FOR_STEP(k, GROUP, LANES) {
        vi rounded = (vi)(load(x + k) * inverse + magic) - (vi)splat(magic);
        integers[k / LANES] = rounded;
        total += rounded;
    }
    store_codes(integers, group);
    group->scale = exponent ? power_of_two(exponent) : __builtin_nanf(""); /* a broken group is NaN as a whole */
    group->sum = group->scale * (float)sum_lanes_i32(total);
}

/* One row. The exponents come first: each takes long to arrive, and so they overlap. */
static void quantise_row(const float *x, int64_t groups, x_group *out) {
    for (int64_t first = 0; first < groups; first += 16) {
        uint32_t exponents[16];
        int count = groups - first < 16 ? (int)(groups - first) : 16;
        for (int g = 0; g < count; g++) exponents[g] = group_exponent(x + (first + g) * GROUP);
        for (int g = 0; g < count; g++) quantise_group(x + (first + g) * GROUP, exponents[g], out + first + g);
    }
}

/* A panel as the tiles see it: 8-bit codes either inside the packed groups or unpacked, scales always in place. */
typedef struct {
    const char *packed; /* q8_group or q4_group */
    const int8_t *codes;
    int64_t packed_bytes, code_bytes; /* from group to group */
    int64_t groups;
} quant_panel;

INLINE vf to_float(vi x) { return __builtin_convertvector(x, vf); }

/* One tile of `rows` rows by `vecs` vectors, from vector `vec`. `rows`, `vecs`, `q4` and `nibbles` (straight from the
 * packed 4-bit codes) are literals at every call. x [rows, groups], y [rows, 16].
 *
 * Besides the dot products, a result vector and group takes a conversion (2 cycles of one of the two units of a
 * Neoverse N1), a multiplication and one multiply-add, with minimums two. A row, a group and 16 outputs: 44 cycles at
 * the least, 50 (q8) and 52 (q4) measured in tiles of 4 rows. */
INLINE void quant_tile(const quant_panel *panel, int q4, int nibbles, const x_group *x, float *y, int rows, int vec,
                       int vecs) {
    vf acc[4][PANEL_VECS];
    FOR(r, rows)
        FOR(v, vecs) acc[r][v] = (vf){0};
    const char *packed = panel->packed;
    const int8_t *codes = panel->codes;
    for (const x_group *end = x + panel->groups; x < end; x++) {
        const x_group *xs[4];
        FOR(r, rows) xs[r] = x + r * panel->groups;
        vi sums[4][PANEL_VECS];
        if (nibbles) dot_nibbles(((const q4_group *)packed)->codes, xs, rows, vec, vecs, sums);
        else dot_codes(codes, xs, rows, vec, vecs, sums);
        const float *scales = (const float *)packed + vec * LANES, *minimums = scales + PANEL;
        FOR(r, rows)
            FOR(v, vecs) {
                acc[r][v] = muladd(acc[r][v], load(scales + v * LANES) * xs[r]->scale, to_float(sums[r][v]));
                if (q4) acc[r][v] = muladd(acc[r][v], load(minimums + v * LANES), splat(xs[r]->sum));
            }
        packed += panel->packed_bytes;
        codes += panel->code_bytes;
    }
    FOR(r, rows)
        FOR(v, vecs) store(y + r * PANEL + (vec + v) * LANES, acc[r][v]);
}

#define QUANT_TILE(name, q4, nibbles, rows, vecs)                                     \
    KERNEL void name(const quant_panel *panel, const x_group *x, float *y, int vec) { \
        quant_tile(panel, q4, nibbles, x, y, rows, vec, vecs);                        \
    }
QUANT_TILE(q8_4, 0, 0, 4, TILE_VECS)
QUANT_TILE(q8_3, 0, 0, 3, TILE_VECS)
QUANT_TILE(q8_2, 0, 0, 2, TILE_VECS)
QUANT_TILE(q8_1, 0, 0, 1, PANEL_VECS)
QUANT_TILE(q4_4, 1, 0, 4, TILE_VECS)
QUANT_TILE(q4_3, 1, 0, 3, TILE_VECS)
QUANT_TILE(q4_2, 1, 0, 2, TILE_VECS)
QUANT_TILE(q4_1, 1, 0, 1, PANEL_VECS)
QUANT_TILE(q4_2_packed, 1, 1, 2, PANEL_VECS)
QUANT_TILE(q4_1_packed, 1, 1, 1, PANEL_VECS)

/* All rows over one panel of 8-bit codes. */
static void quant_rows(const quant_panel *panel, int q4, const x_group *x, int64_t rows, float *y) {
    for (; rows >= 4; rows -= 4, x += 4 * panel->groups, y += 4 * PANEL)
        for (int vec = 0; vec < PANEL_VECS; vec += TILE_VECS) (q4 ? q4_4 : q8_4)(panel, x, y, vec);
    if (rows == 1) (q4 ? q4_1 : q8_1)(panel, x, y, 0);
    else if (rows)
        for (int vec = 0; vec < PANEL_VECS; vec += TILE_VECS)
            (rows == 3 ? q4 ? q4_3 : q8_3 : q4 ? q4_2 : q8_2)(panel, x, y, vec);
}

/* 4-bit codes of a whole panel to 8 bits: [groups] x Q8_CODES. The next panel, which follows in memory, is asked for on
 * the way: it arrives while this one is computed with. 32 stores, one a cycle. */
KERNEL void unpack_nibbles(const q4_group *restrict groups, int64_t count, int8_t *restrict codes) {
    for (int64_t g = 0; g < count; g++) {
        FOR_STEP(line, (int)sizeof(q4_group), 64) __builtin_prefetch((const char *)(groups + count + g) + line, 0, 2);
        for (int p = 0; p < 4; p++)
            for (int i = 0; i < PANEL * 4; i++) {
                uint8_t two = groups[g].codes[p * PANEL * 4 + i];
                codes[g * Q8_CODES + 2 * p * PANEL * 4 + i] = (int8_t)(two & 15);
                codes[g * Q8_CODES + (2 * p + 1) * PANEL * 4 + i] = (int8_t)(two >> 4);
            }
    }
}

#endif
