/* SPDX-License-Identifier: MIT
 *
 * Copies that are timed and whose bytes are checked after every sample.
 *
 *     host     src  pattern    --H2D-->  device  in   poison before
 *              dst  poison     <--D2H--          out  the pattern, put there before
 *
 * A sample uses a window of each; the next one the window behind it, so that what a cache holds of the last samples is not met again until all of the arena
 * has been used. Each window's pattern carries a stamp of the sample in every page: bytes of an earlier sample do not pass.
 */
#ifndef CLI_BENCH_COPY_H
#define CLI_BENCH_COPY_H

#include "bench.h"

enum bench_way { BENCH_H2D, BENCH_D2H, BENCH_BOTH, BENCH_PAGEABLE_H2D, BENCH_PAGEABLE_D2H, BENCH_WAYS };

struct bench_arena {
    struct bench *bench;
    size_t bytes; /* of each of the five */
    char *src, *dst, *pageable;
    char *in, *out;
    bool pageable_is_pattern; /* else poison */
    bool too_fast;            /* a measuring error was told */
    side_stream *up, *down;
    /* The sample under way. */
    size_t copy_bytes, copies, offset;
    uint64_t stamp;
};

/* Times of one sample: of one copy, of as many as ran one after the other. */
struct bench_copied {
    double h2d_s, d2h_s;
    double both_gbps, both_h2d_gbps; /* both directions together, while both ran; of it H2D's */
};

side_status bench_arena_make(struct bench *bench, size_t bytes, struct bench_arena *arena);
void bench_arena_free(struct bench_arena *arena);
/* One sample of `copies` copies of `bytes` each way. alone: seconds of one copy of each direction alone, for BENCH_BOTH. Wrong bytes are a bench_error. */
side_status bench_arena_sample(struct bench_arena *arena, enum bench_way way, size_t bytes, size_t copies,
                               const struct bench_copied *alone, struct bench_copied *copied);

#endif
