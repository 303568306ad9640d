/* What turns the logits of a drafting model into candidates with probabilities: the largest few numbers of every row, and
 * their share of what all of them are. */
#include "foredraft.h"
#include "pool.h"
#include "block_max.h"

#include <math.h>

typedef struct {
    const float *x;
    int64_t stride, columns, count;
    int as_shares;
    float *values;
    int64_t *places;
} top_job;

/* values = exp(values) as shares of the sum of exp(x), whose largest comes first. */
static void shares(const float *x, int64_t columns, int64_t count, float *values) {
    float highest = values[0];
    vf sums[4] = {{0}, {0}, {0}, {0}};
    for (int64_t i = 0; i < columns; i += 4 * LANES) {
        vf v[4];
        load_four(v, x + i, columns - i);
        FOR(u, 4) v[u] -= highest;
        vexp_all(v, 4, 1);
        FOR(u, 4) sums[u] += v[u];
    }
    float sum = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (int64_t i = 0; i < count; i++) values[i] = expf(values[i] - highest) / sum;
}

/* Columns come in ascending order, and one only passes those that are smaller: equal ones stay in order. */
static void top_row(void *context, int64_t row, int worker) {
    (void)worker;
    const top_job *job = context;
    const float *x = job->x + row * job->stride;
    float *values = job->values + row * job->count;
    int64_t *places = job->places + row * job->count, found = 0;
    for (int64_t first = 0; first < job->columns; first += MAX_BLOCK) {
        int64_t end = job->columns - first < MAX_BLOCK ? job->columns : first + MAX_BLOCK;
        if (found == job->count && block_max(x + first, end - first) <= values[found - 1]) continue;
        for (int64_t column = first; column < end; column++) {
            float value = x[column];
            if (value != value || (found == job->count && value <= values[found - 1])) continue;
            int64_t at = found < job->count ? found++ : found - 1;
            for (; at && values[at - 1] < value; at--) {
                values[at] = values[at - 1];
                places[at] = places[at - 1];
            }
            values[at] = value;
            places[at] = column;
        }
    }
    for (; found < job->count; found++) {
        values[found] = -INFINITY;
        places[found] = 0;
    }
    if (job->as_shares) shares(x, job->columns, job->count, values);
}

int fd_top(const float *x, int64_t rows, int64_t columns, int64_t stride, int64_t count, int as_shares, float *values,
           int64_t *places) {
    if (!x || !values || !places) return FD_NULL;
    if (rows < 0 || columns < 1 || count < 1 || count > columns || stride < columns) return FD_SHAPE;
    top_job job = {x, stride, columns, count, as_shares, values, places};
    pool_take();
    pool_run(rows, rows * columns * (as_shares ? 8 : 2), top_row, &job);
    pool_give();
    return FD_OK;
}
