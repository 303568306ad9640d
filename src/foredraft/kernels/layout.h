/* Where the numbers of a packed weight lie. A weight is a row of panels of 16 outputs (the last one padded with zeros);
 * inside a panel the inputs follow one another, so that a vector holds neighbouring outputs:
 *
 *   f32   [inputs][16 outputs] float                                           64 bytes per input
 *   bf16  [inputs / 2][16 outputs][2 inputs] bfloat16: one 32-bit lane holds two inputs of one output, widened by a
 *         shift (even) and a mask (odd); also what the bfloat16 dot products of newer machines want
 *   q8    [inputs / 32] groups of { 16 scales, 8 x [16 outputs][4 inputs] int8 }                   576 bytes
 *   q4    [inputs / 32] groups of { 16 scales, 16 minimums, 4 x [16 outputs][4 bytes] }            384 bytes
 *         the low nibbles of a q4 vector are inputs 8p .. 8p+3, its high nibbles inputs 8p+4 .. 8p+7
 *   q6    [inputs / 32] groups of { 2 x 16 scales, for inputs 0 .. 15 and 16 .. 31, codes as in q8 }  640 bytes
 *   q5    [inputs / 32] groups of { 16 scales, 16 minimums, codes as in q8 }                       640 bytes
 *
 * The inputs of f32 and bf16 are padded with zeros to a multiple of 4. */
#ifndef FD_LAYOUT_H
#define FD_LAYOUT_H

#include "foredraft.h"
#include "simd.h"

#define GROUP 32
#define Q8_CODES (PANEL * GROUP) /* bytes of a group's codes, also of an unpacked q4 group */
#define Q4_CODES (PANEL * GROUP / 2)

typedef struct {
    float scales[PANEL];
    int8_t codes[Q8_CODES];
} q8_group;

typedef struct {
    float scales[PANEL], minimums[PANEL];
    uint8_t codes[Q4_CODES];
} q4_group;

typedef struct {
    float scales[2][PANEL];
    int8_t codes[Q8_CODES];
} q6_group;

typedef struct {
    float scales[PANEL], minimums[PANEL];
    int8_t codes[Q8_CODES];
} q5_group;

INLINE int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

/* Bytes of one panel, or -1 for an impossible weight. */
INLINE int64_t panel_bytes(int kind, int64_t inputs) {
    if (inputs < 1) return -1;
    switch (kind) {
    case FD_F32: return round_up(inputs, 4) * PANEL * 4;
    case FD_BF16: return round_up(inputs, 4) * PANEL * 2;
    case FD_Q8: return inputs % GROUP ? -1 : inputs / GROUP * (int64_t)sizeof(q8_group);
    case FD_Q4: return inputs % GROUP ? -1 : inputs / GROUP * (int64_t)sizeof(q4_group);
    case FD_Q6: return inputs % GROUP ? -1 : inputs / GROUP * (int64_t)sizeof(q6_group);
    case FD_Q5: return inputs % GROUP ? -1 : inputs / GROUP * (int64_t)sizeof(q5_group);
    default: return -1;
    }
}

INLINE int64_t num_panels(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }

/* The place in a group's codes of input k (0 .. 31) of output o (0 .. 15). */
INLINE int code_index(int k, int o) { return k / 4 * (PANEL * 4) + o * 4 + k % 4; }

INLINE int check_weight(const fd_weight *weight) {
    if (!weight || !weight->data) return FD_NULL;
    if (weight->kind < FD_F32 || weight->kind > FD_Q5) return FD_KIND;
    return weight->outputs < 1 || panel_bytes(weight->kind, weight->inputs) < 0 ? FD_SHAPE : FD_OK;
}

#endif
