/* Packing: from the row-major weight of a model file to the panels drawn in layout.h. Runs once, at load. */
#include "layout.h"
#include "pool.h"

typedef struct {
    int kind;
    int64_t outputs, inputs;
    const fd_plain *plain;
    char *packed;
} pack_job;

static void pack_f32(const pack_job *job, float *panel, int64_t first, int lanes) {
    const float *values = (const float *)job->plain->values + first * job->inputs;
    for (int o = 0; o < lanes; o++)
        for (int64_t k = 0; k < job->inputs; k++) panel[k * PANEL + o] = values[o * job->inputs + k];
}

static void pack_bf16(const pack_job *job, uint16_t *panel, int64_t first, int lanes) {
    const uint16_t *values = (const uint16_t *)job->plain->values + first * job->inputs;
    for (int o = 0; o < lanes; o++)
        for (int64_t k = 0; k < job->inputs; k++)
            panel[k / 2 * PANEL * 2 + o * 2 + k % 2] = values[o * job->inputs + k];
}

/* The 32 codes of output o, 4 at a time to where layout.h has them. */
INLINE void pack_codes(int bits, const uint8_t *codes, int o, uint8_t *packed) {
    uint32_t quads[GROUP / 4];
    memcpy(quads, codes, sizeof quads);
    if (bits == 8)
        FOR(q, GROUP / 4) memcpy(packed + code_index(4 * q, o), quads + q, 4);
    else if (bits == 4)
        FOR(p, GROUP / 8) {
            uint32_t both = (quads[2 * p] & 0x0f0f0f0f) | (quads[2 * p + 1] & 0x0f0f0f0f) << 4;
            memcpy(packed + code_index(4 * p, o), &both, 4);
        }
    else
        FOR(t, 6) {
            uint32_t upper = quads[t / 3 * 4 + t % 3], lower = quads[t / 3 * 4 + 3];
            uint32_t both = (upper & 0x3f3f3f3f) << 2 | (lower >> (4 - t % 3 * 2) & 0x03030303);
            memcpy(packed + code_index(4 * t, o), &both, 4);
        }
}

/* One factor of the output's place in its panel, a float16 or a byte: number `index` of row-major [outputs, count]. */
INLINE void pack_factor(const void *factors, int64_t output, int64_t count, int64_t index, int bytes, int offset,
                        uint8_t *packed) {
    int64_t from = output * count + index, to = output % PANEL;
    if (bytes == 2) memcpy(packed + to * 2, (const uint16_t *)factors + from, 2);
    else packed[to] = (uint8_t)(((const uint8_t *)factors)[from] + offset);
}

static void pack_quantised(const pack_job *job, uint8_t *panel, int64_t first, int lanes) {
    int kind = job->kind, width = factor_size(kind), offset = is_k(kind) ? BYTE_OFFSET : 0, head = block_head(kind);
    int64_t groups = job->inputs / GROUP, blocks = groups / groups_per_block(kind);
    const fd_plain *plain = job->plain;
    for (int64_t output = first; output < first + lanes; output++) {
        for (int64_t b = 0; b < blocks && head; b++) {
            uint8_t *block = (uint8_t *)block_of(kind, panel, b * groups_per_block(kind));
            pack_factor(plain->block_scales, output, blocks, b, 2, 0, block);
            if (block_rows(kind) == 2) pack_factor(plain->block_minimums, output, blocks, b, 2, 0, block + PANEL * 2);
        }
        for (int64_t g = 0; g < groups; g++) {
            uint8_t *group = (uint8_t *)group_of(kind, panel, g);
            if (scaling_of(kind) == HALVES)
                FOR(half, 2)
                    pack_factor(plain->scales, output, 2 * groups, 2 * g + half, width, offset, group + half * PANEL);
            else pack_factor(plain->scales, output, groups, g, width, offset, group);
            if (scaling_of(kind) == MINIMUM)
                pack_factor(plain->minimums, output, groups, g, width, offset, group + PANEL * width);
            const uint8_t *codes = (const uint8_t *)plain->values + output * job->inputs + g * GROUP;
            pack_codes(code_bits(kind), codes, (int)(output % PANEL), group + factor_bytes(kind));
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
    default: pack_quantised(job, panel, first, lanes); break;
    }
}

int64_t fd_packed_bytes(int kind, int64_t outputs, int64_t inputs) {
    int64_t bytes = panel_bytes(kind, inputs);
    return bytes < 0 || outputs < 1 ? -1 : bytes * num_panels(outputs);
}

/* Whether everything is there that the kind has. */
static int is_complete(int kind, const fd_plain *plain) {
    if (!plain || !plain->values) return 0;
    if (kind < FD_Q8) return 1;
    int has_minimums = scaling_of(kind) == MINIMUM;
    return plain->scales && (!has_minimums || plain->minimums) &&
           (!is_k(kind) || (plain->block_scales && (!has_minimums || plain->block_minimums)));
}

int fd_pack(int kind, int64_t outputs, int64_t inputs, const fd_plain *plain, void *packed) {
    fd_weight weight = {packed, outputs, inputs, kind, 1};
    int error = check_weight(&weight);
    if (error) return error;
    if (!is_complete(kind, plain)) return FD_NULL;
    pack_job job = {kind, outputs, inputs, plain, packed};
    pool_take();
    pool_run(num_panels(outputs), outputs * inputs, pack_panel, &job);
    pool_give();
    return FD_OK;
}
