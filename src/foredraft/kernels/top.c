/* What turns the logits of a drafting model into candidates with probabilities: the largest few numbers of every row, and
 * the tokens that the target will most probably draw. */
#include "foredraft.h"
#include "floor.h"
#include "noise.h"
#include "pool.h"

/* The largest numbers so far, descending. */
typedef struct {
    float *values;
    int64_t *places, count, found;
} best_few;

INLINE int is_full(const best_few *best) { return best->found == best->count; }

/* Numbers come in ascending order of place, and one only passes those that are smaller: equal ones stay in order. */
INLINE void compete(best_few *best, float value, int64_t place) {
    if (value != value || (is_full(best) && value <= best->values[best->found - 1])) return;
    int64_t at = is_full(best) ? best->found - 1 : best->found++;
    for (; at && best->values[at - 1] < value; at--) {
        best->values[at] = best->values[at - 1];
        best->places[at] = best->places[at - 1];
    }
    best->values[at] = value;
    best->places[at] = place;
}

/* Where there were too few. */
static void fill_up(best_few *best) {
    for (; !is_full(best); best->found++) {
        best->values[best->found] = -INFINITY;
        best->places[best->found] = 0;
    }
}

static void find_top(const float *x, int64_t columns, best_few *best) {
    for (int64_t first = 0; first < columns; first += MAX_BLOCK) {
        int64_t end = min64(first + MAX_BLOCK, columns);
        if (is_full(best) && block_max(x + first, end - first) <= best->values[best->found - 1]) continue;
        for (int64_t column = first; column < end; column++) compete(best, x[column], column);
    }
    fill_up(best);
}

/* values = exp(values) as shares of the sum of exp(x), whose largest comes first. */
static void shares(const float *x, int64_t columns, int64_t count, float *values) {
    float highest = values[0];
    vf sums[4] = {{0}, {0}, {0}, {0}};
    for (int64_t i = 0; i < columns; i += 4 * LANES) {
        vf v[4];
        load_four(v, x + i, columns - i);
        FOR(u, 4) v[u] -= highest;
        vexp_all(v, 4, 1);
        FOR(u, 4) sums[u] += v[u];
    }
    float sum = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (int64_t i = 0; i < count; i++) values[i] = expf(values[i] - highest) / sum;
}

typedef struct {
    const float *x;
    int64_t stride, columns, count;
    int as_shares;
    float *values;
    int64_t *places;
} top_job;

static void top_row(void *context, int64_t row, int worker) {
    (void)worker;
    const top_job *job = context;
    best_few best = {job->values + row * job->count, job->places + row * job->count, job->count, 0};
    find_top(job->x + row * job->stride, job->columns, &best);
    if (job->as_shares) shares(job->x + row * job->stride, job->columns, job->count, best.values);
}

int fd_top(const float *x, int64_t rows, int64_t columns, int64_t stride, int64_t count, int as_shares, float *values,
           int64_t *places) {
    if (!x || !values || !places) return FD_NULL;
    if (rows < 0 || columns < 1 || count < 1 || count > columns || stride < columns) return FD_SHAPE;
    top_job job = {x, stride, columns, count, as_shares, values, places};
    pool_take();
    pool_run(rows, rows * columns * (as_shares ? 8 : 2), top_row, &job);
    pool_give();
    return FD_OK;
}

typedef struct {
    const fd_drawing *drawings;
    const int64_t *token_ids;
    int64_t ids_stride, columns, count;
    float *shares;
    int64_t *places;
} likely_job;

/* The row with the highest of its blocks; 0 where it has NaN or an infinite maximum. */
static int look_at(logit_row *row) {
    vi broken = {0};
    row->highest = -INFINITY;
    for (int64_t block = 0; block < row->blocks; block++) {
        const float *x = row->logits + block * MAX_BLOCK;
        int64_t count = min64(MAX_BLOCK, row->vocab - block * MAX_BLOCK);
        broken |= no_numbers(x, count);
        row->maxima[block] = block_max(x, count);
        if (row->maxima[block] > row->highest) row->highest = row->maxima[block];
    }
    return !any_lane(broken) && isfinite(row->highest);
}

