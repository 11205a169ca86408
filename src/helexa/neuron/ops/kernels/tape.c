/* The threads, and how they go through a tape. One pool of our own: whatever runtime torch brought along stays asleep.
 * Items are handed out one by one, so that a core which is taken away for a while holds up one item, not half of them.
 * A thread that has looked for a while in vain sleeps: a core that falls idle is what makes the system move a thread which
 * waits behind another process.
 */
#include "tape.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

#define MAX_INSTRUCTIONS 16384
#define LOOKS 1500 /* at a flag, before a thread sleeps */

typedef struct {
    _Atomic int64_t next;
    char padding[56];
} counter;

/* A number that only grows, and those who sleep until it does. */
typedef struct {
    _Atomic int64_t number, sleepers;
    pthread_mutex_t mutex;
    pthread_cond_t grown;
} signal_count;

static counter counters[MAX_INSTRUCTIONS];
static const instruction *tape;
static int64_t length, crew = 1;
static _Atomic int64_t arrived;
static signal_count meetings = {.mutex = PTHREAD_MUTEX_INITIALIZER, .grown = PTHREAD_COND_INITIALIZER};
static signal_count jobs = {.mutex = PTHREAD_MUTEX_INITIALIZER, .grown = PTHREAD_COND_INITIALIZER};

int64_t threads(void) { return crew; }

static void grow(signal_count *signal) {
    atomic_fetch_add(&signal->number, 1);
    if (atomic_load(&signal->sleepers)) {
        pthread_mutex_lock(&signal->mutex);
        pthread_cond_broadcast(&signal->grown);
        pthread_mutex_unlock(&signal->mutex);
    }
}

static void wait_beyond(signal_count *signal, int64_t number) {
    for (int look = 0; look < LOOKS; look++) {
        if (atomic_load_explicit(&signal->number, memory_order_acquire) > number) return;
#ifdef __x86_64__
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("yield");
#endif
    }
    pthread_mutex_lock(&signal->mutex);
    atomic_fetch_add(&signal->sleepers, 1);
    while (atomic_load(&signal->number) <= number) pthread_cond_wait(&signal->grown, &signal->mutex);
    atomic_fetch_sub(&signal->sleepers, 1);
    pthread_mutex_unlock(&signal->mutex);
}

/* Returns when all threads have come here. */
static void meet(void) {
    int64_t now = atomic_load_explicit(&meetings.number, memory_order_relaxed);
    if (atomic_fetch_add(&arrived, 1) == crew - 1) {
        atomic_store(&arrived, 0);
        grow(&meetings);
        return;
    }
    wait_beyond(&meetings, now);
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

static void *work(void *started_at) {
    for (int64_t done = (int64_t)started_at;; done++) {
        wait_beyond(&jobs, done);
        play();
    }
    return NULL;
}

/* Starts the pool, or makes it larger; returns how many threads it has. Not while a tape runs. */
int64_t start_threads(int64_t count) {
    while (crew < count && crew < MAX_THREADS) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, work, (void *)atomic_load(&jobs.number))) break;
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
    if (crew > 1) grow(&jobs);
    play();
    return 0;
}
