/* Moves what a cache holds from slot to slot: the K and V of accepted draft tokens, to where committed ones belong. */
#include "foredraft.h"
#include "pool.h"

#include <string.h>

typedef struct {
    char *data;
    int64_t slots, size, count;
    const int64_t *moves;
} move_job;

static void move_part(void *context, int64_t part, int worker) {
    const move_job *job = context;
    char *slots = job->data + part * job->slots * job->size, *read = pool_scratch(worker);
    for (int64_t i = 0; i < job->count; i++)
        memcpy(read + i * job->size, slots + job->moves[2 * i] * job->size, (size_t)job->size);
    for (int64_t i = 0; i < job->count; i++)
        memcpy(slots + job->moves[2 * i + 1] * job->size, read + i * job->size, (size_t)job->size);
}

int fd_move(void *data, int64_t parts, int64_t slots, int64_t size, const int64_t *moves, int64_t count) {
    if ((parts && !data) || !moves) return FD_NULL; /* where all layers have windows, other blocks hold nothing */
    if (parts < 0 || slots < 1 || size < 1 || count < 0) return FD_SHAPE;
    for (int64_t i = 0; i < 2 * count; i++)
        if (moves[i] < 0 || moves[i] >= slots) return FD_RANGE;
    move_job job = {data, slots, size, count, moves};
    pool_take();
    int error = pool_reserve((size_t)(count * size), 0);
    /* No cache has these slots: what takes long is to reach them. */
    if (!error) pool_run(parts, parts * count * (4096 + size), move_part, &job);
    pool_give();
    return error;
}
