/* Exact integer dot products of 16-bit activations with weight codes of 8, 6 or 4 bits, for one group of 32 inputs.
 *
 * Machines with a dot product of bytes (sdot) keep an activation as two planes of int8, x = 256 * high + low, and take
 * one dot product with each; others keep 16-bit numbers and multiply pairs of them (pmaddwd, vpdpwssd), where a weight
 * lane's 4 bytes meet x in the order 0 2 1 3. All sums fit 32 bits, so the result is the same integer everywhere, for
 * any number of rows. */
#ifndef FD_DOT_H
#define FD_DOT_H

#include "layout.h"

/* Whether many rows run in the tiles of linear_amx.h. */
#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__)
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif

/* One group of 32 quantised activations: x = scale * code. */
typedef struct {
    int8_t codes[2 * GROUP]; /* the planes, or the pairs */
    float scale;             /* a power of two */
    float sum;               /* of the x */
    float unused[2];         /* keeps the codes of the next group aligned */
} x_group;

#if defined(__ARM_FEATURE_DOTPROD)

/* The low plane is the low byte as a signed number, the high plane what remains: -127 .. 127, because |x| <= 32639. */
INLINE void store_codes(const vi x[GROUP / LANES], x_group *group) {
    FOR_STEP(k, GROUP, 8) {
        int16x8_t eight = vcombine_s16(vmovn_s32((int32x4_t)x[k / 4]), vmovn_s32((int32x4_t)x[k / 4 + 1]));
        vst1_s8(group->codes + k, vrshrn_n_s16(eight, 8));
        vst1_s8(group->codes + GROUP + k, vmovn_s16(eight));
    }
}

/* vdotq_laneq_s32 and zero, in words that keep the sum in its register: GCC 12 would copy a register of zeros (one
 * instruction), while clearing with movi is free. */
#define sdot_quad(acc, w, x, j)                                                     \
    ({                                                                              \
        int32x4_t sum_ = acc;                                                       \
        __asm__("sdot %0.4s, %1.16b, %2.4b[" #j "]" : "+w"(sum_) : "w"(w), "w"(x)); \
        sum_;                                                                       \
    })

INLINE int32x4_t cleared(void) {
    int32x4_t zero;
    __asm__ volatile("movi %0.4s, #0" : "=w"(zero)); /* volatile: one for each sum */
    return zero;
}

/* sums[row][vec] = the dot products of `rows` activation groups with vectors vec .. vec+vecs-1 of the codes, over the
 * halves first .. first+halves-1 (16 inputs each) of the group.
 *
 * The high plane comes first, its sums are shifted by 8 bits and the low plane is added on top: a single set of sums,
 * and one extra instruction for both planes. A 4x2 tile takes 128 sdot, 2 a cycle, 8 shifts, and 48 loads that hide
 * behind them: 68 cycles on a Neoverse N1 at the least. */
INLINE void dot_codes(const int8_t *codes, int first, int halves, const x_group *const x[], int rows, int vec, int vecs,
                      vi sums[][PANEL_VECS]) {
    codes += vec * 16 + first * 4 * PANEL * 4;
    int32x4_t acc[4][PANEL_VECS];
    FOR(r, rows)
        FOR(v, vecs) acc[r][v] = cleared();
    FOR(plane, 2) {
        FOR(half, halves) {
            const int8_t *w = codes + half * 4 * PANEL * 4;
            int8x16_t xs[4];
            FOR(r, rows) xs[r] = vld1q_s8(x[r]->codes + plane * GROUP + (first + half) * 16);
#define ONE_QUAD(j)                                                  \
    FOR(v, vecs) {                                                   \
        int8x16_t wv = vld1q_s8(w + j * PANEL * 4 + v * 16);         \
        FOR(r, rows) acc[r][v] = sdot_quad(acc[r][v], wv, xs[r], j); \
    }
            ONE_QUAD(0) ONE_QUAD(1) ONE_QUAD(2) ONE_QUAD(3)
#undef ONE_QUAD
        }
        if (plane == 0) {
            FOR(r, rows)
                FOR(v, vecs) acc[r][v] = vshlq_n_s32(acc[r][v], 8);
            __asm__ volatile("" ::: "memory"); /* load the codes again: keeping them would spill the sums */
        }
    }
    FOR(r, rows)
        FOR(v, vecs) sums[r][v] = (vi)acc[r][v];
}

/* The same straight from 4-bit codes, for the few rows of plain decoding and short drafts: each code is unpacked once
 * and meets both planes. One row and 16 outputs: 16 loads, 32 instructions to unpack, 64 sdot, 8 to combine: 52 cycles
 * at the least for 512 weights; the 320 bytes they lie in take 43 cycles from memory when two cores read. */
INLINE void dot_nibbles(const uint8_t *codes, const x_group *const x[], int rows, int vec, int vecs,
                        vi sums[][PANEL_VECS]) {
    codes += vec * 16;
    int32x4_t high[4][PANEL_VECS], low[4][PANEL_VECS];
    FOR(r, rows)
        FOR(v, vecs) high[r][v] = cleared(), low[r][v] = cleared();
    FOR(half, 2) {
        const uint8_t *w = codes + half * 2 * PANEL * 4;
        int8x16_t xh[4], xl[4];
        FOR(r, rows) {
            xh[r] = vld1q_s8(x[r]->codes + half * 16);
            xl[r] = vld1q_s8(x[r]->codes + GROUP + half * 16);
        }
#define TWO_QUADS(j, next)                                                     \
    FOR(v, vecs) {                                                             \
        uint8x16_t both = vld1q_u8(w + j / 2 * PANEL * 4 + v * 16);            \
        int8x16_t first = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15))); \
        int8x16_t second = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));           \
        FOR(r, rows) {                                                         \
            high[r][v] = sdot_quad(high[r][v], first, xh[r], j);               \
            low[r][v] = sdot_quad(low[r][v], first, xl[r], j);                 \
            high[r][v] = sdot_quad(high[r][v], second, xh[r], next);           \
            low[r][v] = sdot_quad(low[r][v], second, xl[r], next);             \
        }                                                                      \
    }
        TWO_QUADS(0, 1) TWO_QUADS(2, 3)
