/* Embedding: single rows taken back out of the packed panels, as float32. */
#include "layout.h"
#include "pool.h"

/* One factor, as load_factors has it. */
static float factor(int kind, const uint8_t *block, const uint8_t *group, int row, int o) {
    float factors[LANES];
    block_factors shared;
    load_block(kind, block, o / LANES, 1, &shared);
    store(factors, load_factors(kind, &shared, group, row, o / LANES, 0));
    return factors[o % LANES];
}

/* The code of input k of output o. */
static int code(int bits, const uint8_t *codes, int k, int o) {
    if (bits == 8) return (int8_t)codes[code_index(k, o)];
    if (bits == 4) {
        uint8_t two = codes[code_index(k / 8 * 4 + k % 4, o)];
        return k % 8 < 4 ? two & 15 : two >> 4;
    }
    const uint8_t *three = codes + code_index(k / 16 * 12 + k % 4, o);
    if (k % 16 < 12) return (int8_t)three[k % 16 / 4 * PANEL * 4] >> 2;
    return (int8_t)(three[0] << 6 | (three[PANEL * 4] & 3) << 4 | (three[2 * PANEL * 4] & 3) << 2) >> 2;
}

static void unpack_row(const fd_weight *weight, int64_t output, float *y) {
    int o = (int)(output % PANEL), kind = weight->kind;
    const void *panel = (const char *)weight->data + output / PANEL * panel_bytes(kind, weight->inputs);
    const float *f32 = panel;
    const uint16_t *bf16 = panel;
    if (kind < FD_Q8) {
        for (int64_t k = 0; k < weight->inputs; k++)
            y[k] = kind == FD_F32 ? f32[k * PANEL + o] : widen_bf16(bf16[k / 2 * PANEL * 2 + o * 2 + k % 2]);
        return;
    }
    for (int64_t g = 0; g < weight->inputs / GROUP; g++) {
        const uint8_t *block = block_of(kind, panel, g), *group = group_of(kind, panel, g);
        float first = factor(kind, block, group, 0, o), second = factor(kind, block, group, group_rows(kind) - 1, o);
        for (int k = 0; k < GROUP; k++) {
            int stored = code(code_bits(kind), group + factor_bytes(kind), k, o);
            float whole = (float)(kind == FD_MX4 ? mx4_values[stored] : stored);
            if (scaling_of(kind) == MINIMUM) y[g * GROUP + k] = first * whole + second;
            else y[g * GROUP + k] = (k < GROUP / 2 ? first : second) * whole;
        }
    }
}

typedef struct {
    const fd_weight *weight;
    int64_t first;
    const int64_t *ids;
    float *y;
} embed_job;

static void embed_row(void *context, int64_t row, int worker) {
    (void)worker;
    const embed_job *job = context;
    int64_t output = job->ids[row] - job->first, inputs = job->weight->inputs;
    if (output >= 0 && output < job->weight->outputs) unpack_row(job->weight, output, job->y + row * inputs);
}

int fd_embed(const fd_weight *weight, int64_t first, int64_t total, const int64_t *ids, int64_t rows, float *y) {
    int error = check_weight(weight);
    if (error) return error;
    if (!ids || !y) return FD_NULL;
    if (rows < 0 || first < 0 || first + weight->outputs > total) return FD_SHAPE;
    for (int64_t row = 0; row < rows; row++)
        if (ids[row] < 0 || ids[row] >= total) return FD_RANGE;
    embed_job job = {weight, first, ids, y};
    pool_take();
    pool_run(rows, rows * weight->inputs * 8, embed_row, &job);
    pool_give();
    return FD_OK;
}
