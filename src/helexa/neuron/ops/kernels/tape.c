/* The threads, and how they go through a tape. One pool of our own: whatever runtime torch brought along stays asleep.
 * Items are handed out one by one, so that a core which is taken away for a while holds up one item, not half of them.
 */
#define _GNU_SOURCE
#include "tape.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>

#define MAX_INSTRUCTIONS 16384
#define SPINS 4000 /* looks at a flag before the processor is offered to others */

typedef struct {
    _Atomic int64_t next;
    char padding[56];
} counter;

static counter counters[MAX_INSTRUCTIONS];
static const instruction *tape;
static int64_t length, crew = 1;
static _Atomic int64_t arrived, round_number;
static _Atomic int64_t job;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t news = PTHREAD_COND_INITIALIZER;

int64_t threads(void) { return crew; }

static inline void pause_briefly(int64_t *spins) {
    if (++*spins > SPINS) {
        sched_yield();
        return;
    }
#ifdef __x86_64__
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Returns when all threads have come here. */
static void meet(void) {
    int64_t now = atomic_load_explicit(&round_number, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&arrived, 1, memory_order_acq_rel) == crew - 1) {
        atomic_store_explicit(&arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&round_number, now + 1, memory_order_release);
        return;
    }
    for (int64_t spins = 0; atomic_load_explicit(&round_number, memory_order_acquire) == now;) pause_briefly(&spins);
}

static void play(void) {
    const instruction *now = tape, *end = tape + length; /* once all have met at the end, others may change these */
    for (counter *taken = counters; now < end; now++, taken++) {
        int64_t items = now->run(now->arguments, -1), item;
        while ((item = atomic_fetch_add_explicit(&taken->next, 1, memory_order_relaxed)) < items)
            now->run(now->arguments, item);
        if (now->waits || now + 1 == end) meet();
    }
}

static void *work(void *unused) {
    (void)unused;
    int64_t done = 0;
    for (;;) {
        int64_t spins = 0;
        while (atomic_load_explicit(&job, memory_order_acquire) == done && ++spins < SPINS)
#ifdef __x86_64__
            __builtin_ia32_pause();
#else
            ;
#endif
        if (atomic_load_explicit(&job, memory_order_acquire) == done) {
            pthread_mutex_lock(&mutex);
            while (atomic_load_explicit(&job, memory_order_acquire) == done) pthread_cond_wait(&news, &mutex);
            pthread_mutex_unlock(&mutex);
        }
        done++;
        play();
    }
    return NULL;
}

/* Starts the pool, once per process; returns how many threads it has. */
int64_t start_threads(int64_t count) {
    if (count > MAX_THREADS) count = MAX_THREADS;
    while (crew < count) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, work, NULL)) break;
        pthread_detach(thread);
        crew++;
    }
    return crew;
}

/* Runs a tape to its end. Only one thread at a time may call it. Returns 0, or -1 when the tape is too long. */
int64_t run_tape(const instruction *instructions, int64_t count) {
    if (count > MAX_INSTRUCTIONS) return -1;
    tape = instructions, length = count;
    memset(counters, 0, count * sizeof *counters);
    if (crew > 1) {
        pthread_mutex_lock(&mutex);
        atomic_fetch_add_explicit(&job, 1, memory_order_release);
        pthread_cond_broadcast(&news);
        pthread_mutex_unlock(&mutex);
    }
    play();
    return 0;
}
