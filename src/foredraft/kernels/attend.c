/* attend: paged attention over the keys that a row's prefix and draft path name, in text order.
 *
 * Keys are taken in blocks of 64, counted from the start of the text. Each block of a row gives a partial result
 * (maximum, sum of weights, weighted values), and the partials are merged in order. A row's bits therefore depend on
 * its keys alone: not on other rows, nor on whether its blocks were computed by one thread or by several.
 *
 *   work item   up to 16 neighbouring rows of one sequence (a tile) x a run of blocks, of all KV heads or of one
 *   KV head     the block's keys and values are gathered once for the tile, as float32 rows; a row then adds what is
 *               its own: the rest of its prefix, and the keys of its path that no row before it had
 *   queries     the query heads of the KV head and of all neighbouring rows that see the same of that block, up to
 *               QUERIES at a time
 *
 * The KV heads are the inner loop because a token's heads lie side by side: so memory is read as one stream. Only where
 * threads would be without work has an item one KV head, or fewer rows. */
#include "attend_block.h"
#include "foredraft.h"
#include "pool.h"

#include <stdatomic.h>

#define TILE 16
#define LEAST_TILE 4 /* fewer rows would gather too often */
#define ITEMS_PER_THREAD 2
#define MOST_PARTIAL_BYTES (16 << 20) /* beyond this a tile is one item: many rows have enough tiles, or nearly */

typedef struct {
    const float *q, *sinks;
    const fd_kv *kv;
    const fd_attention *shape;
    const fd_batch *batch;
    float *out;
    int64_t width;  /* head_dim, padded to a multiple of 16 */
    int64_t group;  /* query heads of a KV head */
    int64_t blocks; /* the most key blocks that any row has */
    const int32_t *tiles; /* [num_tiles + 1] first rows */
    int64_t num_tiles;
    int64_t runs, blocks_per_run;
    int64_t head_parts; /* 1, or the KV heads where each is an item */
    float *partials; /* where runs > 1: [rows, blocks, heads, PARTIAL(width)] */
    _Atomic int error;
} attend_job;

/* A row sees the text places [first_key, end_key). */
static int64_t end_key(const attend_job *job, int64_t row) {
    return (int64_t)job->batch->prefix_lens[row] + job->batch->path_lens[row];
}

static int64_t first_key(const attend_job *job, int64_t row) {
    int64_t window = job->shape->window, first = job->shape->first_key;
    return window > 0 ? max64(first, end_key(job, row) - window) : first;
}

/* What a worker needs at hand; the float arrays lie one after another in its scratch. */
typedef struct {
    float *k, *v;    /* [64, width]: widened copies */
    float *q;        /* [tile rows, heads, width], scaled and padded */
    float *states;   /* [tile rows, heads, PARTIAL(width)] */
    float *partials; /* [QUERIES, PARTIAL(width)] */
} workspace;

static int64_t workspace_floats(const attend_job *job) {
    int64_t per_head = job->width + PARTIAL(job->width);
    return 2 * KEYS * job->width + TILE * job->shape->heads * per_head + QUERIES * PARTIAL(job->width);
}

static workspace lay_out(const attend_job *job, float *scratch) {
    workspace space;
    space.k = scratch;
    space.v = space.k + KEYS * job->width;
    space.q = space.v + KEYS * job->width;
    space.states = space.q + TILE * job->shape->heads * job->width;
    space.partials = space.states + TILE * job->shape->heads * PARTIAL(job->width);
    return space;
}

/* Rows of the cache are read in place, unless they need padding, or are bfloat16 and widening them once pays because
 * several rows of queries look at them. */
static int needs_copies(const attend_job *job, int64_t tile_rows) {
    return job->shape->head_dim != job->width || (job->kv->is_bf16 && tile_rows > 2);
}

