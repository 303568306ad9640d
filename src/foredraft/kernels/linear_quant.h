/* Linear layers with weights of 4 to 8 bits: activations become integers per group of 32 inputs (activations.h), the dot
 * products of a group are exact integers (dot.h), and the groups are added up in order in float32:
 *
 *   acc = acc + (scale_w * scale_x) * dot      and with minimums then      acc = acc + minimum_w * sum_x
 *
 * where q6, which has a scale for each half of a group, takes one half after the other.
 *
 * The number of planes of an activation, of rows and of vectors are literals at every call of an INLINE function. */
#ifndef FD_LINEAR_QUANT_H
#define FD_LINEAR_QUANT_H

#include "dot.h"

/* How far ahead of the codes in use the weights are asked for. One row of q4k, 16 outputs and a group, from memory on two
 * cores of a Neoverse N1: 78 cycles with 4096, 62 with 8192 or 16384, 57 from the first-level cache. */
#define PREFETCH_BYTES 8192

/* acc += what the dot products of a group, or of half of one, stand for. */
INLINE void add_dots(vf acc[][PANEL_VECS], dots_of_tile dots, enum scaling scaling, const vf scales[],
                     const vf minimums[], const x_group *const x[], int rows, int vecs) {
    FOR(r, rows) {
        quad scale_and_sum = load_quad((const float *)x[r]); /* the first two numbers of x_group */
        FOR(v, vecs) acc[r][v] = muladd(acc[r][v], multiply_quad(scales[v], scale_and_sum, 0), dots[r][v]);
        if (scaling == MINIMUM) FOR(v, vecs) acc[r][v] = muladd_quad(acc[r][v], minimums[v], scale_and_sum, 1);
    }
}

/* The same group of `rows` rows. */
INLINE void rows_of_x(const x_group *x, int64_t stride, int rows, const x_group *out[MAX_ROWS]) {
    FOR(r, rows) out[r] = (const x_group *)((const char *)x + r * stride);
}

/* Few rows over a panel as it is packed, one tile of `rows` rows by `vecs` vectors from vector `vec`. x: rows `stride`
 * bytes apart; y [rows, 16].
 *
 * Besides the dot products, a result vector and group takes on a Neoverse N1 a subtraction (see end_of_sum), a
 * multiplication and one multiply-add, with minimums two; and every factor a conversion (2 cycles of one of the two
 * units), in K kinds the move of a byte and a multiply-add instead. One row of 512 weights, 2 instructions a cycle: q4k 96
 * of them, 48 cycles at the least and 57 measured; q6 120, 60 and 69; 296 and 420 bytes, which take 40 and 57 from memory.
 * One row of q4 and 16 outputs on AVX512: 12 instructions to unpack, 8 vpdpbusd, 6 for the rest, 2 a cycle: 13 cycles; 320
 * bytes do not come from memory in twice that time. */
INLINE void packed_tile(int kind, const void *panel, int64_t groups, const x_group *x, int64_t stride, float *y,
                        int planes, int rows, int vec, int vecs) {
    enum scaling scaling = scaling_of(kind);
    vf acc[MAX_ROWS][PANEL_VECS];
    FOR(r, rows)
        FOR(v, vecs) acc[r][v] = (vf){0};
    const uint8_t *block = panel;
    for (int64_t left = groups; left; block += block_bytes(kind)) {
        const uint8_t *group = block + block_head(kind);
        block_factors shared;
        load_block(kind, block, vec, vecs, &shared);
        for (int i = 0; i < groups_per_block(kind); i++, left--, x = next_x(x, planes), group += group_bytes(kind)) {
            const uint8_t *codes = group + factor_bytes(kind);
            const x_group *xs[MAX_ROWS];
            rows_of_x(x, stride, rows, xs);
            if (vec == 0) FOR_STEP(line, group_bytes(kind), 64) __builtin_prefetch(group + PREFETCH_BYTES + line, 0, 2);
            FOR(part, scaling == HALVES ? 2 : 1) {
                int halves = scaling == HALVES ? 1 : 2;
                dots_of_tile dots;
                if (code_bits(kind) == 8)
                    dot_codes((const int8_t *)codes, scaling, part, halves, xs, planes, rows, vec, vecs, dots);
                else if (code_bits(kind) == 6) dot_sixes(codes, scaling, part, halves, xs, planes, rows, vec, vecs, dots);
                else dot_nibbles(codes, kind == FD_MX4, xs, planes, rows, vec, vecs, dots);
                vf scales[PANEL_VECS], minimums[PANEL_VECS];
                FOR(v, vecs) {
                    scales[v] = load_factors(kind, &shared, group, part, vec, v);
                    if (scaling == MINIMUM) minimums[v] = load_factors(kind, &shared, group, 1, vec, v);
                }
                add_dots(acc, dots, scaling, scales, minimums, xs, rows, vecs);
            }
        }
    }
    FOR(r, rows)
        FOR(v, vecs) store(y + r * PANEL + (vec + v) * LANES, acc[r][v]);
}

