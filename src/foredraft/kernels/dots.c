/* Dot products of rows with a few vectors each: the logits of a shortlist, whose rows of the output head differ from
 * sequence to sequence. */
#include "foredraft.h"
#include "pool.h"
#include "simd.h"

/* Four running vectors, so that the additions overlap; the tail goes through a zero-padded vector. */
static float dot(const float *a, const float *b, int64_t width) {
    vf sums[4] = {{0}, {0}, {0}, {0}};
    int64_t i = 0;
    for (; i + 4 * LANES <= width; i += 4 * LANES)
        FOR(u, 4) sums[u] = muladd(sums[u], load(a + i + u * LANES), load(b + i + u * LANES));
    for (; i < width; i += LANES) {
        size_t bytes = 4 * (size_t)(width - i < LANES ? width - i : LANES);
        vf left = {0}, right = {0};
        memcpy(&left, a + i, bytes);
        memcpy(&right, b + i, bytes);
        sums[0] = muladd(sums[0], left, right);
    }
    return sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

typedef struct {
    const float *vectors, *x;
    const int64_t *lanes;
    int64_t count, width;
    float *y;
} dots_job;

static void dots_row(void *context, int64_t row, int worker) {
    (void)worker;
    const dots_job *job = context;
    const float *vectors = job->vectors + job->lanes[row] * job->count * job->width;
    const float *x = job->x + row * job->width;
    for (int64_t i = 0; i < job->count; i++)
        job->y[row * job->count + i] = dot(vectors + i * job->width, x, job->width);
}

int fd_dots(const float *vectors, int64_t num_lanes, int64_t count, int64_t width, const int64_t *lanes, const float *x,
            int64_t rows, float *y) {
    if (!vectors || !lanes || !x || !y) return FD_NULL;
    if (num_lanes < 1 || rows < 0 || count < 1 || width < 1) return FD_SHAPE;
    for (int64_t row = 0; row < rows; row++)
        if (lanes[row] < 0 || lanes[row] >= num_lanes) return FD_RANGE;
    dots_job job = {vectors, x, lanes, count, width, y};
    pool_take();
    pool_run(rows, rows * count * width, dots_row, &job);
    pool_give();
    return FD_OK;
}
