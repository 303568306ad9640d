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

INLINE float power_of_two(uint32_t biased_exponent) { return float_of_bits(biased_exponent << 23); }

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

INLINE vf to_float(vi x) { return __builtin_convertvector(x, vf); }

/* acc += what the dot products of a group, or of half of one, stand for. */
INLINE void add_dots(vf acc[][PANEL_VECS], vi dots[][PANEL_VECS], enum scaling scaling, const vf scales[],
                     const vf minimums[], const x_group *const x[], int rows, int vecs) {
    FOR(r, rows)
        FOR(v, vecs) {
            acc[r][v] = muladd(acc[r][v], scales[v] * x[r]->scale, to_float(dots[r][v]));
            if (scaling == MINIMUM) acc[r][v] = muladd(acc[r][v], minimums[v], splat(x[r]->sum));
        }
}

/* Few rows over a panel as it is packed, one tile of `rows` rows by `vecs` vectors from vector `vec`; `kind`, `rows` and
 * `vecs` are literals at every call. x [rows, groups], y [rows, 16].
 *
 * Besides the dot products, a result vector and group takes a conversion (2 cycles of one of the two units of a
 * Neoverse N1), a multiplication and one multiply-add, with minimums two; and every factor a conversion, in K kinds also
 * the move of a byte and a multiplication. */
INLINE void packed_tile(int kind, const void *panel, int64_t groups, const x_group *x, float *y, int rows, int vec,
                        int vecs) {
    enum scaling scaling = scaling_of(kind);
    vf acc[4][PANEL_VECS];
    FOR(r, rows)
        FOR(v, vecs) acc[r][v] = (vf){0};
    const uint8_t *block = panel;
    for (const x_group *end = x + groups; x < end; block += block_bytes(kind)) {
        const uint8_t *group = block + block_head(kind);
        for (int i = 0; i < groups_per_block(kind); i++, x++, group += group_bytes(kind)) {
            const uint8_t *codes = group + factor_bytes(kind);
            const x_group *xs[4];
            FOR(r, rows) xs[r] = x + r * groups;
            FOR(part, scaling == HALVES ? 2 : 1) {
                int halves = scaling == HALVES ? 1 : 2;
                vi dots[4][PANEL_VECS];
                if (code_bits(kind) == 8) dot_codes((const int8_t *)codes, part, halves, xs, rows, vec, vecs, dots);
                else if (code_bits(kind) == 6) dot_sixes(codes, part, halves, xs, rows, vec, vecs, dots);
                else dot_nibbles(codes, xs, rows, vec, vecs, dots);
                vf scales[PANEL_VECS], minimums[PANEL_VECS];
                FOR(v, vecs) {
                    scales[v] = load_factors(kind, block, group, part, (vec + v) * LANES);
                    if (scaling == MINIMUM) minimums[v] = load_factors(kind, block, group, 1, (vec + v) * LANES);
                }
                add_dots(acc, dots, scaling, scales, minimums, xs, rows, vecs);
            }
        }
    }
    FOR(r, rows)
        FOR(v, vecs) store(y + r * PANEL + (vec + v) * LANES, acc[r][v]);
}

#define PACKED_TILE(name, kind, rows, vecs)                                                          \
    KERNEL void name(const void *panel, int64_t groups, const x_group *x, float *y, int vec) {       \
        packed_tile(kind, panel, groups, x, y, rows, vec, vecs);                                     \
    }