/* One row of the cache to float32 of padded width. Of 64 bfloat16: 16 loads, 16 instructions to widen, 16 stores. */
INLINE void copy_row(const attend_job *job, const void *cache, int64_t at, float *copy) {
    int64_t head_dim = job->shape->head_dim, i = 0;
    if (job->kv->is_bf16) {
        const uint16_t *halves = (const uint16_t *)cache + at;
        for (; i + PANEL <= head_dim; i += PANEL)
            FOR_STEP(j, PANEL, LANES) store(copy + i + j, load_bf16(halves + i + j));
        for (; i < head_dim; i++) copy[i] = widen_bf16(halves[i]);
    } else {
        memcpy(copy, (const float *)cache + at, 4 * (size_t)head_dim);
        i = head_dim;
    }
    for (; i < job->width; i++) copy[i] = 0.0f;
}

/* `count` rows of one side of the cache, in place or copied. */
INLINE void point_at_rows(const attend_job *job, const void *cache, int64_t at, int64_t stride, int64_t count,
                          int copies, float *scratch, const void **rows) {
    for (int64_t n = 0; n < count; n++, at += stride, scratch += job->width) {
        if (copies) {
            copy_row(job, cache, at, scratch);
            rows[n] = scratch;
        } else {
            rows[n] = (const char *)cache + at * (job->kv->is_bf16 ? 2 : 4);
        }
    }
}

/* `count` keys and values from a slot on, to the places from `place` on of the block. */
static int gather_slots(attend_job *job, int64_t slot, int64_t count, int64_t kv_head, int64_t place, int copies,
                        const workspace *space, key_block *block) {
    if (slot < 0 || slot + count > job->kv->slots) return FD_RANGE;
    int64_t stride = job->shape->kv_heads * job->shape->head_dim;
    int64_t at = slot * stride + kv_head * job->shape->head_dim;
    point_at_rows(job, job->kv->k, at, stride, count, copies, space->k + place * job->width, block->k + place);
    point_at_rows(job, job->kv->v, at, stride, count, copies, space->v + place * job->width, block->v + place);
    return FD_OK;
}

/* Whether `count` places of the block already hold the keys at `offset` and behind. */
static int is_held(const key_block *block, int64_t place, int64_t offset, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (block->offsets[place + i] != offset + i) return 0;
    return 1;
}

/* The keys and values at text places [from, to) of a row, all of one block, where they are not there yet. Nothing else
 * is ever read: other slots may hold anything. */
static void gather(attend_job *job, int64_t row, int64_t from, int64_t to, int64_t kv_head, int copies,
                   const workspace *space, key_block *block) {
    const fd_batch *batch = job->batch;
    const int32_t *table = batch->block_tables + batch->sequences[row] * batch->table_width;
    int64_t prefix = batch->prefix_lens[row], size = batch->block_size, count;
    int error = FD_OK;
    for (int64_t at = from; at < to && !error; at += count) {
        int64_t offset = at < prefix ? at : batch->paths[row * batch->depth + at - prefix], place = at % KEYS;
        int64_t page = offset / size, in_page = offset - page * size;
        count = at < prefix ? min64(min64(to, prefix) - at, size - in_page) : 1;
        if (offset < 0 || page >= batch->table_width) error = FD_RANGE;
        else if (!is_held(block, place, offset, count)) {
            error = gather_slots(job, table[page] * size + in_page, count, kv_head, place, copies, space, block);
            for (int64_t i = 0; i < count; i++) block->offsets[place + i] = (int32_t)(offset + i);
        }
    }
    if (error) atomic_store(&job->error, error); /* the result is thrown away */
}

/* Of query heads first .. end-1, like the two below. */
static void load_queries(const attend_job *job, int64_t row, int64_t first, int64_t end, float *q) {
    int64_t head_dim = job->shape->head_dim, width = job->width;
    const float *source = job->q + row * job->shape->heads * head_dim;
    for (int64_t head = first; head < end; head++)
        for (int64_t i = 0; i < width; i++)
            q[head * width + i] = i < head_dim ? source[head * head_dim + i] * job->shape->scale : 0.0f;
}

/* A sink is a first key with no value: its weight, relative to itself, is 1. */
static void start_states(const attend_job *job, int64_t first, int64_t end, float *states) {
    for (int64_t head = first; head < end; head++) {
        float *state = states + head * PARTIAL(job->width);
        memset(state, 0, 4 * (size_t)PARTIAL(job->width));
        state[job->width] = job->sinks ? job->sinks[head] : -INFINITY;
        state[job->width + 1] = job->sinks ? 1.0f : 0.0f;
    }
}

