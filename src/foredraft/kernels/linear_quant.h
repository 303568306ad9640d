/* Linear layers with 8-bit and 4-bit weights: activations become 16-bit integers per group of 32 inputs, the dot products
 * of a group are exact integers, and the groups are added up in order in float32:
 *
 *   acc = acc + (scale_w * scale_x) * dot      and for q4 then      acc = acc + minimum_w * sum_x
 *
 * scale_x is a power of two, so it rounds nothing away and multiplying by it is exact. */
#ifndef FD_LINEAR_QUANT_H
#define FD_LINEAR_QUANT_H

#include "dot.h"

/* Quantised rows: codes [rows, groups, X_GROUP], scales and sums [rows, groups]. */
typedef struct {
    int8_t *codes;
    float *scales, *sums;
    int64_t groups;
} quant_rows;

INLINE float power_of_two(uint32_t biased_exponent) {
    uint32_t bits = biased_exponent << 23;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

/* One group to integers of at most 32639 (so that the high plane fits int8) times a power of two. A group that holds an
 * infinity or NaN becomes NaN as a whole. */
static void quantise_group(const float *x, int8_t *codes, float *scale, float *sum) {
    uint32_t bits[GROUP], largest = 0;
    memcpy(bits, x, sizeof bits);
    for (int k = 0; k < GROUP; k++) {
        uint32_t magnitude = bits[k] & 0x7fffffff; /* orders like the absolute value, infinity and NaN on top */
        largest = magnitude > largest ? magnitude : largest;
    }
    int32_t integers[GROUP] = {0}, total = 0;
    if (largest >= 0x7f800000) {
        *scale = *sum = __builtin_nanf("");
    } else {
        uint32_t exponent = largest >> 23 > 15 ? (largest >> 23) - 14 : 1; /* largest / 2**exponent < 32768 */
        exponent += (largest & 0x7fffff) >= 0x7eff00;                      /* ... and rounds to 32639 or less */
        float inverse = power_of_two(254 - exponent);
        const float magic = 12582912.0f; /* adding it rounds to the nearest integer */
        for (int k = 0; k < GROUP; k++) {
            float rounded = x[k] * inverse + magic;
            int32_t as_bits;
            memcpy(&as_bits, &rounded, 4);
            integers[k] = as_bits - 0x4b400000;
            total += integers[k];
        }
        *scale = power_of_two(exponent);
        *sum = *scale * (float)total;
    }
    store_x_group(integers, codes);
}

static void quantise_row(const float *x, const quant_rows *out, int64_t row) {
    for (int64_t g = 0; g < out->groups; g++) {
        int64_t at = row * out->groups + g;
        quantise_group(x + g * GROUP, out->codes + at * X_GROUP, out->scales + at, out->sums + at);
    }
}

/* A panel as the tiles see it: codes either inside the packed groups or unpacked, scales always in place. */
typedef struct {
    const char *groups;    /* packed q8_group or q4_group */
    const int8_t *codes;   /* first group's 8-bit codes */
    int64_t group_bytes, code_bytes;
} quant_panel;

INLINE vf to_float(vi x) { return __builtin_convertvector(x, vf); }

/* One tile of `rows` rows by `vecs` vectors, from vector `vec`; literals at every call. `nibbles`: straight from the
 * packed 4-bit codes. Besides the dot products a result vector and group takes 4 instructions, with minimums 5. */
INLINE void quant_tile(const quant_panel *panel, int q4, int nibbles, const quant_rows *x, int64_t row, float *y, int rows,
                       int vec, int vecs) {
    vf acc[4][PANEL_VECS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vecs; v++) acc[r][v] = (vf){0};
    const char *packed = panel->groups;
    const int8_t *codes = panel->codes;
    for (int64_t g = 0; g < x->groups; g++) {
        const int8_t *xs[4];
        UNROLL for (int r = 0; r < rows; r++) xs[r] = x->codes + ((row + r) * x->groups + g) * X_GROUP;
        vi sums[4][PANEL_VECS];
        if (nibbles) dot_nibbles(((const q4_group *)packed)->codes, xs, rows, vec, vecs, sums);
        else dot_codes(codes, xs, rows, vec, vecs, sums);
        const float *scales = (const float *)packed + vec * LANES;
        UNROLL for (int r = 0; r < rows; r++) {
            vf scale_x = splat(x->scales[(row + r) * x->groups + g]);
            UNROLL for (int v = 0; v < vecs; v++)
                acc[r][v] = muladd(acc[r][v], load(scales + v * LANES) * scale_x, to_float(sums[r][v]));
        }
        if (q4)
            UNROLL for (int r = 0; r < rows; r++) {
                vf sum_x = splat(x->sums[(row + r) * x->groups + g]);
                UNROLL for (int v = 0; v < vecs; v++)
                    acc[r][v] = muladd(acc[r][v], load(scales + PANEL + v * LANES), sum_x);
            }
        packed += panel->group_bytes;
        codes += panel->code_bytes;
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vecs; v++) store(y + (row + r) * PANEL + (vec + v) * LANES, acc[r][v]);
}

/* `rows` rows over all 16 outputs, TILE_VECS vectors at a time. */
INLINE void quant_tiles(const quant_panel *panel, int q4, const quant_rows *x, int64_t row, float *y, int rows) {
    UNROLL for (int vec = 0; vec < PANEL_VECS; vec += TILE_VECS)
        quant_tile(panel, q4, 0, x, row, y, rows, vec, TILE_VECS);
}

INLINE void quant_rows_over_panel(const quant_panel *panel, int q4, const quant_rows *x, int64_t rows, float *y) {
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4) quant_tiles(panel, q4, x, row, y, 4);
    switch (rows - row) {
    case 3: quant_tiles(panel, q4, x, row, y, 3); break;
    case 2: quant_tiles(panel, q4, x, row, y, 2); break;
    case 1: quant_tile(panel, q4, 0, x, row, y, 1, 0, PANEL_VECS); break;
    }
}

/* 4-bit codes of a whole panel to 8 bits: [groups] x Q8_CODES. */
INLINE void unpack_nibbles(const q4_group *groups, int64_t count, int8_t *codes) {
    for (int64_t g = 0; g < count; g++)
        for (int p = 0; p < 4; p++)
            for (int i = 0; i < PANEL * 4; i++) {
                uint8_t two = groups[g].codes[p * PANEL * 4 + i];
                codes[g * Q8_CODES + 2 * p * PANEL * 4 + i] = (int8_t)(two & 15);
                codes[g * Q8_CODES + (2 * p + 1) * PANEL * 4 + i] = (int8_t)(two >> 4);
            }
}

#endif
