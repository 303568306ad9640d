/* The linear layers by themselves, without Python: for machines that are only emulated here (`make emulate`).
 *
 * For every kind of weight and of activations: the result against float64 over the unpacked weights and the activations
 * as they are quantised, and every number of rows against each row alone, bit for bit. Prints what failed. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../src/foredraft/kernels/foredraft.h"

#define OUTPUTS 37
#define INPUTS 512
#define ROWS 35

static uint64_t state = 7;
static uint32_t random32(void) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33);
}
static double uniform(void) { return random32() / 2147483648.0 * 2 - 1; }

/* A positive float16 between 2**-6 and 2**-5. */
static uint16_t small_half(void) { return (uint16_t)(0x2400 + random32() % 1024); }

static void *packed_weight(int kind, fd_weight *weight) {
    static uint8_t codes[OUTPUTS * INPUTS];
    static float floats[OUTPUTS * INPUTS];
    static uint16_t halves[OUTPUTS * INPUTS], block_scales[OUTPUTS * INPUTS / 256], block_minimums[OUTPUTS * INPUTS / 256];
    static uint16_t scales[OUTPUTS * INPUTS / 16], minimums[OUTPUTS * INPUTS / 16]; /* or bytes of K kinds */
    int is_k = kind == FD_Q6 || kind == FD_Q5K || kind == FD_Q4K;
    int limit = kind == FD_Q8 ? 256 : kind == FD_Q6 ? 64 : kind == FD_Q4 || kind == FD_Q4K || kind == FD_MX4 ? 16 : 32;
    for (int i = 0; i < OUTPUTS * INPUTS; i++) {
        floats[i] = (float)uniform();
        halves[i] = (uint16_t)(0x3f80 + random32() % 64 + (random32() & 1 ? 0x8000 : 0));
        int code = (int)(random32() % (uint32_t)limit);
        codes[i] = (uint8_t)(kind == FD_Q8 || kind == FD_Q6 ? code - limit / 2 : code);
    }
    for (int i = 0; i < OUTPUTS * INPUTS / 16; i++) {
        scales[i] = is_k ? (uint16_t)(random32() & 0x3f3f) : small_half();
        if (kind == FD_MX4) scales[i] = (uint16_t)((random32() & 0x0303) | 0x7878); /* two exponents */
        minimums[i] = is_k ? (uint16_t)(random32() & 0x3f3f) : (uint16_t)(small_half() | 0x8000);
    }
    for (int i = 0; i < OUTPUTS * INPUTS / 256; i++) {
        block_scales[i] = small_half();
        block_minimums[i] = (uint16_t)(small_half() | 0x8000);
    }
    fd_plain plain = {codes, scales, minimums, block_scales, block_minimums};
    if (kind == FD_F32) plain.values = floats;
    if (kind == FD_BF16) plain.values = halves;
    int64_t bytes = fd_packed_bytes(kind, OUTPUTS, INPUTS);
    void *memory = aligned_alloc(64, (size_t)(bytes + 63) / 64 * 64);
    if (fd_pack(kind, OUTPUTS, INPUTS, &plain, memory)) exit(2);
    *weight = (fd_weight){memory, OUTPUTS, INPUTS, kind, 1};
    return memory;
}

/* x as a quantised weight meets it. */
static void quantise(const float *x, int planes, double *out) {
    for (int g = 0; g < INPUTS; g += 32) {
        float largest = 0;
        for (int i = g; i < g + 32; i++) largest = fmaxf(largest, fabsf(x[i]));
        float scale = largest / 127.0f, inverse = 127.0f / largest;
        if (planes == 2) {
            scale = ldexpf(1.0f, ilogbf(largest) - 14);
            if (nearbyintf(largest / scale) > 32639) scale *= 2;
            inverse = 1 / scale;
        }
        for (int i = g; i < g + 32; i++) out[i] = (double)scale * nearbyintf(x[i] * inverse);
    }
}

static int check(int kind, int planes) {
    static float x[ROWS * INPUTS], y[ROWS * OUTPUTS], one[OUTPUTS], dense[OUTPUTS * INPUTS];
    static double met[INPUTS];
    int64_t ids[OUTPUTS];
    fd_weight weight;
    void *memory = packed_weight(kind, &weight);
    weight.planes = planes;
    for (int i = 0; i < OUTPUTS; i++) ids[i] = i;
    if (fd_embed(&weight, 0, OUTPUTS, ids, OUTPUTS, dense)) exit(2);
    for (int i = 0; i < ROWS * INPUTS; i++) x[i] = (float)(uniform() * exp(4 * uniform()));
    double worst = 0;
    int different = 0;
    for (int rows = 1; rows <= ROWS; rows++) {
        if (fd_linear(&weight, x, rows, NULL, y, OUTPUTS)) exit(2);
        for (int row = 0; row < rows; row++) {
            if (fd_linear(&weight, x + row * INPUTS, 1, NULL, one, OUTPUTS)) exit(2);
            different += memcmp(one, y + row * OUTPUTS, sizeof one) != 0;
        }
    }
    for (int row = 0; row < ROWS; row++) {
        if (kind >= FD_Q8) quantise(x + row * INPUTS, planes, met);
        else
            for (int i = 0; i < INPUTS; i++) met[i] = x[row * INPUTS + i];
        for (int o = 0; o < OUTPUTS; o++) {
            double right = 0, size = 0;
            for (int i = 0; i < INPUTS; i++) right += met[i] * dense[o * INPUTS + i], size += fabs(met[i] * dense[o * INPUTS + i]);
            worst = fmax(worst, fabs(y[row * OUTPUTS + o] - right) / size);
        }
    }
    free(memory);
    int failed = different || worst > 1e-5;
    printf("kind %d, %d bits: error %.1e, %d rows differ%s\n", kind, 8 * planes, worst, different, failed ? "  FAILED" : "");
    return failed;
}

int main(void) {
    if (fd_ready()) return puts("the system refuses these instructions"), 0;
    int failed = 0;
    for (int threads = 1; threads <= 3; threads += 2) {
        fd_set_threads(threads);
        for (int kind = FD_F32; kind <= FD_MX4; kind++)
            for (int planes = 1; planes <= (kind < FD_Q8 ? 1 : 2); planes++) failed |= check(kind, planes);
    }
    return failed;
}
