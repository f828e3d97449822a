/* SPDX-License-Identifier: MIT
 *
 * What a feeder costs a batch, beside one memcpy of the same bytes into pinned memory: the caller's calls, and the threads' filling. Batches are taken one at a time, and
 * the device is idle between them, so nothing is waited for: it is the work that is measured. Then what a stream of batches takes, with nothing else to do.
 *
 *     bench_feed [--batches 400] and what bench.h names
 *
 * On software devices the copies themselves run on the processor, in some call: a seed that runs nothing at once (sim:seed=7) keeps them out of the calls' times.
 */
#include "bench.h"

enum { SHAPES = 5, SETS = 8, SLOTS = 4, CALLS = 4 };
static const struct shape {
    size_t pieces, bytes, gap;
    bool pinned;
} shapes[SHAPES] = {{500, 4096, 0, false},
                    {500, 4096, 64, false},
                    {16, 128 * 1024, 0, false},
                    {2, 16 * MIB, 0, false},
                    {2, 16 * MIB, 0, true}};
static const char *const calls[CALLS] = {"submit", "next", "give back", "fill"};

struct feed {
    struct bench b;
    side_stream *reader;
    size_t batches;
    double *us[CALLS], *memcpy_us; /* one a batch */
    void *pinned;                  /* memcpy's target */
};

/* Batches of pieces that lie apart, in sets that are used in turn: more than a cache holds. */
static void pieces_make(struct feed *f, const struct shape *shape, side_feed_piece *pieces)
{
    for (size_t i = 0; i < SETS * shape->pieces; i++) {
        void *p = shape->pinned ? pinned_block(&f->b, shape->bytes) : host_block(shape->bytes);
        random_fill(p, shape->bytes, i + 1);
        pieces[i] = (side_feed_piece){p, shape->bytes, i % shape->pieces * (shape->bytes + shape->gap)};
    }
}

static void pieces_free(struct feed *f, const struct shape *shape, side_feed_piece *pieces)
{
    for (size_t i = 0; i < SETS * shape->pieces; i++) {
        void *p = (void *)(uintptr_t)pieces[i].data;
        if (shape->pinned)
            pinned_done(&f->b, p);
        else
            free(p);
    }
    free(pieces);
}

static double stage_busy_s(side_feeder *feeder)
{
    side_feeder_stats s;

    OK(side_feeder_get_stats(feeder, &s));
    return s.stage_busy_s;
}

static void give_back(struct feed *f, side_feeder *feeder, const side_feed_item *item)
{
    OK(side_slots_release(side_feeder_slots(feeder), &item->slot, f->reader));
    OK(side_slots_give_back(side_feeder_slots(feeder), &item->slot));
}

