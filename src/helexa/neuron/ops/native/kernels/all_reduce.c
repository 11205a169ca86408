/* The exchange of results between the ranks of one host. The ranks share memory: one `rank_state` per rank, then two
 * buffers of EXCHANGE_BYTES. Exchange number n uses buffer n % 2. A rank writes its columns to the buffer, waits until
 * all ranks have written their columns, and reads all columns. Two buffers suffice: a rank writes to the buffer of
 * exchange n again only after all ranks have arrived at exchange n + 1, and have therefore read the buffer. */
#include "graph.h"

#include <stdatomic.h>
#include <stddef.h>
#include <string.h>
#include <time.h>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define RANK_POLLS 20000       /* polls of another rank's state before a thread sleeps */
#define SLEEP_NANOSECONDS 20000000

typedef struct {
    _Atomic uint32_t arrived, sleepers; /* number of exchanges at which the rank has arrived; threads that wait for it */
    volatile int64_t progress;          /* the rank's progress count, see `report_progress` */
    int64_t nanoseconds;                /* time that the rank has spent in `meet_ranks` */
    uint8_t padding[40];
} rank_state;

_Static_assert(sizeof(rank_state) * MAX_RANKS == RANK_STATE_BYTES, "the states fill the start of the shared memory");
_Static_assert(offsetof(rank_state, nanoseconds) == RANK_TIME_OFFSET, "Python reads the time at this offset");

static uint32_t exchanges; /* number of this rank's finished exchanges */

static float *buffer(const uint8_t *shared, uint32_t exchange) {
    return (float *)(shared + RANK_STATE_BYTES + exchange % 2 * EXCHANGE_BYTES);
}

KERNEL(publish, row) {
    if (row < 0) return a->rows;
    memcpy(buffer(a->shared, exchanges) + row * a->stride + a->first, a->x + row * a->width, a->width * sizeof *a->x);
    return 0;
}

KERNEL(collect, row) {
    if (row < 0) return a->rows;
    memcpy(a->out + row * a->stride, buffer(a->shared, exchanges - 1) + row * a->stride, a->stride * sizeof *a->out);
    return 0;
}

static int has_arrived(rank_state *other, uint32_t exchange) {
    return (int32_t)(atomic_load_explicit(&other->arrived, memory_order_acquire) - exchange) > 0;
}

/* Sleep until the rank `other` arrives, but at most SLEEP_NANOSECONDS. */
static void sleep_for(rank_state *other, uint32_t exchange) {
#ifdef __linux__
    struct timespec moment = {0, SLEEP_NANOSECONDS};
    atomic_fetch_add(&other->sleepers, 1);
    uint32_t seen = atomic_load(&other->arrived);
    if ((int32_t)(seen - exchange) <= 0) syscall(SYS_futex, &other->arrived, FUTEX_WAIT, seen, &moment, NULL, 0);
    atomic_fetch_sub(&other->sleepers, 1);
#else
    (void)other, (void)exchange;
#endif
}

static int64_t nanoseconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Return once all ranks have called this function equally often. While this rank waits for another rank, it reports
 * progress whenever the other rank makes progress. */
KERNEL(meet_ranks, item) {
    if (item < 0) return 1;
    rank_state *states = (rank_state *)a->shared, *own = states + a->rank;
    uint32_t exchange = exchanges;
    int64_t begin = nanoseconds_now();
    atomic_store(&own->arrived, exchange + 1);
#ifdef __linux__
    if (atomic_load(&own->sleepers)) syscall(SYS_futex, &own->arrived, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
#endif
    for (int64_t rank = 0; rank < a->ranks; rank++) {
        rank_state *other = states + rank;
        int64_t progress = other->progress;
        for (int64_t poll = 0; !has_arrived(other, exchange); poll++) {
            if (poll < RANK_POLLS) {
#ifdef __x86_64__
                __builtin_ia32_pause();
#elif defined(__aarch64__)
                __asm__ volatile("yield");
#endif
                continue;
            }
            sleep_for(other, exchange);
            if (other->progress != progress) progress = other->progress, add_progress();
        }
    }
    exchanges = exchange + 1;
    own->nanoseconds += nanoseconds_now() - begin;
    return 0;
}

/* Return the address of a rank's progress count in the shared memory. */
int64_t *rank_progress(uint8_t *shared, int64_t rank) { return (int64_t *)&((rank_state *)shared)[rank].progress; }

/* Reset the number of exchanges. Called when the ranks connect, because this process may have been connected before. */
void start_exchanges(void) { exchanges = 0; }
