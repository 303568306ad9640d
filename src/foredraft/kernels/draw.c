/* Drawing a token: argmax of logit + temperature * gumbel(key, id) over the logits that reach a floor (floor.h).
 *
 * Every candidate is hashed, but logarithms are computed for few. Since -log(u) >= 1 - u, a uniform whose complement
 * begins with n zero bits has a variate of at most (n + 1) * log(2). So for each n there is a logit below which the
 * best score so far is out of reach; the floor is part of the same table. */
#include "foredraft.h"
#include "floor.h"
#include "noise.h"
#include "pool.h"

#define SLICES 16

typedef struct race {
    double temperature;
    float floor;
    double best;
    int64_t token;
    float needed[NOISE_BITS + 1]; /* by leading zeros of the uniform's complement: the lowest logit that may win yet */
} race;

/* Rounding never rules a winner out: the slack is far above all errors, and so is the step to the next lower float. */
static void raise_bar(race *race) {
    double slack = 1e-9 * (fabs(race->best) + race->temperature);
    for (int n = 0; n <= NOISE_BITS; n++) {
        double least = race->best - race->temperature * (n + 1) * 0.69314718056 - slack;
        float needed = least > race->floor ? nextafterf((float)least, -INFINITY) : race->floor;
        race->needed[n] = needed > race->floor ? needed : race->floor;
    }
}

/* By itself: inside the loop over all tokens it would take the loop's registers. */
KERNEL void enter(race *race, float logit, int64_t id, uint64_t noise) {
    double score = (double)logit + race->temperature * gumbel(noise);
    if (score < race->best || (score == race->best && id > race->token)) return;
    race->best = score;
    race->token = id;
    raise_bar(race);
}

/* The tokens of a block whose highest logit is `most` enter where they may still win. */
INLINE void race_block(race *race, const logit_row *row, int64_t first, float most, uint64_t key) {
    uint64_t noises[MAX_BLOCK], any = 0;
    int64_t count = min64(MAX_BLOCK, row->vocab - first);
    /* The fewest leading zeros with which so high a logit can win, or one less. */
    double zeros = (race->best - most) / (race->temperature * 0.69314718056) - 2;
    uint64_t least = ~(UINT64_MAX >> (zeros > NOISE_BITS ? NOISE_BITS : zeros > 0 ? (int)zeros : 0));
    for (int i = 0; i < MAX_BLOCK; i++) {
        noises[i] = hash(key, (uint64_t)(first + i));
        any |= noises[i] >= least;
    }
    for (int64_t i = 0; any && i < count; i++) {
        int zeros = __builtin_clzll(~noises[i] | (UINT64_C(1) << (63 - NOISE_BITS)));
        if (row->logits[first + i] >= race->needed[zeros]) enter(race, row->logits[first + i], first + i, noises[i]);
    }
}

/* A drawing has its row looked at, then its floor found, and then its tokens race; the first and the last in slices of
 * the row, so that all threads have work where few tokens are drawn. A winner of winners does not depend on the slices. */
typedef struct {
    logit_row row;
    int is_broken[SLICES]; /* whether a slice has NaN */
    float highest[SLICES];
    race favourite; /* the race before any other token has entered */
    race races[SLICES];
} drawing;

typedef struct {
    const fd_drawing *drawings;
    drawing *states;
} draw_job;

static void look_at(void *context, int64_t item, int worker) {
    (void)worker;
    drawing *state = ((draw_job *)context)->states + item / SLICES;
    logit_row *row = &state->row;
    int64_t slice = item % SLICES, block = row->blocks * slice / SLICES, end = row->blocks * (slice + 1) / SLICES;
    vi broken = {0};
    float highest = -INFINITY;
    for (; block < end; block++) {
        const float *x = row->logits + block * MAX_BLOCK;
        int64_t count = min64(MAX_BLOCK, row->vocab - block * MAX_BLOCK);
        broken |= no_numbers(x, count);
        row->maxima[block] = block_max(x, count);
        if (row->maxima[block] > highest) highest = row->maxima[block];
    }
    state->highest[slice] = highest;
    state->is_broken[slice] = any_lane(broken);
}

/* The lowest place of the largest logit. */
static int64_t favourite(const logit_row *row) {
    int64_t block = 0;
    while (row->maxima[block] != row->highest) block++;
    int64_t place = block * MAX_BLOCK;
    while (row->logits[place] != row->highest) place++;
    return place;
}

static void start(void *context, int64_t item, int worker) {
    const draw_job *job = context;
    const fd_drawing *how = job->drawings + item;
    drawing *state = job->states + item;
    logit_row *row = &state->row;
    int is_broken = 0;
    row->highest = -INFINITY;
    FOR(slice, SLICES) {
        is_broken |= state->is_broken[slice];
        if (state->highest[slice] > row->highest) row->highest = state->highest[slice];
    }
    race *race = &state->favourite;
    *race = (struct race){.temperature = how->temperature, .best = -INFINITY, .token = -1};
    if (is_broken || !isfinite(row->highest)) return;
    row->some = pool_scratch(worker);
    race->floor = floor_of(row, how);
    race->token = favourite(row);
    enter(race, row->highest, race->token, hash(how->key, (uint64_t)race->token));
}

static void run_race(void *context, int64_t item, int worker) {
    (void)worker;
    const draw_job *job = context;
    drawing *state = job->states + item / SLICES;
    const logit_row *row = &state->row;
    int64_t slice = item % SLICES, block = row->blocks * slice / SLICES, end = row->blocks * (slice + 1) / SLICES;
    race *race = state->races + slice;
    *race = state->favourite;
    if (race->token < 0) return;
    for (; block < end; block++)
        if (row->maxima[block] >= race->needed[NOISE_BITS])
            race_block(race, row, block * MAX_BLOCK, row->maxima[block], job->drawings[item / SLICES].key);
}

/* The token that won, after all races. */
static int64_t winner(const drawing *state) {
    const race *best = &state->favourite;
    FOR(slice, SLICES) {
        const race *here = state->races + slice;
        if (here->best > best->best || (here->best == best->best && here->token < best->token)) best = here;
    }
    return best->token;
}

int fd_draw(const fd_drawing *drawings, int64_t count, int64_t vocab, int64_t *tokens) {
    if (!drawings || !tokens) return FD_NULL;
    if (count < 0 || vocab < 1) return FD_SHAPE;
    int64_t blocks = (vocab + MAX_BLOCK - 1) / MAX_BLOCK, num_sampled = 0;
    for (int64_t i = 0; i < count; i++) {
        if (!drawings[i].logits) return FD_NULL;
        num_sampled += drawings[i].temperature != 0; /* the others take no time after the first look */
    }
    pool_take();
    int error = pool_reserve(sizeof(float) * (size_t)vocab, (size_t)count * (sizeof(drawing) + 4 * (size_t)blocks));
    if (!error) {
        drawing *states = pool_shared();
        float *maxima = (float *)(states + count);
        for (int64_t i = 0; i < count; i++, maxima += blocks)
            states[i].row = (logit_row){.logits = drawings[i].logits, .vocab = vocab, .blocks = blocks, .maxima = maxima};
        draw_job job = {drawings, states};
        pool_run(count * SLICES, count * vocab * 4, look_at, &job);
        pool_run(count, num_sampled * vocab * 4, start, &job);
        pool_run(count * SLICES, num_sampled * vocab * 8, run_race, &job);
        for (int64_t i = 0; i < count; i++) tokens[i] = winner(&states[i]);
    }
    pool_give();
    return error;
}
