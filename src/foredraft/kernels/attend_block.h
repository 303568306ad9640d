/* One block of up to 64 keys against queries of one KV head that see the same of them: scores, weights, mixed values,
 * and the merge of such partial results. A partial is { values[width], maximum score, sum of weights }.
 *
 * Cycles per key for 3 queries of width 64 on a Neoverse N1, all in the first-level cache: from float32 rows 67 (scores
 * 28, weights 13, values 26), from bfloat16 rows 94 (43, 13, 38), and 5 for the merge; the multiply-adds alone are 24
 * each for scores and values. With 1024 keys of bfloat16 in 30 layers fd_attend takes 87 a row at 16 rows, 95 at 8 and
 * 162 at 1; to gather and widen a key and its value is some 130 of them, once for all rows. */
#ifndef FD_ATTEND_BLOCK_H
#define FD_ATTEND_BLOCK_H

#include "simd.h"

#include <math.h>

#define KEYS 64   /* keys of a block */
#define QUERIES (LANES == 16 ? 6 : REGISTERS == 32 ? 4 : 3) /* queries that share loaded keys */
#define MOST_QUERIES 6
/* Vectors of values that are summed side by side: 64 columns of few queries on AVX512, 32 of more. */
#define MIX_VECS (LANES == 16 ? 4 : PANEL_VECS)
#define MIX_VECS_OF(queries) (LANES == 16 && (queries) > 4 ? 2 : MIX_VECS)
#define PARTIAL(width) ((width) + 4) /* two of them unused: vectors stay aligned */

/* The keys and values of a block, wherever they lie: float32 or bfloat16 rows of `width`, a multiple of 16. A row of
 * queries looks at first .. end-1 of them; the rows from there to the next multiple of 4 may be read, but do not count.
 *
 * `ahead`, where there is one, is the block that comes next: its rows are asked for four by four while this block is
 * computed with. All at once would stall the core for as long as the memory takes. */
typedef struct key_block {
    const void *k[KEYS], *v[KEYS];
    int32_t offsets[KEYS]; /* whose keys they are, or -1 */
    int bf16;
    const struct key_block *ahead;
} key_block;

INLINE void prefetch_four(const void *const *rows, int64_t at, int bf16) {
    /* x86: to the second-level cache. The first one has 48 KiB, and keys and values of two blocks are 64. */
    FOR(i, 4) __builtin_prefetch((const char *)rows[i] + (at << (2 - bf16)), 0, REGISTERS == 32 && LANES == 4 ? 3 : 2);
}

INLINE vf load_at(const void *row, int64_t at, int bf16) {
    return bf16 ? load_bf16((const uint16_t *)row + at) : load((const float *)row + at);
}

/* sums[query][key] of four keys, not yet added up: per vector 4 + queries loads and 4 * queries multiply-adds, and 4
 * instructions to widen bfloat16 keys. `queries` and `bf16` are literals at every call. */
INLINE void multiply_keys(const float *const q[], const key_block *block, int bf16, int64_t width, int key, int queries,
                          vf sums[][4]) {
    const key_block *ahead = block->ahead;
    int side = bf16 && REGISTERS == 32 ? TILE_VECS : 1; /* vectors of a key that are widened together, see float_tile */
    const void *const *rows = block->k + key;
    FOR(n, queries)
        FOR(i, 4) sums[n][i] = (vf){0};
    for (int64_t panel = 0; panel < width; panel += PANEL) {
        if (ahead) prefetch_four(ahead->k + key, panel, ahead->bf16);
        FOR_STEP(d, PANEL, side * LANES) {
            int64_t at = panel + d;
            vf keys[4][TILE_VECS];
            FOR(i, 4)
                FOR(s, side) keys[i][s] = held(load_at(rows[i], at + s * LANES, bf16));
            FOR(s, side)
                FOR(n, queries) {
                    vf query = load(q[n] + at + s * LANES);
                    FOR(i, 4) sums[n][i] = muladd(sums[n][i], query, keys[i][s]);
                }
        }
    }
}

