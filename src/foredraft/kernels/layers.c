/* run_layers: the verbs of many layers in one call, in the order of run_layers in backends/base.py. */
#include "layers.h"
#include "simd.h"

#include <stdlib.h>

/* What one verb leaves for the next; each is shared by two that do not live at once. */
typedef struct {
    float *wide;     /* q k v, then gate and up */
    float *narrow;   /* q, then the gated activation */
    float *attended; /* what attention mixes */
    float *update;   /* what is added to the residual stream */
} buffers;

static int64_t q_width(const fd_layer *layer) { return layer->shape.heads * layer->shape.head_dim; }

int check_projection(const fd_projection *projection, int64_t outputs, int64_t inputs) {
    if (projection->outputs != outputs || projection->inputs != inputs || outputs < 1) return FD_SHAPE;
    if (!projection->parts) return FD_NULL;
    for (int64_t i = 0; i < projection->num_parts; i++) {
        const fd_weight *part = projection->parts[i];
        if (!part) return FD_NULL;
        if (part->inputs != inputs || part->outputs < 1 || part->outputs > outputs) return FD_SHAPE;
        outputs -= part->outputs;
    }
    return outputs ? FD_SHAPE : FD_OK;
}

/* `inputs` is what q, k and v read. */
static int check_layer(const fd_stack *stack, const fd_layer *layer, int64_t inputs) {
    const fd_attention *shape = &layer->shape;
    if ((!layer->input_norm && layer != stack->layers) || !layer->post_norm) return FD_NULL;
    if (shape->heads < 1 || shape->kv_heads < 1 || shape->head_dim < 1) return FD_SHAPE;
    if (shape->rotary_dim && shape->rotary_dim != stack->rotary_dim) return FD_SHAPE;
    int64_t width = stack->width, inner = layer->mlp.down.inputs;
    int error = check_projection(&layer->qkv, q_width(layer) + 2 * shape->kv_heads * shape->head_dim, inputs);
    if (!error) error = check_projection(&layer->output, width, q_width(layer));
    if (layer->experts) return error ? error : layer->experts->router.inputs == width ? FD_OK : FD_SHAPE;
    if (!error) error = check_projection(&layer->mlp.gate_up, 2 * inner, width);
    return error ? error : check_projection(&layer->mlp.down, width, inner);
}

int project(const fd_projection *projection, const float *x, int64_t rows, float *y) {
    const float *bias = projection->bias;
    for (int64_t i = 0; i < projection->num_parts; i++) {
        const fd_weight *part = projection->parts[i];
        int error = fd_linear(part, x, rows, bias, y, projection->outputs);
        if (error) return error;
        y += part->outputs;
        bias = bias ? bias + part->outputs : NULL;
    }
    return FD_OK;
}

/* Whether every row has a place in the taps, and their layers are in order. */
static int check_taps(const fd_stack *stack, const fd_taps *taps, const fd_batch *batch) {
    if (!taps->data || !taps->layers || !batch->slots) return FD_NULL;
    if (taps->count < 1) return FD_SHAPE;
    for (int64_t i = 0; i < taps->count; i++)
        if (taps->layers[i] < (i ? taps->layers[i - 1] + 1 : 0) || taps->layers[i] > stack->count) return FD_RANGE;
    for (int64_t row = 0; row < batch->rows; row++)
        if (batch->slots[row] < 0 || batch->slots[row] >= taps->slots) return FD_RANGE;
    return FD_OK;
}

/* Copies x to the taps if they want it after `depth` layers. */
static void tap(const fd_taps *taps, int64_t depth, const float *x, int64_t width, const fd_batch *batch) {
    int64_t column = 0;
    while (column < taps->count && taps->layers[column] != depth) column++;
    if (column == taps->count) return;
    for (int64_t row = 0; row < batch->rows; row++, x += width) {
        int64_t at = (batch->slots[row] * taps->count + column) * width;
        if (taps->is_bf16)
            for (int64_t i = 0; i < width; i++) ((uint16_t *)taps->data)[at + i] = round_bf16(x[i]);
        else memcpy((float *)taps->data + at, x, 4 * (size_t)width);
    }
}

