/* Linear layers with weights of 4 to 8 bits: activations become 16-bit integers per group of 32 inputs, the dot
 * products of a group are exact integers, and the groups are added up in order in float32:
 *
 *   acc = acc + (scale_w * scale_x) * dot      and with minimums then      acc = acc + minimum_w * sum_x
 *
 * where q6, which has a scale for each half of a group, takes one half after the other.
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
    vi integers[GROUP / LANES];
    vu total = {0}; /* unsigned: what a broken group holds may overflow */
    FOR_STEP(k, GROUP, LANES) {
        vu rounded = (vu)(load(x + k) * inverse + magic) - (vu)splat(magic);
        integers[k / LANES] = (vi)rounded;
        total += rounded;
    }
    store_codes(integers, group);
    group->planes = 0;
    group->scale = exponent ? power_of_two(exponent) : __builtin_nanf(""); /* a broken group is NaN as a whole */
    group->sum = group->scale * (float)sum_lanes_i32((vi)total);
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
    const char *packed; /* q8_group, q4_group, q6_group or q5_group: scales first, then minimums */
    const int8_t *codes;
    int64_t packed_bytes, code_bytes; /* from group to group */
    int64_t groups;
} quant_panel;

INLINE vf to_float(vi x) { return __builtin_convertvector(x, vf); }

/* What a group has beside codes: one scale per output, a scale and a minimum, or a scale for each half. */
enum scaling { SCALE, MINIMUM, HALVES };

/* One tile of `rows` rows by `vecs` vectors, from vector `vec`. `rows`, `vecs`, `scaling` and `nibbles` (straight from
 * the packed 4-bit codes) are literals at every call. x [rows, groups], y [rows, 16].
 *
 * Besides the dot products, a result vector and group takes a conversion (2 cycles of one of the two units of a
 * Neoverse N1), a multiplication and one multiply-add, with minimums two. A row, a group and 16 outputs: 44 cycles at
 * the least, 50 (q8) and 52 (q4) measured in tiles of 4 rows. */
INLINE void quant_tile(const quant_panel *panel, enum scaling scaling, int nibbles, const x_group *x, float *y,
                       int rows, int vec, int vecs) {
    vf acc[4][PANEL_VECS];
    FOR(r, rows)
        FOR(v, vecs) acc[r][v] = (vf){0};
    const char *packed = panel->packed;
    const int8_t *codes = panel->codes;
    for (const x_group *end = x + panel->groups; x < end; x++) {
        const x_group *xs[4];
        FOR(r, rows) xs[r] = x + r * panel->groups;
        FOR(part, scaling == HALVES ? 2 : 1) {
            vi sums[4][PANEL_VECS];
            if (nibbles) dot_nibbles(((const q4_group *)packed)->codes, xs, rows, vec, vecs, sums);
            else dot_codes(codes, part, scaling == HALVES ? 1 : 2, xs, rows, vec, vecs, sums);
            const float *scales = (const float *)packed + part * PANEL + vec * LANES, *minimums = scales + PANEL;
            FOR(r, rows)
                FOR(v, vecs) {
                    acc[r][v] = muladd(acc[r][v], load(scales + v * LANES) * xs[r]->scale, to_float(sums[r][v]));
                    if (scaling == MINIMUM)
                        acc[r][v] = muladd(acc[r][v], load(minimums + v * LANES), splat(xs[r]->sum));
                }
        }
        packed += panel->packed_bytes;
        codes += panel->code_bytes;
    }
    FOR(r, rows)
        FOR(v, vecs) store(y + r * PANEL + (vec + v) * LANES, acc[r][v]);
}

#define QUANT_TILE(name, scaling, nibbles, rows, vecs)                                \
    KERNEL void name(const quant_panel *panel, const x_group *x, float *y, int vec) { \
        quant_tile(panel, scaling, nibbles, x, y, rows, vec, vecs);                   \
    }
QUANT_TILE(q8_4, SCALE, 0, 4, TILE_VECS)
QUANT_TILE(q8_3, SCALE, 0, 3, TILE_VECS)
QUANT_TILE(q8_2, SCALE, 0, 2, TILE_VECS)
QUANT_TILE(q8_1, SCALE, 0, 1, PANEL_VECS)
QUANT_TILE(q4_4, MINIMUM, 0, 4, TILE_VECS)
QUANT_TILE(q4_3, MINIMUM, 0, 3, TILE_VECS)
QUANT_TILE(q4_2, MINIMUM, 0, 2, TILE_VECS)
QUANT_TILE(q4_1, MINIMUM, 0, 1, PANEL_VECS)
QUANT_TILE(q6_4, HALVES, 0, 4, TILE_VECS)
QUANT_TILE(q6_3, HALVES, 0, 3, TILE_VECS)
QUANT_TILE(q6_2, HALVES, 0, 2, TILE_VECS)
QUANT_TILE(q6_1, HALVES, 0, 1, PANEL_VECS)
QUANT_TILE(q4_4_packed, MINIMUM, 1, 4, TILE_VECS)
QUANT_TILE(q4_3_packed, MINIMUM, 1, 3, TILE_VECS)
QUANT_TILE(q4_2_packed, MINIMUM, 1, 2, PANEL_VECS)
QUANT_TILE(q4_1_packed, MINIMUM, 1, 1, PANEL_VECS)

/* The same in the tiles of linear_amx.h, from groups that were split into planes for them. */
static void quant_rows_in_tiles(const quant_panel *panel, enum scaling scaling, const x_group *x, int64_t rows,
                                float *y);

/* All rows over one panel of 8-bit codes. */
static void quant_rows(const quant_panel *panel, enum scaling scaling, const x_group *x, int64_t rows, float *y) {
    typedef void (*tile)(const quant_panel *, const x_group *, float *, int);
    static const tile tiles[3][4] = {
        [SCALE] = {q8_1, q8_2, q8_3, q8_4},
        [MINIMUM] = {q4_1, q4_2, q4_3, q4_4},
        [HALVES] = {q6_1, q6_2, q6_3, q6_4},
    };
    if (HAS_TILES && x->planes) {
        quant_rows_in_tiles(panel, scaling, x, rows, y);
        return;
    }
    for (; rows >= 4; rows -= 4, x += 4 * panel->groups, y += 4 * PANEL)
        for (int vec = 0; vec < PANEL_VECS; vec += TILE_VECS) tiles[scaling][3](panel, x, y, vec);
    if (rows == 1) tiles[scaling][0](panel, x, y, 0);
    else if (rows)
        for (int vec = 0; vec < PANEL_VECS; vec += TILE_VECS) tiles[scaling][rows - 1](panel, x, y, vec);
}

/* Up to four rows over one panel of 4-bit codes as they are: 68, 118, 175 and 225 cycles for a group and 16 outputs,
 * from the cache. Unpacked first they would take 34 + 51, 102, 145 and 193. */
#define PACKED_ROWS 4
static void packed_rows(const quant_panel *panel, const x_group *x, int64_t rows, float *y) {
    if (rows == 1) q4_1_packed(panel, x, y, 0);
    else if (rows == 2) q4_2_packed(panel, x, y, 0);
    else
        for (int vec = 0; vec < PANEL_VECS; vec += TILE_VECS) (rows == 3 ? q4_3_packed : q4_4_packed)(panel, x, y, vec);
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
