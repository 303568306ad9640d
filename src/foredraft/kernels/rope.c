/* rope_and_store: splits a fused q k v row, norms and rotates q and k, and writes k and v to their slot of the cache.
 */
#include "foredraft.h"
#include "pool.h"
#include "simd.h"

#include <math.h>

typedef struct {
    const float *qkv, *q_norm, *k_norm, *rope;
    const fd_kv *kv;
    const fd_attention *shape;
    const fd_batch *batch;
    float *q;
} rope_job;

/* y = x / rms(x) * weight over one head; the sum runs in one fixed order. */
static void norm_head(const float *x, const float *weight, float eps, int64_t width, float *y) {
    vf sums = {0};
    for (int64_t i = 0; i < width; i += LANES) {
        vf v = {0};
        memcpy(&v, x + i, 4 * (size_t)(width - i < LANES ? width - i : LANES));
        sums = muladd(sums, v, v);
    }
    float factor = 1.0f / sqrtf(sum_lanes(sums) / (float)width + eps);
    for (int64_t i = 0; i < width; i++) y[i] = x[i] * factor * weight[i];
}

/* One head of q or k: the norm where there is one, then pairs (i, i + rotary_dim / 2) turned by the row's angles. */
static void rotate_head(const float *x, const float *norm, const float *cosines, const fd_attention *shape, float *y) {
    int64_t half = shape->rotary_dim / 2;
    const float *sines = cosines + half;
    if (norm) norm_head(x, norm, shape->norm_eps, shape->head_dim, y);
    else memcpy(y, x, 4 * (size_t)shape->head_dim);
    for (int64_t i = 0; i < half; i++) {
        float a = y[i], b = y[half + i];
        y[i] = a * cosines[i] - b * sines[i];
        y[half + i] = b * cosines[i] + a * sines[i];
    }
}

static void write_head(const float *x, const fd_kv *kv, void *cache, int64_t at, int64_t width) {
    if (kv->is_bf16)
        for (int64_t i = 0; i < width; i++) ((uint16_t *)cache)[at + i] = round_bf16(x[i]);
    else memcpy((float *)cache + at, x, 4 * (size_t)width);
}

static void rope_row(void *context, int64_t row, int worker) {
    const rope_job *job = context;
    const fd_attention *shape = job->shape;
    int64_t width = shape->head_dim;
    const float *q = job->qkv + row * (shape->heads + 2 * shape->kv_heads) * width;
    const float *k = q + shape->heads * width, *v = k + shape->kv_heads * width;
    const float *angles = job->rope + job->batch->positions[row] * shape->rotary_dim;
    float *turned = pool_scratch(worker);
    for (int64_t h = 0; h < shape->heads; h++)
        rotate_head(q + h * width, job->q_norm, angles, shape, job->q + (row * shape->heads + h) * width);
    for (int64_t h = 0; h < shape->kv_heads; h++) {
        int64_t at = (job->batch->slots[row] * shape->kv_heads + h) * width;
        rotate_head(k + h * width, job->k_norm, angles, shape, turned);
        write_head(turned, job->kv, job->kv->k, at, width);
        write_head(v + h * width, job->kv, job->kv->v, at, width);
    }
}

int fd_rope_and_store(const float *qkv, const float *q_norm, const float *k_norm, const float *rope,
                      int64_t rope_positions, const fd_kv *kv, const fd_attention *shape, const fd_batch *batch,
                      float *q) {
    if (!qkv || !kv || !kv->k || !kv->v || !shape || !batch || !batch->positions || !batch->slots) return FD_NULL;
    if (shape->heads && !q) return FD_NULL;
    if (shape->rotary_dim && !rope) return FD_NULL;
    if (shape->heads < 0 || shape->kv_heads < 1 || shape->head_dim < 1 || batch->rows < 0) return FD_SHAPE;
    if (kv->kv_heads != shape->kv_heads || kv->head_dim != shape->head_dim) return FD_SHAPE;
    if (shape->rotary_dim < 0 || shape->rotary_dim % 2 || shape->rotary_dim > shape->head_dim) return FD_SHAPE;
    for (int64_t row = 0; row < batch->rows; row++) {
        if (batch->slots[row] < 0 || batch->slots[row] >= kv->slots) return FD_RANGE;
        if (shape->rotary_dim && (batch->positions[row] < 0 || batch->positions[row] >= rope_positions))
            return FD_RANGE;
    }
    rope_job job = {qkv, q_norm, k_norm, rope, kv, shape, batch, q};
    pool_take();
    int error = pool_reserve(4 * (size_t)shape->head_dim, 0);
    if (!error)
        pool_run(batch->rows, batch->rows * (shape->heads + 2 * shape->kv_heads) * shape->head_dim * 6, rope_row, &job);
    pool_give();
    return error;
}
