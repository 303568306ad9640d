/* The vector operations that the kernels are written in: `vf` holds LANES floats, whatever the machine calls them.
 *
 * Plain arithmetic on vf, vi and vu is GCC vector arithmetic; only what the compiler cannot be trusted to find (fused
 * multiply-add, dot products of bytes, horizontal sums) is spelled in intrinsics, and only in this file, layout.h and
 * dot.h. */
#ifndef FD_SIMD_H
#define FD_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__aarch64__)
#include <arm_neon.h>
#define LANES 4
#elif defined(__AVX512F__)
#include <immintrin.h>
#define LANES 16
#elif defined(__AVX2__)
#include <immintrin.h>
#define LANES 8
#else
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#define LANES 4
#endif

/* Tiles of TILE_ROWS rows by TILE_VECS vectors fill the registers without spilling: 8x2 of 32 (NEON), 8x1 of 32
 * (AVX512), 4x2 of 16 (AVX2, SSE). */
#if defined(__aarch64__) || LANES == 16
#define REGISTERS 32
#define TILE_ROWS 8
#else
#define REGISTERS 16
#define TILE_ROWS 4
#endif
#define PANEL 16                    /* outputs that are packed side by side */
#define PANEL_VECS (PANEL / LANES)
#define TILE_VECS (PANEL_VECS < 2 ? PANEL_VECS : 2)

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));

/* INLINE functions take literal sizes, unroll and vanish; a KERNEL is one such size compiled by itself, which leaves
 * the compiler a simple enough task to keep everything in registers. */
#define INLINE static inline __attribute__((always_inline))
#define KERNEL static __attribute__((noinline))
/* Loops over literal sizes, unrolled. */
#define FOR(i, count) _Pragma("GCC unroll 16") for (int i = 0; i < (count); i++)
#define FOR_STEP(i, end, step) _Pragma("GCC unroll 16") for (int i = 0; i < (end); i += (step))

INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