/* Vectors of outputs that a tile takes at once: all 16 outputs of few rows, fewer of more, to fit the registers. */
#define VECS_OF(rows, planes) ((rows) <= 2 && (planes) == 1 ? PANEL_VECS : REGISTERS == 16 && (planes) == 2 ? 1 : TILE_VECS)
/* A name for each number of rows that a tile can have. */
#if LANES == 16
#define EACH_ROWS(f, ...) \
    f(1, __VA_ARGS__) f(2, __VA_ARGS__) f(3, __VA_ARGS__) f(4, __VA_ARGS__) \
    f(5, __VA_ARGS__) f(6, __VA_ARGS__) f(7, __VA_ARGS__) f(8, __VA_ARGS__)
#define TILES_OF(name) {name##_1, name##_2, name##_3, name##_4, name##_5, name##_6, name##_7, name##_8}
#else
#define EACH_ROWS(f, ...) f(1, __VA_ARGS__) f(2, __VA_ARGS__) f(3, __VA_ARGS__) f(4, __VA_ARGS__)
#define TILES_OF(name) {name##_1, name##_2, name##_3, name##_4}
#endif

typedef void packed_kernel(const void *panel, int64_t groups, const x_group *x, int64_t stride, float *y);

#define PACKED_TILE(rows, name, kind, planes)                                                                       \
    KERNEL void name##_##rows(const void *panel, int64_t groups, const x_group *x, int64_t stride, float *y) {      \
        for (int vec = 0; vec < PANEL_VECS; vec += VECS_OF(rows, planes))                                           \
            packed_tile(kind, panel, groups, x, stride, y, planes, rows, vec, VECS_OF(rows, planes));               \
    }
#define PACKED_TILES(name, kind) EACH_ROWS(PACKED_TILE, name##_one, kind, 1) EACH_ROWS(PACKED_TILE, name##_two, kind, 2)
PACKED_TILES(q8, FD_Q8)
PACKED_TILES(q6, FD_Q6)
PACKED_TILES(q5, FD_Q5)
PACKED_TILES(q5k, FD_Q5K)
PACKED_TILES(q4, FD_Q4)
PACKED_TILES(q4k, FD_Q4K)
PACKED_TILES(mx4, FD_MX4)

/* Up to so many rows read a panel as it is packed, tile after tile. To widen it first takes 34 cycles a group and 16
 * outputs on a Neoverse N1, which is more than is saved by it for few rows. A Cascade Lake unpacks in fewer instructions:
 * 16 rows took 0.77 of the time of a widened panel with q4, 0.9 with mx4 and 0.95 with q8, 48 rows 0.91, 1.05 and 0.98;
 * with AVX2 8 rows 0.83 to 0.98 with q4. */
#define PACKED_ROWS (LANES == 16 ? 4 * MAX_ROWS : LANES == 8 ? 2 * MAX_ROWS : MAX_ROWS)

