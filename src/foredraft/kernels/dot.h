/* Exact integer dot products of activations (activations.h) with weight codes of 8, 6 or 4 bits, for one group of 32
 * inputs or half of one. All sums fit 32 bits, so the result is the same integer everywhere, for any number of rows; it
 * is given as a float, the nearest one.
 *
 * ARM multiplies signed bytes (sdot). x86 multiplies unsigned codes by signed activations (vpdpbusd, pmaddubsw): codes
 * below zero are raised by an offset, and the sum starts from minus what that adds, offset * (sum of the activations).
 * Two planes give two sums, (high << 8) + low. */
#ifndef FD_DOT_H
#define FD_DOT_H

#include "activations.h"

/* Whether many rows run in the tiles of linear_amx.h. */
#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__)
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif

#define MAX_ROWS (LANES == 16 ? 8 : 4) /* of a tile of vectors */

typedef vf dots_of_tile[MAX_ROWS][PANEL_VECS];

INLINE vf to_float(vi x) { return __builtin_convertvector(x, vf); }

#if defined(__aarch64__)

/* vdotq_laneq_s32, in words that keep the sum in its register; and what machines without it do instead. */
#if defined(__ARM_FEATURE_DOTPROD)
#define sdot_quad(acc, w, x, j)                                                     \
    ({                                                                              \
        int32x4_t sum_ = acc;                                                       \
        __asm__("sdot %0.4s, %1.16b, %2.4b[" #j "]" : "+w"(sum_) : "w"(w), "w"(x)); \
        sum_;                                                                       \
    })
#else
INLINE int32x4_t sdot(int32x4_t acc, int8x16_t w, int8x16_t x) {
    int16x8_t first = vmull_s8(vget_low_s8(w), vget_low_s8(x)), second = vmull_high_s8(w, x);
    return vaddq_s32(acc, vpaddq_s32(vpaddlq_s16(first), vpaddlq_s16(second)));
}
#define sdot_quad(acc, w, x, j) sdot(acc, w, vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(x), j)))
#endif

/* Zero. GCC 12 would copy a register of zeros (one instruction), while clearing with movi is free. */
INLINE int32x4_t cleared(void) {
    int32x4_t zero;
    __asm__ volatile("movi %0.4s, #0" : "=w"(zero)); /* volatile: one for each sum */
    return zero;
}

/* A conversion takes as long as four other instructions. Sums of one plane, which have less than 22 bits, do without:
 * they start from the bits of a float of 24 bits whose last place counts 1 (1/4 where sums are four times too large),
 * and so become those of that float plus the sum. */
static const float last_place_1[4] = {0x1.8p23f, 0x1.8p23f, 0x1.8p23f, 0x1.8p23f};
static const float last_place_4th[4] = {0x1.8p21f, 0x1.8p21f, 0x1.8p21f, 0x1.8p21f};

INLINE int32x4_t start_of_sum(int planes, const float *start) {
    return planes == 1 ? (int32x4_t)constant(start) : cleared();
}
INLINE vf end_of_sum(int32x4_t sum, const float *start) { return (vf)sum - start[0]; }

/* sums[row][vec] = the dot products of `rows` activation groups with vectors vec .. vec+vecs-1 of the codes, over the
 * halves first .. first+halves-1 (16 inputs each) of the group. The codes are bytes, whatever the scaling.
 *
 * The high plane comes first, its sums are shifted by 8 bits and the low plane is added on top: a single set of sums,
 * and one extra instruction for both planes. One plane of a 4x2 tile takes 64 sdot, 2 a cycle, and 24 loads that hide
 * behind them: 32 cycles on a Neoverse N1 at the least. */
INLINE void dot_codes(const int8_t *codes, enum scaling scaling, int first, int halves, const x_group *const x[],
                      int planes, int rows, int vec, int vecs, dots_of_tile sums) {
    (void)scaling;
    codes += vec * 16 + first * 4 * PANEL * 4;
    int32x4_t acc[4][PANEL_VECS];
    FOR(r, rows)
        FOR(v, vecs) acc[r][v] = start_of_sum(planes, last_place_1);
    FOR(turn, planes) {
        int plane = planes - 1 - turn;
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
        if (plane) {
            FOR(r, rows)
                FOR(v, vecs) acc[r][v] = vshlq_n_s32(acc[r][v], 8);
            __asm__ volatile("" ::: "memory"); /* load the codes again: keeping them would spill the sums */
        }
    }
    FOR(r, rows)
        FOR(v, vecs) sums[r][v] = planes == 1 ? end_of_sum(acc[r][v], last_place_1) : to_float((vi)acc[r][v]);
}

/* The same straight from 4-bit codes, for the few rows of plain decoding and short drafts: each code is unpacked once
 * and meets all planes. One row of one plane and 16 outputs: 16 loads, 32 instructions to unpack, 32 sdot: 32 cycles at
 * the least for 512 weights; the 320 bytes they lie in take 43 cycles from memory when two cores read. */
INLINE void dot_nibbles(const uint8_t *codes, int mx4, const x_group *const x[], int planes, int rows, int vec, int vecs,
                        dots_of_tile sums) {
    int8x16_t values = vld1q_s8(mx4_values); /* two more instructions look up what codes of mx4 stand for */
    codes += vec * 16;
    int32x4_t acc[2][4][PANEL_VECS];
    FOR(plane, planes)
        FOR(r, rows)
            FOR(v, vecs) acc[plane][r][v] = start_of_sum(planes, last_place_1);
    FOR(half, 2) {
        const uint8_t *w = codes + half * 2 * PANEL * 4;
        int8x16_t xs[2][4];
        FOR(plane, planes)
            FOR(r, rows) xs[plane][r] = vld1q_s8(x[r]->codes + plane * GROUP + half * 16);
#define TWO_QUADS(j, next)                                                                      \
    FOR(v, vecs) {                                                                              \
        uint8x16_t both = vld1q_u8(w + j / 2 * PANEL * 4 + v * 16);                             \
        int8x16_t one = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));                    \
        int8x16_t two = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));                               \
        if (mx4) one = vqtbl1q_s8(values, vreinterpretq_u8_s8(one));                            \
        if (mx4) two = vqtbl1q_s8(values, vreinterpretq_u8_s8(two));                            \
        FOR(r, rows)                                                                            \
            FOR(plane, planes) {                                                                \
                acc[plane][r][v] = sdot_quad(acc[plane][r][v], one, xs[plane][r], j);           \
                acc[plane][r][v] = sdot_quad(acc[plane][r][v], two, xs[plane][r], next);        \
            }                                                                                   \
    }
        TWO_QUADS(0, 1) TWO_QUADS(2, 3)
