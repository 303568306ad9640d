/* Threads: workers spin for a few microseconds between verbs, because the next one usually comes at once, and then
 * sleep, so that an idle engine costs nothing and a busy neighbour gets the core.
 *
 * A job is one 64-bit word: its number, how many items it has, and the next item to hand out. Claiming an item is a
 * compare-and-swap on that word, so a worker that wakes late finds nothing left and can do no harm: nobody waits for
 * it. */
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "foredraft.h"

#define ITEM_BITS 22
#define ITEM_MASK ((UINT64_C(1) << ITEM_BITS) - 1)
#define JOB_MASK (UINT64_MAX >> (2 * ITEM_BITS))
#define JOB_OF(word) ((word) >> (2 * ITEM_BITS))
#define ITEMS_OF(word) (((word) >> ITEM_BITS) & ITEM_MASK)
#define NEXT_OF(word) ((word) & ITEM_MASK)

#define SPIN_NANOSECONDS 40000
#define SMALL_JOB 60000 /* multiply-adds: about as long as waking a thread, 5 microseconds */

static struct {
    _Alignas(64) _Atomic uint64_t word;  /* the job, see above */
    _Alignas(64) _Atomic int64_t done;   /* finished items of it */
    _Alignas(64) pool_body body;
    void *context;
    _Atomic int sleepers;
    _Atomic int wanted;                  /* threads including the caller */
    int started;                         /* workers that exist: 1 .. started-1 */
    pthread_mutex_t sleep_lock;
    pthread_cond_t wake;
} pool = {.wanted = 1, .started = 1, .sleep_lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static pthread_mutex_t verb_lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    void *memory;
    size_t bytes;
} scratch[MAX_THREADS + 1]; /* the last one is shared */

void pool_take(void) { pthread_mutex_lock(&verb_lock); }
void pool_give(void) { pthread_mutex_unlock(&verb_lock); }
int pool_threads(void) { return atomic_load(&pool.wanted); }
void *pool_scratch(int worker) { return scratch[worker].memory; }
void *pool_shared(void) { return scratch[MAX_THREADS].memory; }

static void relax(void) {
#if defined(__aarch64__)
    __asm__ volatile("yield");
#elif defined(__x86_64__)
    __asm__ volatile("pause");
#endif
}

static int64_t nanoseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Claim and run items of the current job until none is left. */
static void work(int worker) {
    uint64_t word = atomic_load_explicit(&pool.word, memory_order_acquire);
    while (NEXT_OF(word) < ITEMS_OF(word)) {
        if (!atomic_compare_exchange_weak_explicit(&pool.word, &word, word + 1, memory_order_acq_rel,
                                                   memory_order_acquire))
            continue;
        /* The job cannot end before this item does, so body and context are the ones of `word`. */
        pool.body(pool.context, (int64_t)NEXT_OF(word), worker);
        atomic_fetch_add_explicit(&pool.done, 1, memory_order_acq_rel);
        word = atomic_load_explicit(&pool.word, memory_order_acquire);
    }
}

/* Wait until the job number differs from `seen`: spinning first, asleep later. */
static void await_job(uint64_t seen) {
    int64_t deadline = nanoseconds() + SPIN_NANOSECONDS;
    while (nanoseconds() < deadline)
        for (int i = 0; i < 64; i++) {
            if (JOB_OF(atomic_load_explicit(&pool.word, memory_order_acquire)) != seen) return;
            relax();
        }
    pthread_mutex_lock(&pool.sleep_lock);
    atomic_fetch_add(&pool.sleepers, 1);
    while (JOB_OF(atomic_load(&pool.word)) == seen) pthread_cond_wait(&pool.wake, &pool.sleep_lock);
    atomic_fetch_sub(&pool.sleepers, 1);
    pthread_mutex_unlock(&pool.sleep_lock);
}

static void *worker_main(void *argument) {
    int worker = (int)(intptr_t)argument;
    uint64_t seen = 0;
    for (;;) {
        await_job(seen);
        seen = JOB_OF(atomic_load_explicit(&pool.word, memory_order_acquire));
        if (worker < atomic_load_explicit(&pool.wanted, memory_order_relaxed)) work(worker);
    }
    return NULL;
}

/* A forked child has none of the parent's threads: start again with none, and with whatever state the pool was in
 * thrown away. */
static void forget_threads(void) {
    pthread_mutex_init(&verb_lock, NULL);
    pthread_mutex_init(&pool.sleep_lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    atomic_store(&pool.sleepers, 0);
    atomic_store(&pool.word, 0); /* items that were left are the parent's */
    pool.started = 1;
}

static void start_workers(void) {
    static int registered;
    if (!registered) registered = !pthread_atfork(NULL, NULL, forget_threads);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    while (pool.started < pool_threads() &&
           !pthread_create(&thread, &attributes, worker_main, (void *)(intptr_t)pool.started))
        pool.started++;
    pthread_attr_destroy(&attributes);
}

int fd_set_threads(int threads) {
    if (threads < 1 || threads > MAX_THREADS) return FD_SHAPE;
    pool_take();
    atomic_store(&pool.wanted, threads);
    pool_give();
    return FD_OK;
}

static void wake_sleepers(void) {
    if (!atomic_load(&pool.sleepers)) return;
    pthread_mutex_lock(&pool.sleep_lock);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.sleep_lock);
}

void pool_run(int64_t items, int64_t multiply_adds, pool_body body, void *context) {
    if (pool_threads() == 1 || items < 2 || items > (int64_t)ITEM_MASK || multiply_adds < SMALL_JOB) {
        for (int64_t item = 0; item < items; item++) body(context, item, 0);
        return;
    }
    if (pool.started < pool_threads()) start_workers();
    pool.body = body;
    pool.context = context;
    atomic_store_explicit(&pool.done, 0, memory_order_relaxed);
    uint64_t number = (JOB_OF(atomic_load_explicit(&pool.word, memory_order_relaxed)) + 1) & JOB_MASK;
    atomic_store(&pool.word, number << (2 * ITEM_BITS) | (uint64_t)items << ITEM_BITS);
    wake_sleepers();
    work(0);
    for (int spins = 0; atomic_load_explicit(&pool.done, memory_order_acquire) < items; spins++) {
        if (spins < 20000) relax();
        else sched_yield();
    }
}

static int reserve(int which, size_t bytes) {
    if (scratch[which].bytes >= bytes) return FD_OK;
    free(scratch[which].memory);
    bytes = (bytes + 4095) / 4096 * 4096;
    scratch[which].memory = aligned_alloc(4096, bytes);
    scratch[which].bytes = scratch[which].memory ? bytes : 0;
    return scratch[which].memory ? FD_OK : FD_NO_MEMORY;
}

/* For every worker there is: one that woke before the number of threads was lowered may still join this job. */
int pool_reserve(size_t bytes, size_t shared_bytes) {
    int error = reserve(MAX_THREADS, shared_bytes), workers = pool_threads();
    if (workers < pool.started) workers = pool.started;
    for (int worker = 0; worker < workers; worker++) error = error ? error : reserve(worker, bytes);
    return error;
}
