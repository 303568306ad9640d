/* The linear verb: splits rows into blocks that stay in the cache and outputs into panels, and hands the pieces out. */
#include "linear_amx.h"
#include "linear_float.h"
#include "linear_quant.h"
#include "pool.h"

#define X_BLOCK_BYTES (384 * 1024) /* activations of one row block: they stay in a core's second-level cache */
#define ROW_UNIT (HAS_TILES ? MAX_TILE_ROWS : TILE_ROWS) /* a row block is a multiple of it */
#define INPUT_BLOCK 768 /* inputs of a widened panel block: 48 KiB, in the first-level cache */
#define SPAN 4 /* groups that are quantised at once: one row has work for several threads */
#define ITEMS_PER_THREAD 8 /* more: better balance beside other programs; fewer: longer streams of weights */

typedef struct {
    const fd_weight *weight;
    const float *x; /* [rows, x_stride] */
    int64_t x_stride, rows;
    const float *bias;
    float *y;
    int64_t y_stride;
    /* Quantised weights: x of row blocks, as tiles read them or in rows that are quantised_stride bytes apart. */
    char *quantised;
    int64_t quantised_stride, quantised_block; /* bytes */
    uint16_t *split; /* [rows, split_stride]: bf16 layers that run in tiles */
    int64_t panels_per_item, row_block;
    int64_t items_per_block;
} linear_job;

/* Scratch of a worker: the 16 sums of every row of a block (some are in two tiles), then the panel in the form that the
 * tiles read. */
static int64_t sums_bytes(const linear_job *job) { return (job->row_block + num_tiles(job->row_block)) * PANEL * 4; }
static float *scratch_sums(int worker) { return pool_scratch(worker); }
static void *scratch_panel(const linear_job *job, int worker) { return (char *)pool_scratch(worker) + sums_bytes(job); }

static void widen_block(const void *panel, int64_t first, int64_t inputs, float *out) {
    const uint32_t *pairs = (const uint32_t *)panel + first / 2 * PANEL;
    for (int64_t p = 0; p < inputs / 2; p++)
        FOR(v, PANEL_VECS) {
            vu pair = load_u32(pairs + p * PANEL + v * LANES);
            store(out + 2 * p * PANEL + v * LANES, even_bf16(pair));
            store(out + (2 * p + 1) * PANEL + v * LANES, odd_bf16(pair));
        }
}

static void float_panel(const linear_job *job, const void *panel, int64_t row, int64_t rows, float *sums,
                        float *scratch) {
    int64_t inputs = round_up(job->weight->inputs, 4);
    float_span span = {job->x + row * job->x_stride, job->x_stride, inputs, sums, 1};
    if (job->weight->kind == FD_BF16 && rows <= 2 * TILE_ROWS) {
        float_rows(panel, 1, &span, rows);
        return;
    }
    for (int64_t first = 0; first < inputs; first += INPUT_BLOCK) {
        span.inputs = inputs - first < INPUT_BLOCK ? inputs - first : INPUT_BLOCK;
        const float *block = (const float *)panel + first * PANEL;
        if (job->weight->kind == FD_BF16) {
            widen_block(panel, first, span.inputs, scratch);
            block = scratch;
        }
        float_rows(block, 0, &span, rows);
        span.x += span.inputs;
        span.first_block = 0;
    }
}

static char *quantised_block(const linear_job *job, int64_t row) {
    return job->quantised + row / job->row_block * job->quantised_block;
}

static void quant_panel(const linear_job *job, const void *panel, int64_t row, int64_t rows, float *sums,
                        void *scratch) {
    const fd_weight *weight = job->weight;
    int64_t groups = weight->inputs / GROUP, stride = job->quantised_stride;
    const x_group *x = (const x_group *)quantised_block(job, row);
    if (rows <= PACKED_ROWS) {
        packed_rows(weight->kind, panel, groups, x, stride, weight->planes, rows, sums);
        return;
    }
    wide_panel wide = widen_any(weight->kind, panel, groups, 0, groups, scratch);
    wide_rows(&wide, x, stride, weight->planes, rows, sums);
}

static void write_results(const linear_job *job, const float *sums, int64_t row, int64_t rows, int64_t output) {
    int64_t lanes = job->weight->outputs - output < PANEL ? job->weight->outputs - output : PANEL;
    for (int64_t r = 0; r < rows; r++) {
        float *y = job->y + (row + r) * job->y_stride + output;
        if (job->bias)
            for (int64_t o = 0; o < lanes; o++) y[o] = sums[r * PANEL + o] + job->bias[output + o];
        else memcpy(y, sums + r * PANEL, 4 * (size_t)lanes);
    }
}

