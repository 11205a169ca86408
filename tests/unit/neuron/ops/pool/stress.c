/* Runs many small random graphs on the thread pool beside busy threads, and checks the result of each graph.
 *
 * Arguments: number of graphs, number of threads of the pool, number of busy threads, seed, seconds without a finished
 * graph after which the program fails. The program prints one line with its figures.
 *
 * Kernels of a graph read what earlier instructions wrote, so a thread that starts an instruction too early, or that
 * runs the instructions of another graph, changes the results. Every eighth graph runs on a random number of threads,
 * because a pool on busy cores otherwise uses one thread most of the time. */
#include "pool.h"

#define MOST_INSTRUCTIONS 24
#define MOST_ITEMS 40

static uint64_t values[MOST_INSTRUCTIONS + 1][MOST_ITEMS]; /* row i + 1 has the results of instruction i */
static uint8_t runs[MOST_INSTRUCTIONS][MOST_ITEMS];
static _Atomic int64_t finished, ended;

/* Arguments of `mix`. */
typedef struct {
    int64_t row, items, source, work; /* `source`: the row that the items read */
    uint64_t salt;
} mix_arguments;

static uint64_t random_from(uint64_t *state) {
    *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
    return *state;
}

static uint64_t mixed(const mix_arguments *a, int64_t item) {
    uint64_t value = a->salt + item;
    for (int64_t i = 0; i < 3; i++) value = (value ^ values[a->source][(item * 7 + i * 11) % MOST_ITEMS]) * 0x9e3779b97f4a7c15;
    return value;
}

static int64_t mix(const void *arguments, int64_t item) {
    const mix_arguments *a = arguments;
    if (item < 0) return a->items;
    for (int64_t i = 0; i < a->work; i++) __asm__ volatile("");
    if (a->work < 0) wait_ns(-a->work);
    values[a->row][item] = mixed(a, item);
    runs[a->row - 1][item]++;
    return 0;
}

/* Make a random graph; return its number of instructions. */
static int64_t make(instruction *graph, uint64_t *state) {
    int64_t count = 1 + random_from(state) % MOST_INSTRUCTIONS, complete = 0; /* rows up to `complete` are readable */
    if (random_from(state) % 4 == 0) count = 1 + count % 3;
    for (int64_t i = 0; i < count; i++) {
        uint64_t kind = random_from(state) % 4096;
        mix_arguments a = {
            .row = i + 1,
            .items = random_from(state) % (kind % 3 == 0 ? 3 : MOST_ITEMS + 1),
            .source = complete,
            .work = kind < 8 ? -(int64_t)(random_from(state) % 200000) : kind < 512 ? (int64_t)(random_from(state) % 2000) : 0,
            .salt = random_from(state),
        };
        graph[i].run = mix;
        graph[i].waits = random_from(state) % 4 > 0;
        if (graph[i].waits) complete = i + 1;
        memcpy(graph[i].arguments, &a, sizeof a);
    }
    return count;
}

static int is_right(const instruction *graph, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const mix_arguments *a = (const mix_arguments *)graph[i].arguments;
        for (int64_t item = 0; item < a->items; item++)
            if (runs[i][item] != 1 || values[a->row][item] != mixed(a, item)) return 0;
    }
    return 1;
}

/* Use a core. Half of the time, yield it often, so that threads of the pool change places with busy threads more often
 * than the scheduler's time slices let them. */
static void *be_busy(void *seed) {
    uint64_t state = (uint64_t)seed * 2654435761 + 1;
    while (!atomic_load_explicit(&ended, memory_order_relaxed)) {
        for (uint64_t i = random_from(&state) % 100000; i > 0; i--) __asm__ volatile("");
        if (now_ns() / 500000000 % 2) sched_yield();
    }
    return NULL;
}

/* Abort the program, with a core file and the stacks in a debugger, if no graph ends for `seconds`. */
static void *watch(void *seconds) {
    int64_t last = -1, silent = 0;
    while (!atomic_load(&ended)) {
        wait_ns(100000000);
        int64_t now = atomic_load(&finished);
        silent = now == last ? silent + 1 : 0;
        last = now;
        if (silent > 10 * (int64_t)seconds) {
            fprintf(stderr, "hang: graph %ld did not end for %ld s on %ld threads\n", (long)now, (long)seconds, (long)active);
            abort();
        }
    }
    return NULL;
}

int main(int argument_count, char **arguments) {
    if (argument_count != 6) return 2;
    int64_t graphs_to_run = atoll(arguments[1]), threads = atoll(arguments[2]), busy = atoll(arguments[3]);
    uint64_t seed = strtoull(arguments[4], NULL, 10), state = seed * 0x9e3779b97f4a7c15 + 1;
    int64_t by_threads[MAX_THREADS + 1] = {0}, changes = 0;
    pthread_t watcher, busy_threads[busy + 1];
    static instruction graph[MOST_INSTRUCTIONS];
    CHECK(start_threads(threads) == threads);
    CHECK(pthread_create(&watcher, NULL, watch, (void *)atoll(arguments[5])) == 0);
    for (int64_t i = 0; i < busy; i++) CHECK(pthread_create(&busy_threads[i], NULL, be_busy, (void *)(seed + i)) == 0);
    int64_t start = now_ns();
    for (int64_t number = 0; number < graphs_to_run; number++) {
        int64_t length_of_graph = make(graph, &state), chosen = active;
        if (number % 8 == 0) active = 1 + random_from(&state) % threads;
        by_threads[active]++;
        memset(runs, 0, sizeof runs[0] * length_of_graph);
        CHECK(run_graph(graph, length_of_graph) == 0);
        CHECK(is_right(graph, length_of_graph));
        CHECK(active >= 1 && active <= threads);
        changes += number % 8 && active != chosen;
        if (number % 8 == 0) active = chosen;
        atomic_store(&finished, number + 1);
    }
    double seconds = (now_ns() - start) / 1e9;
    atomic_store(&ended, 1);
    CHECK(pthread_join(watcher, NULL) == 0);
    for (int64_t i = 0; i < busy; i++) CHECK(pthread_join(busy_threads[i], NULL) == 0);
    printf("%ld graphs in %.1f s, seed %lu, %ld busy threads, %ld changes of the number of threads, graphs by threads:",
           (long)graphs_to_run, seconds, (unsigned long)seed, (long)busy, (long)changes);
    for (int64_t i = 1; i <= threads; i++) printf(" %ld", (long)by_threads[i]);
    printf("\n");
    return 0;
}