/* scores[query][key]. On AVX512 they are stored 16 at a time: vectors of them are read next, which would have to wait
 * until several smaller stores are done. */
INLINE void score(const float *const q[], const key_block *block, int bf16, int64_t width, int first, int end,
                  int queries, float scores[][KEYS]) {
    vf sums[MOST_QUERIES][4];
#if LANES == 16
    for (int key = first & ~15; key < end; key += 16) {
        vf fours[MOST_QUERIES][4];
        for (int quad = 0; quad < 4; quad++) {
            int any = key + 4 * quad < end && key + 4 * quad + 4 > first;
            if (any) multiply_keys(q, block, bf16, width, key + 4 * quad, queries, sums);
            FOR(n, queries) fours[n][quad] = any ? sum_fours(sums[n]) : (vf){0};
        }
        FOR(n, queries) store(scores[n] + key, sum_quarters(fours[n]));
    }
#else
    for (int key = first & ~3; key < end; key += 4) {
        multiply_keys(q, block, bf16, width, key, queries, sums);
        FOR(n, queries) sum_lanes4(sums[n], scores[n] + key);
    }
#endif
}

/* scores -> weights e**(score - maximum) of keys first .. end-1, zero in the rest of their vectors; four vectors side
 * by side. 64 keys: 266 cycles measured, 184 for the instructions of vexp_all alone. */
static void soften(float *scores, int first, int end, float *maximum, float *sum) {
    const int step = 4 * LANES;
    int from = first / step * step, to = (end + step - 1) / step * step;
    for (int i = from; i < first; i++) scores[i] = -INFINITY;
    for (int i = end; i < to; i++) scores[i] = -INFINITY;
    vf top[4], total = {0};
    FOR(i, 4) top[i] = load(scores + from + i * LANES);
    for (int key = from + step; key < to; key += step)
        FOR(i, 4) top[i] = vmax(top[i], load(scores + key + i * LANES));
    float largest = max_lanes(vmax(vmax(top[0], top[1]), vmax(top[2], top[3])));
    for (int key = from; key < to; key += step) {
        vf weights[4];
        FOR(i, 4) weights[i] = load(scores + key + i * LANES) - largest;
        vexp_all(weights, 4, 1);
        FOR(i, 4) total += weights[i];
        FOR(i, 4) store(scores + key + i * LANES, weights[i]);
    }
    *maximum = largest;
    *sum = sum_lanes(total);
}

/* Columns d .. of out[query] = sum over keys of weight * value, keys in order, `vecs` vectors of columns at a time: per
 * key 4 loads and 4 * queries multiply-adds on NEON, and 4 instructions to widen bfloat16 values, two keys at a time (see
 * float_tile). */
INLINE void mix_columns(float weights[][KEYS], const key_block *block, int bf16, int64_t d, int first, int end,
                        int queries, int vecs, float *const out[]) {
    const key_block *ahead = block->ahead;
    vf acc[MOST_QUERIES][MIX_VECS];
    FOR(n, queries)
        FOR(i, vecs) acc[n][i] = (vf){0};
    int key = first;
    for (; key + 4 <= end; key += 4) {
        quad four[MOST_QUERIES];
        FOR(n, queries) four[n] = load_quad(weights[n] + key);
        if (ahead) FOR_STEP(c, vecs * LANES, PANEL) prefetch_four(ahead->v + key, d + c, ahead->bf16);
#define ONE_KEY(j, values) \
    FOR(i, vecs)           \
        FOR(n, queries) acc[n][i] = muladd_quad(acc[n][i], values[i], four[n], j);
#define TWO_KEYS(j, next)                                                         \
    {                                                                             \
        vf one[MIX_VECS], two[MIX_VECS];                                          \
        FOR(i, vecs) one[i] = load_at(block->v[key + j], d + i * LANES, bf16);    \
        FOR(i, vecs) two[i] = load_at(block->v[key + next], d + i * LANES, bf16); \
        ONE_KEY(j, one) ONE_KEY(next, two)                                        \
    }
        TWO_KEYS(0, 1) TWO_KEYS(2, 3)
#undef TWO_KEYS
#undef ONE_KEY
    }
    for (; key < end; key++)
        FOR(i, vecs) {
            vf values = load_at(block->v[key], d + i * LANES, bf16);
            FOR(n, queries) acc[n][i] = muladd(acc[n][i], values, splat(weights[n][key]));
        }
    FOR(n, queries)
        FOR(i, vecs) store(out[n] + d + i * LANES, acc[n][i]);
}

