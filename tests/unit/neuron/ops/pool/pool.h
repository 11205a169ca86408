/* Shared by the programs that test the thread pool by itself. Programs include the pool's source, so that they
 * can read and set its figures. */
#include "thread_pool.c"

#include <sched.h>
#include <stdio.h>

#define CHECK(CONDITION) \
    do { \
        if (!(CONDITION)) { \
            fprintf(stderr, "line %d: %s is false\n", __LINE__, #CONDITION); \
            exit(1); \
        } \
    } while (0)

static void wait_ns(int64_t ns) {
    struct timespec moment = {ns / 1000000000, ns % 1000000000};
    nanosleep(&moment, NULL);
}