/* Processor time of this thread: where a fill thread is woken on the same core, the wall clock would count its work too. */
static double thread_s(void)
{
    struct timespec t;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* One batch, alone. */
static void one(struct feed *f, side_feeder *feeder, const side_feed_piece *pieces, size_t count, size_t at)
{
    double busy = stage_busy_s(feeder), t[5];
    uint64_t number, done = 0;
    side_feed_item item;

    t[0] = thread_s();
    OK(side_feeder_submit(feeder, pieces, count, &number));
    t[1] = thread_s();
    while (done <= number)
        OK(side_feeder_copied(feeder, &done));
    double wait = host_s() + 50e-6; /* the thread that filled it queues the copy */
    while (host_s() < wait)
        ;
    t[2] = thread_s();
    OK(side_feeder_next(feeder, f->reader, &item));
    t[3] = thread_s();
    give_back(f, feeder, &item);
    t[4] = thread_s();
    f->us[0][at] = (t[1] - t[0]) * 1e6;
    f->us[1][at] = (t[3] - t[2]) * 1e6;
    f->us[2][at] = (t[4] - t[3]) * 1e6;
    f->us[3][at] = (stage_busy_s(feeder) - busy) * 1e6;
    OK(side_stream_sync(f->reader, 60));
}

static double copy_us(struct feed *f, const side_feed_piece *pieces, size_t count, const void *from)
{
    size_t bytes = pieces[count - 1].offset + pieces[count - 1].bytes;
    double t = host_s();

    memcpy(f->pinned, from, bytes);
    return (host_s() - t) * 1e6;
}

/* us a batch, submitted and taken as fast as they go. */
static double stream_us(struct feed *f, side_feeder *feeder, const side_feed_piece *pieces, size_t count)
{
    side_feed_item item;
    double t = host_s();

    for (size_t i = 0; i < f->batches + 2; i++) {
        if (i < f->batches)
            OK(side_feeder_submit(feeder, pieces + i % SETS * count, count, NULL));
        if (i >= 2) {
            OK(side_feeder_next(feeder, f->reader, &item));
            give_back(f, feeder, &item);
        }
    }
    OK(side_stream_sync(f->reader, 60));
    return (host_s() - t) * 1e6 / (double)f->batches;
}

static void report(struct feed *f, const struct shape *shape, double stream, bool last)
{
    double sum = 0, one_copy = quantile(f->memcpy_us, f->batches, 0.5);

    fprintf(f->b.json, "{\"pinned\": %s", shape->pinned ? "true" : "false");
    json_number(&f->b, "pieces", (double)shape->pieces);
    json_number(&f->b, "piece_bytes", (double)shape->bytes);
    json_number(&f->b, "gap_bytes", (double)shape->gap);
    printf("%5zu x %8zu%s %s", shape->pieces, shape->bytes, shape->gap != 0 ? " (gaps)" : "       ",
           shape->pinned ? "pinned  " : "pageable");
    for (int c = 0; c < CALLS; c++) {
        const double us = quantile(f->us[c], f->batches, 0.5);
        sum += us;
        printf(" %9.1f", us);
        json_samples(&f->b, calls[c], f->us[c], f->batches);
    }
    printf(" %9.1f %9.1f %6.2f %10.1f\n", sum, one_copy, sum / one_copy, stream);
    json_samples(&f->b, "memcpy_us", f->memcpy_us, f->batches);
    json_number(&f->b, "native_us", sum);
    json_number(&f->b, "of_memcpy", sum / one_copy);
    json_number(&f->b, "stream_us", stream);
    fprintf(f->b.json, "}%s", last ? "" : ", ");
}

static void shape_run(struct feed *f, const struct shape *shape, bool last)
{
    size_t n = shape->pieces, bytes = n * (shape->bytes + shape->gap);
    side_feeder_options o = SIDE_FEEDER_OPTIONS_INIT;
    side_feed_piece *pieces = host_block(SETS * n * sizeof(*pieces));
    char *whole = host_block(SETS * bytes);
    side_feeder *feeder;

    random_fill(whole, SETS * bytes, 99);
    pieces_make(f, shape, pieces);
    f->pinned = pinned_block(&f->b, bytes);
    o.slots = SLOTS;
    o.slot_bytes = bytes;
    o.timing = true;
    OK(side_feeder_create(f->b.device, &o, &feeder));
    for (size_t i = 0; i < f->batches + SETS; i++) { /* the first ones warm up */
        const size_t at = i >= SETS ? i - SETS : 0;
        one(f, feeder, pieces + i % SETS * n, n, at);
        f->memcpy_us[at] = copy_us(f, pieces, n, whole + i % SETS * bytes);
    }
    report(f, shape, stream_us(f, feeder, pieces, n), last);
    OK(side_feeder_destroy(feeder));
    pinned_done(&f->b, f->pinned);
    pieces_free(f, shape, pieces);
    free(whole);
}

int main(int argc, char **argv)
{
    struct feed f = {.b = bench_begin("feed", argc, argv, 1)};

    f.batches = bench_number(&f.b, "--batches", 400);
    for (int c = 0; c < CALLS; c++)
        f.us[c] = host_block(f.batches * sizeof(double));
    f.memcpy_us = host_block(f.batches * sizeof(double));
    OK(side_stream_create(f.b.device, &f.reader));
    printf("us a batch, medians; \"native\": calls and filling; \"stream\": batches one after the other\n%33s",
           "pieces");
    for (int c = 0; c < CALLS; c++)
        printf(" %9s", calls[c]);
    printf(" %9s %9s %6s %10s\n", "native", "memcpy", "ratio", "stream");
    fprintf(f.b.json, ", \"rows\": [");
    for (int s = 0; s < SHAPES; s++)
        shape_run(&f, &shapes[s], s + 1 == SHAPES);
    fputc(']', f.b.json);
    for (int c = 0; c < CALLS; c++)
        free(f.us[c]);
    free(f.memcpy_us);
    side_stream_destroy(f.reader);
    bench_end(&f.b);
    return 0;
}
