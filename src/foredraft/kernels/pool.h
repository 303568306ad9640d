/* One small thread pool for all verbs, and the scratch memory of its threads. */
#ifndef FD_POOL_H
#define FD_POOL_H

#include <stddef.h>
#include <stdint.h>

#define MAX_THREADS 256

typedef void (*pool_body)(void *context, int64_t item, int worker);

/* Verbs run one at a time: each takes the pool at its start and gives it back at its end. */
void pool_take(void);
void pool_give(void);

/* Run body(context, item, worker) for item = 0 .. items-1 and return when all are done. Items are handed out one by
 * one, so a thread that other programs hold up delays one item only. `multiply_adds` is the size of the whole job, of
 * whatever kind: how many vector multiply-adds take as long. Small jobs stay on the calling thread: to hand
 * them out costs more. */
void pool_run(int64_t items, int64_t multiply_adds, pool_body body, void *context);

int pool_threads(void);

/* Give every worker `bytes` of scratch and the call itself `shared_bytes`; nonzero when memory ran out. */
int pool_reserve(size_t bytes, size_t shared_bytes);
void *pool_scratch(int worker);
void *pool_shared(void);

#endif