/* fd_rms_norm, or a copy where there is no weight. */
static int norm_if(const float *x, const float *weight, float eps, int64_t rows, int64_t width, float *out) {
    if (weight) return fd_rms_norm(x, weight, eps, rows, width, out);
    memcpy(out, x, 4 * (size_t)(rows * width));
    return FD_OK;
}

/* The same in place, or nothing where there is no weight. */
static int norm_update(float *update, const float *weight, float eps, int64_t rows, int64_t width) {
    return weight ? fd_rms_norm(update, weight, eps, rows, width, update) : FD_OK;
}

/* What the first layer reads of an entry: [rows, 2 * width]. */
static int enter(const fd_stack *stack, const fd_batch *batch, const float *x, float *embedded, float *out) {
    const fd_projection *embedding = &stack->entry->embedding;
    int64_t width = stack->width, first = 0;
    int error = FD_OK;
    for (int64_t i = 0; i < embedding->num_parts && !error; i++) {
        error = fd_embed(embedding->parts[i], first, embedding->outputs, batch->token_ids, batch->rows, embedded);
        first += embedding->parts[i]->outputs;
    }
    for (int64_t row = 0; row < batch->rows && !error; row++, out += 2 * width) {
        error = norm_if(embedded + row * width, stack->layers[0].input_norm, stack->eps, 1, width, out);
        if (!error) error = norm_if(x + row * width, stack->entry->norm, stack->eps, 1, width, out + width);
    }
    return error;
}

static int run_mlp(const fd_layer *layer, const float *x, int64_t rows, const buffers *to) {
    if (layer->experts) return fd_mix_experts(layer->experts, x, rows, layer->activation, to->update);
    int error = project(&layer->mlp.gate_up, x, rows, to->wide);
    if (!error) error = fd_gated(to->wide, rows, layer->mlp.down.inputs, layer->activation, to->narrow);
    return error ? error : project(&layer->mlp.down, to->narrow, rows, to->update);
}

/* q, k and v read `entry`, which is x after the layer's first norm but for some first layers; `normed` leaves as x after
 * `next_norm`. */
static int run_layer(const fd_stack *stack, const fd_layer *layer, const float *next_norm, const fd_kv *kv,
                     const fd_batch *batch, const buffers *to, const float *entry, float *x, float *normed) {
    int64_t rows = batch->rows, width = stack->width;
    const float *rope = layer->shape.window > 0 && stack->window_rope ? stack->window_rope : stack->rope;
    int error = project(&layer->qkv, entry, rows, to->wide);
    if (!error)
        error = fd_rope_and_store(to->wide, layer->q_norm, layer->k_norm, rope, stack->rope_positions, kv,
                                  &layer->shape, batch, to->narrow);
    if (!error) error = fd_attend(to->narrow, layer->sinks, kv, &layer->shape, batch, to->attended);
    if (!error) error = project(&layer->output, to->attended, rows, to->update);
    if (!error) error = norm_update(to->update, layer->attention_update_norm, stack->eps, rows, width);
    if (!error)
        error = fd_add_rms_norm(x, to->update, stack->multiplier, layer->post_norm, stack->eps, rows, width, normed);
    if (!error) error = run_mlp(layer, normed, rows, to);
    if (!error) error = norm_update(to->update, layer->mlp_update_norm, stack->eps, rows, width);
    if (!error) error = fd_add_rms_norm(x, to->update, stack->multiplier, next_norm, stack->eps, rows, width, normed);
    return error;
}