#undef TWO_QUADS
    }
    FOR(r, rows)
        FOR(v, vecs)
            sums[r][v] = planes == 1 ? end_of_sum(acc[0][r][v], last_place_1)
                                     : to_float((vi)vaddq_s32(vshlq_n_s32(acc[1][r][v], 8), acc[0][r][v]));
}

/* The same straight from 6-bit codes, over the halves first .. first+halves-1. Codes stay in the upper six bits of their
 * bytes, and so the sums are four times too large until the planes are combined. One row of one plane and 16 outputs: 24
 * loads, 48 instructions to unpack, 32 sdot: 40 cycles at the least for 512 weights, whose 420 bytes take 57 from
 * memory. */
INLINE void dot_sixes(const uint8_t *codes, enum scaling scaling, int first, int halves, const x_group *const x[],
                      int planes, int rows, int vec, int vecs, dots_of_tile sums) {
    (void)scaling;
    codes += vec * 16 + first * 3 * PANEL * 4;
    int32x4_t acc[2][4][PANEL_VECS];
    FOR(plane, planes)
        FOR(r, rows)
            FOR(v, vecs) acc[plane][r][v] = start_of_sum(planes, last_place_4th);
    FOR(half, halves) {
        int8x16_t xs[2][4];
        FOR(plane, planes)
            FOR(r, rows) xs[plane][r] = vld1q_s8(x[r]->codes + plane * GROUP + (first + half) * 16);
        FOR(v, vecs) {
            const uint8_t *w = codes + half * 3 * PANEL * 4 + v * 16;
            uint8x16_t upper = vdupq_n_u8(0xfc);
            uint8x16_t a = vld1q_u8(w), b = vld1q_u8(w + PANEL * 4), c = vld1q_u8(w + 2 * PANEL * 4);
            uint8x16_t rest = vsliq_n_u8(vsliq_n_u8(vshlq_n_u8(c, 2), b, 4), a, 6);
#define ONE_QUAD(j, code)                                                                                       \
    FOR(r, rows)                                                                                                \
        FOR(plane, planes)                                                                                      \
            acc[plane][r][v] = sdot_quad(acc[plane][r][v], vreinterpretq_s8_u8(code), xs[plane][r], j);
            ONE_QUAD(0, vandq_u8(a, upper))
            ONE_QUAD(1, vandq_u8(b, upper))
            ONE_QUAD(2, vandq_u8(c, upper))
            ONE_QUAD(3, rest)
#undef ONE_QUAD
        }
    }
    FOR(r, rows)
        FOR(v, vecs)
            sums[r][v] = planes == 1 ? end_of_sum(acc[0][r][v], last_place_4th)
                                     : to_float((vi)vsraq_n_s32(vshlq_n_s32(acc[1][r][v], 6), acc[0][r][v], 2));
}

