/* Constants, structs and kernel arguments shared by C and Python. `ops/kernel_header.py` parses this file. The parser
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
#define MAX_DIM 576            /* largest head size */
#define MAX_QUERIES 48         /* maximum queries of an attention tile: rows times query heads per KV head */
#define GROUP 32               /* columns per group of a quantized matrix */
#define STRETCH_GROUPS 8       /* groups of a stretch, which share a unit in formats with two scale levels */
#define BLOCK_BYTES 84         /* bytes of a block: GROUP rounded activations */
#define SPARE_BLOCKS 8         /* allocated blocks after the last block, which `multiply` may read but ignores */
#define MAX_EXPERTS 4096       /* maximum number of experts of a mixture */
#define MAX_INSTRUCTIONS 16384 /* maximum number of instructions of a graph */
#define ARGUMENT_BYTES 128     /* bytes for the arguments of one instruction */
#define MAX_RANKS 64           /* maximum number of ranks of a model */
#define RANK_STATE_BYTES 4096  /* bytes of the states of all ranks, at the start of the memory that ranks share */
#define RANK_TIME_OFFSET 16    /* offset in a rank's state of the time that the rank has spent in exchanges, int64 */
#define EXCHANGE_BYTES 4194304 /* bytes of each of the two exchange buffers after the states */
#define MIXED 0                /* value of `x_bits`: activations are rounded to 8 bits, and outliers to 16 bits */
#define NON_FINITE -1          /* token id of a row whose largest logit is NaN or infinite */

/* Types of plain weights and of scale units. */
#define FLOAT16 0
#define BFLOAT16 1
#define FLOAT32 2

/* Activations. SILU and GELU_TANH are also gates; 0 means no gate. */
#define SILU 1
#define GELU_TANH 2
#define GELU 3
#define RELU2 4

/* A format of quantized matrices:
 *   bits: bits per code
 *   levels: 1 if a scale is one number, 2 if a scale is a code times a unit
 *   minimum: whether groups have minimums
 *   zero: code of the value 0
 *   group: columns per scale
 *   table: whether a table maps each 4-bit code to a value from 0 to 255; the value 128 then represents 0
 *   unit: type of the scale units
 *   entries, width: number of entries of the codebook, and codes per entry; 0 if the matrix contains codes instead of
 *     indexes into a codebook */
typedef struct {
    int bits, levels, minimum, zero, group, table, unit, entries, width;
} format;
#define FORMAT_COUNT 21

