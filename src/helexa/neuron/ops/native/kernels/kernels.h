/* Constants, structs and kernel arguments shared by C and Python. `kernel_header.py` parses this file. The parser
 * accepts only `#define`s of integers and structs of numbers and pointers. The kernel NAME takes a struct
 * NAME_arguments. Comments after pointers give the shapes of arrays. */
#ifndef KERNELS_H
#define KERNELS_H

#include <stdint.h>

#define nullable /* the pointer may be null */
typedef uint16_t bfloat16;

#define LANES 16               /* numbers in a vector; rows of a weight tile */
#define PAGE_SIZE 64           /* positions per page of the KV cache */
#define SEGMENT_POSITIONS 512  /* positions per partial result of attention */
#define SPLIT_ROWS 8           /* maximum sequences in a batch whose decode rows are split into segments */
#define MAX_DIM 256            /* largest head size */
#define MAX_QUERIES 32         /* maximum queries of an attention tile: rows times query heads per KV head */
#define GROUP 32               /* columns per group of a quantized matrix */
#define STRETCH_GROUPS 8       /* groups of a stretch: they share a unit, in formats with two scale levels */
#define BLOCK_BYTES 84         /* bytes of a block: GROUP rounded activations */
#define SPARE_BLOCKS 8         /* allocated blocks after the last block, which `multiply` may read but ignores */
#define MAX_EXPERTS 4096       /* maximum number of experts of a mixture */
#define MAX_INSTRUCTIONS 16384 /* maximum number of instructions of a graph */
#define ARGUMENT_BYTES 128     /* bytes for the arguments of one instruction */
#define MAX_RANKS 64           /* maximum number of ranks of a model */
#define RANK_STATE_BYTES 4096  /* bytes of the states of all ranks, at the start of the memory that ranks share */
#define RANK_TIME_OFFSET 16    /* offset in a rank's state of the time that the rank has spent in exchanges, int64 */
#define EXCHANGE_BYTES 4194304 /* bytes of each of the two exchange buffers after the states */
#define MIXED 0                /* bits of rounded activations: 8, and 16 for outliers */
#define NON_FINITE -1          /* token id of a row whose largest logit is NaN or infinite */

/* Types of plain weights and of scale units. */
#define FLOAT16 0
#define BFLOAT16 1
#define FLOAT32 2

/* Activations. SILU and GELU_TANH are also gates; 0 means no gate. */
#define SILU 1
#define GELU_TANH 2
#define GELU 3

/* A format of quantized matrices: bits per code; levels of scales (2 if scales are codes times a unit); whether groups
 * have minimums; code of the value 0; columns per scale; whether a table maps each 4-bit code to a value from 0 to 255
 * (the value 128 then represents 0); type of the scale units. */
typedef struct {
    int bits, levels, minimum, zero, group, table, unit;
} format;
#define FORMAT_COUNT 13

/* A tile of attention: queries of consecutive rows of one sequence. */
typedef struct {
    int64_t row, rows, position; /* first row, number of rows, position of the first row */
    int64_t pages;               /* index of the sequence's first page number in `page_numbers` */
    int64_t first_segment, segments; /* first segment and number of segments to attend to */
    int64_t partial;             /* index of the first partial result to write; -1: write the final output */
    int64_t seen;                /* number of positions that every row sees; 0: a row sees the positions up to its own */
} tile;

/* A row whose segments are computed as partial results, which `combine` merges. */
typedef struct {
    int64_t row, partial, segments; /* row in the batch, index of the first partial result, number of segments */
} split;

/* The rows of one sequence in a batch. */
typedef struct {
    int64_t row, rows, settled; /* first row, number of rows, number of rows with accepted tokens */
    int64_t slot;               /* index of the sequence's recurrent state */
    int64_t initial;            /* whether the sequence starts here, with a state of zeros */
} span;

/* RMS norm: x += delta; out = x / rms(x) * weight. */
typedef struct {
    float *x;                    /* [rows, width] */
    const float *nullable delta; /* [rows, width] */
    const float *weight;         /* [width] */
    float *out;                  /* [rows, width] */
    int64_t rows, width;
    float eps;
} add_rms_norm_arguments;