#else

/* The offset of a kind's codes, as a shift and as what makes unsigned codes of signed ones; and the largest of them. */
INLINE int offset_shift(enum scaling scaling) { return scaling == SCALE ? 7 : 5; }
INLINE uint32_t offset_bytes(enum scaling scaling) {
    return scaling == SCALE ? 0x80808080 : scaling == HALVES ? 0x20202020 : 0;
}
INLINE int largest_code(enum scaling scaling) { return scaling == SCALE ? 255 : scaling == HALVES ? 63 : 31; }

/* The sums of a tile on their way. `pairs` are sums of 16 bits where the machine makes those first. */
typedef struct {
    vi acc[2][MAX_ROWS][PANEL_VECS], pairs[2][MAX_ROWS][PANEL_VECS];
} tile_sums;

INLINE void start_sums(tile_sums *sums, enum scaling scaling, int first, int halves, const x_group *const x[],
                       int planes, int rows, int vecs) {
    FOR(r, rows)
        FOR(v, vecs) {
            int32_t negated = halves == 2 ? x[r]->negated[0] + x[r]->negated[1] : x[r]->negated[first];
            sums->acc[0][r][v] = (vi){0};
            if (scaling != MINIMUM) sums->acc[0][r][v] = ((int32_t)((uint32_t)negated << offset_shift(scaling))) - (vi){0};
            if (planes == 2) sums->acc[1][r][v] = (vi){0};
        }
}

/* sums += four inputs of unsigned codes times x, in each lane. Machines without a dot product of four bytes add
 * products of two in 16 bits, as many as surely fit (`turn` counts them, from 0 to turns-1), and then those in 32. */
INLINE void add_quads(vi *acc, vi *pairs, vu codes, const int8_t *x, int most, int turn, int turns) {
    int32_t four;
    memcpy(&four, x, 4);
    vi xs = four - (vi){0};
    (void)pairs, (void)most, (void)turn, (void)turns;
#if LANES == 16 && defined(__AVX512VNNI__)
    *acc = (vi)_mm512_dpbusd_epi32((__m512i)*acc, (__m512i)codes, (__m512i)xs);
#elif LANES == 8 && defined(__AVXVNNI__)
    *acc = (vi)_mm256_dpbusd_avx_epi32((__m256i)*acc, (__m256i)codes, (__m256i)xs);
#else
#if LANES == 16
#define MULTIPLY_BYTES(a, b) (vi) _mm512_maddubs_epi16((__m512i)(a), (__m512i)(b))
#define ADD_WORDS(a, b) (vi) _mm512_add_epi16((__m512i)(a), (__m512i)(b))
#define ADD_PAIRS(a) (vi) _mm512_madd_epi16((__m512i)(a), _mm512_set1_epi16(1))
#elif LANES == 8
#define MULTIPLY_BYTES(a, b) (vi) _mm256_maddubs_epi16((__m256i)(a), (__m256i)(b))
#define ADD_WORDS(a, b) (vi) _mm256_add_epi16((__m256i)(a), (__m256i)(b))
#define ADD_PAIRS(a) (vi) _mm256_madd_epi16((__m256i)(a), _mm256_set1_epi16(1))
#else
#define MULTIPLY_BYTES(a, b) (vi) _mm_maddubs_epi16((__m128i)(a), (__m128i)(b))
#define ADD_WORDS(a, b) (vi) _mm_add_epi16((__m128i)(a), (__m128i)(b))
#define ADD_PAIRS(a) (vi) _mm_madd_epi16((__m128i)(a), _mm_set1_epi16(1))
#endif
    if (most > 127) { /* two products may not fit: one at a time */
        *acc += ADD_PAIRS(MULTIPLY_BYTES(codes & 0x00ff00ff, xs));
        *acc += ADD_PAIRS(MULTIPLY_BYTES(codes & 0xff00ff00, xs));
    } else {
        int fitting = 32767 / (2 * 128 * most);
        vi products = MULTIPLY_BYTES(codes, xs);
        *pairs = turn % fitting ? ADD_WORDS(*pairs, products) : products;
        if (turn % fitting == fitting - 1 || turn == turns - 1) *acc += ADD_PAIRS(*pairs);
    }
#undef MULTIPLY_BYTES
#undef ADD_WORDS
#undef ADD_PAIRS
#endif
}