/* All columns: as many at a time as there must be sums on their way, because each waits for its last addition. */
INLINE void mix(float weights[][KEYS], const key_block *block, int bf16, int64_t width, int first, int end, int queries,
                float *const out[]) {
    int64_t d = 0, step = MIX_VECS_OF(queries) * LANES;
    for (; d + step <= width; d += step)
        mix_columns(weights, block, bf16, d, first, end, queries, MIX_VECS_OF(queries), out);
    for (; d < width; d += PANEL) mix_columns(weights, block, bf16, d, first, end, queries, PANEL_VECS, out);
}

/* The partials of queries q[0], q[1], ..., each to where it is wanted. */
INLINE void block_partials(const float *const q[], const key_block *block, int bf16, int64_t width, int first, int end,
                           int queries, float *const partials[]) {
    _Alignas(64) float scores[MOST_QUERIES][KEYS];
    score(q, block, bf16, width, first, end, queries, scores);
    for (int n = 0; n < queries; n++) soften(scores[n], first, end, partials[n] + width, partials[n] + width + 1);
    mix(scores, block, bf16, width, first, end, queries, partials);
}

typedef void block_kernel(const float *const q[], const key_block *block, int64_t width, int first, int end,
                          float *const partials[]);

#define BLOCK_KERNEL(name, queries, bf16)                                                                      \
    KERNEL void name(const float *const q[], const key_block *block, int64_t width, int first, int end,        \
                     float *const partials[]) {                                                                \
        block_partials(q, block, bf16, width, first, end, queries, partials);                                  \
    }
#define BLOCK_KERNELS(queries) \
    BLOCK_KERNEL(f32_queries_##queries, queries, 0) BLOCK_KERNEL(bf16_queries_##queries, queries, 1)
BLOCK_KERNELS(1) BLOCK_KERNELS(2) BLOCK_KERNELS(3)
#if REGISTERS == 32
BLOCK_KERNELS(4)
#endif
#if LANES == 16
BLOCK_KERNELS(5) BLOCK_KERNELS(6)
#endif

static block_kernel *const block_kernels[2][QUERIES] = {
#if LANES == 16
    {f32_queries_1, f32_queries_2, f32_queries_3, f32_queries_4, f32_queries_5, f32_queries_6},
    {bf16_queries_1, bf16_queries_2, bf16_queries_3, bf16_queries_4, bf16_queries_5, bf16_queries_6},
#elif REGISTERS == 32
    {f32_queries_1, f32_queries_2, f32_queries_3, f32_queries_4},
    {bf16_queries_1, bf16_queries_2, bf16_queries_3, bf16_queries_4},
#else
    {f32_queries_1, f32_queries_2, f32_queries_3},
    {bf16_queries_1, bf16_queries_2, bf16_queries_3},
#endif
};

/* state = state merged with the next block's partial. */
static void merge(float *state, const float *partial, int64_t width) {
    float maximum = state[width] > partial[width] ? state[width] : partial[width];
    vf scales = vexp((vf){state[width] - maximum, partial[width] - maximum});
    vf old = splat(scales[0]), new = splat(scales[1]);
    for (int64_t d = 0; d < width; d += LANES) store(state + d, muladd(load(state + d) * old, load(partial + d), new));
    state[width] = maximum;
    state[width + 1] = state[width + 1] * scales[0] + partial[width + 1] * scales[1];
}

#endif