/* Layer norm: x += delta; out = (x - mean(x)) / deviation(x) * weight + bias. */
typedef struct {
    float *x;                    /* [rows, width] */
    const float *nullable delta; /* [rows, width] */
    const float *weight, *bias;  /* [width] */
    float *out;                  /* [rows, width] */
    int64_t rows, width;
    float eps;
} add_layer_norm_arguments;

/* x = activation(x). */
typedef struct {
    float *x; /* [rows, width] */
    int64_t rows, width, activation;
} activate_arguments;

/* Gated activation: out = gate(first half of x) * second half of x. */
typedef struct {
    const float *x; /* [rows, 2 * width] */
    float *out;     /* [rows, width] */
    int64_t rows, width, gate;
} gate_mul_arguments;

/* out = the rows of x with the indexes `chosen`. */
typedef struct {
    const float *x;        /* [.., width] */
    const int32_t *chosen; /* [rows] */
    float *out;            /* [rows, width] */
    int64_t rows, width;
} choose_rows_arguments;

typedef struct {
    const float *x; /* [rows, width] */
    int64_t *out;   /* [rows], column of each row's first maximum, or NON_FINITE */
    int64_t rows, width;
} argmax_arguments;

/* Compute the cosines and sines of RoPE, times `factor`, for the angles position * frequency. */
typedef struct {
    const int32_t *positions; /* [rows] */
    const float *frequencies; /* [half] */
    float *cosines, *sines;   /* [rows, half] */
    int64_t rows, half;
    float factor;
} rope_tables_arguments;

/* Normalize queries and keys, apply RoPE, and store keys and values at `slots` of the cache. The cache contains, for
 * each page and KV head:
 *   bfloat16: keys [dim / 2, PAGE_SIZE, 2], values [PAGE_SIZE / 2, dim, 2]
 *   8 bits: the same layout in bytes, then key scales float32 [PAGE_SIZE], value scales float32 [PAGE_SIZE] */
typedef struct {
    const float *qkv;             /* [rows, heads + 2 * kv_heads, dim] */
    const float *cosines, *sines; /* [rows, half] */
    bfloat16 *queries;            /* [rows, heads, dim] */
    uint8_t *cache;
    const int32_t *slots;         /* [rows] */
    const float *nullable query_norm, *nullable key_norm; /* [dim] */
    int64_t rows, heads, kv_heads, dim, half;
    int64_t narrow;               /* whether the cache has 8 bits */
    float eps;
} rotate_store_arguments;

/* Compute attention for all tiles, as outputs or as partial results. */
typedef struct {
    const bfloat16 *queries;     /* [rows, heads, dim] */
    const uint8_t *cache;        /* as `rotate_store` writes it */
    const int64_t *tile_count;   /* [1] */
    const tile *tiles;           /* [tile_count] */
    const int64_t *page_numbers; /* page numbers of all sequences, one sequence after another */
    float *partials;             /* [.., heads, 2 + dim]: peak and total of the softmax, sums of values */
    float *out;                  /* [rows, heads, dim] */
    const float *nullable sinks; /* [heads] */
    int64_t heads, kv_heads, dim;
    int64_t narrow;              /* whether the cache has 8 bits */
    int64_t window;              /* positions that a query attends to, including its own position */
    float scale;
} attend_arguments;

/* Merge the partial results of `attend`. */
typedef struct {
    const int64_t *split_count;  /* [1] */
    const split *splits;         /* [split_count] */
    const float *partials;       /* [.., heads, 2 + dim] */
    float *out;                  /* [rows, heads, dim] */
    const float *nullable sinks; /* [heads] */
    int64_t heads, dim;
} combine_arguments;

/* out = rows `tokens - first` of a packed matrix of the format `number` with `outputs` rows, times `factor`. Tokens
 * outside these rows get zeros. */
typedef struct {
    const int32_t *tokens; /* [count] */
    const uint8_t *matrix;
    float *out;            /* [count, columns] */
    int64_t count, columns, number, first, outputs;
    float factor;
} embed_arguments;

/* `embed` for a bfloat16 matrix. */
typedef struct {
    const int32_t *tokens; /* [count] */
    const uint8_t *matrix;
    float *out;            /* [count, columns] */
    int64_t count, columns, first, outputs;
    float factor;
} embed_plain_arguments;