#define PACKED_TILES(name, kind)                  \
    PACKED_TILE(name##_1, kind, 1, PANEL_VECS)    \
    PACKED_TILE(name##_2, kind, 2, PANEL_VECS)    \
    PACKED_TILE(name##_3, kind, 3, TILE_VECS)     \
    PACKED_TILE(name##_4, kind, 4, TILE_VECS)
PACKED_TILES(q8, FD_Q8)
PACKED_TILES(q6, FD_Q6)
PACKED_TILES(q5, FD_Q5)
PACKED_TILES(q5k, FD_Q5K)
PACKED_TILES(q4, FD_Q4)
PACKED_TILES(q4k, FD_Q4K)

/* Up to four rows over one panel as it is packed. To widen it first takes 34 cycles a group and 16 outputs on a Neoverse
 * N1, which is more than is saved by it for so few. */
#define PACKED_ROWS 4
static void packed_rows(int kind, const void *panel, int64_t groups, const x_group *x, int64_t rows, float *y) {
    typedef void (*tile)(const void *, int64_t, const x_group *, float *, int);
    static const tile tiles[][PACKED_ROWS] = {
        [FD_Q8] = {q8_1, q8_2, q8_3, q8_4},     [FD_Q6] = {q6_1, q6_2, q6_3, q6_4},
        [FD_Q5] = {q5_1, q5_2, q5_3, q5_4},     [FD_Q5K] = {q5k_1, q5k_2, q5k_3, q5k_4},
        [FD_Q4] = {q4_1, q4_2, q4_3, q4_4},     [FD_Q4K] = {q4k_1, q4k_2, q4k_3, q4k_4},
    };
    int vecs = rows <= 2 ? PANEL_VECS : TILE_VECS;
    for (int vec = 0; vec < PANEL_VECS; vec += vecs) tiles[kind][rows - 1](panel, groups, x, y, vec);
}

/* A panel as many rows see it, whatever its kind: codes of 8 bits (code_index), those of q8 where they are packed, and
 * factors [groups][2][16] as in load_factors. */
typedef struct {
    const int8_t *codes;
    int64_t code_bytes; /* from group to group */
    const float *factors;
    int64_t groups;
    enum scaling scaling;
} wide_panel;

/* The 4-bit or 6-bit codes of one group to 8 bits. 32 stores, one a cycle. */
INLINE void widen_codes(int bits, const uint8_t *restrict packed, int8_t *restrict codes) {
    if (bits == 4)
        for (int p = 0; p < 4; p++)
            for (int i = 0; i < PANEL * 4; i++) {
                uint8_t two = packed[p * PANEL * 4 + i];
                codes[2 * p * PANEL * 4 + i] = (int8_t)(two & 15);
                codes[(2 * p + 1) * PANEL * 4 + i] = (int8_t)(two >> 4);
            }
    else
        for (int half = 0; half < 2; half++)
            for (int i = 0; i < PANEL * 4; i++) {
                const uint8_t *three = packed + half * 3 * PANEL * 4 + i;
                int8_t *four = codes + half * 4 * PANEL * 4 + i;
                uint8_t a = three[0], b = three[PANEL * 4], c = three[2 * PANEL * 4];
                four[0] = (int8_t)((int8_t)a >> 2);
                four[PANEL * 4] = (int8_t)((int8_t)b >> 2);
                four[2 * PANEL * 4] = (int8_t)((int8_t)c >> 2);
                four[3 * PANEL * 4] = (int8_t)((int8_t)(uint8_t)(a << 6 | (b & 3) << 4 | (c & 3) << 2) >> 2);
            }
}

/* The next panel, which follows in memory, is asked for on the way: it arrives while this one is computed with. */
INLINE wide_panel widen_panel(int kind, const void *panel, int64_t groups, void *scratch) {
    float *factors = scratch;
    int8_t *codes = (int8_t *)(factors + groups * 2 * PANEL);
    int64_t next = panel_bytes(kind, groups * GROUP);
    for (int64_t g = 0; g < groups; g++) {
        const uint8_t *block = block_of(kind, panel, g), *group = group_of(kind, panel, g);
        if (code_bits(kind) < 8) {
            FOR_STEP(line, group_bytes(kind), 64) __builtin_prefetch(group + next + line, 0, 2);
            widen_codes(code_bits(kind), group + factor_bytes(kind), codes + g * GROUP_CODES);
        }
        FOR(row, group_rows(kind))
            FOR_STEP(o, PANEL, LANES)
                store(factors + (g * 2 + row) * PANEL + o, load_factors(kind, block, group, row, o));
    }
    if (code_bits(kind) == 8)
        return (wide_panel){(const int8_t *)panel + factor_bytes(kind), group_bytes(kind), factors, groups, scaling_of(kind)};
    return (wide_panel){codes, GROUP_CODES, factors, groups, scaling_of(kind)};
}

/* Bytes of the scratch that widen_panel fills. */
INLINE int64_t wide_bytes(int64_t inputs) { return inputs * PANEL + inputs / GROUP * 2 * PANEL * 4; }

KERNEL wide_panel widen_any(int kind, const void *panel, int64_t groups, void *scratch) {
    switch (kind) {
    case FD_Q8: return widen_panel(FD_Q8, panel, groups, scratch);
    case FD_Q6: return widen_panel(FD_Q6, panel, groups, scratch);
    case FD_Q5: return widen_panel(FD_Q5, panel, groups, scratch);
    case FD_Q5K: return widen_panel(FD_Q5K, panel, groups, scratch);
    case FD_Q4: return widen_panel(FD_Q4, panel, groups, scratch);
    default: return widen_panel(FD_Q4K, panel, groups, scratch);
    }
}

/* A tile as above, over a wide panel. A row, a group and 16 outputs: 44 cycles at the least, 50 (one scale) and 52
 * (minimums) measured in tiles of 4 rows. */
INLINE void wide_tile(enum scaling scaling, const wide_panel *panel, const x_group *x, float *y, int rows, int vec,
                      int vecs) {
    vf acc[4][PANEL_VECS];
    FOR(r, rows)
        FOR(v, vecs) acc[r][v] = (vf){0};
    const float *factors = panel->factors + vec * LANES;
    const int8_t *codes = panel->codes;
    for (const x_group *end = x + panel->groups; x < end; x++) {
        const x_group *xs[4];
        FOR(r, rows) xs[r] = x + r * panel->groups;
        FOR(part, scaling == HALVES ? 2 : 1) {
            vi dots[4][PANEL_VECS];
            dot_codes(codes, part, scaling == HALVES ? 1 : 2, xs, rows, vec, vecs, dots);
            vf scales[PANEL_VECS], minimums[PANEL_VECS];
            FOR(v, vecs) {
                scales[v] = load(factors + part * PANEL + v * LANES);
                minimums[v] = load(factors + PANEL + v * LANES);
            }
            add_dots(acc, dots, scaling, scales, minimums, xs, rows, vecs);
        }
        factors += 2 * PANEL;
        codes += panel->code_bytes;
    }
    FOR(r, rows)
        FOR(v, vecs) store(y + r * PANEL + (vec + v) * LANES, acc[r][v]);
}

#define WIDE_TILE(name, scaling, rows, vecs)                                         \
    KERNEL void name(const wide_panel *panel, const x_group *x, float *y, int vec) { \
        wide_tile(scaling, panel, x, y, rows, vec, vecs);                            \
    }
#define WIDE_TILES(name, scaling)                 \
    WIDE_TILE(name##_1, scaling, 1, PANEL_VECS)   \
    WIDE_TILE(name##_2, scaling, 2, TILE_VECS)    \
    WIDE_TILE(name##_3, scaling, 3, TILE_VECS)    \
    WIDE_TILE(name##_4, scaling, 4, TILE_VECS)
WIDE_TILES(scale, SCALE)
WIDE_TILES(minimum, MINIMUM)
WIDE_TILES(halves, HALVES)

/* All rows over one wide panel. */
static void wide_rows(const wide_panel *panel, const x_group *x, int64_t rows, float *y) {
    typedef void (*tile)(const wide_panel *, const x_group *, float *, int);
    static const tile tiles[3][4] = {
        [SCALE] = {scale_1, scale_2, scale_3, scale_4},
        [MINIMUM] = {minimum_1, minimum_2, minimum_3, minimum_4},
        [HALVES] = {halves_1, halves_2, halves_3, halves_4},
    };
    const tile *chosen = tiles[panel->scaling];
    for (; rows >= 4; rows -= 4, x += 4 * panel->groups, y += 4 * PANEL)
        for (int vec = 0; vec < PANEL_VECS; vec += TILE_VECS) chosen[3](panel, x, y, vec);
    if (rows == 1) chosen[0](panel, x, y, 0);
    else if (rows)
        for (int vec = 0; vec < PANEL_VECS; vec += TILE_VECS) chosen[rows - 1](panel, x, y, vec);
}

#endif
