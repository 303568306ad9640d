/* What turns the logits of a drafting model into candidates with probabilities: the largest few numbers of every row, and
 * the logarithm of the sum of its exponentials. */
#include "foredraft.h"
#include "pool.h"
#include "block_max.h"

#include <math.h>

typedef struct {
    const float *x;
    int64_t stride, columns, count;
    float *values;
    int64_t *places;
} top_job;

static float log_sum(const float *x, int64_t columns) {
    float highest = -INFINITY;
    for (int64_t i = 0; i < columns; i += MAX_BLOCK) {
        float here = block_max(x + i, columns - i < MAX_BLOCK ? columns - i : MAX_BLOCK);
        highest = here > highest ? here : highest;
    }
    if (highest == -INFINITY) return highest;
    vf sums[4] = {{0}, {0}, {0}, {0}};
    for (int64_t i = 0; i < columns; i += 4 * LANES) {
        vf v[4];
        FOR(u, 4) {
            int64_t at = i + u * LANES, left = columns - at;
            v[u] = splat(-INFINITY);
            if (left >= LANES) v[u] = load(x + at);
            else if (left > 0) memcpy(&v[u], x + at, 4 * (size_t)left);
            v[u] -= highest;
        }
        vexp_all(v, 4, 1);
        FOR(u, 4) sums[u] += v[u];
    }
    return highest + logf(sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3])));
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
}

static void log_sum_row(void *context, int64_t row, int worker) {
    (void)worker;
    const top_job *job = context;
    job->values[row] = log_sum(job->x + row * job->stride, job->columns);
}

int fd_top(const float *x, int64_t rows, int64_t columns, int64_t stride, int64_t count, float *values,
           int64_t *places) {
    if (!x || !values || !places) return FD_NULL;
    if (rows < 0 || columns < 1 || count < 1 || count > columns || stride < columns) return FD_SHAPE;
    top_job job = {x, stride, columns, count, values, places};
    pool_take();
    pool_run(rows, rows * columns * 2, top_row, &job);
    pool_give();
    return FD_OK;
}

int fd_log_sums(const float *x, int64_t rows, int64_t columns, int64_t stride, float *sums) {
    if (!x || !sums) return FD_NULL;
    if (rows < 0 || columns < 1 || stride < columns) return FD_SHAPE;
    top_job job = {x, stride, columns, 0, sums, NULL};
    pool_take();
    pool_run(rows, rows * columns * 8, log_sum_row, &job);
    pool_give();
    return FD_OK;
}