#undef TWO_QUADS
    }
    FOR(r, rows)
        FOR(v, vecs) sums[r][v] = (vi)vaddq_s32(vshlq_n_s32(high[r][v], 8), low[r][v]);
}

/* The same straight from 6-bit codes, over the halves first .. first+halves-1. Codes stay in the upper six bits of their
 * bytes, and so the sums are four times too large until the planes are combined. One row and 16 outputs: 24 loads, 48
 * instructions to unpack, 64 sdot: 60 cycles at the least for 512 weights, whose 420 bytes take 57 from memory. */
INLINE void dot_sixes(const uint8_t *codes, int first, int halves, const x_group *const x[], int rows, int vec,
                      int vecs, vi sums[][PANEL_VECS]) {
    codes += vec * 16 + first * 3 * PANEL * 4;
    int32x4_t high[4][PANEL_VECS], low[4][PANEL_VECS];
    FOR(r, rows)
        FOR(v, vecs) high[r][v] = cleared(), low[r][v] = cleared();
    FOR(half, halves) {
        int8x16_t xh[4], xl[4];
        FOR(r, rows) {
            xh[r] = vld1q_s8(x[r]->codes + (first + half) * 16);
            xl[r] = vld1q_s8(x[r]->codes + GROUP + (first + half) * 16);
        }
        FOR(v, vecs) {
            const uint8_t *w = codes + half * 3 * PANEL * 4 + v * 16;
            uint8x16_t upper = vdupq_n_u8(0xfc);
            uint8x16_t a = vld1q_u8(w), b = vld1q_u8(w + PANEL * 4), c = vld1q_u8(w + 2 * PANEL * 4);
            uint8x16_t rest = vshlq_n_u8(vsliq_n_u8(vsliq_n_u8(c, b, 2), a, 4), 2);
#define ONE_QUAD(j, code)                                                                   \
    FOR(r, rows) {                                                                          \
        high[r][v] = sdot_quad(high[r][v], vreinterpretq_s8_u8(code), xh[r], j);            \
        low[r][v] = sdot_quad(low[r][v], vreinterpretq_s8_u8(code), xl[r], j);              \
    }
            ONE_QUAD(0, vandq_u8(a, upper))
            ONE_QUAD(1, vandq_u8(b, upper))
            ONE_QUAD(2, vandq_u8(c, upper))
            ONE_QUAD(3, rest)
#undef ONE_QUAD
        }
    }
    FOR(r, rows)
        FOR(v, vecs) sums[r][v] = (vi)vsraq_n_s32(vshlq_n_s32(high[r][v], 6), low[r][v], 2);
}

#else

