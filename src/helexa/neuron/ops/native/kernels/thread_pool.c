/* The thread pool and the execution of graphs. The pool is independent of torch's threads. Each thread first runs its
 * own contiguous range of items, which lets it read memory in order, and then takes single items from the ranges of
 * other threads. If the operating system interrupts a thread for a while, only one item is therefore delayed. A waiting
 * thread polls for a while and then sleeps, so that the operating system can run another thread on its core.
 *
 * If another program uses a core all the time, all threads wait again and again for the thread that shares this core.
 * The pool measures how long its threads sleep while one of them waits for a core. If one thread less would be faster,
 * the next graphs run on one thread less, and after a pause the pool tries one thread more. The results of graphs do
 * not depend on the number of threads.
 *
 * These times are counted per graph. The threads wait for each other in meetings (barriers). In all meetings except the
 * last one of a graph, each thread counts its own sleep, because the graph cannot end without the thread. In the last
 * meeting, the thread that arrives last counts the sleep of the others before it ends the meeting. If the other threads
 * counted their own sleep there, a thread that wakes up late would add its time to a later graph, which may run on
 * fewer threads. */
#include "graph.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define POLLS 1500             /* polls of a flag before a thread sleeps */
#define JOB (2 * MAX_THREADS)  /* a job number is a multiple of JOB, plus the number of threads that run the job */
#define SHORT 100000           /* ns of sleep in a graph that the pool ignores */
#define WATCHED 16             /* graphs, after one with sleep above SHORT, in which waits for a core are measured */
#define MOST_LOSS 10000000     /* ns that a thread may cost before the pool uses one thread less */
#define FIRST_PAUSE 100000000  /* ns until the pool tries one thread more; twice as long after each failed attempt */
#define LAST_PAUSE 3200000000
#define FEW_GRAPHS 8           /* an attempt that ends within this many graphs has failed, even if they took long */

typedef _Atomic int64_t counter;

/* A counter that only grows, and the threads that sleep until it grows. */
typedef struct {
    _Atomic int64_t number, sleepers;
    pthread_mutex_t mutex;
    pthread_cond_t grown;
} signal_count;

/* A function of the pool that stack traces name: `backtrace_symbols_fd` knows exported functions only. */
#ifdef __clang__
#define TRACED __attribute__((noinline))
#else
#define TRACED __attribute__((noipa, visibility("protected"))) /* noipa: GCC makes no copies under other names */
#endif

#define NO_SIGNAL {.mutex = PTHREAD_MUTEX_INITIALIZER, .grown = PTHREAD_COND_INITIALIZER}

static counter *counters[MAX_THREADS]; /* per thread and instruction: number of items taken from the thread's range */
static const instruction *graph;
static int64_t length, crew = 1;
static int64_t active = 1; /* number of threads that run the next graph, from 1 to `crew` */
static int64_t loss, pause_ns = FIRST_PAUSE;
static int64_t changed, changed_graph; /* time of the last change of `active`, and number of graphs until then */
static int attempt;        /* whether the last change of `active` was one thread more */
static int64_t graphs;     /* number of graphs that have started */
static int64_t watched;    /* number of next graphs in which threads read how long they waited for a core */
static _Atomic int64_t slept; /* ns that threads slept in this graph, until other threads had run their items */
static _Atomic int64_t delayed; /* ns that threads of this graph waited for a core */
static _Atomic int64_t asleep_since[MAX_THREADS]; /* time at which the thread fell asleep in a meeting, else 0 */
static _Thread_local int64_t core_wait, core_wait_graph; /* `ns_without_core` after graph `core_wait_graph` */
/* Progress count that nothing reads. It has its own cache line, because threads read adjacent data. */
static counter unwatched[8] __attribute__((aligned(64)));
static counter *progress = unwatched; /* written by the thread that runs the graph, read by another process */
static _Atomic int64_t arrived;
static signal_count meetings = NO_SIGNAL, ready = NO_SIGNAL, jobs = NO_SIGNAL;

int64_t threads(void) { return crew; }

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static void grow(signal_count *signal, int64_t amount) {
    atomic_fetch_add(&signal->number, amount);
    if (atomic_load(&signal->sleepers)) {
        pthread_mutex_lock(&signal->mutex);
        pthread_cond_broadcast(&signal->grown);
        pthread_mutex_unlock(&signal->mutex);
    }
}

