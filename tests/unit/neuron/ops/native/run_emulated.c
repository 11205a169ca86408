/* Runs a list of kernel calls on copies of memory areas, for tests of kernels that another processor must run.
 *
 * Usage: run_emulated LIBRARY FILE. All numbers in FILE are int64:
 *   number of areas, then per area: size, bytes
 *   number of calls, then per call: name [32], `waits`, arguments [ARGUMENT_BYTES], number of pointers,
 *     then per pointer: offset in the arguments, area, offset in the area
 * The program runs the calls, and replaces FILE by the bytes of all areas. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "graph.h"

static FILE *file;

static void check(int good, const char *action) {
    if (good) return;
    fprintf(stderr, "cannot %s\n", action);
    exit(1);
}

static int64_t number(void) {
    int64_t value;
    check(fread(&value, sizeof value, 1, file) == 1, "read a number");
    return value;
}

int main(int count, char **words) {
    check(count == 3, "run without a library and a file");
    void *library = dlopen(words[1], RTLD_NOW);
    check(library != NULL, "load the library");
    int64_t (*start_threads)(int64_t) = (int64_t (*)(int64_t))dlsym(library, "start_threads");
    int64_t (*run_graph)(const instruction *, int64_t) =
        (int64_t (*)(const instruction *, int64_t))dlsym(library, "run_graph");
    check(start_threads && run_graph, "resolve the functions");
    check((file = fopen(words[2], "rb")) != NULL, "open the file");
    int64_t areas = number();
    uint8_t **memory = calloc(areas + 1, sizeof *memory);
    int64_t *sizes = calloc(areas + 1, sizeof *sizes);
    for (int64_t i = 0; i < areas; i++) {
        sizes[i] = number();
        memory[i] = aligned_alloc(64, (sizes[i] + 127) / 64 * 64);
        check((int64_t)fread(memory[i], 1, sizes[i], file) == sizes[i], "read an area");
    }
    int64_t calls = number();
    instruction *graph = calloc(calls + 1, sizeof *graph);
    for (int64_t i = 0; i < calls; i++) {
        char name[33] = {0};
        check(fread(name, 32, 1, file) == 1, "read a name");
        graph[i].run = (kernel *)dlsym(library, name);
        check(graph[i].run != NULL, name);
        graph[i].waits = number();
        check(fread(graph[i].arguments, ARGUMENT_BYTES, 1, file) == 1, "read arguments");
        for (int64_t pointers = number(); pointers > 0; pointers--) {
            int64_t offset = number(), area = number();
            uint8_t *address = memory[area] + number();
            memcpy(graph[i].arguments + offset, &address, sizeof address);
        }
    }
    fclose(file);
    start_threads(2);
    check(run_graph(graph, calls) == 0, "run the calls");
    check((file = fopen(words[2], "wb")) != NULL, "write the file");
    for (int64_t i = 0; i < areas; i++) fwrite(memory[i], 1, sizes[i], file);
    check(fclose(file) == 0, "write the areas");
    return 0;
}