/* Copy this rank's columns, from `first` on, to the memory that the ranks share (see ranks.c). */
typedef struct {
    const float *x;  /* [rows, width] */
    uint8_t *shared;
    int64_t rows, width, first, stride; /* `stride` is the number of columns of all ranks */
} publish_arguments;

/* Wait until all ranks have published their columns. */
typedef struct {
    uint8_t *shared;
    int64_t rank, ranks;
} meet_ranks_arguments;

/* Copy the columns of all ranks from the shared memory. */
typedef struct {
    const uint8_t *shared;
    float *out; /* [rows, stride] */
    int64_t rows, stride;
} collect_arguments;

/* Round x to blocks of integers with `x_bits` bits (16, 8 or MIXED), which `multiply` reads. With a gate, round
 * gate(first half of x) * second half of x. */
typedef struct {
    const float *x; /* [rows, columns], or [rows, 2 * columns] with a gate */
    uint8_t *out;
    int64_t rows, columns, gate, x_bits;
} quantise_arguments;

/* out = x times the transposed matrix of the format `number`, plus the bias. */
typedef struct {
    const uint8_t *x;           /* blocks of [rows, columns], from `quantise` */
    const uint8_t *matrix;
    float *out;                 /* [rows, stride] */
    const float *nullable bias; /* [outputs] */
    int64_t rows, columns, outputs, stride, number;
} multiply_arguments;

/* Round x to bfloat16. */
typedef struct {
    const float *x; /* [rows, columns] */
    bfloat16 *out;  /* [rows, columns] */
    int64_t rows, columns;
} narrow_arguments;

/* `multiply` for a bfloat16 matrix. */
typedef struct {
    const bfloat16 *x;          /* [rows, columns] */
    const uint8_t *matrix;
    float *out;                 /* [rows, stride] */
    const float *nullable bias; /* [outputs] */
    int64_t rows, columns, outputs, stride;
} multiply_plain_arguments;

/* Choose experts for each row. A pair is an expert and a row that uses the expert. Pairs are sorted by expert, then by
 * row. */
typedef struct {
    const float *scores; /* [rows, experts] */
    int32_t *pairs;      /* [rows * chosen], the row of each pair */
    int64_t *starts;     /* [experts + 1], index of each expert's first pair */
    int64_t *places;     /* [rows, chosen], indexes of each row's pairs */
    float *weights;      /* [rows, chosen], softmax over the chosen experts if `normalised`, else over all experts */
    int64_t rows, experts, chosen, normalised;
} route_arguments;

/* `quantise` for the pairs of each expert. */
typedef struct {
    const int64_t *starts; /* [experts + 1] */
    const float *x;        /* [pairs, columns], or [pairs, 2 * columns] with a gate */
    uint8_t *out;
    int64_t experts, columns, gate, x_bits;
} quantise_experts_arguments;

/* `multiply` for the pairs of each expert, or `multiply_plain` if the format number is -1. */
typedef struct {
    const int64_t *starts;      /* [experts + 1] */
    const void *x;              /* blocks from `quantise_experts`, or bfloat16 [pairs, columns] */
    const int64_t *matrices;    /* [experts], addresses of packed matrices */
    float *out;                 /* [pairs, stride] */
    const float *nullable bias; /* [experts, stride] */
    int64_t experts, columns, outputs, stride, number;
} multiply_experts_arguments;

/* Change gate and up in place: first limit gate to at most `limit`, and up to the range from -limit to limit. Then
 * change both, so that silu(gate) * up equals gate * sigmoid(alpha * gate) * (up + 1) of the limited values. */
typedef struct {
    float *gate_up; /* [rows, 2 * width], gate then up */
    int64_t rows, width;
    float alpha, limit;
} clamp_gate_up_arguments;

/* out = for each row, the weighted sum of the results of its pairs. */
typedef struct {
    const float *x;        /* [pairs, width] */
    const int64_t *places; /* [rows, chosen] */
    const float *weights;  /* [rows, chosen] */
    float *out;            /* [rows, width] */
    int64_t rows, chosen, width;
} sum_pairs_arguments;

/* out += x * sigmoid(gate). */
typedef struct {
    float *out;        /* [rows, width] */
    const float *x;    /* [rows, width] */
    const float *gate; /* [rows] */
    int64_t rows, width;
} add_gated_arguments;