/* Poll for a while. Return whether the counter exceeds `number`. */
static int poll_beyond(signal_count *signal, int64_t number) {
    for (int poll = 0; poll < POLLS; poll++) {
        if (atomic_load_explicit(&signal->number, memory_order_acquire) > number) return 1;
#ifdef __x86_64__
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("yield");
#endif
    }
    return 0;
}

TRACED void pool_sleep(signal_count *signal, int64_t number) {
    pthread_mutex_lock(&signal->mutex);
    atomic_fetch_add(&signal->sleepers, 1);
    while (atomic_load(&signal->number) <= number) pthread_cond_wait(&signal->grown, &signal->mutex);
    atomic_fetch_sub(&signal->sleepers, 1);
    pthread_mutex_unlock(&signal->mutex);
}

/* Wait until the counter exceeds `number`. */
static void wait_beyond(signal_count *signal, int64_t number) {
    if (!poll_beyond(signal, number)) pool_sleep(signal, number);
}

/* Add the time that other threads have slept in the meeting that this thread ends. */
static void count_sleep(int64_t thread_count) {
    int64_t now = now_ns();
    for (int64_t i = 0; i < thread_count; i++) {
        int64_t since = atomic_load(&asleep_since[i]);
        if (since) atomic_fetch_add(&slept, now - since);
    }
}

/* Return once `thread_count` threads have called this function. `last`: whether the graph ends with this meeting. */
TRACED void pool_meet(int64_t self, int64_t thread_count, int last) {
    int64_t now = atomic_load_explicit(&meetings.number, memory_order_relaxed);
    if (atomic_fetch_add(&arrived, 1) == thread_count - 1) {
        atomic_store(&arrived, 0);
        if (last && atomic_load(&meetings.sleepers)) count_sleep(thread_count);
        grow(&meetings, 1);
        return;
    }
    if (poll_beyond(&meetings, now)) return;
    int64_t start = now_ns();
    if (last) atomic_store(&asleep_since[self], start);
    pool_sleep(&meetings, now);
    if (last) atomic_store(&asleep_since[self], 0); /* before this thread comes to the next meeting */
    else atomic_fetch_add(&slept, now_ns() - start);
}

/* Return the ns that this thread has been ready to run but had no core, since it started; 0 if the operating system
 * does not report them. */
static int64_t ns_without_core(void) {
    char text[64] = {0};
    int file = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    ssize_t size = read(file, text, sizeof text - 1);
    close(file);
    char *second = size > 0 ? strchr(text, ' ') : NULL;
    return second ? strtoll(second, NULL, 10) : 0;
}

/* Begin to count the time without a core for the graph after `graph_number`. */
static void start_delay(int64_t graph_number) { core_wait = ns_without_core(), core_wait_graph = graph_number; }

/* Add the ns that this thread had no core in this graph. If the thread read its time neither at the end of the
 * graph before nor at the start of this one, the time of this graph is unknown, and only the next graph counts. */
static void add_delay(void) {
    int64_t before = core_wait, known = core_wait_graph == graphs - 1;
    start_delay(graphs);
    if (known) atomic_fetch_add(&delayed, core_wait - before);
}

/* Increment the progress count. If two threads do so at the same time, one increment may be lost. */
static inline void count_progress(void) {
    int64_t count = atomic_load_explicit(progress, memory_order_relaxed);
    atomic_store_explicit(progress, count + 1, memory_order_relaxed);
}

void add_progress(void) { count_progress(); }

TRACED void pool_play(int64_t self, int64_t thread_count) {
    const instruction *now = graph; /* after the last `pool_meet`, `graph` and `length` may change */
    int64_t count = length;
    if (self && watched && core_wait_graph != graphs - 1) start_delay(graphs - 1); /* its time is not known yet */
    for (int64_t i = 0; i < count; i++, now++) {
        int64_t items = now->run(now->arguments, -1);
        for (int64_t offset = 0; offset < thread_count; offset++) {
            int64_t owner = (self + offset) % thread_count, claimed;
            int64_t first = items * owner / thread_count, last = items * (owner + 1) / thread_count;
            while ((claimed = atomic_fetch_add_explicit(&counters[owner][i], 1, memory_order_relaxed)) < last - first) {
                now->run(now->arguments, first + claimed);
                if (self == 0) count_progress();
            }
        }
        int last = i == count - 1;
        if (last && (watched || atomic_load_explicit(&slept, memory_order_relaxed) > SHORT)) add_delay();
        if (now->waits || last) pool_meet(self, thread_count, last);
        if (self == 0) count_progress(); /* even if the other threads took all items */
    }
}

