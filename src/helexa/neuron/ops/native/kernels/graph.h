/* A graph is a list of kernel calls that run one after another. Each call consists of items, which the threads divide
 * among themselves. */
#ifndef GRAPH_H
#define GRAPH_H

#include "kernels.h"

#define MAX_THREADS 256

/* A kernel: runs the item `item`; for item -1, returns the number of items for these arguments. */
typedef int64_t kernel(const void *arguments, int64_t item);

/* Begin the definition of the kernel NAME, a function with the arguments `a` and the item number ITEM. */
#define KERNEL(NAME, ITEM) \
    _Static_assert(sizeof(NAME##_arguments) <= ARGUMENT_BYTES, "an instruction has no room for the arguments"); \
    int64_t NAME(const NAME##_arguments *a, int64_t ITEM)

typedef struct {
    kernel *run;
    int64_t waits; /* whether the next instruction waits until this instruction is done */
    uint8_t arguments[ARGUMENT_BYTES] __attribute__((aligned(8)));
} instruction;

int64_t threads(void);

/* Increment the progress count. Only the thread that runs an item may call this function. */
void add_progress(void);

#endif