/* Quad q of the group (inputs 4q .. 4q+3), the turn-th of `turns`, for all rows of vector v. */
INLINE void add_quad(tile_sums *sums, vu codes, int most, int q, int turn, int turns, const x_group *const x[],
                     int planes, int rows, int v) {
    FOR(r, rows)
        FOR(plane, planes)
            add_quads(&sums->acc[plane][r][v], &sums->pairs[plane][r][v], codes, x[r]->codes + plane * GROUP + 4 * q, most,
                      turn, turns);
}

INLINE void combine_planes(const tile_sums *sums, int planes, int rows, int vecs, dots_of_tile out) {
    FOR(r, rows)
        FOR(v, vecs)
            out[r][v] = to_float(planes == 1 ? sums->acc[0][r][v]
                                             : (vi)((vu)sums->acc[1][r][v] << 8) + sums->acc[0][r][v]);
}

/* Per vector of 4 inputs: a load and an addition, then one vpdpbusd a row and plane. */
INLINE void dot_codes(const int8_t *codes, enum scaling scaling, int first, int halves, const x_group *const x[],
                      int planes, int rows, int vec, int vecs, dots_of_tile out) {
    tile_sums sums;
    start_sums(&sums, scaling, first, halves, x, planes, rows, vecs);
    FOR(t, halves * 4)
        FOR(v, vecs) {
            vu quad = load_u32(codes + (first * 4 + t) * PANEL * 4 + (vec + v) * LANES * 4);
            quad ^= offset_bytes(scaling);
            if (scaling == HALVES) quad &= 0x3f3f3f3f; /* codes of -32 .. 31 */
            add_quad(&sums, quad, largest_code(scaling), first * 4 + t, t, halves * 4, x, planes, rows, v);
        }
    combine_planes(&sums, planes, rows, vecs, out);
}

INLINE void dot_nibbles(const uint8_t *codes, int mx4, const x_group *const x[], int planes, int rows, int vec, int vecs,
                        dots_of_tile out) {
    enum scaling scaling = mx4 ? SCALE : MINIMUM;
    int most = mx4 ? largest_code(SCALE) : 15;
    tile_sums sums;
    start_sums(&sums, scaling, 0, 2, x, planes, rows, vecs);
    FOR(p, GROUP / 8)
        FOR(v, vecs) {
            vu both = load_u32(codes + p * PANEL * 4 + (vec + v) * LANES * 4);
            vu one = both & 0x0f0f0f0f, two = (both >> 4) & 0x0f0f0f0f;
            if (mx4) one = mx4_quad(one) ^ offset_bytes(SCALE), two = mx4_quad(two) ^ offset_bytes(SCALE);
            add_quad(&sums, one, most, 2 * p, 2 * p, 8, x, planes, rows, v);
            add_quad(&sums, two, most, 2 * p + 1, 2 * p + 1, 8, x, planes, rows, v);
        }
    combine_planes(&sums, planes, rows, vecs, out);
}

INLINE void dot_sixes(const uint8_t *codes, enum scaling scaling, int first, int halves, const x_group *const x[],
                      int planes, int rows, int vec, int vecs, dots_of_tile out) {
    tile_sums sums;
    start_sums(&sums, scaling, first, halves, x, planes, rows, vecs);
    FOR(half, halves)
        FOR(v, vecs) {
            vu quads[4];
            FOR(q, 3) quads[q] = load_u32(codes + ((first + half) * 3 + q) * PANEL * 4 + (vec + v) * LANES * 4);
            quads[3] = (quads[0] & 0x03030303) << 4 | (quads[1] & 0x03030303) << 2 | (quads[2] & 0x03030303);
            FOR(q, 3) quads[q] = (quads[q] >> 2) & 0x3f3f3f3f;
            FOR(q, 4)
                add_quad(&sums, quads[q] ^ offset_bytes(scaling), 63, (first + half) * 4 + q, half * 4 + q, halves * 4,
                         x, planes, rows, v);
        }
    combine_planes(&sums, planes, rows, vecs, out);
}

#endif
#endif
