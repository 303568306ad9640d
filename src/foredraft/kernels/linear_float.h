/* Linear layers with float32 and bfloat16 weights: y = x W^T in float32, one accumulator per result, over k in order.
 *
 * Every tile below, whatever its width, does the same to one result: acc = muladd(acc, w[k], x[k]) for k = 0, 1, 2, ...
 * So a row's bits do not depend on the tile that it was computed in. */
#ifndef FD_LINEAR_FLOAT_H
#define FD_LINEAR_FLOAT_H

#include "layout.h"

/* Where a tile reads x and writes y, and how far it goes. */
typedef struct {
    const float *x; /* [rows, x_stride], inputs padded with zeros to a multiple of 4 */
    int64_t x_stride, inputs;
    float *y; /* [rows, 16]: the running sums, kept here between blocks of inputs */
    int first_block;
} float_span;

/* One tile of `rows` rows by `vecs` vectors of outputs, from vector `vec` of the panel. `rows`, `vecs` and `bf16` are
 * literals at every call, so that the loops unroll into straight code with the sums in registers.
 *
 * Four inputs of an 8x2 tile on NEON take 64 multiply-adds, 2 a cycle, and 16 loads that hide behind them: 32 cycles on
 * a Neoverse N1 at the least, 34 measured. With bf16 weights 8 instructions to widen them come on top; between
 * multiply-adds each costs a whole cycle: 40 cycles at the least, 43 measured. */
INLINE void float_tile(const void *panel, int bf16, const float_span *span, int64_t row, int rows, int vec, int vecs) {
    const float *x = span->x + row * span->x_stride;
    float *y = span->y + row * PANEL + vec * LANES;
    const float *w = (const float *)panel + vec * LANES;
    const uint32_t *pairs = (const uint32_t *)panel + vec * LANES;
    vf acc[TILE_ROWS][PANEL_VECS];
    FOR(r, rows)
        FOR(v, vecs) acc[r][v] = span->first_block ? (vf){0} : load(y + r * PANEL + v * LANES);

    for (int64_t k = 0; k < span->inputs; k += 4) {
        quad xs[TILE_ROWS];
        FOR(r, rows) xs[r] = load_quad(x + r * span->x_stride + k);
#define ONE_INPUT(weights, v, j)                                       \
    {                                                                  \
        vf wv = weights;                                               \
        FOR(r, rows) acc[r][v] = muladd_quad(acc[r][v], wv, xs[r], j); \
    }
#define WIDEN_PAIRS(p)                                      \
    FOR(v, vecs) {                                          \
        vu pair = load_u32(pairs + p * PANEL + v * LANES);  \
        even[v] = even_bf16(pair), odd[v] = odd_bf16(pair); \
    }
        if (bf16) {
            vf even[PANEL_VECS], odd[PANEL_VECS];
            WIDEN_PAIRS(0)
            FOR(v, vecs) ONE_INPUT(even[v], v, 0)
            FOR(v, vecs) ONE_INPUT(odd[v], v, 1)
            WIDEN_PAIRS(1)
            FOR(v, vecs) ONE_INPUT(even[v], v, 2)
            FOR(v, vecs) ONE_INPUT(odd[v], v, 3)
        } else {
            FOR(v, vecs) ONE_INPUT(load(w + v * LANES), v, 0)
            FOR(v, vecs) ONE_INPUT(load(w + PANEL + v * LANES), v, 1)
            FOR(v, vecs) ONE_INPUT(load(w + 2 * PANEL + v * LANES), v, 2)
            FOR(v, vecs) ONE_INPUT(load(w + 3 * PANEL + v * LANES), v, 3)
        }
#undef ONE_INPUT
#undef WIDEN_PAIRS
        w += 4 * PANEL;
        pairs += 2 * PANEL;
    }
    FOR(r, rows)
        FOR(v, vecs) store(y + r * PANEL + v * LANES, acc[r][v]);
}

#define FLOAT_TILE(name, bf16, rows, vecs)                                              \
    KERNEL void name(const void *panel, const float_span *span, int64_t row, int vec) { \
        float_tile(panel, bf16, span, row, rows, vec, vecs);                            \
    }
FLOAT_TILE(f32_full, 0, TILE_ROWS, TILE_VECS)
FLOAT_TILE(f32_4, 0, 4, PANEL_VECS)
FLOAT_TILE(f32_2, 0, 2, PANEL_VECS)
FLOAT_TILE(f32_1, 0, 1, PANEL_VECS)
FLOAT_TILE(bf16_full, 1, TILE_ROWS, TILE_VECS)
FLOAT_TILE(bf16_4, 1, 4, PANEL_VECS)
FLOAT_TILE(bf16_2, 1, 2, PANEL_VECS)
FLOAT_TILE(bf16_1, 1, 1, PANEL_VECS)

/* All rows over one panel (or a block of its inputs). Few rows take all 16 outputs at once, to keep the units busy. */
static void float_rows(const void *panel, int bf16, const float_span *span, int64_t rows) {
    int64_t row = 0;
    for (; row + TILE_ROWS <= rows; row += TILE_ROWS)
        for (int vec = 0; vec < PANEL_VECS; vec += TILE_VECS) (bf16 ? bf16_full : f32_full)(panel, span, row, vec);
    if (rows - row >= 4) (bf16 ? bf16_4 : f32_4)(panel, span, row, 0), row += 4;
    if (rows - row >= 2) (bf16 ? bf16_2 : f32_2)(panel, span, row, 0), row += 2;
    if (rows - row >= 1) (bf16 ? bf16_1 : f32_1)(panel, span, row, 0);
}

#endif