static void write_row(const attend_job *job, int64_t row, int64_t first, int64_t end, const float *states) {
    int64_t head_dim = job->shape->head_dim;
    float *out = job->out + row * job->shape->heads * head_dim;
    for (int64_t head = first; head < end; head++) {
        const float *state = states + head * PARTIAL(job->width);
        for (int64_t i = 0; i < head_dim; i++) out[head * head_dim + i] = state[i] / state[job->width + 1];
    }
}

/* Where the partials of one block wait to be merged: [heads, PARTIAL(width)]. */
static float *waiting_partials(const attend_job *job, int64_t row, int64_t block) {
    return job->partials + (row * job->blocks + block) * job->shape->heads * PARTIAL(job->width);
}

/* The rows of an item, its KV heads, the keys that any of the rows sees, and up to where all of them see the same. */
typedef struct {
    int64_t row, end, kv_head, kv_heads, first_key, from_block, to_block, common;
} tile_span;

/* The text places of a block that a row sees: [from, to). */
typedef struct {
    int64_t from, to;
} key_range;

static key_range range_of(const attend_job *job, int64_t row, int64_t block) {
    return (key_range){max64(block * KEYS, first_key(job, row)), min64((block + 1) * KEYS, end_key(job, row))};
}

/* `rows` rows, which see the same range of the gathered block; the partials are merged at once or, when blocks are
 * split over threads, wait. */
static void rows_block(const attend_job *job, const tile_span *tile, int64_t row, int64_t rows, int64_t kv_head,
                       int64_t block, key_range range, const workspace *space, key_block *keys) {
    int64_t group = job->group, partial = PARTIAL(job->width), heads = job->shape->heads;
    int64_t total = rows * group, chunks = (total + QUERIES - 1) / QUERIES;
    int first = (int)(range.from % KEYS), end = (int)(first + range.to - range.from);
    for (int64_t chunk = 0, next = 0; chunk < chunks; chunk++) {
        const float *q[QUERIES];
        float *partials[QUERIES], *states[QUERIES];
        int count = (int)((total - next + chunks - chunk - 1) / (chunks - chunk)); /* as even as possible */
        for (int n = 0; n < count; n++, next++) {
            int64_t at = row + next / group, head = kv_head * group + next % group;
            int64_t in_tile = (at - tile->row) * heads + head;
            q[n] = space->q + in_tile * job->width;
            states[n] = space->states + in_tile * partial;
            partials[n] = space->partials + n * partial;
            if (job->runs > 1) partials[n] = waiting_partials(job, at, block) + head * partial;
        }
        block_kernels[keys->bf16][count - 1](q, keys, job->width, first, end, partials);
        keys->ahead = NULL; /* asked for once */
        if (job->runs == 1)
            for (int n = 0; n < count; n++) merge(states[n], partials[n], job->width);
    }
}

/* Step `step` of a tile is a block and a KV head. Gathers what all rows share of it. */
static void gather_step(attend_job *job, const tile_span *tile, int64_t step, int copies, const workspace *space,
                        key_block *keys) {
    int64_t block = tile->from_block + step / tile->kv_heads;
    int64_t from = max64(block * KEYS, tile->first_key), to = min64((block + 1) * KEYS, tile->common);
    memset(keys->offsets, -1, sizeof keys->offsets);
    gather(job, tile->row, from, to, tile->kv_head + step % tile->kv_heads, copies, space, keys);
}

static void run_step(attend_job *job, const tile_span *tile, int64_t step, int copies, const workspace *space,
                     key_block *keys) {
    int64_t block = tile->from_block + step / tile->kv_heads, kv_head = tile->kv_head + step % tile->kv_heads;
    for (int64_t row = tile->row, next; row < tile->end; row = next) {
        key_range range = range_of(job, row, block);
        next = row + 1;
        if (range.from >= range.to) continue;
        gather(job, row, max64(range.from, tile->common), range.to, kv_head, copies, space, keys);
        for (; next < tile->end && range.to <= tile->common; next++) {
            key_range other = range_of(job, next, block);
            if (other.from != range.from || other.to != range.to) break;
        }
        rows_block(job, tile, row, next - row, kv_head, block, range, space, keys);
    }
}