/* The same rows in window blocks: `slots` and `tables` become those of the result. -1 stands for what is not there. */
static fd_batch in_windows(const fd_batch *batch, const int32_t *window_map, int64_t num_blocks, int64_t *slots,
                           int32_t *tables) {
    fd_batch windowed = *batch;
    int64_t size = batch->block_size;
    for (int64_t row = 0; row < batch->rows; row++) {
        int64_t slot = batch->slots[row], block = slot / size;
        int is_there = slot >= 0 && block < num_blocks && window_map[block] >= 0;
        slots[row] = is_there ? window_map[block] * size + slot % size : -1;
    }
    for (int64_t i = 0; i < batch->num_sequences * batch->table_width; i++) {
        int64_t block = batch->block_tables[i];
        tables[i] = block >= 0 && block < num_blocks ? window_map[block] : -1;
    }
    windowed.slots = slots;
    windowed.block_tables = tables;
    return windowed;
}

int fd_run_layers(const fd_stack *stack, const fd_kv *const *kv, const fd_batch *batch, const int32_t *window_map,
                  int64_t num_blocks, const fd_taps *taps, float *x, float *normed) {
    if (!stack || !stack->layers || !stack->norm || !kv || !batch || !x || !normed) return FD_NULL;
    if (stack->count < 1 || stack->width < 1 || batch->rows < 0) return FD_SHAPE;
    if (window_map && (!batch->slots || !batch->block_tables)) return FD_NULL;
    if (window_map && (batch->block_size < 1 || batch->num_sequences < 0 || batch->table_width < 0)) return FD_SHAPE;
    int64_t wide = 0, narrow = 0, attended = 0, entered = stack->entry ? 2 * stack->width : 0;
    if (stack->entry) {
        const fd_projection *embedding = &stack->entry->embedding;
        int error = check_projection(embedding, embedding->outputs, stack->width);
        if (!error && !batch->token_ids) error = FD_NULL;
        if (error) return error;
    }
    for (int64_t i = 0; i < stack->count; i++) {
        const fd_layer *layer = &stack->layers[i];
        int64_t inputs = i == 0 && entered ? entered : stack->width;
        int error = kv[i] && (window_map || !kv[i]->of_windows) ? check_layer(stack, layer, inputs) : FD_NULL;
        if (error) return error;
        wide = max64(wide, max64(layer->qkv.outputs, layer->mlp.gate_up.outputs)); /* 0 where there are experts */
        narrow = max64(narrow, max64(q_width(layer), layer->mlp.down.inputs));
        attended = max64(attended, q_width(layer));
    }
    int64_t rows = batch->rows;
    if (rows == 0) return FD_OK;
    int error = taps ? check_taps(stack, taps, batch) : FD_OK;
    if (error) return error;
    size_t bytes = 4 * (size_t)(rows * (wide + narrow + attended + stack->width + entered));
    size_t slots = window_map ? (size_t)rows : 0, tables = window_map ? batch->num_sequences * batch->table_width : 0;
    bytes = (bytes + 63) / 64 * 64;
    float *memory = aligned_alloc(64, bytes + (8 * slots + 4 * tables + 63) / 64 * 64);
    if (!memory) return FD_NO_MEMORY;
    int64_t *window_slots = (int64_t *)((char *)memory + bytes);
    fd_batch windowed = *batch;
    if (window_map) windowed = in_windows(batch, window_map, num_blocks, window_slots, (int32_t *)(window_slots + slots));
    buffers to = {memory, memory + rows * wide, memory + rows * (wide + narrow),
                  memory + rows * (wide + narrow + attended)};

    if (taps) tap(taps, 0, x, stack->width, batch);
    float *entry = normed;
    if (entered) {
        entry = to.update + rows * stack->width;
        error = enter(stack, batch, x, to.update, entry);
    } else error = norm_if(x, stack->layers[0].input_norm, stack->eps, rows, stack->width, normed);
    for (int64_t i = 0; i < stack->count && !error; i++, entry = normed) {
        const float *next_norm = i + 1 < stack->count ? stack->layers[i + 1].input_norm : stack->norm;
        const fd_batch *its_batch = kv[i]->of_windows ? &windowed : batch;
        error = run_layer(stack, &stack->layers[i], next_norm, kv[i], its_batch, &to, entry, x, normed);
        if (taps && !error) tap(taps, i + 1, x, stack->width, batch);
    }
    free(memory);
    return error;
}
