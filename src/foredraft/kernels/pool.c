/* Threads: workers spin between verbs, because the next one usually comes at once, then keep offering their core to
 * others, and then sleep, so that an idle engine costs nothing and a busy neighbour gets the core.
 *
 * The items of a job are cut into one piece for each thread, neighbouring items together, so that a thread reads one
 * stretch of a weight. A piece is one 64-bit word: how many items it has, the next one to hand out, and how many are
 * done. Taking an item is a compare-and-swap on that word. A thread takes the items of its own piece, whose cache line
 * nobody else wants, and then those that others have left; a worker that wakes late finds nothing and can do no harm:
 * nobody waits for it. */
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "foredraft.h"

#define COUNT_BITS 21
#define COUNT_MASK ((UINT64_C(1) << COUNT_BITS) - 1)
#define ITEMS_OF(word) ((word) >> (2 * COUNT_BITS))
#define NEXT_OF(word) (((word) >> COUNT_BITS) & COUNT_MASK)
#define DONE_OF(word) ((word) & COUNT_MASK)
#define ONE_TAKEN (UINT64_C(1) << COUNT_BITS)
#define ONE_DONE UINT64_C(1)

#define SPIN_NANOSECONDS 40000    /* between the verbs of a step */
#define YIELD_NANOSECONDS 1000000 /* between steps: waking a thread takes up to a tenth of that on a virtual machine */
#define SMALL_JOB 60000 /* multiply-adds: about as long as waking a thread, 5 microseconds */

/* A thread's piece of the job, and how it waits for one. */
static struct {
    _Alignas(128) _Atomic uint64_t word; /* see above; 128: lines are fetched in pairs */
    _Atomic int asleep;
    pthread_cond_t wake;
} pieces[MAX_THREADS] = {[0 ... MAX_THREADS - 1] = {.wake = PTHREAD_COND_INITIALIZER}};

static struct {
    pool_body body; /* of the job, like context and items */
    void *context;
    int64_t items;
    _Atomic int num_pieces;
    _Atomic int wanted; /* threads including the caller */
    int started;        /* workers that exist: 1 .. started-1 */
    pthread_mutex_t sleep_lock;
} pool = {.wanted = 1, .started = 1, .num_pieces = 1, .sleep_lock = PTHREAD_MUTEX_INITIALIZER};

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

static int num_pieces(void) { return atomic_load_explicit(&pool.num_pieces, memory_order_relaxed); }
static int64_t first_item(int64_t piece) { return piece * pool.items / num_pieces(); }

static uint64_t piece_word(int piece) { return atomic_load_explicit(&pieces[piece].word, memory_order_acquire); }
static int has_items(int piece) {
    uint64_t word = piece_word(piece);
    return NEXT_OF(word) < ITEMS_OF(word);
}

/* Take and run items of a piece until none is left. */
static void finish_piece(int piece, int worker) {
    uint64_t word = piece_word(piece);
    while (NEXT_OF(word) < ITEMS_OF(word)) {
        if (!atomic_compare_exchange_weak_explicit(&pieces[piece].word, &word, word + ONE_TAKEN, memory_order_acq_rel,
                                                   memory_order_acquire))
            continue;
        /* The job cannot end before this item does, so what `pool` says is said of it. */
        pool.body(pool.context, first_item(piece) + (int64_t)NEXT_OF(word), worker);
        word = atomic_fetch_add_explicit(&pieces[piece].word, ONE_DONE, memory_order_acq_rel) + ONE_DONE;
    }
}

static void work(int worker) {
    int count = num_pieces();
    finish_piece(worker, worker);
    for (int i = 1; i < count; i++) finish_piece((worker + i) % count, worker);
}

/* Wait until the worker's piece has items: spinning first, then offering the core, asleep later. */
static void await_items(int worker) {
    int64_t start = nanoseconds(), waited = 0;
    for (; waited < YIELD_NANOSECONDS; waited = nanoseconds() - start) {
        for (int i = 0; i < 64; i++) {
            if (has_items(worker)) return;
            relax();
        }
        if (waited > SPIN_NANOSECONDS) sched_yield();
    }
    pthread_mutex_lock(&pool.sleep_lock);
    atomic_store(&pieces[worker].asleep, 1);
    atomic_thread_fence(memory_order_seq_cst); /* see publish */
    while (!has_items(worker)) pthread_cond_wait(&pieces[worker].wake, &pool.sleep_lock);
    atomic_store(&pieces[worker].asleep, 0);
    pthread_mutex_unlock(&pool.sleep_lock);
}

static void *worker_main(void *argument) {
    int worker = (int)(intptr_t)argument;
    for (;;) {
        await_items(worker);
        work(worker);
    }
    return NULL;
}

/* A forked child has none of the parent's threads: start again with none, and with whatever state the pool was in
 * thrown away. */
static void forget_threads(void) {
    pthread_mutex_init(&verb_lock, NULL);
    pthread_mutex_init(&pool.sleep_lock, NULL);
    for (int piece = 0; piece < MAX_THREADS; piece++) {
        pthread_cond_init(&pieces[piece].wake, NULL);
        atomic_store(&pieces[piece].asleep, 0);
        atomic_store(&pieces[piece].word, 0); /* items that were left are the parent's */
    }
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

/* Hand out a job. A piece's word comes last: whoever sees it sees the job. */
static void publish(int64_t items, pool_body body, void *context) {
    int count = items < pool_threads() ? (int)items : pool_threads();
    pool.body = body;
    pool.context = context;
    pool.items = items;
    atomic_store(&pool.num_pieces, count);
    for (int piece = count - 1; piece >= 0; piece--) {
        uint64_t size = (uint64_t)(first_item(piece + 1) - first_item(piece));
        atomic_store_explicit(&pieces[piece].word, size << (2 * COUNT_BITS), memory_order_release);
    }
    atomic_thread_fence(memory_order_seq_cst); /* a worker says that it sleeps and then looks at its word */
    for (int piece = 1; piece < count; piece++)
        if (atomic_load(&pieces[piece].asleep)) {
            pthread_mutex_lock(&pool.sleep_lock);
            pthread_cond_signal(&pieces[piece].wake);
            pthread_mutex_unlock(&pool.sleep_lock);
        }
}

void pool_run(int64_t items, int64_t multiply_adds, pool_body body, void *context) {
    if (pool_threads() == 1 || items < 2 || items > (int64_t)COUNT_MASK || multiply_adds < SMALL_JOB) {
        for (int64_t item = 0; item < items; item++) body(context, item, 0);
        return;
    }
    if (pool.started < pool_threads()) start_workers();
    publish(items, body, context);
    work(0);
    for (int piece = 0; piece < num_pieces(); piece++)
        for (int spins = 0; DONE_OF(piece_word(piece)) < ITEMS_OF(piece_word(piece)); spins++) {
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