/* Apply a causal convolution over `taps` tokens to each column, and then SiLU. Update the state of each sequence, which
 * is its last taps - 1 inputs. */
typedef struct {
    const float *x;            /* [rows, stride], of which the first `width` columns are the inputs */
    const float *weights;      /* [taps, width] */
    float *state;              /* [slots, taps - 1, width] */
    const int64_t *span_count; /* [1] */
    const span *spans;         /* [span_count] */
    float *out;                /* [rows, width] */
    int64_t width, stride, taps;
} convolve_arguments;

/* Compute the factors of the gated delta rule for each row: the decay exp(-rate * softplus(decay + bias)) and
 * sigmoid(beta) of each value head, the factors that scale queries to the length 1 / sqrt(key_dim), and the factors
 * that scale keys to the length 1. */
typedef struct {
    const float *qkv;          /* [rows, width]: queries and keys [key_heads, key_dim], values */
    const float *decay, *beta; /* [rows, stride], of which the first `heads` columns are the inputs */
    const float *rate, *bias;  /* [heads] */
    float *factors;            /* [rows, 2 * heads + 2 * key_heads] */
    int64_t rows, width, stride, heads, key_heads, key_dim;
} delta_factors_arguments;

/* Apply the gated delta rule to each sequence, and update its state. */
typedef struct {
    const float *qkv;          /* [rows, (2 * key_heads * key_dim + heads * value_dim)]: queries, keys, values */
    const float *factors;      /* from `delta_factors` */
    float *state;              /* [slots, heads, key_dim, value_dim] */
    const int64_t *span_count; /* [1] */
    const span *spans;         /* [span_count] */
    float *out;                /* [rows, heads, value_dim] */
    int64_t heads, key_heads, key_dim, value_dim;
} delta_rule_arguments;

/* out = x / rms(x) * weight * silu(z) for each head of the rows `chosen`, or of all rows. */
typedef struct {
    const float *x;                 /* [.., heads, dim] */
    const float *z;                 /* [.., stride], of which the first heads * dim columns are the inputs */
    const float *weight;            /* [dim] */
    const int32_t *nullable chosen; /* [rows] */
    float *out;                     /* [rows, heads, dim] */
    int64_t rows, heads, dim, stride;
    float eps;
} gated_norm_arguments;

/* Copy the query of each head, which its gate follows, and the keys and values of a row to adjacent heads. */
typedef struct {
    const float *gated; /* [rows, heads, 2, dim] */
    const float *kv;    /* [rows, 2 * kv_heads, dim] */
    float *qkv;         /* [rows, heads + 2 * kv_heads, dim] */
    int64_t rows, heads, kv_heads, dim;
} join_queries_arguments;

/* x *= sigmoid(gate) for the gate of each head. */
typedef struct {
    float *x;           /* [rows, heads, dim] */
    const float *gated; /* [rows, heads, 2, dim] */
    int64_t rows, heads, dim;
} gate_heads_arguments;

/* Pack a quantized matrix into tiles. The rows of the last tile after row `outputs` become zero. */
typedef struct {
    const uint8_t *codes;              /* [outputs, columns] */
    const void *unit;                  /* [outputs, units] of the format's unit type */
    const void *nullable scale;        /* 8-bit codes [outputs, columns / group] */
    const void *nullable minimum_unit; /* unit and codes of the minimums, or null */
    const void *nullable minimum;
    const uint8_t *nullable table;     /* [16] */
    uint8_t *matrix;
    int64_t outputs, columns, number;
} pack_arguments;

/* Pack a plain matrix into tiles. */
typedef struct {
    const bfloat16 *weights; /* [outputs, columns] */
    uint8_t *matrix;
    int64_t outputs, columns;
} pack_plain_arguments;

/* Quantize a plain matrix to the format `number`, and pack it into tiles. */
typedef struct {
    const void *weights; /* [outputs, columns] of the type `source` */
    uint8_t *matrix;
    uint8_t *faults;     /* [tiles], 1 for a tile that is not written because a weight is not finite or too large */
    int64_t source, outputs, columns, number;
} quantize_weights_arguments;

#endif