/* All steps of a tile. The next step is looked up early, so that its keys can be asked for while this one is computed:
 * `ahead` names rows of the cache; where rows are copied, the copies are made when their step has come. */
static void run_tile(attend_job *job, const tile_span *tile, const workspace *space) {
    int64_t steps = (tile->to_block - tile->from_block) * tile->kv_heads;
    int copies = needs_copies(job, tile->end - tile->row);
    key_block in_place[2], copied = {.bf16 = 0};
    for (int i = 0; i < KEYS; i++) /* places that no key has come to yet may be read, but do not count */
        FOR(n, 2) in_place[n].k[i] = in_place[n].v[i] = copied.k[i] = copied.v[i] = space->k;
    FOR(n, 2) in_place[n].bf16 = job->kv->is_bf16;
    for (int64_t step = 0; step < steps; step++) {
        key_block *now = copies ? &copied : &in_place[step % 2], *next = &in_place[(step + 1) % 2];
        if (copies || step == 0) gather_step(job, tile, step, copies, space, now);
        if (step + 1 < steps) gather_step(job, tile, step + 1, 0, space, next);
        now->ahead = step + 1 < steps ? next : NULL;
        run_step(job, tile, step, copies, space, now);
    }
}

static void attend_item(void *context, int64_t item, int worker) {
    attend_job *job = context;
    int64_t part = item % job->head_parts, run = item / job->head_parts % job->runs, last = 0;
    const int32_t *rows = job->tiles + item / job->head_parts / job->runs;
    int64_t kv_heads = job->shape->kv_heads / job->head_parts, heads = job->shape->heads;
    tile_span tile = {.row = rows[0], .end = rows[1], .kv_head = part * kv_heads, .kv_heads = kv_heads,
                      .first_key = INT64_MAX, .common = INT64_MAX};
    int64_t first = tile.kv_head * job->group, end = first + kv_heads * job->group; /* query heads */
    workspace space = lay_out(job, pool_scratch(worker));
    for (int64_t r = tile.row; r < tile.end; r++) {
        load_queries(job, r, first, end, space.q + (r - tile.row) * heads * job->width);
        if (job->runs == 1) start_states(job, first, end, space.states + (r - tile.row) * heads * PARTIAL(job->width));
        tile.first_key = min64(tile.first_key, first_key(job, r));
        tile.common = min64(tile.common, job->batch->prefix_lens[r]);
        last = max64(last, end_key(job, r) - 1);
    }
    tile.from_block = max64(tile.first_key / KEYS, run * job->blocks_per_run);
    tile.to_block = min64(last / KEYS + 1, (run + 1) * job->blocks_per_run);
    run_tile(job, &tile, &space);
    if (job->runs == 1)
        for (int64_t r = tile.row; r < tile.end; r++)
            write_row(job, r, first, end, space.states + (r - tile.row) * heads * PARTIAL(job->width));
}

/* Split runs only: a row's waiting partials, merged in order. */
static void merge_item(void *context, int64_t row, int worker) {
    const attend_job *job = context;
    float *states = lay_out(job, pool_scratch(worker)).states;
    start_states(job, 0, job->shape->heads, states);
    for (int64_t head = 0; head < job->shape->heads; head++)
        for (int64_t block = first_key(job, row) / KEYS; block * KEYS < end_key(job, row); block++)
            merge(states + head * PARTIAL(job->width), waiting_partials(job, row, block) + head * PARTIAL(job->width),
                  job->width);
    write_row(job, row, 0, job->shape->heads, states);
}