/* Panels of quantised weights over one block of rows, in tiles. */
static void quant_panels_in_tiles(const linear_job *job, int64_t panel, int64_t end, int64_t row, int64_t rows,
                                  int worker) {
    const fd_weight *weight = job->weight;
    int64_t bytes = panel_bytes(weight->kind, weight->inputs);
    int count = rows_of_a_tile(rows);
    float *sums = scratch_sums(worker);
    for (; panel < end; panel++) {
        quant_panel_in_tiles(weight->kind, (const char *)weight->data + panel * bytes, weight->inputs / GROUP,
                             quantised_block(job, row), weight->planes, rows, sums, scratch_panel(job, worker));
        for (int64_t tile = 0; tile < num_tiles(rows); tile++)
            write_results(job, sums + tile * count * PANEL, row + tile_start(tile, rows), count, panel * PANEL);
    }
}

/* Panels of bf16 weights over one block of rows, in tiles. */
static void bf16_panels_in_tiles(const linear_job *job, int64_t panel, int64_t end, int64_t row, int64_t rows) {
    int64_t inputs = job->weight->inputs, bytes = panel_bytes(FD_BF16, inputs);
    int count = rows_of_a_tile(rows);
    _Alignas(64) bf16_sums sums;
    for (; panel < end; panel += BF16_PANELS) {
        int64_t panels = end - panel < BF16_PANELS ? end - panel : BF16_PANELS;
        const char *data = (const char *)job->weight->data + panel * bytes;
        for (int64_t tile = 0; tile < num_tiles(rows); tile++) {
            int64_t first = row + tile_start(tile, rows);
            bf16_rows_in_tiles(data, bytes, panels, inputs, job->split + first * split_stride(inputs), sums);
            for (int64_t p = 0; p < panels; p++) write_results(job, sums[p], first, count, (panel + p) * PANEL);
        }
    }
}

/* An item is some panels of the weight over one block of rows. */
static void linear_item(void *context, int64_t item, int worker) {
    const linear_job *job = context;
    const fd_weight *weight = job->weight;
    int64_t row = item / job->items_per_block * job->row_block;
    int64_t rows = job->rows - row < job->row_block ? job->rows - row : job->row_block;
    int64_t panel = item % job->items_per_block * job->panels_per_item, panels = num_panels(weight->outputs);
    int64_t end = panel + job->panels_per_item < panels ? panel + job->panels_per_item : panels;
    int64_t bytes = panel_bytes(weight->kind, weight->inputs);
    float *sums = scratch_sums(worker);
    if (tiles_serve(weight->kind, rows)) {
        begin_tiles(weight->kind, rows);
        if (weight->kind == FD_BF16) bf16_panels_in_tiles(job, panel, end, row, rows);
        else quant_panels_in_tiles(job, panel, end, row, rows, worker);
        end_tiles();
        return;
    }
    for (; panel < end; panel++) {
        const char *data = (const char *)weight->data + panel * bytes;
        if (weight->kind <= FD_BF16) float_panel(job, data, row, rows, sums, scratch_panel(job, worker));
        else quant_panel(job, data, row, rows, sums, scratch_panel(job, worker));
        write_results(job, sums, row, rows, panel * PANEL);
    }
}

/* Row blocks, tiles of a row block, and spans of groups: an item has some groups of up to MAX_TILE_ROWS rows. No two
 * items write to the same lines. */
static int64_t num_spans(const linear_job *job) { return (job->weight->inputs / GROUP + SPAN - 1) / SPAN; }

static void quantise_item(void *context, int64_t item, int worker) {
    const linear_job *job = context;
    int planes = job->weight->planes;
    int64_t first = item % num_spans(job) * SPAN, groups = job->weight->inputs / GROUP;
    int64_t some = min64(SPAN, groups - first);
    int64_t tiles = num_tiles(job->row_block), tile = item / num_spans(job) % tiles;
    int64_t block_row = item / num_spans(job) / tiles * job->row_block;
    int64_t rows = min64(job->row_block, job->rows - block_row);
    if (tile >= num_tiles(rows)) return;
    int tiled = tiles_serve(job->weight->kind, rows);
    int64_t row = tiled ? tile_start(tile, rows) : tile * MAX_TILE_ROWS;
    int count = tiled ? rows_of_a_tile(rows) : (int)min64(MAX_TILE_ROWS, rows - row);
    char *block = quantised_block(job, block_row), *scratch = scratch_panel(job, worker);
    for (int place = 0; place < count; place++, row++) {
        char *in_rows = block + row * job->quantised_stride + first * x_group_bytes(planes);
        x_group *out = (x_group *)(tiled ? scratch : in_rows);
        quantise_row(planes, job->x + (block_row + row) * job->x_stride + first * GROUP, some, out);
        if (tiled)
            lay_out(out, some, planes, place, count, block + (tile * groups + first) * tile_group_bytes(planes, count));
    }
}

