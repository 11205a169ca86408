/* Compares the functions of slices with plain C, for random numbers. The program prints the name of the first function
 * whose results differ. The instructions depend on the processor for which the program is compiled. */
#include <stdio.h>
#include <stdlib.h>

#include "slices.h"

#define ROUNDS 200
#define QUAD_COUNT 8

static int failed;

static void check(int good, const char *name) {
    if (!good && !failed++) printf("%s\n", name);
}

static void fill_random(void *to, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i++) ((uint8_t *)to)[i] = (uint8_t)(rand() >> 7);
}

static float random_number(void) { return (float)(rand() % 20001 - 10000) / 1000; }

/* Return number `i` of quad `q` of the quads of one row. */
static int number_of(const quad *quads, int q, int i) {
#if defined(VNNI)
    return ((const int8_t *)(quads + q))[i];
#else
    static const int order[] = {0, 2, 1, 3};
    return ((const int16_t *)(quads + q))[order[i]];
#endif
}

static int64_t product(const uint8_t *codes, const quad *quads, int q) {
    int64_t total = 0;
    for (int i = 0; i < 4; i++) total += (SIGNED_CODES ? (int8_t)codes[i] : codes[i]) * number_of(quads, q, i);
    return total;
}

static void check_dots(void) {
    uint8_t codes[2][4 * SLICE];
    quad quads[2][QUAD_COUNT];
    slice_bits loaded[2];
    fill_random(codes, sizeof codes), fill_random(quads, sizeof quads);
    if (rand() % 4 == 0) memset(codes, rand() % 2 ? 0x80 : 0xff, sizeof codes), memset(quads, 0x80, sizeof quads);
    for (int i = 0; i < 2; i++) loaded[i] = slice_load(codes[i]);
    for (int q = 0; q < QUAD_COUNT; q++) {
        slice_words dots = dot4((slice_words){0} + 5, loaded[0], quads[0], q);
        for (int l = 0; l < SLICE; l++) check(dots[l] == (int32_t)(5 + product(codes[0] + 4 * l, quads[0], q)), "dot4");
    }
#if MATRIX_PRODUCTS
    for (int q = 0; q < QUAD_COUNT; q += 2) {
        slice_bits pairs[2], both = load_quads(quads[0] + q, quads[1] + q);
        slice_words sums[2];
        join_quads(loaded[0], loaded[1], pairs);
        for (int i = 0; i < 2; i++) sums[i] = dot8((slice_words){0} + 5, pairs[i], both);
        part_rows(sums, sums + 1);
        for (int row = 0; row < 2; row++)
            for (int l = 0; l < SLICE; l++) {
                int64_t first = product(codes[0] + 4 * l, quads[row], q);
                check(sums[row][l] == 5 + first + product(codes[1] + 4 * l, quads[row], q + 1), "dot8");
            }
    }
#endif
}

static void check_loads(void) {
    uint8_t bytes[4 * SLICE], table[16], places[4 * SLICE];
    fill_random(bytes, sizeof bytes), fill_random(table, sizeof table);
    for (int i = 0; i < 4 * SLICE; i++) places[i] = (uint8_t)(bytes[i] & 15);
    slice_bits found = look_up(load_table(table), slice_load(places));
    for (int i = 0; i < 4 * SLICE; i++) check(((uint8_t *)&found)[i] == table[places[i]], "look_up");
    slice positive = slice_of_unsigned(bytes), number = slice_of_signed(bytes), half = slice_of_halves(bytes);
    slice_bits wide = (slice_bits)slice_of_bfloats(bytes);
    for (int l = 0; l < SLICE; l++) {
        uint16_t bits;
        memcpy(&bits, bytes + 2 * l, sizeof bits);
        int exponent = bits >> 10 & 31, fraction = bits & 1023;
        float size = exponent ? ldexpf((float)(1024 + fraction), exponent - 25) : ldexpf((float)fraction, -24);
        check(positive[l] == bytes[l], "slice_of_unsigned");
        check(number[l] == (int8_t)bytes[l], "slice_of_signed");
        check(wide[l] == (uint32_t)bits << 16, "slice_of_bfloats");
        check(exponent == 31 || half[l] == (bits >> 15 ? -size : size), "slice_of_halves");
    }
}

static void check_functions(void) {
    float a[LANES], b[LANES];
    uint16_t top[LANES];
    for (int i = 0; i < LANES; i++) a[i] = random_number(), b[i] = random_number();
    lanes most = larger(load(a), load(b)), power = power_of_two(load(a)), share = sigmoid(load(a));
    lanes total = fused(load(a), load(b), all(0.5f));
    float size = 0;
    store_rounded(top, load(a));
    for (int i = 0; i < LANES; i++) {
        uint32_t bits;
        memcpy(&bits, a + i, sizeof bits);
        size = fmaxf(size, fmaxf(fabsf(a[i]), fabsf(b[i])));
        check(most[i] == (a[i] > b[i] ? a[i] : b[i]), "larger");
        check(fabsf(power[i] - exp2f(a[i])) <= 1e-6f * exp2f(a[i]), "power_of_two");
        check(fabsf(share[i] - 1 / (1 + expf(-a[i]))) <= 1e-6f, "sigmoid");
        check(fabsf(total[i] - (a[i] * b[i] + 0.5f)) <= 1e-4f, "fused");
        check(top[i] == (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16), "store_rounded");
    }
    check(largest_size(load(a), load(b)) == size, "largest_size");
    for (int l = 0; l < SLICE; l++) a[l] = (float)(rand() % 256 - 128), b[l] = (float)(rand() % 256 - 128);
    slice_bits pairs;
    for (int l = 0; l < SLICE; l++) {
        uint32_t low, high;
        memcpy(&low, a + l, sizeof low), memcpy(&high, b + l, sizeof high);
        pairs[l] = low >> 16 | (high & 0xffff0000u);
    }
    slice dots = slice_dot2(fill(3.0f), pairs, 0x40403f80); /* the numbers 1 and 3 */
    for (int l = 0; l < SLICE; l++) check(dots[l] == 3.0f + a[l] + 3 * b[l], "slice_dot2");
}

int main(void) {
    for (int i = 0; i < ROUNDS; i++) check_dots(), check_loads(), check_functions();
    return failed != 0;
}
