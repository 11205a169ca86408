/* Row operations of latent attention (MLA). The kernels for mixtures of experts multiply each head by its own matrix.
 * They require that the rows of a head are adjacent. */
#include "graph.h"
#include "lanes.h"

KERNEL(split_heads, item) {
    int64_t rows = a->rows, heads = a->heads, count = a->count;
    if (item < 0) return rows > 0 ? rows : 1; /* without rows, the products still read `starts` */
    for (int64_t head = 0; head <= heads && item == 0; head++) a->starts[head] = head * rows;
    if (rows == 0) return 0;
    for (int64_t head = 0; head < heads; head++)
        memcpy(a->out + (head * rows + item) * count, a->x + (item * heads + head) * a->width + a->first,
               count * sizeof *a->out);
    return 0;
}

KERNEL(join_heads, item) {
    int64_t rows = a->rows, heads = a->heads, width = a->width;
    if (item < 0) return rows;
    for (int64_t head = 0; head < heads; head++)
        memcpy(a->out + (item * heads + head) * width, a->x + (head * rows + item) * width, width * sizeof *a->out);
    return 0;
}

static void copy_rotated(const join_latent_arguments *a, const float *from, float *to) {
    int64_t half = a->rotated / 2, step = a->interleaved ? 2 : 1, other = a->interleaved ? 1 : half;
    for (int64_t i = 0; i < half; i++) to[i] = from[step * i], to[half + i] = from[step * i + other];
}

KERNEL(join_latent, item) {
    int64_t heads = a->heads, rank = a->rank, rotated = a->rotated, dim = rank + rotated;
    if (item < 0) return a->rows;
    float *out = a->out + item * (heads + 1) * dim;
    for (int64_t head = 0; head < heads; head++, out += dim) {
        copy_rotated(a, a->queries + (item * heads + head + 1) * a->width - rotated, out);
        memcpy(out + rotated, a->absorbed + (item * heads + head) * rank, rank * sizeof *out);
    }
    const float *latent = a->latent + item * dim;
    lanes squares = {0};
    for (int64_t i = 0; i < rank; i += LANES) squares = fused(load(latent + i), load(latent + i), squares);
    lanes scale = all(1.0f / sqrtf(sum(squares) / (float)rank + a->eps));
    copy_rotated(a, latent + rank, out);
    for (int64_t i = 0; i < rank; i += LANES)
        store(out + rotated + i, load(latent + i) * scale * load(a->norm + i));
    return 0;
}