static void split_item(void *context, int64_t row, int worker) {
    (void)worker;
    const linear_job *job = context;
    int64_t inputs = job->weight->inputs;
    split_row(job->x + row * inputs, inputs, job->split + row * split_stride(inputs));
}

/* x as the tiles want it: quantised, split, or padded to a multiple of 4 inputs where it is not. Lives in the shared
 * scratch. */
static int64_t prepared_bytes(const linear_job *job) {
    int64_t inputs = job->weight->inputs, rows = job->rows;
    if (job->weight->kind == FD_BF16 && tiles_serve(FD_BF16, rows)) return rows * split_stride(inputs) * 2;
    if (job->weight->kind >= FD_Q8) return (rows + job->row_block - 1) / job->row_block * job->quantised_block;
    return inputs % 4 ? rows * round_up(inputs, 4) * 4 : 0;
}

static void prepare(linear_job *job) {
    int64_t inputs = job->weight->inputs, rows = job->rows;
    if (job->weight->kind >= FD_Q8) {
        job->quantised = pool_shared();
        int64_t blocks = (rows + job->row_block - 1) / job->row_block;
        int64_t items = blocks * num_tiles(job->row_block) * num_spans(job);
        pool_run(items, rows * inputs * 12, quantise_item, job); /* as long as 12 multiply-adds */
    } else if (job->weight->kind == FD_BF16 && tiles_serve(FD_BF16, rows)) {
        job->split = pool_shared();
        pool_run(rows, rows * inputs * 12, split_item, job);
    } else if (inputs % 4) {
        float *padded = pool_shared();
        int64_t stride = round_up(inputs, 4);
        for (int64_t row = 0; row < rows; row++) {
            memcpy(padded + row * stride, job->x + row * job->x_stride, 4 * (size_t)inputs);
            memset(padded + row * stride + inputs, 0, 4 * (size_t)(stride - inputs));
        }
        job->x = padded;
        job->x_stride = stride;
    }
}

int fd_linear(const fd_weight *weight, const float *x, int64_t rows, const float *bias, float *y, int64_t y_stride) {
    int error = check_weight(weight);
    if (error) return error;
    if (!x || !y) return FD_NULL;
    if (rows < 0 || y_stride < weight->outputs) return FD_SHAPE;
    if (rows == 0) return FD_OK;

    linear_job job = {
        .weight = weight, .x = x, .x_stride = weight->inputs, .rows = rows, .bias = bias, .y = y, .y_stride = y_stride};
    int64_t panels = num_panels(weight->outputs);
    int64_t x_row_bytes = weight->kind >= FD_Q8 ? x_stride(weight->inputs, weight->planes) : weight->inputs * 4;
    int64_t fitting = X_BLOCK_BYTES / x_row_bytes / ROW_UNIT * ROW_UNIT;
    job.row_block = fitting < ROW_UNIT ? ROW_UNIT : fitting;
    if (job.row_block > rows) job.row_block = rows;
    if (weight->kind >= FD_Q8) {
        job.quantised_stride = x_row_bytes;
        job.quantised_block = max64(job.row_block * x_row_bytes,
                                    tiles_bytes(weight->inputs / GROUP, weight->planes, job.row_block));
    }

    pool_take();
    int64_t per_item = panels / (pool_threads() * ITEMS_PER_THREAD);
    job.panels_per_item = per_item < 1 ? 1 : per_item;
    if (weight->kind == FD_BF16 && tiles_serve(FD_BF16, rows) && panels >= pool_threads() * BF16_PANELS)
        job.panels_per_item = round_up(job.panels_per_item, BF16_PANELS);
    job.items_per_block = (panels + job.panels_per_item - 1) / job.panels_per_item;
    int64_t panel_scratch = weight->kind >= FD_Q8 ? wide_bytes(weight->inputs) : INPUT_BLOCK * PANEL * 4;
    error = pool_reserve((size_t)(sums_bytes(&job) + panel_scratch), (size_t)prepared_bytes(&job));
    if (!error) {
        prepare(&job);
        int64_t blocks = (rows + job.row_block - 1) / job.row_block;
        pool_run(blocks * job.items_per_block, rows * weight->outputs * weight->inputs, linear_item, &job);
    }
    pool_give();
    return error;
}
