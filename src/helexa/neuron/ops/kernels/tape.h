/* A tape is a list of kernel calls that run one after another, each cut into items that all threads share. */
#ifndef TAPE_H
#define TAPE_H

#include <stdint.h>

#define MAX_ARGUMENTS 16
#define MAX_THREADS 256

/* Runs item number `item`; for item -1, returns how many items these arguments make. */
typedef int64_t kernel(const int64_t *arguments, int64_t item);

typedef struct {
    kernel *run;
    int64_t waits; /* whether the next instruction must wait until this one is done */
    int64_t arguments[MAX_ARGUMENTS];
} instruction;

int64_t threads(void);

#endif
