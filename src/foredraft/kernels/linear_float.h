/* Linear layers with float32 and bfloat16 weights: y = x W^T in float32, one accumulator per result, over k in order.
 *
 * Every tile below, whatever its width, does the same to one result: acc = muladd(acc, w[k], x[k]) for k = 0, 1, 2, ...
 * So a row's bits do not depend on the tile that it was computed in. */
#ifndef FD_LINEAR_FLOAT_H
#define FD_LINEAR_FLOAT_H

#include "layout.h"

/* How far ahead of the weights in use more are asked for from memory. On a Neoverse N1 the processor's own prefetching
 * costs 3 % of one row, and 512 bytes alone cost 3 % of two rows and of five. */
#define FAR_AHEAD 8192

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
 * Four inputs of 16 outputs on NEON take 16 multiply-adds a row, 2 a cycle: 8 cycles a row on a Neoverse N1 at the
 * least, 8.1 to 8.2 measured with float32 weights and 2 to 8 rows; the loads hide behind them. With bf16 weights 16
 * instructions to widen come on top, 8 cycles. They are quicker than a multiply-add, and one that follows it on the
 * same unit has to wait for the way out: 2 cycles for each change from one to the other, so they come in bursts of as
 * many as the registers hold. Measured: 8.1 a row and 10 (2 and 3 rows) to 12 (4 to 8 rows), where single ones cost
 * 16. */
INLINE void float_tile(const void *panel, int bf16, const float_span *span, int64_t row, int rows, int vec, int vecs) {
    const float *x = span->x + row * span->x_stride;
    float *y = span->y + row * PANEL + vec * LANES;
    const float *w = (const float *)panel + vec * LANES;
    const uint32_t *pairs = (const uint32_t *)panel + vec * LANES;
    const char *weights = panel;
    int at_once = bf16 && rows == 8 ? 4 : rows; /* rows that meet the weights together */
    int burst = rows * vecs + 4 * vecs + at_once < REGISTERS; /* whether there is room to widen four inputs at a time */
    vf acc[TILE_ROWS][PANEL_VECS];
    FOR(r, rows)
        FOR(v, vecs) acc[r][v] = span->first_block ? (vf){0} : load(y + r * PANEL + v * LANES);

    for (int64_t k = 0; k < span->inputs; k += 4) {
        if (vec == 0)
            FOR_STEP(line, bf16 ? 128 : 256, 64) {
                __builtin_prefetch(weights + line + 512);
                __builtin_prefetch(weights + line + FAR_AHEAD, 0, 2);
            }
        weights += bf16 ? 128 : 256;
        vf even[2][PANEL_VECS], odd[2][PANEL_VECS];
        FOR_STEP(first, rows, at_once) {
            quad xs[TILE_ROWS];
            FOR(r, at_once) xs[r] = load_quad(x + (first + r) * span->x_stride + k);
#define ONE_INPUT(weights, v, j)                                                          \
    {                                                                                     \
        vf wv = weights;                                                                  \
        FOR(r, at_once) acc[first + r][v] = muladd_quad(acc[first + r][v], wv, xs[r], j); \
    }
#define WIDEN_PAIRS(p)                                            \
    FOR(v, vecs) {                                                \
        vu pair = load_u32(pairs + p * PANEL + v * LANES);        \
        even[p][v] = even_bf16(pair), odd[p][v] = odd_bf16(pair); \
    }
            if (bf16) {
                if (first == 0) WIDEN_PAIRS(0)
                if (first == 0 && burst) WIDEN_PAIRS(1)
                FOR(v, vecs) ONE_INPUT(even[0][v], v, 0)
                FOR(v, vecs) ONE_INPUT(odd[0][v], v, 1)
                if (!burst) WIDEN_PAIRS(1)
                FOR(v, vecs) ONE_INPUT(even[1][v], v, 2)
                FOR(v, vecs) ONE_INPUT(odd[1][v], v, 3)
            } else {
                FOR(v, vecs) ONE_INPUT(load(w + v * LANES), v, 0)
                FOR(v, vecs) ONE_INPUT(load(w + PANEL + v * LANES), v, 1)
                FOR(v, vecs) ONE_INPUT(load(w + 2 * PANEL + v * LANES), v, 2)
                FOR(v, vecs) ONE_INPUT(load(w + 3 * PANEL + v * LANES), v, 3)
            }
        }
#undef ONE_INPUT
#undef WIDEN_PAIRS
        w += 4 * PANEL;
        pairs += 2 * PANEL;
    }
    FOR(r, rows)
        FOR(v, vecs) store(y + r * PANEL + v * LANES, acc[r][v]);
}

/* Few rows take all 16 outputs at once, to keep the units busy and to read the weights once; more take TILE_VECS
 * vectors, to fit the registers. */
#define WIDTH_OF(bf16, rows) \
    ((rows) <= TILE_ROWS / 2 || (!(bf16) && (PANEL_VECS + 1) * (rows) + 2 <= REGISTERS) ? PANEL_VECS : TILE_VECS)

typedef void float_kernel(const void *panel, const float_span *span, int64_t row);

#define FLOAT_TILE(name, bf16, rows)                                             \
    KERNEL void name(const void *panel, const float_span *span, int64_t row) {   \
        for (int vec = 0; vec < PANEL_VECS; vec += WIDTH_OF(bf16, rows))         \
            float_tile(panel, bf16, span, row, rows, vec, WIDTH_OF(bf16, rows)); \
    }
#define FLOAT_TILES(rows) FLOAT_TILE(f32_##rows, 0, rows) FLOAT_TILE(bf16_##rows, 1, rows)
FLOAT_TILES(1) FLOAT_TILES(2) FLOAT_TILES(3) FLOAT_TILES(4)
#if TILE_ROWS == 8
FLOAT_TILES(5) FLOAT_TILES(6) FLOAT_TILES(7) FLOAT_TILES(8)
#endif

static float_kernel *const float_kernels[2][TILE_ROWS] = {
#if TILE_ROWS == 8
    {f32_1, f32_2, f32_3, f32_4, f32_5, f32_6, f32_7, f32_8},
    {bf16_1, bf16_2, bf16_3, bf16_4, bf16_5, bf16_6, bf16_7, bf16_8},
#else
    {f32_1, f32_2, f32_3, f32_4},
    {bf16_1, bf16_2, bf16_3, bf16_4},
#endif
};

/* All rows over one panel (or a block of its inputs), in as few tiles as possible, as even as possible: 9 rows are
 * 5 + 4. A tile of one row would be as slow as one of two. */
static void float_rows(const void *panel, int bf16, const float_span *span, int64_t rows) {
    int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, row = 0;
    for (; tiles; tiles--) {
        int64_t count = (rows - row + tiles - 1) / tiles;
        float_kernels[bf16][count - 1](panel, span, row);
        row += count;
    }
}

#endif