INLINE vf load(const void *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE vu load_u32(const void *p) {
    vu v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store(float *p, vf v) { memcpy(p, &v, sizeof v); }

INLINE vf splat(float x) { return x - (vf){0}; }

/* The next four vectors of a row that has `left` more floats; -infinity behind its end. */
INLINE void load_four(vf v[4], const float *x, int64_t left) {
    FOR(u, 4) {
        v[u] = splat(-INFINITY);
        if (left >= (u + 1) * LANES) v[u] = load(x + u * LANES);
        else if (left > u * LANES) memcpy(&v[u], x + u * LANES, 4 * (size_t)(left - u * LANES));
    }
}

/* acc + a * b, rounded once where the machine can. */
INLINE vf muladd(vf acc, vf a, vf b) {
#if defined(__aarch64__)
    return vfmaq_f32(acc, a, b);
#elif LANES == 16
    return _mm512_fmadd_ps(a, b, acc);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, acc);
#else
    return acc + a * b;
#endif
}

/* LANES floats, in a register of their own that a multiply-add may overwrite. NEON has no other kind of multiply-add: GCC
 * would keep one copy and move it each time, in the units that multiply; loading it again leaves those alone. */
INLINE vf load_again(const float *p) {
#if defined(__aarch64__)
    vf v;
    __asm__ volatile("ldr %q0, %1" : "=w"(v) : "m"(*(const float(*)[4])p));
    return v;
#else
    return load(p);
#endif
}

/* A constant for the same use. */
INLINE vf constant(const float *four) {
#if defined(__aarch64__)
    return load_again(four);
#else
    return splat(four[0]);
#endif
}

/* Stays in a register. GCC would rather read it again for each multiply-add, and loads are scarce on AVX512. */
INLINE vf held(vf v) {
#if LANES == 16
    __asm__("" : "+v"(v));
#endif
    return v;
}

/* Four neighbouring floats of x, of which muladd_quad multiplies a vector by the j-th (j a literal). NEON multiplies by
 * a lane of a register; the others broadcast from memory for free. The assembly is what vfmaq_laneq_f32 stands for, but
 * it keeps the sum in its register: GCC 12 moves sums about, which costs 20 % of the multiply-adds. */
#if defined(__aarch64__)
typedef float32x4_t quad;
INLINE quad load_quad(const float *p) { return vld1q_f32(p); }
#define muladd_quad(acc, w, x, j)                                                 \
    ({                                                                            \
        vf sum_ = acc;                                                            \
        __asm__("fmla %0.4s, %1.4s, %2.s[" #j "]" : "+w"(sum_) : "w"(w), "w"(x)); \
        sum_;                                                                     \
    })
#define multiply_quad(w, x, j)                                                        \
    ({                                                                                \
        vf product_;                                                                  \
        __asm__("fmul %0.4s, %1.4s, %2.s[" #j "]" : "=w"(product_) : "w"(w), "w"(x)); \
        product_;                                                                     \
    })
#else
typedef const float *quad;
INLINE quad load_quad(const float *p) { return p; }
#define muladd_quad(acc, w, x, j) muladd(acc, w, splat((x)[j]))
#define multiply_quad(w, x, j) ((w) * (x)[j])
#endif

INLINE vf pick(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }

/* The larger of each lane, b where they are not ordered: what x86 has one instruction for. */
INLINE vf vmax(vf a, vf b) {
#if LANES == 16
    return _mm512_max_ps(a, b);
#elif LANES == 8
    return _mm256_max_ps(a, b);
#else
    return pick(a > b, a, b);
#endif
}

/* Every lane's partner, `distance` lanes (a literal power of two below LANES) away from it, and lanes with the middle
 * two of every four exchanged: masks for __builtin_shuffle. */
#define EACH_LANE_4(f, n) f(0, n), f(1, n), f(2, n), f(3, n)
#define EACH_LANE_8(f, n) EACH_LANE_4(f, n), f(4, n), f(5, n), f(6, n), f(7, n)
#define EACH_LANE_16(f, n) EACH_LANE_8(f, n), f(8, n), f(9, n), f(10, n), f(11, n), f(12, n), f(13, n), f(14, n), f(15, n)
#if LANES == 16
#define EACH_LANE EACH_LANE_16
#elif LANES == 8
#define EACH_LANE EACH_LANE_8
#else
#define EACH_LANE EACH_LANE_4
#endif
#define PARTNER_OF(lane, distance) (lane) ^ (distance)
#define PARTNERS(distance) ((vi){EACH_LANE(PARTNER_OF, distance)})
#define MIDDLE_OF(lane, unused) (lane) / 4 * 4 + (lane) % 2 * 2 + (lane) % 4 / 2
#define MIDDLES_EXCHANGED ((vi){EACH_LANE(MIDDLE_OF, 0)})

/* All lanes as one, in a tree: neighbours first, always in this order. `meet` is an expression of `lanes` and
 * `partners`. */
#define MEET(meet, distance)                                         \
    if (LANES > (distance)) {                                        \
        partners = __builtin_shuffle(lanes, PARTNERS(distance));     \
        lanes = meet;                                                \
    }
#define TREE(type, v, meet)                                          \
    ({                                                               \
        type lanes = v, partners;                                    \
        MEET(meet, 1) MEET(meet, 2) MEET(meet, 4) MEET(meet, 8)      \
        lanes[0];                                                    \
    })

INLINE float sum_lanes(vf v) {
#if defined(__aarch64__)
    return vaddvq_f32(v);
#else
    return TREE(vf, v, lanes + partners);
#endif
}

INLINE float max_lanes(vf v) {
#if defined(__aarch64__)
    return vmaxvq_f32(v);
#else
    return TREE(vf, v, vmax(lanes, partners));
#endif
}

/* The larger of each lane of numbers below 2**31. */
INLINE vu max_u32(vu a, vu b) {
#if defined(__aarch64__)
    return (vu)vmaxq_u32((uint32x4_t)a, (uint32x4_t)b);
#elif LANES == 16
    return (vu)_mm512_max_epu32((__m512i)a, (__m512i)b);
#elif LANES == 8
    return (vu)_mm256_max_epu32((__m256i)a, (__m256i)b);
#else
    return (a & (vu)(a > b)) | (b & ~(vu)(a > b));
#endif
}

/* The largest lane of numbers below 2**31. */
INLINE uint32_t max_lanes_u32(vu v) {
#if defined(__aarch64__)
    return vmaxvq_u32((uint32x4_t)v);
#else
    return TREE(vu, v, max_u32(lanes, partners));
#endif
}

/* The sums of all lanes of a and of b, modulo 2**32. */
INLINE void sum_two_i32(vi a, vi b, int32_t out[2]) {
#if defined(__aarch64__)
    out[0] = vaddvq_s32((int32x4_t)a);
    out[1] = vaddvq_s32((int32x4_t)b);
#elif LANES == 16
    __m512i low = _mm512_unpacklo_epi32((__m512i)a, (__m512i)b), high = _mm512_unpackhi_epi32((__m512i)a, (__m512i)b);
    __m512i both = _mm512_add_epi32(low, high);
    __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64(both, 1));
    __m128i rest = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    _mm_storel_epi64((__m128i *)out, _mm_add_epi32(rest, _mm_shuffle_epi32(rest, 0x4e)));
#else
    out[0] = (int32_t)TREE(vu, (vu)a, lanes + partners);
    out[1] = (int32_t)TREE(vu, (vu)b, lanes + partners);
#endif
}

/* sum_lanes of many vectors at once, with fewer shuffles and additions: of 16 vectors 30 and 15, not 64 and 64. */
#if LANES == 16
#define PAIRS(a, b) (_mm512_shuffle_ps(a, b, 0x88) + _mm512_shuffle_ps(a, b, 0xdd))
#define QUARTERS(a, b) (_mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd))
/* The first half: lane 4q + i is the sum of lanes 4q .. 4q+3 of v[i]. */
INLINE vf sum_fours(const vf v[4]) { return PAIRS(PAIRS(v[0], v[1]), PAIRS(v[2], v[3])); }
/* The other half, for 16 vectors at once: lane 4n + i is the sum of those lanes of fours[n] that are of vector i. */
INLINE vf sum_quarters(const vf fours[4]) {
    return QUARTERS(QUARTERS(fours[0], fours[1]), QUARTERS(fours[2], fours[3]));
}
#undef QUARTERS
#else
/* out[i] = sum_lanes(v[i]) of four vectors. */
INLINE void sum_lanes4(const vf v[4], float *out) {
#if defined(__aarch64__)
    vst1q_f32(out, vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3])));
