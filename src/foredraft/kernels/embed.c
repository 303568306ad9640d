/* Embedding: single rows taken back out of the packed panels, as float32. */
#include "layout.h"

static void unpack_row(const fd_weight *weight, int64_t output, float *y) {
    int o = (int)(output % PANEL);
    const void *panel = (const char *)weight->data + output / PANEL * panel_bytes(weight->kind, weight->inputs);
    const float *f32 = panel;
    const uint16_t *bf16 = panel;
    const q8_group *q8 = panel;
    const q4_group *q4 = panel;
    const q6_group *q6 = panel;
    const q5_group *q5 = panel;
    for (int64_t k = 0; k < weight->inputs; k++) {
        int64_t g = k / GROUP;
        int at = (int)(k % GROUP);
        switch (weight->kind) {
        case FD_F32: y[k] = f32[k * PANEL + o]; break;
        case FD_BF16: y[k] = widen_bf16(bf16[k / 2 * PANEL * 2 + o * 2 + k % 2]); break;
        case FD_Q8: y[k] = q8[g].scales[o] * q8[g].codes[code_index(at, o)]; break;
        case FD_Q4: {
            uint8_t two = q4[g].codes[at / 8 * (PANEL * 4) + o * 4 + at % 4];
            y[k] = q4[g].scales[o] * (at % 8 < 4 ? two & 15 : two >> 4) + q4[g].minimums[o];
            break;
        }
        case FD_Q6: y[k] = q6[g].scales[at / 16][o] * q6[g].codes[code_index(at, o)]; break;
        case FD_Q5: y[k] = q5[g].scales[o] * q5[g].codes[code_index(at, o)] + q5[g].minimums[o]; break;
        }
    }
}

int fd_embed(const fd_weight *weight, int64_t first, int64_t total, const int64_t *ids, int64_t rows, float *y) {
    int error = check_weight(weight);
    if (error) return error;
    if (!ids || !y) return FD_NULL;
    if (rows < 0 || first < 0 || first + weight->outputs > total) return FD_SHAPE;
    for (int64_t row = 0; row < rows; row++)
        if (ids[row] < 0 || ids[row] >= total) return FD_RANGE;
    for (int64_t row = 0; row < rows; row++) {
        int64_t output = ids[row] - first;
        if (output >= 0 && output < weight->outputs) unpack_row(weight, output, y + row * weight->inputs);
    }
    return FD_OK;
}
