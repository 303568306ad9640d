/* Packing: from the row-major weight of a model file to the panels drawn in layout.h. Runs once, at load. */
#include "layout.h"
#include "pool.h"

typedef struct {
    int kind;
    int64_t outputs, inputs;
    const void *values;
    const float *scales, *minimums;
    char *packed;
} pack_job;

static void pack_f32(const pack_job *job, float *panel, int64_t first, int lanes) {
    const float *values = (const float *)job->values + first * job->inputs;
    for (int o = 0; o < lanes; o++)
        for (int64_t k = 0; k < job->inputs; k++) panel[k * PANEL + o] = values[o * job->inputs + k];
}

static void pack_bf16(const pack_job *job, uint16_t *panel, int64_t first, int lanes) {
    const uint16_t *values = (const uint16_t *)job->values + first * job->inputs;
    for (int o = 0; o < lanes; o++)
        for (int64_t k = 0; k < job->inputs; k++)
            panel[k / 2 * PANEL * 2 + o * 2 + k % 2] = values[o * job->inputs + k];
}

static void pack_q8(const pack_job *job, q8_group *panel, int64_t first, int lanes) {
    int64_t groups = job->inputs / GROUP;
    const int8_t *codes = (const int8_t *)job->values + first * job->inputs;
    for (int o = 0; o < lanes; o++)
        for (int64_t g = 0; g < groups; g++) {
            panel[g].scales[o] = job->scales[(first + o) * groups + g];
            for (int k = 0; k < GROUP; k++) panel[g].codes[code_index(k, o)] = codes[o * job->inputs + g * GROUP + k];
        }
}

static void pack_q4(const pack_job *job, q4_group *panel, int64_t first, int lanes) {
    int64_t groups = job->inputs / GROUP;
    const uint8_t *codes = (const uint8_t *)job->values + first * job->inputs;
    for (int o = 0; o < lanes; o++)
        for (int64_t g = 0; g < groups; g++) {
            panel[g].scales[o] = job->scales[(first + o) * groups + g];
            panel[g].minimums[o] = job->minimums[(first + o) * groups + g];
            for (int k = 0; k < GROUP; k++) {
                uint8_t code = codes[o * job->inputs + g * GROUP + k] & 15;
                int byte = k / 8 * (PANEL * 4) + o * 4 + k % 4;
                panel[g].codes[byte] |= (uint8_t)(k % 8 < 4 ? code : code << 4);
            }
        }
}

static void pack_panel(void *context, int64_t item, int worker) {
    (void)worker;
    const pack_job *job = context;
    int64_t bytes = panel_bytes(job->kind, job->inputs), first = item * PANEL;
    int lanes = job->outputs - first < PANEL ? (int)(job->outputs - first) : PANEL;
    void *panel = job->packed + item * bytes;
    memset(panel, 0, (size_t)bytes);
    switch (job->kind) {
    case FD_F32: pack_f32(job, panel, first, lanes); break;
    case FD_BF16: pack_bf16(job, panel, first, lanes); break;
    case FD_Q8: pack_q8(job, panel, first, lanes); break;
    case FD_Q4: pack_q4(job, panel, first, lanes); break;
    }
}

int64_t fd_packed_bytes(int kind, int64_t outputs, int64_t inputs) {
    int64_t bytes = panel_bytes(kind, inputs);
    return bytes < 0 || outputs < 1 ? -1 : bytes * num_panels(outputs);
}

int fd_pack(int kind, int64_t outputs, int64_t inputs, const void *values, const float *scales, const float *minimums,
            void *packed) {
    fd_weight weight = {packed, outputs, inputs, kind};
    int error = check_weight(&weight);
    if (error) return error;
    if (!values || (kind >= FD_Q8 && !scales) || (kind == FD_Q4 && !minimums)) return FD_NULL;
    pack_job job = {kind, outputs, inputs, values, scales, minimums, packed};
    pool_take();
    pool_run(num_panels(outputs), outputs * inputs, pack_panel, &job);
    pool_give();
    return FD_OK;
}
