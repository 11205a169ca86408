/* The thread pool and the execution of graphs. The pool is independent of torch's threads. Each thread first runs its
 * own contiguous range of items, which lets it read memory in order, and then takes single items from the ranges of
 * other threads. If the operating system interrupts a thread for a while, only one item is therefore delayed. A waiting
 * thread polls for a while and then sleeps, so that the operating system can run another thread on its core. */
#include "graph.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define POLLS 1500 /* polls of a flag before a thread sleeps */

typedef _Atomic int64_t counter;

/* A counter that only grows, and the threads that sleep until it grows. */
typedef struct {
    _Atomic int64_t number, sleepers;
    pthread_mutex_t mutex;
    pthread_cond_t grown;
} signal_count;

static counter *counters[MAX_THREADS]; /* per thread and instruction: number of items taken from the thread's range */
static const instruction *graph;
static int64_t length, crew = 1;
static int64_t unwatched[8] __attribute__((aligned(64))); /* its own cache line, because threads read adjacent data */
static volatile int64_t *progress = unwatched; /* written by the thread that runs the graph, read by another process */
static _Atomic int64_t arrived;
static signal_count meetings = {.mutex = PTHREAD_MUTEX_INITIALIZER, .grown = PTHREAD_COND_INITIALIZER};
static signal_count ready = {.mutex = PTHREAD_MUTEX_INITIALIZER, .grown = PTHREAD_COND_INITIALIZER};
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
    for (int poll = 0; poll < POLLS; poll++) {
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

/* Return once all threads have called this function. */
static void meet(void) {
    int64_t now = atomic_load_explicit(&meetings.number, memory_order_relaxed);
    if (atomic_fetch_add(&arrived, 1) == crew - 1) {
        atomic_store(&arrived, 0);
        grow(&meetings);
        return;
    }
    wait_beyond(&meetings, now);
}

static void play(int64_t self) {
    const instruction *now = graph; /* after the last `meet`, `graph` and `length` may change */
    int64_t count = length;
    for (int64_t i = 0; i < count; i++, now++) {
        int64_t items = now->run(now->arguments, -1);
        for (int64_t offset = 0; offset < crew; offset++) {
            int64_t owner = (self + offset) % crew, claimed;
            int64_t first = items * owner / crew, last = items * (owner + 1) / crew;
            while ((claimed = atomic_fetch_add_explicit(&counters[owner][i], 1, memory_order_relaxed)) < last - first) {
                now->run(now->arguments, first + claimed);
                if (self == 0) ++*progress;
            }
        }
        if (now->waits || i == count - 1) meet();
        if (self == 0) ++*progress; /* even if the other threads took all items */
    }
}

static void *work(void *self) {
    int64_t done = atomic_load(&jobs.number);
    grow(&ready);
    for (;; done++) {
        wait_beyond(&jobs, done);
        play((int64_t)self);
    }
    return NULL;
}

/* Start or enlarge the pool to `count` threads; return the number of threads. Do not call this while a graph runs. */
int64_t start_threads(int64_t count) {
    if (count > MAX_THREADS) count = MAX_THREADS;
    if (!counters[0]) counters[0] = calloc(MAX_INSTRUCTIONS, sizeof(counter));
    while (counters[0] && crew < count) {
        pthread_t thread;
        counters[crew] = calloc(MAX_INSTRUCTIONS, sizeof(counter));
        if (!counters[crew] || pthread_create(&thread, NULL, work, (void *)crew)) break;
        pthread_detach(thread);
        wait_beyond(&ready, crew - 1); /* the new thread has read the job counter */
        crew++;
    }
    return counters[0] ? crew : 0;
}

/* Set the address of the progress count, which grows with finished items and instructions. Do not call this while a
 * graph runs. */
void report_progress(int64_t *where) { progress = where; }

void add_progress(void) { ++*progress; }

/* Run a graph to its end; return 0, or -1 if the graph is too long. Only one thread at a time may call `run_graph`. */
int64_t run_graph(const instruction *instructions, int64_t count) {
    if (count > MAX_INSTRUCTIONS) return -1;
    if (count == 1 && instructions->run(instructions->arguments, -1) == 1) { /* a single item needs no other threads */
        instructions->run(instructions->arguments, 0);
        ++*progress;
        return 0;
    }
    graph = instructions, length = count;
    for (int64_t i = 0; i < crew; i++) memset((void *)counters[i], 0, count * sizeof(counter));
    if (crew > 1) grow(&jobs);
    play(0);
    return 0;
}