/* The columns whose logits are at least `least`; returns how many they are. */
static int64_t gather(const logit_row *row, float least, int32_t *columns) {
    int64_t count = 0;
    for (int64_t block = 0; block < row->blocks; block++) {
        if (row->maxima[block] < least) continue;
        int64_t first = block * MAX_BLOCK, end = min64(first + MAX_BLOCK, row->vocab);
        for (int64_t column = first; column < end; column++) {
            columns[count] = (int32_t)column;
            count += row->logits[column] >= least;
        }
    }
    return count;
}

/* Logits with noise of up to MAX_BLOCK columns. */
KERNEL void add_noise(const fd_drawing *how, const int64_t *token_ids, const int32_t *columns, int64_t count,
                      float *scores) {
    uint64_t noises[MAX_BLOCK] = {0};
    double variates[MAX_BLOCK];
    for (int64_t i = 0; i < count; i++)
        noises[i] = hash(how->key, (uint64_t)(token_ids ? token_ids[columns[i]] : columns[i]));
    for (int i = 0; i < MAX_BLOCK; i++) variates[i] = gumbel(noises[i]);
    for (int64_t i = 0; i < count; i++)
        scores[i] = (float)((double)how->logits[columns[i]] + how->temperature * variates[i]);
}

static void find_by_noise(const fd_drawing *how, const int64_t *token_ids, int64_t vocab, float *scratch,
                          best_few *best) {
    logit_row row = {.logits = how->logits, .vocab = vocab, .blocks = (vocab + MAX_BLOCK - 1) / MAX_BLOCK};
    row.some = scratch;
    row.maxima = scratch + vocab;
    int32_t *columns = (int32_t *)(row.maxima + row.blocks);
    int64_t count = 0;
    if (look_at(&row)) {
        float least = floor_of(&row, how);
        float lead = vocab > FD_CONTENDERS ? top_k_floor(&row, FD_CONTENDERS) : least;
        count = gather(&row, lead > least ? lead : least, columns);
    }
    float *scores = row.some; /* nothing looks for a floor any more */
    for (int64_t first = 0; first < count; first += MAX_BLOCK)
        add_noise(how, token_ids, columns + first, min64(MAX_BLOCK, count - first), scores + first);
    for (int64_t i = 0; i < count; i++) compete(best, scores[i], columns[i]);
    fill_up(best);
    shares(scores, count, best->count, best->values);
}

static void likely_row(void *context, int64_t index, int worker) {
    const likely_job *job = context;
    const fd_drawing *how = job->drawings + index;
    best_few best = {job->shares + index * job->count, job->places + index * job->count, job->count, 0};
    if (how->temperature == 0) {
        find_top(how->logits, job->columns, &best);
        shares(how->logits, job->columns, job->count, best.values);
    } else {
        const int64_t *token_ids = job->token_ids ? job->token_ids + index * job->ids_stride : NULL;
        find_by_noise(how, token_ids, job->columns, pool_scratch(worker), &best);
    }
    for (int64_t rank = 0; rank < job->count; rank++) /* also where there is no number */
        if (!(best.values[rank] > 0)) best.values[rank] = 0;
}

int fd_likely(const fd_drawing *drawings, const int64_t *token_ids, int64_t ids_stride, int64_t rows, int64_t columns,
              int64_t count, float *shares, int64_t *places) {
    if (!drawings || !shares || !places) return FD_NULL;
    if (rows < 0 || columns < 1 || columns > INT32_MAX || count < 1 || count > columns) return FD_SHAPE;
    if (ids_stride && ids_stride < columns) return FD_SHAPE;
    for (int64_t row = 0; row < rows; row++)
        if (!drawings[row].logits) return FD_NULL;
    likely_job job = {drawings, token_ids, ids_stride, columns, count, shares, places};
    pool_take();
    int error = pool_reserve(4 * (size_t)(2 * columns + (columns + MAX_BLOCK - 1) / MAX_BLOCK), 0);
    if (!error) pool_run(rows, rows * columns * 8, likely_row, &job);
    pool_give();
    return error;
}
