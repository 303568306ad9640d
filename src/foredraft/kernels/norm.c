/* RMS norms: each row by itself, its squares summed in one fixed order. */
#include "foredraft.h"
#include "pool.h"
#include "simd.h"

#include <math.h>

/* Four running vectors, so that the additions overlap; the tail goes through a zero-padded vector. */
static float sum_of_squares(const float *x, int64_t width) {
    vf sums[4] = {{0}, {0}, {0}, {0}};
    int64_t i = 0;
    for (; i + 4 * LANES <= width; i += 4 * LANES)
        FOR(u, 4) {
            vf v = load(x + i + u * LANES);
            sums[u] = muladd(sums[u], v, v);
        }
    for (; i < width; i += LANES) {
        vf v = {0};
        memcpy(&v, x + i, 4 * (size_t)(width - i < LANES ? width - i : LANES));
        sums[0] = muladd(sums[0], v, v);
    }
    return sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

typedef struct {
    float *x;
    const float *source, *update, *weight;
    float multiplier, eps, *y;
    int64_t width;
} norm_job;

static void norm_row(void *context, int64_t row, int worker) {
    (void)worker;
    const norm_job *job = context;
    int64_t width = job->width;
    const float *x = job->source + row * width;
    float *y = job->y + row * width;
    if (job->update) {
        float *sum = job->x + row * width;
        const float *update = job->update + row * width;
        for (int64_t i = 0; i < width; i++) sum[i] = sum[i] + job->multiplier * update[i];
    }
    float factor = 1.0f / sqrtf(sum_of_squares(x, width) / (float)width + job->eps);
    for (int64_t i = 0; i < width; i++) y[i] = x[i] * factor * job->weight[i];
}

int fd_rms_norm(const float *x, const float *weight, float eps, int64_t rows, int64_t width, float *y) {
    if (!x || !weight || !y) return FD_NULL;
    if (rows < 0 || width < 1) return FD_SHAPE;
    norm_job job = {NULL, x, NULL, weight, 0.0f, eps, y, width};
    pool_take();
    pool_run(rows, rows * width * 8, norm_row, &job);
    pool_give();
    return FD_OK;
}

int fd_add_rms_norm(float *x, const float *update, float multiplier, const float *weight, float eps, int64_t rows,
                    int64_t width, float *y) {
    if (!x || !update || !weight || !y) return FD_NULL;
    if (rows < 0 || width < 1) return FD_SHAPE;
    norm_job job = {x, x, update, weight, multiplier, eps, y, width};
    pool_take();
    pool_run(rows, rows * width * 8, norm_row, &job);
    pool_give();
    return FD_OK;
}