INLINE void store_codes(const vi x[GROUP / LANES], x_group *group) {
    typedef int16_t narrow __attribute__((vector_size(2 * LANES)));
    FOR(i, GROUP / LANES) {
        narrow codes = __builtin_convertvector(__builtin_shuffle(x[i], MIDDLES_EXCHANGED), narrow);
        memcpy(group->codes + i * 2 * LANES, &codes, sizeof codes);
    }
}

/* acc + a.low * b.low + a.high * b.high in each 32-bit lane of 16-bit pairs. */
INLINE vi add_pairs(vi acc, vi a, vi b) {
#if LANES == 16 && defined(__AVX512VNNI__)
    return (vi)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif LANES == 16
    return acc + (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif LANES == 8
    return acc + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    return acc + (vi)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    return acc + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

INLINE vi splat_pair(const int8_t *p) {
    int32_t pair;
    memcpy(&pair, p, 4);
    return pair - (vi){0};
}

typedef int16_t vh __attribute__((vector_size(4 * LANES)));
typedef uint16_t vuh __attribute__((vector_size(4 * LANES)));

/* Per vector of 4 inputs: 3 shifts to spread bytes into pairs, then 2 multiplications and 2 additions a row. */
INLINE void dot_codes(const int8_t *codes, int first, int halves, const x_group *const x[], int rows, int vec, int vecs,
                      vi sums[][PANEL_VECS]) {
    FOR(r, rows)
        FOR(v, vecs) sums[r][v] = (vi){0};
    for (int q = first * 4; q < (first + halves) * 4; q++)
        FOR(v, vecs) {
            vh four = (vh)load_u32(codes + q * PANEL * 4 + (vec + v) * LANES * 4);
            vi even = (vi)((four << 8) >> 8), odd = (vi)(four >> 8);
            FOR(r, rows) {
                sums[r][v] = add_pairs(sums[r][v], even, splat_pair(x[r]->codes + q * 8));
                sums[r][v] = add_pairs(sums[r][v], odd, splat_pair(x[r]->codes + q * 8 + 4));
            }
        }
}

INLINE void dot_nibbles(const uint8_t *codes, const x_group *const x[], int rows, int vec, int vecs,
                        vi sums[][PANEL_VECS]) {
    FOR(r, rows)
        FOR(v, vecs) sums[r][v] = (vi){0};
    for (int q = 0; q < GROUP / 8; q++)
        FOR(v, vecs) {
            vuh eight = (vuh)load_u32(codes + q * PANEL * 4 + (vec + v) * LANES * 4);
            vi even = (vi)(eight & 15), odd = (vi)((eight >> 8) & 15);
            vi next_even = (vi)((eight >> 4) & 15), next_odd = (vi)(eight >> 12);
            FOR(r, rows) {
                sums[r][v] = add_pairs(sums[r][v], even, splat_pair(x[r]->codes + q * 16));
                sums[r][v] = add_pairs(sums[r][v], odd, splat_pair(x[r]->codes + q * 16 + 4));
                sums[r][v] = add_pairs(sums[r][v], next_even, splat_pair(x[r]->codes + q * 16 + 8));
                sums[r][v] = add_pairs(sums[r][v], next_odd, splat_pair(x[r]->codes + q * 16 + 12));
            }
        }
}

/* The shifts that spread bytes into pairs also leave out their lower two bits. */
INLINE void dot_sixes(const uint8_t *codes, int first, int halves, const x_group *const x[], int rows, int vec,
                      int vecs, vi sums[][PANEL_VECS]) {
    FOR(r, rows)
        FOR(v, vecs) sums[r][v] = (vi){0};
    for (int half = first; half < first + halves; half++)
        FOR(v, vecs) {
            vu quads[4];
            FOR(q, 3) quads[q] = load_u32(codes + (half * 3 + q) * PANEL * 4 + (vec + v) * LANES * 4);
            quads[3] = (quads[0] & 0x03030303) << 6 | (quads[1] & 0x03030303) << 4 | (quads[2] & 0x03030303) << 2;
            FOR(q, 4) {
                vi even = (vi)((vh)((vuh)quads[q] << 8) >> 10), odd = (vi)((vh)quads[q] >> 10);
                FOR(r, rows) {
                    const int8_t *pairs = x[r]->codes + (half * 4 + q) * 8;
                    sums[r][v] = add_pairs(sums[r][v], even, splat_pair(pairs));
                    sums[r][v] = add_pairs(sums[r][v], odd, splat_pair(pairs + 4));
                }
            }
        }
}

#endif
#endif