/* Up to PACKED_ROWS rows over one panel as it is packed. */
static void packed_rows(int kind, const void *panel, int64_t groups, const x_group *x, int64_t stride, int planes,
                        int64_t rows, float *y) {
    static packed_kernel *const one[][MAX_ROWS] = {
        [FD_Q8] = TILES_OF(q8_one), [FD_Q6] = TILES_OF(q6_one),   [FD_Q5] = TILES_OF(q5_one),
        [FD_Q4] = TILES_OF(q4_one), [FD_Q5K] = TILES_OF(q5k_one), [FD_Q4K] = TILES_OF(q4k_one),
        [FD_MX4] = TILES_OF(mx4_one),
    };
    static packed_kernel *const two[][MAX_ROWS] = {
        [FD_Q8] = TILES_OF(q8_two), [FD_Q6] = TILES_OF(q6_two),   [FD_Q5] = TILES_OF(q5_two),
        [FD_Q4] = TILES_OF(q4_two), [FD_Q5K] = TILES_OF(q5k_two), [FD_Q4K] = TILES_OF(q4k_two),
        [FD_MX4] = TILES_OF(mx4_two),
    };
    packed_kernel *const *chosen = (planes == 1 ? one : two)[kind];
    for (int64_t row = 0; row < rows; row += MAX_ROWS) {
        int64_t count = rows - row < MAX_ROWS ? rows - row : MAX_ROWS;
        chosen[count - 1](panel, groups, (const x_group *)((const char *)x + row * stride), stride, y + row * PANEL);
    }
}

/* A panel as many rows see it, whatever its kind: codes of 8 bits (code_index), those of q8 where they are packed, and
 * factors [groups][2][16] as in load_factors. */
typedef struct {
    const int8_t *codes;
    int64_t code_bytes; /* from group to group */
    const float *factors;
    int64_t groups;
    enum scaling scaling;
    const char *next; /* the same groups of the next panel, which are asked for while these are computed with */
    int64_t next_bytes; /* of them for each group */
} wide_panel;

