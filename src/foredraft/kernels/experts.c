/* mix_experts: every row through the few MLPs that a router chooses for it.
 *
 * Rows are brought together by expert, so that an expert's weights are read once for all rows that chose it, and not at
 * all where none did. A row's own sequence of operations is fixed all the same: its scores, its experts one by one, and
 * the sum of what they give, best first. */
#include "foredraft.h"
#include "layers.h"
#include "pool.h"
#include "simd.h"

#include <stdlib.h>

/* What one call needs; a choice is a row and the rank of one of its experts, row * chosen + rank. */
typedef struct {
    float *shares;     /* [rows, chosen]: what the experts' results are multiplied by */
    float *scores;     /* [rows, experts] */
    float *gathered;   /* [rows, width]: the rows of one expert */
    float *wide;       /* [rows, 2 * inner] */
    float *narrow;     /* [rows, inner] */
    float *result;     /* [rows, width] */
    float *updates;    /* [rows, chosen, width] */
    int64_t *experts;  /* [rows, chosen] */
    int64_t *choices;  /* [rows * chosen], expert by expert */
    int64_t *starts;   /* [experts + 1]: where the choices of each begin */
} experts_space;

/* The next `count` things of a size, or NULL while bytes are only counted. */
static void *take(char *memory, int64_t *bytes, int64_t count, int64_t size) {
    char *taken = memory ? memory + *bytes : NULL;
    *bytes += (count * size + 63) / 64 * 64;
    return taken;
}

/* Lays the space out from `memory` on, which may be NULL; returns the bytes that it takes. */
static int64_t lay_out(const fd_experts *of, int64_t rows, int64_t width, char *memory, experts_space *space) {
    int64_t bytes = 0;
    space->shares = take(memory, &bytes, rows * of->chosen, 4);
    space->scores = take(memory, &bytes, rows * of->count, 4);
    space->gathered = take(memory, &bytes, rows * width, 4);
    space->wide = take(memory, &bytes, rows * 2 * of->inner, 4);
    space->narrow = take(memory, &bytes, rows * of->inner, 4);
    space->result = take(memory, &bytes, rows * width, 4);
    space->updates = take(memory, &bytes, rows * of->chosen * width, 4);
    space->experts = take(memory, &bytes, rows * of->chosen, 8);
    space->choices = take(memory, &bytes, rows * of->chosen, 8);
    space->starts = take(memory, &bytes, of->count + 1, 8);
    return bytes;
}

/* A row with scores that are no numbers gets the first experts: any, but no expert twice. Its results are none either. */
static void make_distinct(int64_t *experts, int64_t chosen) {
    for (int64_t rank = 1; rank < chosen; rank++)
        for (int64_t other = 0; other < rank; other++)
            if (experts[rank] == experts[other]) {
                for (int64_t i = 0; i < chosen; i++) experts[i] = i;
                return;
            }
}

/* The experts of every row, best first, and their shares. */
static int choose(const fd_experts *of, const float *x, int64_t rows, const experts_space *space) {
    int error = project(&of->router, x, rows, space->scores);
    if (!error)
        error = fd_top(space->scores, rows, of->count, of->count, of->chosen, 1, space->shares, space->experts);
    for (int64_t row = 0; row < rows && !error; row++) {
        float *shares = space->shares + row * of->chosen, sum = 0.0f;
        make_distinct(space->experts + row * of->chosen, of->chosen);
        if (!of->normalised) continue;
        for (int64_t rank = 0; rank < of->chosen; rank++) sum += shares[rank];
        for (int64_t rank = 0; rank < of->chosen; rank++) shares[rank] /= sum;
    }
    return error;
}

/* All choices, expert by expert and row by row. */
static void sort_choices(const fd_experts *of, int64_t rows, const experts_space *space) {
    int64_t *starts = space->starts, total = rows * of->chosen;
    memset(starts, 0, 8 * (size_t)(of->count + 1));
    for (int64_t i = 0; i < total; i++) starts[space->experts[i] + 1]++;
    for (int64_t e = 0; e < of->count; e++) starts[e + 1] += starts[e];
    for (int64_t i = 0; i < total; i++) space->choices[starts[space->experts[i]]++] = i;
    for (int64_t e = of->count; e > 0; e--) starts[e] = starts[e - 1];
    starts[0] = 0;
}

/* One expert for `count` choices. */
static int run_expert(const fd_experts *of, const fd_mlp *mlp, const float *x, int64_t width, int activation,
                      const int64_t *choices, int64_t count, const experts_space *space) {
    int error = check_projection(&mlp->gate_up, 2 * of->inner, width);
    if (!error) error = check_projection(&mlp->down, width, of->inner);
    if (error) return error;
    size_t bytes = 4 * (size_t)width;
    for (int64_t i = 0; i < count; i++)
        memcpy(space->gathered + i * width, x + choices[i] / of->chosen * width, bytes);
    error = project(&mlp->gate_up, space->gathered, count, space->wide);
    if (!error) error = fd_gated(space->wide, count, of->inner, activation, space->narrow);
    if (!error) error = project(&mlp->down, space->narrow, count, space->result);
    for (int64_t i = 0; i < count && !error; i++)
        memcpy(space->updates + choices[i] * width, space->result + i * width, bytes);
    return error;
}

typedef struct {
    const experts_space *space;
    int64_t chosen, width;
    float *y;
} mix_job;

static void mix_row(void *context, int64_t row, int worker) {
    (void)worker;
    const mix_job *job = context;
    const float *shares = job->space->shares + row * job->chosen;
    const float *updates = job->space->updates + row * job->chosen * job->width;
    float *y = job->y + row * job->width;
    for (int64_t i = 0; i < job->width; i++) y[i] = shares[0] * updates[i];
    for (int64_t rank = 1; rank < job->chosen; rank++)
        for (int64_t i = 0; i < job->width; i++) y[i] = y[i] + shares[rank] * updates[rank * job->width + i];
}

int fd_mix_experts(const fd_experts *experts, const float *x, int64_t rows, int activation, float *y) {
    if (!experts || !experts->each || !x || !y) return FD_NULL;
    int64_t width = experts->router.inputs;
    if (rows < 0 || experts->chosen < 1 || experts->chosen > experts->count || experts->inner < 1) return FD_SHAPE;
    int error = check_projection(&experts->router, experts->count, width);
    if (error || rows == 0) return error;
    experts_space space;
    int64_t bytes = lay_out(experts, rows, width, NULL, &space);
    char *memory = aligned_alloc(64, (size_t)bytes);
    if (!memory) return FD_NO_MEMORY;
    lay_out(experts, rows, width, memory, &space);
    error = choose(experts, x, rows, &space);
    if (!error) sort_choices(experts, rows, &space);
    for (int64_t e = 0; e < experts->count && !error; e++) {
        int64_t count = space.starts[e + 1] - space.starts[e];
        if (count)
            error = run_expert(experts, &experts->each[e], x, width, activation, space.choices + space.starts[e], count,
                               &space);
    }
    if (!error) {
        mix_job job = {&space, experts->chosen, width, y};
        pool_take();
        pool_run(rows, rows * experts->chosen * width, mix_row, &job);
        pool_give();
    }
    free(memory);
    return error;
}
