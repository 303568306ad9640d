/* Drawing a token: argmax of logit + temperature * gumbel(key, id) over the logits that reach a floor. The same bits as
 * sampling/draw.py: the same exactly rounded operations in the same order, which -ffp-contract=off leaves alone.
 *
 * Every candidate is hashed, but logarithms are computed for few. Since -log(u) >= 1 - u, a uniform whose complement
 * begins with n zero bits has a variate of at most (n + 1) * log(2). So for each n there is a logit below which the
 * best score so far is out of reach; the floor is part of the same table. */
#include "foredraft.h"
#include "block_max.h"

#include <math.h>

#define LOG_TERMS 12
#define NOISE_BITS 52

INLINE uint64_t hash(uint64_t key, uint64_t id) {
    uint64_t z = id * 0x9E3779B97F4A7C15u + key;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* The logarithm of sampling/noise.py, operation by operation. */
static double exact_log(double x) {
    int exponent;
    double mantissa = frexp(x, &exponent);
    if (mantissa < 0x1.6a09e667f3bcdp-1) { /* sqrt(0.5) */
        mantissa = mantissa * 2;
        exponent = exponent - 1;
    }
    double s = (mantissa - 1) / (mantissa + 1), square = s * s, series = 1.0 / (2 * LOG_TERMS + 1);
    for (int term = LOG_TERMS - 1; term >= 0; term--) series = series * square + 1.0 / (2 * term + 1);
    return exponent * 0x1.62e42fefa39efp-1 + series * (s * 2); /* log(2) */
}

static double gumbel(uint64_t noise) {
    double uniform = ((double)(noise >> (64 - NOISE_BITS)) + 0.5) * 0x1p-52;
    return -exact_log(-exact_log(uniform));
}

typedef struct {
    double temperature;
    float floor;
    double best;
    int64_t token;
    float needed[NOISE_BITS + 1]; /* by leading zeros of the uniform's complement: the lowest logit that may win yet */
} race;

/* Rounding never rules a winner out: the slack is far above all errors, and so is the step to the next lower float. */
static void raise_bar(race *race) {
    double slack = 1e-9 * (fabs(race->best) + race->temperature);
    for (int n = 0; n <= NOISE_BITS; n++) {
        double least = race->best - race->temperature * (n + 1) * 0.69314718056 - slack;
        float needed = least > race->floor ? nextafterf((float)least, -INFINITY) : race->floor;
        race->needed[n] = needed > race->floor ? needed : race->floor;
    }
}

/* By itself: inside the loop over all tokens it would take the loop's registers. */
KERNEL void enter(race *race, float logit, int64_t id, uint64_t noise) {
    double score = (double)logit + race->temperature * gumbel(noise);
    if (score < race->best || (score == race->best && id > race->token)) return;
    race->best = score;
    race->token = id;
    raise_bar(race);
}

/* The lowest place of the largest logit. */
static int64_t favourite(const float *logits, int64_t vocab) {
    float highest = -INFINITY;
    int64_t place = 0;
    for (int64_t first = 0; first < vocab; first += MAX_BLOCK) {
        float here = block_max(logits + first, vocab - first < MAX_BLOCK ? vocab - first : MAX_BLOCK);
        if (here > highest) highest = here, place = first;
    }
    while (place < vocab - 1 && logits[place] != highest) place++;
    return place;
}

int64_t fd_draw(const float *logits, int64_t vocab, float floor, double temperature, uint64_t key) {
    if (!logits || vocab < 1 || !(temperature >= 0)) return -1;
    int64_t first_guess = favourite(logits, vocab);
    if (!(logits[first_guess] >= floor)) return -1;
    race race = {.temperature = temperature, .floor = floor, .best = -INFINITY, .token = first_guess};
    enter(&race, logits[first_guess], first_guess, hash(key, (uint64_t)first_guess));
    for (int64_t first = 0; first < vocab; first += MAX_BLOCK) {
        int64_t end = vocab - first < MAX_BLOCK ? vocab : first + MAX_BLOCK;
        if (block_max(logits + first, end - first) < race.needed[NOISE_BITS]) continue;
        for (int64_t id = first; id < end; id++) {
            uint64_t noise = hash(key, (uint64_t)id);
            int zeros = __builtin_clzll(~noise | (1u << (63 - NOISE_BITS)));
            if (logits[id] >= race.needed[zeros]) enter(&race, logits[id], id, noise);
        }
    }
    return race.token;
}
