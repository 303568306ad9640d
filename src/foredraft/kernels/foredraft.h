/* The native CPU kernels: a plain C interface over raw pointers. backends/native/ is its only caller, but for texts,
 * which the proposer `suffix` calls.
 *
 * Every result row is produced by one fixed sequence of operations. It depends neither on how many rows share a
 * call, nor on where the row stands, nor on which thread computes it: speculative and plain decoding give equal bits.
 *
 * A verb returns FD_OK or the code of the first thing that was wrong; it then has written nothing useful. */
#ifndef FOREDRAFT_H
#define FOREDRAFT_H

#include <stdint.h>

enum fd_error {
    FD_OK = 0,
    FD_NULL = 1,      /* a pointer is missing */
    FD_SHAPE = 2,     /* a size is negative, zero where it must not be, or does not fit the others */
    FD_KIND = 3,      /* an unknown weight kind */
    FD_RANGE = 4,     /* an index (token, slot, position, block) points outside its table */
    FD_NO_MEMORY = 5, /* scratch memory could not be had */
    FD_REFUSED = 6,   /* the system does not let this process use the instructions of this level */
};

/* How the numbers of a weight are stored; the layouts are drawn in layout.h. */
enum fd_kind { FD_F32 = 0, FD_BF16 = 1, FD_Q8 = 2, FD_Q4 = 3, FD_Q6 = 4, FD_Q5 = 5, FD_Q5K = 6, FD_Q4K = 7, FD_MX4 = 8 };

/* What the gate of a gated activation goes through; as in ACTIVATIONS of backends/base.py. */
enum fd_activation { FD_SILU = 0, FD_GELU_TANH = 1, FD_CLAMPED = 2 };

/* A weight before packing: row-major [outputs, inputs] values, a code a byte where they are codes. The factors of groups
 * are float16, or int8 where blocks have factors too, which are float16; NULL where the kind has none. Those of FD_MX4 are
 * exponents, uint8. */
typedef struct {
    const void *values, *scales, *minimums, *block_scales, *block_minimums;
} fd_plain;

/* A weight packed by fd_pack. Where it is quantised, activations meet it as integers of `planes` times 8 bits. */
typedef struct {
    const void *data;
    int64_t outputs, inputs;
    int32_t kind, planes;
} fd_weight;

/* One forward run: which slot a row writes, and which keys it sees (batch.py says it in words). */
typedef struct {
    const int64_t *token_ids;    /* [rows] */
    const int64_t *positions;    /* [rows] */
    const int64_t *slots;        /* [rows] */
    const int32_t *sequences;    /* [rows], row of block_tables */
    const int32_t *block_tables; /* [num_sequences, table_width] */
    const int32_t *prefix_lens;  /* [rows] */
    const int32_t *paths;        /* [rows, depth] */
    const int32_t *path_lens;    /* [rows] */
    int64_t rows, num_sequences, table_width, depth, block_size;
} fd_batch;

/* K and V of one layer: each [slots, kv_heads, head_dim], float32 or bfloat16. A cache of window blocks has room
 * for some blocks only, and slots of its own. */
typedef struct {
    void *k, *v;
    int64_t slots, kv_heads, head_dim;
    int32_t is_bf16, of_windows;
} fd_kv;

typedef struct {
    int64_t heads, kv_heads, head_dim, rotary_dim, window, first_key;
    float scale, norm_eps;
} fd_attention;

/* A linear layer: weights that share their input, their outputs side by side, and a bias or NULL. */
typedef struct {
    const fd_weight *const *parts; /* [num_parts] */
    const float *bias;             /* [outputs] */
    int64_t num_parts, outputs, inputs;
} fd_projection;

typedef struct {
    fd_projection gate_up, down;
} fd_mlp;

/* MLPs of which a router chooses the best `chosen` for every row, each with the probability that the softmax of all
 * scores gives it, or with its share of those of the chosen ones. */
typedef struct {
    fd_projection router; /* [count, width] */
    const fd_mlp *each;   /* [count], from width to inner and back */
    int64_t count, chosen, inner;
    int32_t normalised;
} fd_experts;

/* One transformer layer; q_norm, k_norm and sinks may be NULL, the norms of what attention and the MLP add to the residual
 * stream too, and input_norm of a first layer, whose q, k and v then read rows as they are. */
typedef struct {
    const float *input_norm, *q_norm, *k_norm, *sinks, *post_norm, *attention_update_norm, *mlp_update_norm;
    fd_projection qkv, output;
    fd_mlp mlp;
    const fd_experts *experts; /* in place of the MLP, or NULL */
    fd_attention shape;
    int32_t activation;
} fd_layer;

/* What the first layer's q, k and v read where it is not the normed residual stream: the embedding of the row's token
 * after that layer's norm, and behind it the residual stream, after a norm of its own if there is one. */
