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

/* The 32 codes of one output, 4 at a time to where code_index says. */
INLINE void pack_codes(const int8_t *codes, int o, int8_t *packed) {
    FOR_STEP(k, GROUP, 4) memcpy(packed + code_index(k, o), codes + k, 4);
}

static void pack_q8(const pack_job *job, q8_group *panel, int64_t first, int lanes) {
    int64_t groups = job->inputs / GROUP;
    const int8_t *codes = (const int8_t *)job->values + first * job->inputs;
    for (int o = 0; o < lanes; o++)
        for (int64_t g = 0; g < groups; g++) {
            panel[g].scales[o] = job->scales[(first + o) * groups + g];
            pack_codes(codes + o * job->inputs + g * GROUP, o, panel[g].codes);
        }
}

static void pack_q6(const pack_job *job, q6_group *panel, int64_t first, int lanes) {
    int64_t groups = job->inputs / GROUP;
    const int8_t *codes = (const int8_t *)job->values + first * job->inputs;
    for (int o = 0; o < lanes; o++)
        for (int64_t g = 0; g < groups; g++) {
            const float *scales = job->scales + ((first + o) * groups + g) * 2;
            panel[g].scales[0][o] = scales[0];
            panel[g].scales[1][o] = scales[1];
            pack_codes(codes + o * job->inputs + g * GROUP, o, panel[g].codes);
        }
}

static void pack_q5(const pack_job *job, q5_group *panel, int64_t first, int lanes) {
    int64_t groups = job->inputs / GROUP;
    const int8_t *codes = (const int8_t *)job->values + first * job->inputs;
    for (int o = 0; o < lanes; o++)
        for (int64_t g = 0; g < groups; g++) {
            panel[g].scales[o] = job->scales[(first + o) * groups + g];
            panel[g].minimums[o] = job->minimums[(first + o) * groups + g];
            pack_codes(codes + o * job->inputs + g * GROUP, o, panel[g].codes);
        }
}

static void pack_q4(const pack_job *job, q4_group *panel, int64_t first, int lanes) {
    int64_t groups = job->inputs / GROUP;
    const uint8_t *codes = (const uint8_t *)job->values + first * job->inputs;
    for (int o = 0; o < lanes; o++)
        for (int64_t g = 0; g < groups; g++) {
            panel[g].scales[o] = job->scales[(first + o) * groups + g];
            panel[g].minimums[o] = job->minimums[(first + o) * groups + g];
            FOR_STEP(k, GROUP, 8) {
                uint32_t low, high;
                memcpy(&low, codes + o * job->inputs + g * GROUP + k, 4);
                memcpy(&high, codes + o * job->inputs + g * GROUP + k + 4, 4);
                uint32_t both = (low & 0x0f0f0f0fu) | (high & 0x0f0f0f0fu) << 4;
                memcpy(panel[g].codes + k / 8 * (PANEL * 4) + o * 4, &both, 4);
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
    case FD_Q6: pack_q6(job, panel, first, lanes); break;
    case FD_Q5: pack_q5(job, panel, first, lanes); break;
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
    if (!values || (kind >= FD_Q8 && !scales) || ((kind == FD_Q4 || kind == FD_Q5) && !minimums)) return FD_NULL;
    pack_job job = {kind, outputs, inputs, values, scales, minimums, packed};
    pool_take();
    pool_run(num_panels(outputs), outputs * inputs, pack_panel, &job);
    pool_give();
    return FD_OK;
}