/* A tile of attention: queries of consecutive rows of one sequence. */
typedef struct {
    int64_t row, rows, position; /* first row, number of rows, position of the first row */
    int64_t pages;               /* index of the sequence's first page number in `page_numbers` */
    int64_t first_segment, segments; /* first segment and number of segments to attend to */
    int64_t partial;             /* index of the first partial result to write; -1: write the final output */
    int64_t seen;                /* number of positions that every row attends to; 0 for causal attention */
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

/* x = (x + delta) * factor. */
typedef struct {
    float *x;           /* [rows, width] */
    const float *delta; /* [rows, width] */
    int64_t rows, width;
    float factor;
} add_scaled_arguments;

/* Soft cap: x = cap * tanh(x / cap) + bias. */
typedef struct {
    float *x;                   /* [rows, width] */
    const float *nullable bias; /* [width] */
    int64_t rows, width;
    float cap;
} soft_cap_arguments;

/* Gated activation: out = gate(first half of x) * second half of x. */
typedef struct {
    const float *x; /* [rows, 2 * width] */
    float *out;     /* [rows, width] */
    int64_t rows, width, gate;
} gate_mul_arguments;

/* out = gate(x) * inputs, for the columns of `inputs` from `first` on. */
typedef struct {
    const float *x;      /* [rows, width] */
    const float *inputs; /* [rows, stride] */
    float *out;          /* [rows, width] */
    int64_t rows, width, stride, first, gate;
} gate_inputs_arguments;

/* out = the rows of x with the indexes `chosen`. */
typedef struct {
    const float *x;        /* [.., width] */
    const int32_t *chosen; /* [rows] */
    float *out;            /* [rows, width] */
    int64_t rows, width;
} choose_rows_arguments;

/* Choose a token for each row of logits. The lines of `filters` are temperature (0 for the first largest logit), top-k
 * (0 for no limit), top-p and min-p. Adjustments change logits before the choice, and are undone after it. `starts` has
 * the index of the first bias of each row, then of the first repetition penalty of each row, then of the first presence
 * penalty of each row, and finally the number of adjustments. */
typedef struct {
    float *x;                          /* [samples, width] */
    const float *filters;              /* [samples, 4] */
    const int64_t *seeds, *positions;  /* [samples], which determine the random number of a row */
    const int32_t *nullable starts;    /* [3 * samples + 1], or null without adjustments */
    const int32_t *nullable tokens;    /* token of each adjustment; if negative, an index from the end of `last` */
    const float *nullable values;
    const int64_t *nullable last;      /* [last_count], tokens of the previous step */
    const int32_t *nullable chosen;    /* [rows], or null for the first rows */
    const uint8_t *nullable masks;     /* [rows, mask_bytes], bits of allowed tokens; select other random numbers */
    int64_t *out;                      /* [rows], or NON_FINITE if the row's largest logit is NaN or infinite */
    int64_t rows, samples, width, mask_bytes, last_count;
} choose_tokens_arguments;

/* Log-probabilities of a token of each row and of the `likeliest` tokens, in descending order. They are NaN if the
 * row's largest logit is NaN or infinite. Of tokens with equal logits, the lowest ids come first. */
typedef struct {
    const float *x;                 /* [.., width] */
    const int64_t *tokens;          /* [..] */
    const int32_t *nullable chosen; /* [rows], or null for the first rows */
    float *out;                     /* [rows] */
    int64_t *ids;                   /* [rows, likeliest] */
    float *values;                  /* [rows, likeliest] */
    int64_t rows, width, likeliest;
} log_probabilities_arguments;

/* Compute the cosines and sines of RoPE, times `factor`, for the angles position * frequency. */
typedef struct {
    const int32_t *positions; /* [rows] */
    const float *frequencies; /* [half] */
    float *cosines, *sines;   /* [rows, half] */
    int64_t rows, half;
    float factor;
} rope_tables_arguments;

/* Normalize queries and keys, apply RoPE (before the norm if `norm_last` is set), and store keys and values at `slots`
 * of the cache. A row of `qkv` has `width` heads: queries, keys and values. Without values, the keys before norm and
 * RoPE are also the values. With only queries, nothing is stored. The cache contains, for each page and KV head:
 *   bfloat16: keys [dim / 2, PAGE_SIZE, 2], values [PAGE_SIZE / 2, dim, 2]
 *   8 bits: keys [dim / 4, PAGE_SIZE, 4], values [PAGE_SIZE / 4, dim, 4], then float32 [PAGE_SIZE] each: scales of
 *           keys, base-2 logarithms of the scales of values, reciprocals of the scales of values; base of the keys
 *           bfloat16 [dim]
 * For 8 bits, queries and keys are Hadamard transformed. The keys are differences from the base, plus 128. The base is
 * the first key of the page, or 0 if this key is not finite. With `keys_only`, a cache of bfloat16 has no values. */
typedef struct {
    const float *qkv;             /* [rows, width, dim] */
    const float *cosines, *sines; /* [rows, half] */
    void *queries;                /* [rows, heads, dim], bfloat16, or float32 for a cache of 8 bits */
    uint8_t *cache;
    const int32_t *slots;         /* [rows], ascending within the rows of a page */
    const float *nullable query_norm, *nullable key_norm; /* [dim] */
    int64_t rows, heads, kv_heads, width, dim;
    int half;
    int narrow;                   /* whether the cache has 8 bits */
    int norm_last;                /* whether the norms follow RoPE */
    int keys_only;                /* whether the cache of 16 bits has no values, because the keys are the values */
    int norm_values;              /* whether values are normalized, with a weight of 1 */
    float eps;
} rotate_store_arguments;

/* out = the `count` columns from `first` on of each head, with the rows of a head together. starts = index of the first
 * row of each head in `out`, and of the end. */
typedef struct {
    const float *x;  /* [rows, heads, width] */
    float *out;      /* [heads, rows, count] */
    int64_t *starts; /* [heads + 1] */
    int64_t rows, heads, width, first, count;
} split_heads_arguments;

/* out = x with the heads of a row together. */
typedef struct {
    const float *x; /* [heads, rows, width] */
    float *out;     /* [rows, heads, width] */
    int64_t rows, heads, width;
} join_heads_arguments;

/* Write the query heads and the key head of latent attention. A head has first the `rotated` numbers that RoPE will
 * rotate, then `rank` other numbers. The other numbers of the key are normalized. If `interleaved` is set, the inputs
 * have pairs of numbers 2i and 2i + 1. These are reordered to pairs of numbers i and i + rotated / 2. */
typedef struct {
    const float *queries;  /* [rows, heads, width], of which the last `rotated` numbers of each head are used */
    const float *absorbed; /* [rows, heads, rank] */
    const float *latent;   /* [rows, rank + rotated] */
    const float *norm;     /* [rank] */
    float *out;            /* [rows, heads + 1, rotated + rank] */
    int64_t rows, heads, width, rank, rotated, interleaved;
    float eps;
} join_latent_arguments;

/* Multiply the first `width` columns of each row, its query heads, by 1 + slope * log(1 + position / length), with an
 * integer division. */
typedef struct {
    float *x;                 /* [rows, stride] */
    const int32_t *positions; /* [rows] */
    int64_t rows, stride, width, length;
    float slope;
} scale_queries_arguments;

/* Apply an RMS norm to the first columns of each row, and another one to the columns that follow. */
typedef struct {
    float *x;                    /* [rows, stride] */
    const float *first, *second; /* weights [first_width] and [second_width] */
    int64_t rows, stride, first_width, second_width;
    float eps;
} norm_columns_arguments;

/* Compute attention for all tiles, as outputs or as partial results. */
typedef struct {
    const void *queries;         /* [rows, heads, dim], as `rotate_store` writes them */
    const uint8_t *cache;        /* as `rotate_store` writes it */
    const int64_t *tile_count;   /* [1] */
    const tile *tiles;           /* [tile_count] */
    const int64_t *page_numbers; /* page numbers of all sequences, one sequence after another */
    float *partials;             /* [.., heads, 2 + dim]: peak and total of the softmax, sums of values */
    float *out;                  /* [rows, heads, dim] */
    const float *nullable sinks; /* [heads] */
    int64_t heads, kv_heads, dim;
    int64_t cached_heads;        /* KV heads in the cache; kv_heads is larger if query heads are divided into parts */
    int narrow, keys_only;       /* as for `rotate_store` */
    int64_t window;              /* positions that a query attends to, including its own position */
    float scale;
    float cap;                   /* soft cap of the scores: cap * tanh(score / cap); 0 for no cap */
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

/* Copy this rank's columns, from `first` on, to the memory that the ranks share (see all_reduce.c). */
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
} quantize_arguments;

/* out = x times the transposed matrix of the format `number`, plus the bias. */
typedef struct {
    const uint8_t *x;           /* blocks of [rows, columns], from `quantize` */
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
 * row.
 *
 * The value of an expert is its share of the softmax over all scores, or with `sigmoids` the sigmoid of its score. The
 * experts with the largest values plus bias are chosen. With several groups of consecutive experts, the experts are
 * chosen from the `chosen_groups` groups with the largest sums of `summed` (1 or 2) values plus bias. */
typedef struct {
    const float *scores; /* [rows, experts] */
    int32_t *pairs;      /* [rows * chosen], the row of each pair */
    int64_t *starts;     /* [experts + 1], index of each expert's first pair */
    int64_t *places;     /* [rows, chosen], indexes of each row's pairs */
    float *weights;      /* [rows, chosen], values of the chosen experts, divided by their sum if `normalized` */
    const float *nullable bias;    /* [experts] */
    const float *nullable factors; /* [experts], factors by which the weights are finally multiplied */
    int64_t rows, experts, chosen, normalized;
    int64_t by_scores; /* whether the experts with the largest scores are chosen: no bias, sigmoids or groups */
    int64_t sigmoids, groups, chosen_groups, summed;
} route_arguments;

/* `quantize` for the pairs of each expert. */
typedef struct {
    const int64_t *starts; /* [experts + 1] */
    const float *x;        /* [pairs, columns], or [pairs, 2 * columns] with a gate */
    uint8_t *out;
    int64_t experts, columns, gate, x_bits;
} quantize_experts_arguments;

/* `multiply` for the pairs of each expert, or `multiply_plain` if the format number is -1. */
typedef struct {
    const int64_t *starts;      /* [experts + 1] */
    const void *x;              /* blocks from `quantize_experts`, or bfloat16 [pairs, columns] */
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

/* out += x * sigmoid(gate), or out += x without a gate. */
typedef struct {
    float *out;                 /* [rows, width] */
    const float *x;             /* [rows, width] */
    const float *nullable gate; /* [rows] */
    int64_t rows, width;
} add_gated_arguments;

/* Apply a causal convolution over `taps` tokens to each column, and then SiLU. Update the state of each sequence, which
 * is its last taps - 1 inputs. */
typedef struct {
    const float *x;             /* [rows, stride], of which the first `width` columns are the inputs */
    const float *weights;       /* [taps, width] */
    const float *nullable bias; /* [width] */
    float *state;               /* [slots, taps - 1, width] */
    const int64_t *span_count;  /* [1] */
    const span *spans;          /* [span_count] */
    float *out;                 /* [rows, width] */
    int64_t width, stride, taps;
} convolve_arguments;

/* out = c * convolution(b * v): a causal convolution over `taps` tokens of each column, between two gates. Update the
 * state of each sequence, which is its last taps - 1 products b * v. */
typedef struct {
    const float *x;             /* [rows, 3 * width]: b, c, v */
    const float *weights;       /* [taps, width] */
    const float *nullable bias; /* [width] */
    float *state;               /* [slots, taps - 1, width] */
    const int64_t *span_count;  /* [1] */
    const span *spans;          /* [span_count] */
    float *out;                 /* [rows, width] */
    int64_t width, taps;
} gated_convolve_arguments;

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

/* Compute the factors of the scan of Mamba-2 for each row: the step size softplus(steps + bias) and the decay
 * exp(-rate * step size) of each head. */
typedef struct {
    const float *steps;       /* [rows, stride], of which the first `heads` columns are the inputs */
    const float *rate, *bias; /* [heads] */
    float *factors;           /* [rows, 2 * heads] */
    int64_t rows, stride, heads;
} scan_factors_arguments;

/* Apply the scan of Mamba-2 to each sequence, and update its state. Add a part of the inputs and apply the gate. */
typedef struct {
    const float *mixed;        /* [rows, heads * head_dim + 2 * groups * state_dim]: inputs, keys, queries */
    const float *factors;      /* from `scan_factors` */
    const float *skip;         /* [heads] */
    const float *z;            /* [rows, stride], of which the first heads * head_dim columns are the gate's inputs */
    float *state;              /* [slots, heads, state_dim, head_dim] */
    const int64_t *span_count; /* [1] */
    const span *spans;         /* [span_count] */
    float *out;                /* [rows, heads, head_dim] */
    int64_t heads, groups, head_dim, state_dim, stride;
} scan_arguments;

/* out = x / rms(x) * weight for each of `groups` groups of `width` columns. */
typedef struct {
    const float *x;      /* [rows, groups, width] */
    const float *weight; /* [groups, width] */
    float *out;          /* [rows, groups, width] */
    int64_t rows, groups, width;
    float eps;
} group_norm_arguments;

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
    const float *gated; /* [rows, heads, first + dim] */
    int64_t rows, heads, dim;
    int64_t first;      /* numbers of a head before its gate */
} gate_heads_arguments;

/* Pack a quantized matrix into tiles. The rows of the last tile after row `outputs` become zero. */
typedef struct {
    const uint8_t *codes;              /* [outputs, columns] */
    const void *unit;                  /* [outputs, units] of the format's unit type */
    const void *nullable scale;        /* 8-bit codes [outputs, columns / group] */
    const void *nullable minimum_unit; /* unit and codes of the minimums, or null */
    const void *nullable minimum;
    const uint8_t *nullable table;     /* [16] */
    const uint8_t *nullable codebook;  /* codes [entries, width] */
    const int32_t *nullable places;    /* index of each entry; for the codes c0, c1, .. at c0 + c1 * base + .. */
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