typedef struct {
    fd_projection embedding; /* [vocab, width] */
    const float *norm;       /* [width], may be NULL */
} fd_entry;

/* Layers one after the other, and what they share. */
typedef struct {
    const fd_layer *layers; /* [count] */
    const float *norm;      /* after the last layer */
    const float *rope;      /* [rope_positions, 2, rotary_dim / 2] */
    const float *window_rope; /* the same for layers with a window; NULL: they rotate as the others */
    const fd_entry *entry;  /* may be NULL */
    int64_t count, width, rope_positions, rotary_dim;
    float multiplier, eps; /* of the residual stream, and of the norms */
} fd_stack;

/* Where the residual stream goes after some layers: [slots, count * width], float32 or bfloat16, layers ascending. */
typedef struct {
    void *data;
    const int64_t *layers; /* [count], the number of layers that the rows have gone through */
    int64_t count, slots;
    int32_t is_bf16;
} fd_taps;

/* Rows of a cache: [slots, parts, width], float32 or bfloat16. */
typedef struct {
    const void *data;
    int64_t slots, parts, width;
    int32_t is_bf16;
} fd_cache;

/* The digest of the sources that the library was built from; it fits to nothing else. */
const char *fd_sources(void);

/* The level, and what compiled it. */
const char *fd_build(void);

/* To be called first: asks the system for what the level needs, and fails where it is refused. */
int fd_ready(void);

int fd_set_threads(int threads);

int64_t fd_packed_bytes(int kind, int64_t outputs, int64_t inputs); /* -1: no such weight */
int fd_pack(int kind, int64_t outputs, int64_t inputs, const fd_plain *plain, void *packed);

/* y[row * y_stride + output] = x[row] . weight[output] + bias[output]; bias may be NULL. */
int fd_linear(const fd_weight *weight, const float *x, int64_t rows, const float *bias, float *y, int64_t y_stride);

/* y[row] = the weight's row ids[row] - first, for ids in [first, first + outputs); other rows are left alone, and an id
 * outside [0, total) is an error. */
int fd_embed(const fd_weight *weight, int64_t first, int64_t total, const int64_t *ids, int64_t rows, float *y);

int fd_rms_norm(const float *x, const float *weight, float eps, int64_t rows, int64_t width, float *y);
/* x += multiplier * update; y = rms_norm(x). */
int fd_add_rms_norm(float *x, const float *update, float multiplier, const float *weight, float eps, int64_t rows,
                    int64_t width, float *y);
int fd_gated(const float *gate_up, int64_t rows, int64_t width, int activation, float *y);
/* y [rows, width] = what the experts of each row make of it, added up. */
int fd_mix_experts(const fd_experts *experts, const float *x, int64_t rows, int activation, float *y);
int fd_silu(const float *x, int64_t size, float *y);

/* y [rows, count] = vectors[lanes[row]] . x[row], for vectors [num_lanes, count, width]. */
int fd_dots(const float *vectors, int64_t num_lanes, int64_t count, int64_t width, const int64_t *lanes, const float *x,
            int64_t rows, float *y);

/* rope [rope_positions, 2, rotary_dim / 2]: cosines, then sines. q_norm and k_norm [head_dim] may be NULL. */
int fd_rope_and_store(const float *qkv, const float *q_norm, const float *k_norm, const float *rope,
                      int64_t rope_positions, const fd_kv *kv, const fd_attention *shape, const fd_batch *batch,
                      float *q);
/* sinks [heads] may be NULL: scores that take their share of a head's attention and give nothing for it. */
int fd_attend(const float *q, const float *sinks, const fd_kv *kv, const fd_attention *shape, const fd_batch *batch,
              float *out);

/* x [rows, width] through all layers, in place; normed: x after the stack's norm. kv has one cache for each layer;
 * window_map [num_blocks] says which window block a block has, -1 for none, and is NULL where no cache has window blocks.
 * taps may be NULL. An error may leave some layers' rows written. */
int fd_run_layers(const fd_stack *stack, const fd_kv *const *kv, const fd_batch *batch, const int32_t *window_map,
                  int64_t num_blocks, const fd_taps *taps, float *x, float *normed);

/* y [rows, count, width]: some parts of the rows at some slots, widened; parts NULL: all. */
int fd_read(const fd_cache *cache, const int64_t *parts, int64_t count, const int64_t *slots, int64_t rows, float *y);
/* The same at the slot of the key before each row's own, in sequence order; where there is none, at the first of its
 * sequence. */
int fd_read_previous(const fd_cache *cache, const int64_t *parts, int64_t count, const fd_batch *batch, float *y);

/* Copies what memory [parts, slots, `size` bytes] holds from slot to slot, in all parts: for each of `count` moves from
 * the first of two slots to the second. All are read before any is written. */
int fd_move(void *data, int64_t parts, int64_t slots, int64_t size, const int64_t *moves, int64_t count);

