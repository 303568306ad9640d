/* Where the numbers of a packed weight lie. A weight is a row of panels of 16 outputs (the last one padded with zeros);
 * inside a panel the inputs follow one another, so that a vector holds neighbouring outputs:
 *
 *   f32   [inputs][16 outputs] float                                           64 bytes per input
 *   bf16  [inputs / 2][16 outputs][2 inputs] bfloat16: one 32-bit lane holds two inputs of one output, widened by a
 *         shift (even) and a mask (odd); also what the bfloat16 dot products of newer machines want
 *
 * The inputs of f32 and bf16 are padded with zeros to a multiple of 4. The other kinds hold groups of 32 inputs, and the
 * K kinds blocks of 8 groups. A factor is a float16, or in K kinds an int8, stored as a byte that is larger by
 * BYTE_OFFSET, times the float16 of its block: the numbers that the file has, which are multiplied when they are needed
 * (exactly: 11 bits by 8).
 *
 *   kind  a block has             a group has                codes      bytes of a group, bits a weight
 *   q8                            16 scales                  bytes      544               8.5
 *   q5                            16 scales, 16 minimums     sixes      448               7
 *   q4                            16 scales, 16 minimums     nibbles    320               5
 *   q6    16 scales               2 x 16 scales              sixes      416 + 32 / 8      6.5625
 *   q5k   16 scales, 16 minimums  16 scales, 16 minimums     sixes      416 + 64 / 8      6.625
 *   q4k   16 scales, 16 minimums  16 scales, 16 minimums     nibbles    288 + 64 / 8      4.625
 *   mx4                           16 exponents               nibbles    272               4.25
 *
 * A code of mx4 stands for a number of mx4_values, whose factor is 2**(exponent - 128). Exponents 0 and 1 count as zero.
 *
 * The two rows of scales of q6 are those of inputs 0 .. 15 and of inputs 16 .. 31. Codes, factors first:
 *
 *   bytes    8 x [16 outputs][4 inputs] int8
 *   nibbles  4 x [16 outputs][4 bytes]: low nibbles are inputs 8p .. 8p+3, high nibbles inputs 8p+4 .. 8p+7
 *   sixes    2 x 3 x [16 outputs][4 bytes], signed: the upper six bits of the three vectors of a half are inputs 0 .. 3,
 *            4 .. 7 and 8 .. 11; the lower two bits are those of inputs 12 .. 15, upper ones first */
#ifndef FD_LAYOUT_H
#define FD_LAYOUT_H

#include "foredraft.h"
#include "simd.h"

#define GROUP 32
#define BLOCK_GROUPS 8
#define BYTE_OFFSET 128
#define GROUP_CODES (PANEL * GROUP) /* of a group; also their bytes where they are unpacked */

/* What a group has beside codes: one scale per output, a scale and a minimum, or a scale for each half. */
enum scaling { SCALE, MINIMUM, HALVES };

INLINE enum scaling scaling_of(int kind) {
    return kind == FD_Q8 || kind == FD_MX4 ? SCALE : kind == FD_Q6 ? HALVES : MINIMUM;
}
INLINE int is_k(int kind) { return kind == FD_Q6 || kind == FD_Q5K || kind == FD_Q4K; }
INLINE int code_bits(int kind) { return kind == FD_Q8 ? 8 : kind == FD_Q4 || kind == FD_Q4K || kind == FD_MX4 ? 4 : 6; }

/* Twice what the codes of mx4 (E2M1: a sign, two bits of exponent, one of mantissa) stand for. */
static const _Alignas(16) int8_t mx4_values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

/* The same of four codes in every lane. */
INLINE vu mx4_quad(vu codes) {
#if defined(__aarch64__)
    return (vu)vqtbl1q_s8(vld1q_s8(mx4_values), (uint8x16_t)codes);
#else
    __m128i values = _mm_load_si128((const __m128i *)mx4_values);
#if LANES == 16
    return (vu)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), (__m512i)codes);
#elif LANES == 8
    return (vu)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), (__m256i)codes);
#else
    return (vu)_mm_shuffle_epi8(values, (__m128i)codes);
#endif
#endif
}

/* Rows of 16 factors, and their bytes: what a group has, and what a block of a K kind has for all its groups. */
INLINE int group_rows(int kind) { return scaling_of(kind) == SCALE ? 1 : 2; }
INLINE int block_rows(int kind) { return !is_k(kind) ? 0 : scaling_of(kind) == MINIMUM ? 2 : 1; }
INLINE int factor_size(int kind) { return is_k(kind) || kind == FD_MX4 ? 1 : 2; }
INLINE int factor_bytes(int kind) { return group_rows(kind) * PANEL * factor_size(kind); }
INLINE int block_head(int kind) { return block_rows(kind) * PANEL * 2; }