/* The 4-bit or 6-bit codes of one group to 8 bits. 32 stores, one a cycle. */
INLINE void widen_codes(int kind, const uint8_t *restrict packed, int8_t *restrict codes) {
    if (kind == FD_MX4)
        for (int p = 0; p < 4; p++)
            for (int i = 0; i < PANEL * 4; i += LANES * 4) { /* by hand: compilers look up byte by byte */
                vu two = load_u32(packed + p * PANEL * 4 + i);
                vu low = mx4_quad(two & 0x0f0f0f0f), high = mx4_quad((two >> 4) & 0x0f0f0f0f);
                memcpy(codes + 2 * p * PANEL * 4 + i, &low, sizeof low);
                memcpy(codes + (2 * p + 1) * PANEL * 4 + i, &high, sizeof high);
            }
    else if (code_bits(kind) == 4)
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

/* `groups` groups from `first`, a multiple of what a block has, of a panel of `all`. */
INLINE wide_panel widen_panel(int kind, const void *panel, int64_t all, int64_t first, int64_t groups, void *scratch) {
    float *factors = scratch;
    int8_t *codes = (int8_t *)(factors + groups * 2 * PANEL);
    const uint8_t *from = block_of(kind, panel, first);
    block_factors shared;
    for (int64_t g = 0; g < groups; g++) {
        const uint8_t *group = group_of(kind, from, g);
        if (g % groups_per_block(kind) == 0) load_block(kind, block_of(kind, from, g), 0, PANEL_VECS, &shared);
        if (code_bits(kind) < 8) widen_codes(kind, group + factor_bytes(kind), codes + g * GROUP_CODES);
        FOR(row, group_rows(kind))
            FOR(v, PANEL_VECS)
                store(factors + (g * 2 + row) * PANEL + v * LANES, load_factors(kind, &shared, group, row, 0, v));
    }
    int64_t bytes = panel_bytes(kind, all * GROUP);
    int in_place = code_bits(kind) == 8;
    return (wide_panel){in_place ? (const int8_t *)from + factor_bytes(kind) : codes,
                        in_place ? group_bytes(kind) : GROUP_CODES,
                        factors,
                        groups,
                        scaling_of(kind),
                        (const char *)from + bytes,
                        bytes / all};
}

/* Bytes of the scratch that widen_panel fills. */
INLINE int64_t wide_bytes(int64_t inputs) { return inputs * PANEL + inputs / GROUP * 2 * PANEL * 4; }

KERNEL wide_panel widen_any(int kind, const void *panel, int64_t all, int64_t first, int64_t groups, void *scratch) {
    switch (kind) {
    case FD_Q8: return widen_panel(FD_Q8, panel, all, first, groups, scratch);
    case FD_Q6: return widen_panel(FD_Q6, panel, all, first, groups, scratch);
    case FD_Q5: return widen_panel(FD_Q5, panel, all, first, groups, scratch);
    case FD_Q5K: return widen_panel(FD_Q5K, panel, all, first, groups, scratch);
    case FD_Q4: return widen_panel(FD_Q4, panel, all, first, groups, scratch);
    case FD_MX4: return widen_panel(FD_MX4, panel, all, first, groups, scratch);
    default: return widen_panel(FD_Q4K, panel, all, first, groups, scratch);
    }
}

INLINE void prefetch_next(const wide_panel *panel, int64_t group) {
    const char *from = panel->next + group * panel->next_bytes;
    for (int64_t line = 0; line < panel->next_bytes; line += 64) __builtin_prefetch(from + line, 0, 2);
}

/* A tile as above, over a wide panel; the first one also asks for the next panel. */
INLINE void wide_tile(enum scaling scaling, const wide_panel *panel, const x_group *x, int64_t stride, float *y, int first,
                      int planes, int rows, int vec, int vecs) {
    vf acc[MAX_ROWS][PANEL_VECS];
    FOR(r, rows)
        FOR(v, vecs) acc[r][v] = (vf){0};
    const float *factors = panel->factors + vec * LANES;
    const int8_t *codes = panel->codes;
    for (int64_t g = 0; g < panel->groups; g++, x = next_x(x, planes)) {
        const x_group *xs[MAX_ROWS];
        rows_of_x(x, stride, rows, xs);
        if (first && vec == 0) prefetch_next(panel, g);
        FOR(part, scaling == HALVES ? 2 : 1) {
            dots_of_tile dots;
            dot_codes(codes, scaling, part, scaling == HALVES ? 1 : 2, xs, planes, rows, vec, vecs, dots);
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

typedef void wide_kernel(const wide_panel *panel, const x_group *x, int64_t stride, float *y, int first);

#define WIDE_TILE(rows, name, scaling, planes)                                                                          \
    KERNEL void name##_##rows(const wide_panel *panel, const x_group *x, int64_t stride, float *y, int first) {         \
        for (int vec = 0; vec < PANEL_VECS; vec += VECS_OF(rows, planes))                                               \
            wide_tile(scaling, panel, x, stride, y, first, planes, rows, vec, VECS_OF(rows, planes));                   \
    }
#define WIDE_TILES(name, scaling) EACH_ROWS(WIDE_TILE, name##_one, scaling, 1) EACH_ROWS(WIDE_TILE, name##_two, scaling, 2)
WIDE_TILES(scale, SCALE)
WIDE_TILES(minimum, MINIMUM)
WIDE_TILES(halves, HALVES)

/* All rows over one wide panel. */
static void wide_rows(const wide_panel *panel, const x_group *x, int64_t stride, int planes, int64_t rows, float *y) {
    static wide_kernel *const tiles[2][3][MAX_ROWS] = {
        {[SCALE] = TILES_OF(scale_one), [MINIMUM] = TILES_OF(minimum_one), [HALVES] = TILES_OF(halves_one)},
        {[SCALE] = TILES_OF(scale_two), [MINIMUM] = TILES_OF(minimum_two), [HALVES] = TILES_OF(halves_two)},
    };
    wide_kernel *const *chosen = tiles[planes - 1][panel->scaling];
    for (int64_t row = 0; row < rows; row += MAX_ROWS) {
        int64_t count = rows - row < MAX_ROWS ? rows - row : MAX_ROWS;
        chosen[count - 1](panel, (const x_group *)((const char *)x + row * stride), stride, y + row * PANEL, row == 0);
    }
}

#endif