/* The largest `count` numbers of rows that are `stride` apart, largest first and the lowest column first among equals;
 * or what exp makes of them, as shares of the sum over the row. NaN is not a number; where there are too few, -infinity
 * at column 0 follows. */
int fd_top(const float *x, int64_t rows, int64_t columns, int64_t stride, int64_t count, int as_shares, float *values,
           int64_t *places);

/* How a token is drawn from a row of logits: see SamplingParams. */
typedef struct {
    const float *logits;
    double temperature, top_p, min_p_log; /* the last is the logarithm of min-p */
    int64_t top_k; /* 0: all */
    uint64_t key; /* of the noise */
} fd_drawing;

/* For each drawing, of those tokens whose logit reaches its floor, the one with the largest logit + temperature *
 * gumbel(key, token), the lowest of equals; -1 where the logits have NaN or an infinite maximum. */
int fd_draw(const fd_drawing *drawings, int64_t count, int64_t vocab, int64_t *tokens);

enum { FD_CONTENDERS = 256 }; /* logits that may win by noise, beside those that equal the last of them */

/* For rows of logits of a drafting model, the `count` tokens that such drawings from the target's logits most probably
 * give: by the share of exp(logit), or with a temperature of exp(logit + temperature * gumbel(key, token)) among the
 * largest logits that reach the floor. Of a token that cannot be drawn the share is 0. `token_ids` says what the columns
 * stand for, of rows `ids_stride` apart, which may be 0; NULL: for their own numbers. */
int fd_likely(const fd_drawing *drawings, const int64_t *token_ids, int64_t ids_stride, int64_t rows, int64_t columns,
              int64_t count, float *shares, int64_t *places);

enum { FD_NODES = 64 }; /* of a draft, run or not, at most */

/* The nodes of a draft, parents first. */
typedef struct {
    int32_t tokens[FD_NODES], parents[FD_NODES];
    double scores[FD_NODES];
} fd_nodes;

/* A head that reads taps of the target for tokens, and its own output for draft tokens. */
typedef struct {
    const fd_cache *taps;
    const int64_t *parts; /* [num_parts] of the taps that it reads; NULL: all */
    const fd_projection *fusion; /* makes of them what the stack reads */
    const fd_stack *stack;
    const fd_kv *const *kv; /* one for each layer, none of window blocks */
    const fd_taps *kept; /* where what the stack puts out is kept, */
    const fd_cache *outputs; /* and the same memory as it is read: [slots, 1, width] */
    const fd_projection *output;
    const int64_t *token_ids; /* [output.outputs]: what its columns stand for */
    int64_t num_parts;
} fd_taps_head;

/* How trees grow: see TreeShape in proposers/model/tree.py. */
typedef struct {
    int64_t depth, width;
    double min_score;
    const double *shares; /* [width]: weights by rank alone; NULL: by probability */
} fd_growth;

/* Runs `first`, all rows up to the ends of its sequences, which have `lengths` tokens, and then levels of trees behind
 * them, whose best `budgets` nodes are the drafts. The target will make `drawings` [sequences, depth of the trees] there,
 * whose logits are not read. The block tables reach FD_NODES tokens further. */
int fd_grow_trees(const fd_taps_head *head, const fd_batch *first, const fd_growth *growth, const int64_t *lengths,
                  const int64_t *budgets, const fd_drawing *drawings, fd_nodes *drafts, int32_t *counts);

/* A text that the proposer `suffix` copies from, and where its n-grams of a few lengths have occurred. */
typedef struct fd_text fd_text;

enum { FD_SUFFIX_MATCH = 32 }; /* tokens of a match, at most */

/* How drafts are made of texts: the options of the proposer, and how much a match of each length is doubted. */
typedef struct {
    int64_t max_n; /* up to FD_SUFFIX_MATCH */
    int64_t is_chain;
    double depth, min_score, store_doubt;
    double doubts[FD_SUFFIX_MATCH + FD_NODES + 1];
} fd_suffix_rules;

fd_text *fd_text_new(const int64_t *lengths, int64_t num_lengths); /* ascending; NULL: no memory */
void fd_text_free(fd_text *text);
/* Have these tokens from a place on. Returns how many others stood there, which are taken back; or an error, negative,
 * and then the text stays as it was. */
int64_t fd_text_replace(fd_text *text, int64_t from, const int32_t *tokens, int64_t count);
/* Forget the oldest tokens, and every n-gram that begins among them. */
int fd_text_forget(fd_text *text, int64_t count);
void fd_text_size(const fd_text *text, int64_t *num_tokens, int64_t *num_grams); /* that take memory */
/* What may follow `own`, by itself and by a store, which may be NULL. Returns the number of nodes, up to `size`. */
int fd_text_draft(const fd_text *own, const fd_text *store, int64_t size, const fd_suffix_rules *rules,
                  fd_nodes *nodes);

#endif