static int check(const float *q, const fd_kv *kv, const fd_attention *shape, const fd_batch *batch, const float *out) {
    if (!q || !kv || !kv->k || !kv->v || !shape || !batch || !out) return FD_NULL;
    if (!batch->sequences || !batch->block_tables || !batch->prefix_lens || !batch->path_lens) return FD_NULL;
    if (batch->depth > 0 && !batch->paths) return FD_NULL;
    if (shape->heads < 1 || shape->kv_heads < 1 || shape->heads % shape->kv_heads || shape->head_dim < 1)
        return FD_SHAPE;
    if (kv->kv_heads != shape->kv_heads || kv->head_dim != shape->head_dim) return FD_SHAPE;
    if (shape->first_key < 0 || batch->rows < 0 || batch->depth < 0 || batch->table_width < 1 || batch->block_size < 1) return FD_SHAPE;
    for (int64_t row = 0; row < batch->rows; row++) {
        if (batch->sequences[row] < 0 || batch->sequences[row] >= batch->num_sequences) return FD_RANGE;
        if (batch->prefix_lens[row] < 0 || batch->path_lens[row] < 0 || batch->path_lens[row] > batch->depth)
            return FD_RANGE;
        if (batch->prefix_lens[row] + batch->path_lens[row] <= shape->first_key) return FD_RANGE;
    }
    return FD_OK;
}

/* Neighbouring rows of one sequence, up to `most` of them, share gathered blocks. */
static int64_t cut_tiles(const fd_batch *batch, int64_t most, int32_t *tiles) {
    int64_t count = 0, start = 0;
    for (int64_t row = 1; row <= batch->rows; row++)
        if (row == batch->rows || row - start == most || batch->sequences[row] != batch->sequences[start]) {
            tiles[count++] = (int32_t)start;
            start = row;
        }
    tiles[count] = (int32_t)batch->rows;
    return count;
}

/* Cuts the work into items, so that all threads have some: runs of blocks first, then KV heads, then smaller tiles. */
static int cut_items(attend_job *job) {
    const fd_batch *batch = job->batch;
    int64_t threads = pool_threads(), most = TILE;
    size_t tile_bytes = (size_t)(batch->rows + 16) / 16 * 64;
    size_t partial_bytes = 4 * (size_t)(batch->rows * job->shape->heads * job->blocks * PARTIAL(job->width));
    int can_wait = threads > 1 && job->blocks > 1 && partial_bytes <= MOST_PARTIAL_BYTES;
    int error = pool_reserve(4 * (size_t)workspace_floats(job), tile_bytes + (can_wait ? partial_bytes : 0));
    if (error) return error;
    int32_t *tiles = pool_shared();
    job->tiles = tiles;
    job->partials = (float *)((char *)tiles + tile_bytes);
    job->num_tiles = cut_tiles(batch, most, tiles);
    job->runs = job->head_parts = 1;
    if (threads > 1) {
        int64_t wanted = ITEMS_PER_THREAD * threads;
        if (can_wait) job->runs = max64(1, min64(2 * wanted / job->num_tiles, job->blocks));
        if (job->num_tiles * job->runs < wanted) job->head_parts = job->shape->kv_heads;
        for (; job->num_tiles * job->runs * job->head_parts < wanted && most > LEAST_TILE; most /= 2)
            job->num_tiles = cut_tiles(batch, most / 2, tiles);
    }
    job->blocks_per_run = (job->blocks + job->runs - 1) / job->runs;
    return FD_OK;
}

int fd_attend(const float *q, const float *sinks, const fd_kv *kv, const fd_attention *shape, const fd_batch *batch,
              float *out) {
    int error = check(q, kv, shape, batch, out);
    if (error || batch->rows == 0) return error;
    attend_job job = {.q = q, .sinks = sinks, .kv = kv, .shape = shape, .batch = batch, .out = out};
    job.width = (shape->head_dim + PANEL - 1) / PANEL * PANEL;
    job.group = shape->heads / shape->kv_heads;
    int64_t keys = 0;
    for (int64_t row = 0; row < batch->rows; row++) {
        job.blocks = max64(job.blocks, (end_key(&job, row) + KEYS - 1) / KEYS);
        keys += end_key(&job, row) - first_key(&job, row);
    }
    pool_take();
    error = cut_items(&job);
    if (!error) {
        int64_t work = keys * shape->heads * job.width * 2;
        pool_run(job.num_tiles * job.runs * job.head_parts, work, attend_item, &job);
        if (job.runs > 1 && !atomic_load(&job.error)) pool_run(batch->rows, work / KEYS, merge_item, &job);
        error = atomic_load(&job.error);
    }
    pool_give();
    return error;
}