#elif LANES == 8
#define PAIRS(a, b) (_mm256_shuffle_ps(a, b, 0x88) + _mm256_shuffle_ps(a, b, 0xdd))
    __m256 halves = PAIRS(PAIRS(v[0], v[1]), PAIRS(v[2], v[3]));
    _mm_storeu_ps(out, _mm256_castps256_ps128(halves) + _mm256_extractf128_ps(halves, 1));
#else
    for (int i = 0; i < 4; i++) out[i] = sum_lanes(v[i]);
#endif
}
#endif
#undef PAIRS

/* x[i] = e**x[i] to 2 units in the last place; 0 below -87.3, infinity above 88.3. Polynomial of Cephes' expf.
 *
 * Each step waits for the one before it, some 50 cycles in all, so several vectors go side by side (`count` and
 * `negative`, which says that no x is above 0, are literals at every call): 23 instructions a vector, 2 a cycle. */
INLINE void vexp_all(vf *x, int count, int negative) {
    const float magic = 12582912.0f; /* 1.5 * 2**23: adding it rounds to an integer, kept in the low mantissa bits */
#define FOUR(x) {x, x, x, x}
    static const float terms[6][4] = {FOUR(1.3981999507e-3f), FOUR(8.3334519073e-3f), FOUR(4.1665795894e-2f),
                                      FOUR(1.6666665459e-1f), FOUR(5.0000001201e-1f), FOUR(12582912.0f)};
#undef FOUR
    vf shifted[4], n[4], r[4], p[4];
    FOR(i, count) r[i] = negative ? x[i] : pick(x[i] > 89.0f, splat(89.0f), x[i]); /* 2**128 is infinity */
    FOR(i, count) shifted[i] = muladd(constant(terms[5]), r[i], splat(1.44269504f));
    FOR(i, count) n[i] = shifted[i] - magic;
    FOR(i, count) r[i] = muladd(r[i], n[i], splat(-0.693359375f));
    FOR(i, count) r[i] = muladd(r[i], n[i], splat(2.12194440e-4f));
    FOR(i, count) p[i] = splat(1.9875691500e-4f);
    FOR(t, 5)
        FOR(i, count) p[i] = muladd(constant(terms[t]), p[i], r[i]);
    FOR(i, count) p[i] = muladd(r[i] + 1.0f, p[i], r[i] * r[i]);
    FOR(i, count) p[i] *= (vf)(((vi)shifted[i] - (vi)splat(magic) + 127) << 23);
    FOR(i, count) x[i] = pick(x[i] < -87.3f, splat(0.0f), p[i]);
}

