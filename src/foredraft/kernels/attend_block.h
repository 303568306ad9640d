/* One block of up to 64 keys against the queries of one row and KV head: scores, weights, mixed values, and the merge of
 * such partial results. A partial is { values[width], maximum score, sum of weights }. */
#ifndef FD_ATTEND_BLOCK_H
#define FD_ATTEND_BLOCK_H

#include "simd.h"

#include <math.h>

#define KEYS 64   /* keys of a block */
#define QUERIES 4 /* queries that share loaded keys */
#define PARTIAL(width) ((width) + 2)

/* The keys and values of a block, wherever they lie: float32 rows of `width`, a multiple of 16. A row of queries looks at
 * first .. end-1 of them; the rows from there to the next multiple of 4 may be read, but do not count. */
typedef struct {
    const float *k[KEYS + 3], *v[KEYS + 3];
} key_block;

/* scores[query][key], four keys at a time: per vector 4 + queries loads and 4 * queries multiply-adds. */
INLINE void score(const float *q, const key_block *block, int64_t width, int first, int end, int queries, float scores[][KEYS]) {
    for (int key = first & ~3; key < end; key += 4) {
        const float *const *rows = block->k + key;
        const float *k0 = rows[0], *k1 = rows[1], *k2 = rows[2], *k3 = rows[3];
        vf acc[QUERIES][4];
        UNROLL for (int n = 0; n < queries; n++)
            UNROLL for (int i = 0; i < 4; i++) acc[n][i] = (vf){0};
        for (int64_t panel = 0; panel < width; panel += PANEL)
            UNROLL for (int d = 0; d < PANEL; d += LANES) {
                int64_t at = panel + d;
                vf keys[4] = {load(k0 + at), load(k1 + at), load(k2 + at), load(k3 + at)};
                UNROLL for (int n = 0; n < queries; n++) {
                    vf query = load(q + n * width + at);
                    UNROLL for (int i = 0; i < 4; i++) acc[n][i] = muladd(acc[n][i], query, keys[i]);
                }
            }
        UNROLL for (int n = 0; n < queries; n++) sum_lanes4(acc[n], scores[n] + key);
    }
}

/* scores -> weights e**(score - maximum) of keys first .. end-1, zero in the rest of their vectors. About 20 instructions
 * a vector. */
static void soften(float *scores, int first, int end, float *maximum, float *sum) {
    int from = first / LANES * LANES, to = (end + LANES - 1) / LANES * LANES;
    for (int i = from; i < first; i++) scores[i] = -INFINITY;
    for (int i = end; i < to; i++) scores[i] = -INFINITY;
    vf top = load(scores + from);
    for (int i = from + LANES; i < to; i += LANES) top = vmax(top, load(scores + i));
    float largest = max_lanes(top);
    vf total = {0};
    for (int i = from; i < to; i += LANES) {
        vf weight = vexp(load(scores + i) - largest);
        total += weight;
        store(scores + i, weight);
    }
    *maximum = largest;
    *sum = sum_lanes(total);
}

/* out[query] = sum over keys of weight * value, keys in order, 16 columns at a time: per key 4 loads and 4 * queries
 * multiply-adds on NEON. */
INLINE void mix(float weights[][KEYS], const key_block *block, int64_t width, int first, int end, int queries, float *out) {
    for (int64_t d = 0; d < width; d += PANEL) {
        vf acc[QUERIES][PANEL_VECS];
        UNROLL for (int n = 0; n < queries; n++)
            UNROLL for (int i = 0; i < PANEL_VECS; i++) acc[n][i] = (vf){0};
        int key = first;
        for (; key + 4 <= end; key += 4) {
            quad four[QUERIES];
            UNROLL for (int n = 0; n < queries; n++) four[n] = load_quad(weights[n] + key);
#define ONE_KEY(j)                                                                                             \
    UNROLL for (int i = 0; i < PANEL_VECS; i++) {                                                              \
        vf values = load(block->v[key + j] + d + i * LANES);                                                   \
        UNROLL for (int n = 0; n < queries; n++) acc[n][i] = muladd_quad(acc[n][i], values, four[n], j);       \
    }
            ONE_KEY(0) ONE_KEY(1) ONE_KEY(2) ONE_KEY(3)
#undef ONE_KEY
        }
        for (; key < end; key++)
            UNROLL for (int i = 0; i < PANEL_VECS; i++) {
                vf values = load(block->v[key] + d + i * LANES);
                UNROLL for (int n = 0; n < queries; n++) acc[n][i] = muladd(acc[n][i], values, splat(weights[n][key]));
            }
        UNROLL for (int n = 0; n < queries; n++)
            UNROLL for (int i = 0; i < PANEL_VECS; i++) store(out + n * PARTIAL(width) + d + i * LANES, acc[n][i]);
    }
}

INLINE void block_partials(const float *q, const key_block *block, int64_t width, int first, int end, int queries, float *partials) {
    float scores[QUERIES][KEYS];
    score(q, block, width, first, end, queries, scores);
    for (int n = 0; n < queries; n++) {
        float *partial = partials + n * PARTIAL(width);
        soften(scores[n], first, end, partial + width, partial + width + 1);
    }
    mix(scores, block, width, first, end, queries, partials);
}

#define BLOCK_PARTIALS(queries)                                                                                \
    KERNEL void block_partials_##queries(const float *q, const key_block *block, int64_t width, int first,     \
                                         int end, float *partials) {                                           \
        block_partials(q, block, width, first, end, queries, partials);                                        \
    }
BLOCK_PARTIALS(1)
BLOCK_PARTIALS(2)
BLOCK_PARTIALS(3)
BLOCK_PARTIALS(4)

/* The partials of all `group` query heads of one KV head: q [group, width]. */
static void group_partials(const float *q, const key_block *block, int64_t width, int first, int end, int64_t group, float *partials) {
    for (; group >= QUERIES; group -= QUERIES, q += QUERIES * width, partials += QUERIES * PARTIAL(width))
        block_partials_4(q, block, width, first, end, partials);
    if (group == 3) block_partials_3(q, block, width, first, end, partials);
    if (group == 2) block_partials_2(q, block, width, first, end, partials);
    if (group == 1) block_partials_1(q, block, width, first, end, partials);
}

/* state = state merged with the next block's partial. */
static void merge(float *state, const float *partial, int64_t width) {
    float maximum = state[width] > partial[width] ? state[width] : partial[width];
    vf old = vexp(splat(state[width] - maximum)), new = vexp(splat(partial[width] - maximum));
    for (int64_t d = 0; d < width; d += LANES) store(state + d, muladd(load(state + d) * old, load(partial + d), new));
    state[width] = maximum;
    state[width + 1] = state[width + 1] * old[0] + partial[width + 1] * new[0];
}

#endif