TRACED void *pool_work(void *self) {
    int64_t job = atomic_load(&jobs.number);
    grow(&ready, 1);
    for (;;) {
        wait_beyond(&jobs, job);
        job = atomic_load(&jobs.number);
        if ((int64_t)self < job % JOB) pool_play((int64_t)self, job % JOB);
    }
    return NULL;
}

/* Choose the number of threads for the next graphs, after a graph that took `ns` on `active` threads. If each thread
 * lost `wait` to a thread without a core, one thread less would take (ns - wait) * active / (active - 1). That is less
 * than ns if `loss` grows. */
static void adapt(int64_t ns) {
    int64_t now = now_ns(), sleep = atomic_load(&slept), delay = atomic_load(&delayed);
    int64_t wait = active > 1 ? sleep / (active - 1) : 0;
    watched = sleep > SHORT ? WATCHED : watched > 0 ? watched - 1 : 0;
    loss += (wait < delay ? wait : delay) * active - ns;
    if (loss < 0) loss = 0;
    if (loss > MOST_LOSS && active > 1) {
        int failed = now - changed < FIRST_PAUSE || graphs - changed_graph < FEW_GRAPHS;
        if (!failed) pause_ns = FIRST_PAUSE;
        else if (attempt) pause_ns = pause_ns < LAST_PAUSE ? 2 * pause_ns : LAST_PAUSE;
        active--, attempt = 0, loss = 0, changed = now, changed_graph = graphs;
    } else if (active < crew && now - changed > pause_ns) {
        active++, attempt = 1, loss = 0, changed = now, changed_graph = graphs;
        watched = WATCHED; /* so that one slow graph is enough to end the attempt */
    }
}

/* Forget the other threads, which a forked process does not have. */
static void after_fork(void) {
    signal_count none = NO_SIGNAL;
    meetings = ready = jobs = none;
    crew = active = 1;
    atomic_store(&arrived, 0);
}

/* Start or enlarge the pool to `count` threads; return the number of threads. Do not call this while a graph runs. */
int64_t start_threads(int64_t count) {
    if (count > MAX_THREADS) count = MAX_THREADS;
    if (!counters[0]) {
        counters[0] = calloc(MAX_INSTRUCTIONS, sizeof(counter));
        pthread_atfork(NULL, NULL, after_fork);
    }
    while (counters[0] && crew < count) {
        pthread_t thread;
        if (!counters[crew]) counters[crew] = calloc(MAX_INSTRUCTIONS, sizeof(counter));
        if (!counters[crew] || pthread_create(&thread, NULL, pool_work, (void *)crew)) break;
        pthread_detach(thread);
        wait_beyond(&ready, crew - 1); /* the new thread has read the job number */
        active = ++crew;
    }
    return counters[0] ? crew : 0;
}

/* Set the address of the progress count, which grows with finished items and instructions. Do not call this while a
 * graph runs. */
void report_progress(int64_t *where) { progress = (counter *)where; }

/* Run a graph to its end; return 0, or -1 if the graph is too long. Only one thread at a time may call `run_graph`. */
int64_t run_graph(const instruction *instructions, int64_t count) {
    if (count > MAX_INSTRUCTIONS) return -1;
    if (count < 1) return 0; /* without a meeting, other threads could still read `graph` when the next graph is set */
    if (count == 1 && instructions->run(instructions->arguments, -1) == 1) { /* a single item needs no other threads */
        instructions->run(instructions->arguments, 0);
        count_progress();
        return 0;
    }
    int64_t start = now_ns(), thread_count = active;
    graph = instructions, length = count;
    graphs++;
    atomic_store(&slept, 0);
    atomic_store(&delayed, 0);
    if (watched) start_delay(graphs - 1); /* this thread may have lost its core since the graph before */
    for (int64_t i = 0; i < thread_count; i++) memset((void *)counters[i], 0, count * sizeof(counter));
    if (thread_count > 1) grow(&jobs, JOB + thread_count - atomic_load(&jobs.number) % JOB);
    pool_play(0, thread_count);
    if (crew > 1) adapt(now_ns() - start);
    return 0;
}