INLINE vf vexp(vf x) {
    vexp_all(&x, 1, 0);
    return x;
}

/* A lane of two bfloat16 (an even and an odd input) to floats. NEON's trn1 does what a shift by 16 does, on either
 * unit, and trn2 does what a mask does, without a register for the mask. */
INLINE vf even_bf16(vu pair) {
#if defined(__aarch64__)
    return (vf)vtrn1q_u16(vdupq_n_u16(0), (uint16x8_t)pair);
#else
    return (vf)(pair << 16);
#endif
}
INLINE vf odd_bf16(vu pair) {
#if defined(__aarch64__)
    return (vf)vtrn2q_u16(vdupq_n_u16(0), (uint16x8_t)pair);
#else
    return (vf)(pair & 0xffff0000u);
#endif
}

INLINE float float_of_bits(uint32_t bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

/* A bfloat16 is the upper half of a float. */
INLINE float widen_bf16(uint16_t x) { return float_of_bits((uint32_t)x << 16); }

/* LANES neighbouring bfloat16. */
INLINE vf load_bf16(const uint16_t *p) {
#if defined(__aarch64__)
    return (vf)vzip1q_u16(vdupq_n_u16(0), vcombine_u16(vld1_u16(p), vdup_n_u16(0)));
#elif LANES == 16
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif LANES == 8
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    float four[LANES];
    for (int i = 0; i < LANES; i++) four[i] = widen_bf16(p[i]);
    return load(four);
#endif
}

/* A float16 as a float: shifted to the place of a float's bits it is too small by 2**112, also where it is subnormal. */
INLINE float widen_half(uint16_t x) {
    uint32_t sign = (uint32_t)(x & 0x8000) << 16, magnitude = (uint32_t)(x & 0x7fff) << 13;
    if (magnitude >= 0x0f800000) return float_of_bits(sign | 0x7f800000 | magnitude); /* infinity and NaN */
    return float_of_bits(sign | magnitude) * 0x1p112f;
}

/* LANES neighbouring float16. */
INLINE vf load_halves(const void *p) {
#if defined(__aarch64__)
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p)));
#elif LANES == 16
    return _mm512_cvtph_ps(_mm256_loadu_si256(p));
#elif LANES == 8
    return _mm256_cvtph_ps(_mm_loadu_si128(p));
#else
    uint16_t halves[LANES];
    memcpy(halves, p, sizeof halves);
    vf v;
    for (int i = 0; i < LANES; i++) v[i] = widen_half(halves[i]);
    return v;
#endif
}

/* The upper half of each lane, side by side. */
INLINE void store_upper_halves(uint16_t *p, vu v) {
#if LANES == 16
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16((__m512i)(v >> 16)));
#else
    for (int i = 0; i < LANES; i++) p[i] = (uint16_t)(v[i] >> 16);
#endif
}

/* The low byte of each lane, side by side. GCC 12 takes a conversion of vectors apart, lane by lane. */
INLINE void store_low_bytes(int8_t *p, vi v) {
#if LANES == 16
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)v));
#elif LANES == 8
    __m256i four = _mm256_shuffle_epi8((__m256i)v, _mm256_set1_epi32(0x0c080400));
    _mm_storel_epi64((__m128i *)p, _mm_unpacklo_epi32(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1)));
#else
    for (int i = 0; i < LANES; i++) p[i] = (int8_t)v[i];
#endif
}

/* To the nearest bfloat16, ties to even; NaN stays NaN. */
INLINE uint16_t round_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? (uint16_t)((bits >> 16) | 0x40) : (uint16_t)rounded;
}

#endif
