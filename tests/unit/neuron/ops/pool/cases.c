/* Single cases of the thread pool. The argument of the program is the name of a case. */
#include "pool.h"

#include <sys/wait.h>

/* Arguments of a test kernel. */
typedef struct {
    int64_t (*call)(int64_t item); /* called with each item */
    int64_t items;
} call_arguments;

static int64_t call(const void *arguments, int64_t item) {
    const call_arguments *a = arguments;
    return item < 0 ? a->items : a->call(item);
}

static instruction instruction_of(int64_t (*function)(int64_t), int64_t items) {
    instruction result = {.run = call, .waits = 1};
    call_arguments arguments = {function, items};
    memcpy(result.arguments, &arguments, sizeof arguments);
    return result;
}

static _Atomic int64_t ran, phase;

/* Keep the pool from trying one thread more for an hour. */
static void keep_threads(void) { changed = now_ns() + INT64_C(3600000000000); }

static int64_t count(int64_t item) { return (void)item, atomic_fetch_add(&ran, 1), 0; }

static void run_counted(void) {
    instruction graph = instruction_of(count, 8);
    atomic_store(&ran, 0);
    CHECK(run_graph(&graph, 1) == 0);
    CHECK(atomic_load(&ran) == 8);
}

/* A graph of one thread starts while times of a graph of two threads are still counted. */
static void foreign_times(void) {
    CHECK(start_threads(2) == 2);
    active = 1, loss = 0;
    keep_threads();
    atomic_fetch_add(&slept, INT64_C(60000000));
    atomic_fetch_add(&delayed, INT64_C(60000000));
    run_counted();
    CHECK(active == 1);
    run_counted();
}

/* Item 1 of a graph of two threads ends when the other thread has slept for 50 ms. */
static int64_t long_item(int64_t item) {
    while (item == 1) {
        int64_t since = atomic_load(&asleep_since[0]) + atomic_load(&asleep_since[1]);
        if (since && now_ns() - since > 50000000) return 0;
        wait_ns(1000000);
    }
    return 0;
}

/* The sleep of a thread that wakes up late counts for its own graph, and not for the next one. */
static void late_sleeper(void) {
    CHECK(start_threads(2) == 2);
    instruction graph = instruction_of(long_item, 2);
    CHECK(run_graph(&graph, 1) == 0);
    CHECK(atomic_load(&slept) > 30000000);
    active = 1;
    run_counted();
    CHECK(atomic_load(&slept) == 0);
}

static int64_t both_wait(int64_t item) { /* each of two threads runs one item, and both items end together */
    (void)item;
    atomic_fetch_add(&phase, 1);
    while (atomic_load(&phase) % 2) sched_yield();
    return 0;
}

/* A delay from before the graph, for example of Python code between steps, does not count for the graph. */
static void foreign_delay(void) {
    CHECK(start_threads(2) == 2);
    instruction graph = instruction_of(long_item, 2);
    CHECK(run_graph(&graph, 1) == 0); /* starts to watch delays */
    core_wait -= 1000000000;          /* this thread had no core for a second since */
    instruction paired = instruction_of(both_wait, 2);
    CHECK(run_graph(&paired, 1) == 0);
    CHECK(atomic_load(&delayed) < 900000000);
}

/* Like `long_item`, by a thread that has no core during the item and while the other thread sleeps. */
static int64_t item_without_core(int64_t item) {
    if (item == 1) atomic_fetch_add(&delayed, INT64_C(1000000000000));
    return long_item(item);
}

/* If a thread waits for the other thread, which waits for a core, the next graphs run on one thread. */
static void lost_core(void) {
    CHECK(start_threads(2) == 2);
    instruction graph = instruction_of(item_without_core, 2);
    for (int64_t i = 0; i < 50 && active == 2; i++) { /* other programs may delay both threads */
        keep_threads();
        CHECK(run_graph(&graph, 1) == 0);
    }
    CHECK(active == 1);
    keep_threads();
    run_counted();
    CHECK(active == 1);
    changed = now_ns() - 2 * LAST_PAUSE; /* after the pause, the pool tries two threads again */
    run_counted();
    CHECK(active == 2);
    run_counted();
}

