/* One block of up to 64 keys against the queries of one row and KV head: scores, weights, mixed values, and the merge of
 * such partial results. A partial is { values[width], maximum score, sum of weights }. */
#ifndef FD_ATTEND_BLOCK_H
#define FD_ATTEND_BLOCK_H

#include "simd.h"

#include <math.h>

#define KEYS 64   /* keys of a block */
#define QUERIES 4 /* queries that share loaded keys */
#define PARTIAL(width) ((width) + 2)

/* scores[query][key] for `queries` queries and keys first .. first + count - 1 (rounded up to 4: what lies beyond is
 * computed from old scratch and thrown away). Per vector step: 4 + queries loads and 4 * queries multiply-adds. */
INLINE void score(const float *q, const float *k, int64_t width, int first, int count, int queries, float scores[][KEYS]) {
    for (int key = first & ~3; key < first + count; key += 4) {
        const float *rows = k + key * width;
        vf acc[QUERIES][4];
        UNROLL for (int n = 0; n < queries; n++)
            UNROLL for (int i = 0; i < 4; i++) acc[n][i] = (vf){0};
        for (int64_t d = 0; d < width; d += LANES) {
            vf keys[4];
            UNROLL for (int i = 0; i < 4; i++) keys[i] = load(rows + i * width + d);
            UNROLL for (int n = 0; n < queries; n++) {
                vf query = load(q + n * width + d);
                UNROLL for (int i = 0; i < 4; i++) acc[n][i] = muladd(acc[n][i], query, keys[i]);
            }
        }
        UNROLL for (int n = 0; n < queries; n++) sum_lanes4(acc[n], scores[n] + key);
    }
}

/* scores -> weights e**(score - maximum) for keys first .. first + count - 1, zero elsewhere in the block. */
static void soften(float *scores, int first, int count, float *maximum, float *sum) {
    for (int i = 0; i < first; i++) scores[i] = -INFINITY;
    for (int i = first + count; i < KEYS; i++) scores[i] = -INFINITY;
    vf top = load(scores);
    for (int i = LANES; i < KEYS; i += LANES) top = vmax(top, load(scores + i));
    float largest = max_lanes(top);
    vf total = {0};
    for (int i = 0; i < KEYS; i += LANES) {
        vf weight = vexp(load(scores + i) - largest);
        total += weight;
        store(scores + i, weight);
    }
    *maximum = largest;
    *sum = sum_lanes(total);
}

/* out[query] = sum over keys of weights[query][key] * v[key], 16 columns at a time, keys in order. */
INLINE void mix(float weights[][KEYS], const float *v, int64_t width, int first, int count, int queries, float *out, int64_t out_stride) {
    for (int64_t d = 0; d < width; d += PANEL) {
        vf acc[QUERIES][PANEL_VECS];
        UNROLL for (int n = 0; n < queries; n++)
            UNROLL for (int i = 0; i < PANEL_VECS; i++) acc[n][i] = (vf){0};
        for (int key = first; key < first + count; key++) {
            const float *values = v + key * width + d;
            UNROLL for (int n = 0; n < queries; n++) {
                vf weight = splat(weights[n][key]);
                UNROLL for (int i = 0; i < PANEL_VECS; i++) acc[n][i] = muladd(acc[n][i], weight, load(values + i * LANES));
            }
        }
        UNROLL for (int n = 0; n < queries; n++)
            UNROLL for (int i = 0; i < PANEL_VECS; i++) store(out + n * out_stride + d + i * LANES, acc[n][i]);
    }
}

/* One block's partial results of up to QUERIES queries: { values[width], maximum, sum } each. */
INLINE void block_partials(const float *q, const float *k, const float *v, int64_t width, int first, int count, int queries, float *partials) {
    float scores[QUERIES][KEYS];
    int64_t stride = PARTIAL(width);
    score(q, k, width, first, count, queries, scores);
    for (int n = 0; n < queries; n++)
        soften(scores[n], first, count, partials + n * stride + width, partials + n * stride + width + 1);
    mix(scores, v, width, first, count, queries, partials, stride);
}

/* The partials of all `group` query heads of one KV head: q [group, width]. */
static void group_partials(const float *q, const float *k, const float *v, int64_t width, int first, int count, int64_t group,
                           float *partials) {
    for (; group >= QUERIES; group -= QUERIES, q += QUERIES * width, partials += QUERIES * PARTIAL(width))
        block_partials(q, k, v, width, first, count, QUERIES, partials);
    switch (group) {
    case 3: block_partials(q, k, v, width, first, count, 3, partials); break;
    case 2: block_partials(q, k, v, width, first, count, 2, partials); break;
    case 1: block_partials(q, k, v, width, first, count, 1, partials); break;
    }
}

/* state = state merged with the next block's partial; both { values[width], maximum, sum }. */
static void merge(float *state, const float *partial, int64_t width) {
    float maximum = state[width] > partial[width] ? state[width] : partial[width];
    vf old = vexp(splat(state[width] - maximum)), new = vexp(splat(partial[width] - maximum));
    for (int64_t d = 0; d < width; d += LANES) store(state + d, muladd(load(state + d) * old, load(partial + d), new));
    state[width] = maximum;
    state[width + 1] = state[width + 1] * old[0] + partial[width + 1] * new[0];
}

#endif