INLINE int groups_per_block(int kind) { return is_k(kind) ? BLOCK_GROUPS : 1; }
INLINE int group_bytes(int kind) { return factor_bytes(kind) + GROUP_CODES * code_bits(kind) / 8; }
INLINE int block_bytes(int kind) { return block_head(kind) + groups_per_block(kind) * group_bytes(kind); }

/* Group g of a panel, and the block that it lies in. */
INLINE const uint8_t *block_of(int kind, const void *panel, int64_t g) {
    return (const uint8_t *)panel + g / groups_per_block(kind) * block_bytes(kind);
}
INLINE const uint8_t *group_of(int kind, const void *panel, int64_t g) {
    return block_of(kind, panel, g) + block_head(kind) + g % groups_per_block(kind) * group_bytes(kind);
}

/* LANES neighbouring bytes, as floats that are RAISED too large. NEON puts each byte into a float of 2**15, where it
 * counts itself: a conversion would take four times as long. The assembly is what vld1q_lane_u32 stands for, without the
 * lanes that GCC would keep. */
#if defined(__aarch64__)
#define RAISED 0x1p15f
#else
#define RAISED 0.0f
#endif
INLINE vf load_raised(const uint8_t *p) {
#if defined(__aarch64__)
    static const uint8_t places[16] = {255, 0, 255, 255, 255, 1, 255, 255, 255, 2, 255, 255, 255, 3, 255, 255};
    static const float raised[4] = {RAISED, RAISED, RAISED, RAISED};
    uint8x16_t four;
    __asm__("ldr %s0, %1" : "=w"(four) : "m"(*(const uint8_t(*)[4])p));
    return (vf)vqtbx1q_u8((uint8x16_t)constant(raised), four, vld1q_u8(places));
#elif LANES == 16
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif LANES == 8
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
    vf v;
    for (int i = 0; i < LANES; i++) v[i] = (float)p[i];
    return v;
#endif
}

/* 2**(exponent - 128) of LANES neighbouring bytes; 0 for exponents 0 and 1. */
INLINE vf load_powers(const uint8_t *p) {
#if defined(__aarch64__)
    uint32_t four;
    memcpy(&four, p, 4);
    vu exponents = (vu)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
#elif LANES == 16
    vu exponents = (vu)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif LANES == 8
    vu exponents = (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    vu exponents;
    for (int i = 0; i < LANES; i++) exponents[i] = p[i];
#endif
    return (vf)((exponents + (vu)(exponents != 0)) << 23); /* a comparison that holds is -1 */
}

/* What the groups of a block share in K kinds: the float16 of each row of factors, and what a product with it and the
 * byte of a group is too large by, negated; in memory, as load_again reads it. */
typedef struct {
    vf factors[2][PANEL_VECS];
    float excess[2][PANEL_VECS][LANES];
} block_factors;

INLINE void load_block(int kind, const uint8_t *block, int vec, int vecs, block_factors *out) {
    FOR(row, block_rows(kind))
        FOR(v, vecs) {
            out->factors[row][v] = load_halves(block + (row * PANEL + (vec + v) * LANES) * 2);
            store(out->excess[row][v], out->factors[row][v] * -(BYTE_OFFSET + RAISED));
        }
}

/* The factors of row `row` (0: scales; 1: minimums, or the scales of the second half) of a group, for vector vec + v of
 * the outputs; `block` as loaded from vector `vec`. Exact, as are the sums on the way. */
INLINE vf load_factors(int kind, const block_factors *block, const uint8_t *group, int row, int vec, int v) {
    int first = (vec + v) * LANES, block_row = block_rows(kind) == 2 ? row : 0;
    if (kind == FD_MX4) return load_powers(group + first);
    if (!is_k(kind)) return load_halves(group + (row * PANEL + first) * 2);
    vf raised = load_raised(group + row * PANEL + first);
    return muladd(load_again(block->excess[block_row][v]), block->factors[block_row][v], raised);
}

INLINE int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

/* Bytes of one panel, or -1 for an impossible weight. */
INLINE int64_t panel_bytes(int kind, int64_t inputs) {
    if (inputs < 1) return -1;
    if (kind == FD_F32) return round_up(inputs, 4) * PANEL * 4;
    if (kind == FD_BF16) return round_up(inputs, 4) * PANEL * 2;
    int64_t block = groups_per_block(kind) * GROUP;
    return inputs % block ? -1 : inputs / block * block_bytes(kind);
}

INLINE int64_t num_panels(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }

/* The place among a group's bytes, or unpacked codes, of input k (0 .. 31) of output o (0 .. 15). */
INLINE int code_index(int k, int o) { return k / 4 * (PANEL * 4) + o * 4 + k % 4; }

INLINE int check_weight(const fd_weight *weight) {
    if (!weight || !weight->data) return FD_NULL;
    if (weight->kind < FD_F32 || weight->kind > FD_MX4 || weight->planes < 1 || weight->planes > 2) return FD_KIND;
    return weight->outputs < 1 || panel_bytes(weight->kind, weight->inputs) < 0 ? FD_SHAPE : FD_OK;
}

#endif