/* Graphs whose threads sleep and have no core lower the number of threads to one, and not further. */
static void least_threads(void) {
    CHECK(start_threads(4) == 4);
    for (int64_t i = 0; i < 20; i++) {
        keep_threads();
        atomic_store(&slept, INT64_C(1000000000000));
        atomic_store(&delayed, INT64_C(1000000000000));
        adapt(1);
        CHECK(active >= 1 && active <= crew);
    }
    CHECK(active == 1);
    run_counted();
    for (int64_t i = 0; i < 20; i++) {
        changed = -LAST_PAUSE * 3;
        atomic_store(&slept, 0);
        atomic_store(&delayed, 0);
        adapt(1);
        CHECK(active >= 1 && active <= crew);
    }
    CHECK(active == 4);
    run_counted();
}

/* Pretend that the pool ran `count` graphs of two threads in 200 ms each, in which both threads had no core. */
static void run_slowly(int64_t count) {
    for (int64_t i = 0; i < count && active == 2; i++) {
        graphs++, changed -= 200000000;
        atomic_store(&slept, INT64_C(190000000));
        atomic_store(&delayed, INT64_C(190000000));
        adapt(200000000);
    }
}

/* If graphs are slower than the pause, the pool tries two threads less and less often all the same. */
static void slow_attempts(void) {
    CHECK(start_threads(2) == 2);
    graphs = 100, changed_graph = 0, changed = now_ns() - LAST_PAUSE;
    run_slowly(3);
    CHECK(active == 1 && pause_ns == FIRST_PAUSE); /* two threads were good for 100 graphs */
    for (int64_t expected = 2 * FIRST_PAUSE; expected <= LAST_PAUSE; expected *= 2) {
        changed -= pause_ns;
        atomic_store(&slept, 0);
        atomic_store(&delayed, 0);
        adapt(1);
        CHECK(active == 2 && watched == WATCHED);
        run_slowly(3);
        CHECK(active == 1 && pause_ns == expected);
    }
    run_counted();
}

/* Reductions in a row are no failed attempts: the pause stays short. */
static void reductions_in_a_row(void) {
    CHECK(start_threads(8) == 8);
    for (int64_t i = 0; i < 4; i++) {
        graphs++, changed = now_ns() - INT64_C(400000000);
        atomic_store(&slept, INT64_C(7) * 390000000);
        atomic_store(&delayed, INT64_C(390000000));
        adapt(400000000);
    }
    CHECK(active == 4 && pause_ns == FIRST_PAUSE);
    run_counted();
}

/* Graphs without instructions end at once, and the other threads do not run the next graph twice. */
static void empty_graphs(void) {
    CHECK(start_threads(4) == 4);
    for (int64_t i = 0; i < 2000; i++) {
        CHECK(run_graph(NULL, 0) == 0);
        active = 4;
        run_counted();
    }
    instruction none = instruction_of(count, 0);
    CHECK(run_graph(&none, 1) == 0);
}

/* A forked process, which lacks the threads of its parent, runs graphs and can start threads again. */
static void forked(void) {
    CHECK(start_threads(4) == 4);
    run_counted();
    pid_t child = fork();
    if (child == 0) {
        run_counted();
        CHECK(start_threads(3) == 3);
        run_counted();
        exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    run_counted();
}

/* Threads that are started between graphs take part in the next graphs. */
static void more_threads(void) {
    for (int64_t threads = 1; threads <= 16; threads++) {
        CHECK(start_threads(threads) == threads && active == threads);
        run_counted();
    }
}

int main(int argument_count, char **arguments) {
    const struct {
        const char *name;
        void (*run)(void);
    } cases[] = {
        {"foreign_times", foreign_times}, {"late_sleeper", late_sleeper}, {"foreign_delay", foreign_delay},
        {"lost_core", lost_core}, {"least_threads", least_threads}, {"empty_graphs", empty_graphs}, {"forked", forked},
        {"more_threads", more_threads}, {"slow_attempts", slow_attempts},
        {"reductions_in_a_row", reductions_in_a_row},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (argument_count == 2 && !strcmp(arguments[1], cases[i].name)) return cases[i].run(), 0;
    return 2;
}
