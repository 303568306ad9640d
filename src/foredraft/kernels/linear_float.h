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

/* One tile of `rows` rows by `vecs` vectors of outputs, from vector `vec` of the panel. All three and `bf16` are
 * literals at every call, so that the loops unroll into straight code with the sums in registers.
 *
 * Four inputs of an 8x2 tile on NEON: 64 multiply-adds (32 cycles on a Neoverse N1), 8 loads of x, 8 of f32 weights; or 4
 * of bf16 weights and 8 instructions to widen them (4 cycles). */
INLINE void float_tile(const void *panel, int bf16, const float_span *span, int64_t row, int rows, int vec, int vecs) {
    const float *x = span->x + row * span->x_stride;
    float *y = span->y + row * PANEL + vec * LANES;
    const float *w = (const float *)panel + vec * LANES;
    const uint32_t *pairs = (const uint32_t *)panel + vec * LANES;
    vf acc[TILE_ROWS][PANEL_VECS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vecs; v++)
            acc[r][v] = span->first_block ? (vf){0} : load(y + r * PANEL + v * LANES);

    for (int64_t k = 0; k < span->inputs; k += 4) {
        quad xs[TILE_ROWS];
        UNROLL for (int r = 0; r < rows; r++) xs[r] = load_quad(x + r * span->x_stride + k);
#define ONE_INPUT(weights, v, j) \
    { vf wv = weights; UNROLL for (int r = 0; r < rows; r++) acc[r][v] = muladd_quad(acc[r][v], wv, xs[r], j); }
        if (bf16) {
            UNROLL for (int v = 0; v < vecs; v++) {
                vu first = load_u32(pairs + v * LANES), second = load_u32(pairs + PANEL + v * LANES);
                ONE_INPUT((vf)(first << 16), v, 0)
                ONE_INPUT((vf)(first & 0xffff0000u), v, 1)
                ONE_INPUT((vf)(second << 16), v, 2)
                ONE_INPUT((vf)(second & 0xffff0000u), v, 3)
            }
        } else {
            UNROLL for (int v = 0; v < vecs; v++) ONE_INPUT(load(w + v * LANES), v, 0)
            UNROLL for (int v = 0; v < vecs; v++) ONE_INPUT(load(w + PANEL + v * LANES), v, 1)
            UNROLL for (int v = 0; v < vecs; v++) ONE_INPUT(load(w + 2 * PANEL + v * LANES), v, 2)
            UNROLL for (int v = 0; v < vecs; v++) ONE_INPUT(load(w + 3 * PANEL + v * LANES), v, 3)
        }
#undef ONE_INPUT
        w += 4 * PANEL;
        pairs += 2 * PANEL;
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vecs; v++) store(y + r * PANEL + v * LANES, acc[r][v]);
}

/* A full tile over the panel's 16 outputs, TILE_VECS vectors at a time. */
INLINE void full_float_tile(const void *panel, int bf16, const float_span *span, int64_t row) {
    UNROLL for (int vec = 0; vec < PANEL_VECS; vec += TILE_VECS)
        float_tile(panel, bf16, span, row, TILE_ROWS, vec, TILE_VECS);
}

/* All rows over one panel (or a block of its inputs). Few rows take all 16 outputs at once, to keep the units busy. */
INLINE void float_rows(const void *panel, int bf16, const float_span *span, int64_t rows) {
    int64_t row = 0;
    for (; row + TILE_ROWS <= rows; row += TILE_ROWS) full_float_tile(panel, bf16, span, row);
    if (TILE_ROWS == 8 && rows - row >= 4) float_tile(panel, bf16, span, row, 4, 0, PANEL_VECS), row += 4;
    if (rows - row >= 2) float_tile(panel, bf16, span, row, 2, 0, PANEL_VECS), row += 2;
    if (rows - row >= 1) float_tile(panel, bf16, span, row, 1, 0, PANEL_VECS);
}

#endif
