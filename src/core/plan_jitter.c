/* SPDX-License-Identifier: MIT
 *
 * Unequal times without chance: 256 equally likely values of a log-logistic distribution (near a log-normal one, and its quantiles are a formula), in a fixed
 * order like a random one. Each block of 256 items has every value once, so mean and deviation are exact over it. A sequence that spreads its values
 * evenly over short stretches as well (golden ratio, Halton) would not do: there a long time is followed by a short one, and rings would look better than they are. */
#include "plan.h"

#include <math.h>

/* Values for a width of the distribution, mean 1; returns their deviation. */
static double fill(double *factor, double width)
{
    double sum = 0, squares = 0;

    for (uint32_t i = 0; i < PLAN_STRATA; i++) {
        double u = (i + 0.5) / PLAN_STRATA;
        factor[i] = exp(width * log(u / (1 - u)));
        sum += factor[i];
    }
    for (uint32_t i = 0; i < PLAN_STRATA; i++) {
        factor[i] *= PLAN_STRATA / sum;
        squares += (factor[i] - 1) * (factor[i] - 1);
    }
    return sqrt(squares / PLAN_STRATA);
}

static uint64_t mix(uint64_t x) /* splitmix64 */
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static void shuffle(uint8_t *order, uint64_t seed)
{
    for (uint32_t i = 0; i < PLAN_STRATA; i++)
        order[i] = (uint8_t)i;
    for (uint32_t i = PLAN_STRATA - 1; i > 0; i--) {
        uint32_t k = (uint32_t)(mix(seed + i) % (i + 1));
        uint8_t kept = order[i];
        order[i] = order[k];
        order[k] = kept;
    }
}

void plan_jitter_make(struct plan_jitter *jitter, double deviation)
{
    double low = 0, high = 8; /* 8: all but one value are next to nothing */

    for (int i = 0; i < 50; i++) {
        double width = (low + high) / 2;
        if (fill(jitter->factor, width) < deviation)
            low = width;
        else
            high = width;
    }
    shuffle(jitter->order[PLAN_OF_COMPUTE], 1000);
    shuffle(jitter->order[PLAN_OF_SOURCE], 2000);
}

double plan_jitter_factor(const struct plan_jitter *jitter, int of, uint64_t item)
{
    uint64_t block = item / PLAN_STRATA;

    /* Another order for each block: the same values, exchanged in pairs. */
    return jitter->factor[jitter->order[of][item % PLAN_STRATA] ^ (mix(block) % PLAN_STRATA)];
}
