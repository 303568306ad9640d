/* The lowest logit that a request may draw, as in sampling/pipeline.py: the highest of the floors of top-k, top-p and
 * min-p. It is the reference's floor except where the mass comes so close to top_p that the rounding of its sum, or of an
 * exponential (some 1e-6 of the mass), decides. */
#ifndef FD_FLOOR_H
#define FD_FLOOR_H

#include "foredraft.h"
#include "block_max.h"

#include <float.h>

/* A row of finite logits or -infinity, of which one at least is finite. */
typedef struct {
    const float *logits;
    int64_t vocab, blocks;
    float *maxima; /* of its blocks of MAX_BLOCK */
    float highest;
    float *some; /* room for all logits or maxima */
} logit_row;

/* The sum of exp((x - highest) * rate). */
static double mass_of(const float *x, int64_t count, float highest, float rate) {
    double mass = 0;
    for (int64_t i = 0; i < count; i += 4 * LANES) {
        vf v[4];
        load_four(v, x + i, count - i);
        FOR(u, 4) v[u] = (v[u] - highest) * rate;
        vexp_all(v, 4, 1);
        mass += sum_lanes((v[0] + v[1]) + (v[2] + v[3]));
    }
    return mass;
}

/* How much some numbers weigh: each one 1 where the rate is 0, else its mass. */
static double weight_of(const float *x, int64_t count, float highest, float rate) {
    return rate == 0 ? (double)count : mass_of(x, count, highest, rate);
}

/* Moves the numbers that are above the pivot, or equal to it, to the front; returns how many they are. */
static int64_t to_front(float *x, int64_t count, float pivot, int equal) {
    int64_t found = 0;
    for (int64_t i = 0; i < count; i++) {
        float value = x[i];
        x[i] = x[found];
        x[found] = value;
        found += equal ? value == pivot : value > pivot;
    }
    return found;
}

/* The highest number that weighs as much as is needed together with all that are above it, or the lowest of all where
 * rounding leaves too little. The numbers are put into another order. */
static float reached(float *x, int64_t count, double needed, float highest, float rate) {
    double above = 0; /* what those weigh that are above all that are left */
    for (;;) {
        float a = x[0], b = x[count / 2], c = x[count - 1];
        float low = a < b ? a : b, high = a < b ? b : a, pivot = c < low ? low : c > high ? high : c;
        int64_t higher = to_front(x, count, pivot, 0);
        int64_t equal = to_front(x + higher, count - higher, pivot, 1);
        double to_higher = above + weight_of(x, higher, highest, rate);
        double to_equal = to_higher + weight_of(x + higher, equal, highest, rate);
        if (higher && to_higher >= needed) {
            count = higher;
        } else if (to_equal >= needed || higher + equal == count) {
            return pivot;
        } else {
            above = to_equal;
            x += higher + equal;
            count -= higher + equal;
        }
    }
}

/* Copies the logits that are at least `least` to `some`; returns how many they are. */
static int64_t collect(const logit_row *row, float least) {
    int64_t count = 0;
    for (int64_t block = 0; block < row->blocks; block++) {
        if (row->maxima[block] < least) continue;
        int64_t first = block * MAX_BLOCK, end = min64(first + MAX_BLOCK, row->vocab);
        for (int64_t id = first; id < end; id++) {
            row->some[count] = row->logits[id];
            count += row->logits[id] >= least;
        }
    }
    return count;
}

/* The k-th largest logit. The k-th largest of the blocks' maxima is no higher. */
static float top_k_floor(const logit_row *row, int64_t k) {
    float least = -INFINITY;
    if (k <= row->blocks) {
        memcpy(row->some, row->maxima, sizeof(float) * (size_t)row->blocks);
        least = reached(row->some, row->blocks, (double)k, 0, 0);
    }
    return reached(row->some, collect(row, least), (double)k, 0, 0);
}

/* The lowest logit that is needed to reach `top_p` of the mass of those from `kept` on. */
static float top_p_floor(const logit_row *row, float kept, double temperature, double top_p) {
    float rate = (float)(1 / temperature);
    double mass = kept > -FLT_MAX ? mass_of(row->some, collect(row, kept), row->highest, rate)
                                  : mass_of(row->logits, row->vocab, row->highest, rate);
    /* All that are further below the highest have less than a third of the mass that is not needed. */
    double depth = temperature * log(3.0 * (double)row->vocab / ((1 - top_p) * mass));
    float least = (float)(row->highest - depth);
    return reached(row->some, collect(row, least > kept ? least : kept), top_p * mass, row->highest, rate);
}

static float floor_of(const logit_row *row, const fd_drawing *how) {
    if (how->temperature == 0) return row->highest;
    float floor = (float)(row->highest + how->temperature * how->min_p_log), kept = -FLT_MAX;
    if (how->top_k > 0 && how->top_k < row->vocab) kept = top_k_floor(row, how->top_k);
    if (kept < -FLT_MAX) kept = -FLT_MAX; /* what is -infinity cannot be drawn */
    if (how->top_p < 1) kept = top_p_floor(row, kept, how->temperature, how->top_p);
    return floor > kept ? floor : kept;
}

#endif
