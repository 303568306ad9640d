/* What a short stretch of numbers holds, for those that look for the largest of many. */
#ifndef FD_BLOCK_MAX_H
#define FD_BLOCK_MAX_H

#include "simd.h"

#define MAX_BLOCK 64 /* numbers that are passed over together where none of them can win */

/* The largest of at most MAX_BLOCK numbers; NaN is not one. */
INLINE float block_max(const float *x, int64_t count) {
    float highest = -INFINITY;
    if (count == MAX_BLOCK) {
        vf best = splat(-INFINITY);
        FOR_STEP(i, MAX_BLOCK, LANES) best = vmax(load(x + i), best);
        return max_lanes(best);
    }
    for (int64_t i = 0; i < count; i++) highest = x[i] > highest ? x[i] : highest;
    return highest;
}

/* Lanes that are not 0 where some of at most MAX_BLOCK numbers is NaN. */
INLINE vi no_numbers(const float *x, int64_t count) {
    vi found = {0};
    if (count == MAX_BLOCK) {
        FOR_STEP(i, MAX_BLOCK, LANES) found |= (vi)(load(x + i) != load(x + i));
    } else {
        for (int64_t i = 0; i < count; i++) found[0] |= x[i] != x[i];
    }
    return found;
}

INLINE int any_lane(vi found) {
    int32_t any = 0;
    FOR(i, LANES) any |= found[i];
    return any != 0;
}

#endif
