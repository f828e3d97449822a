/* SPDX-License-Identifier: MIT
 *
 * Loans of batches (python/native/loan.c), without Python: a slot is rewritten only after its last tensor has died, on whatever thread, and after the streams
 * that read it. */
#include "pipe_help.h"

#include "fence.h"
#include "life.h"
#include "loan.h"

#include <pthread.h>
#include <sys/wait.h>

enum { SLOT_BYTES = 4096, MOST_TENSORS = 64 };

static atomic_uint buried;

static void bury(struct grave *grave)
{
    struct lender *l = (struct lender *)grave;

    assert_true(lender_rest(l));
    lender_free(l);
    atomic_fetch_add(&buried, 1);
}

static void sweep(void)
{
    for (struct grave *g = life_exhume(), *next; g != NULL; g = next) {
        next = g->next;
        g->bury(g);
    }
}

struct bench {
    side_device *dev;
    struct lender *l;
    uint64_t submitted;
    unsigned char data[MOST_TENSORS * 16]; /* of the batch to be submitted */
};

static void bench_open(struct bench *b, uint32_t slots, uint64_t seed)
{
    side_feeder_options o = SIDE_FEEDER_OPTIONS_INIT;

    assert_int_equal(life_watch_forks(), 0);
    rig_small_pool();
    memset(b, 0, sizeof(*b));
    b->dev = rig_device("", seed);
    b->l = lender_make(b->dev, bury);
    assert_non_null(b->l);
    o.slots = slots;
    o.queue = 8;
    o.slot_bytes = SLOT_BYTES;
    o.threads = 1;
    T_OK(lender_open(b->l, &o));
}

/* All loans have ended. */
static void bench_close(struct bench *b)
{
    unsigned before = atomic_load(&buried);

    assert_int_equal(atomic_load(&b->l->held), 0);
    assert_int_equal(atomic_load(&b->l->failed), 0);
    T_OK(lender_stop(b->l));
    lender_unref(b->l);
    sweep();
    assert_int_equal(atomic_load(&buried), before + 1);
    rig_close(b->dev);
}

/* Batch i is full of the byte i + 1; once it is in the queue its source may go. */
static void submit(struct bench *b)
{
    side_feed_piece piece = {b->data, sizeof(b->data), 0};
    uint64_t number, copied = 0;

    memset(b->data, (int)(b->submitted + 1), sizeof(b->data));
    T_OK(side_feeder_submit(b->l->feeder, &piece, 1, &number));
    assert_int_equal(number, b->submitted);
    b->submitted++;
    while (copied <= number)
        T_OK(side_feeder_copied(b->l->feeder, &copied));
}

/* The next batch as `count` tensors of 16 bytes. */
static struct loan *take(struct bench *b, size_t count, side_stream *reader, dl_managed **tensors)
{
    struct loan *loan = loan_make(b->l, count, count);

    assert_non_null(loan);
    for (size_t i = 0; i < count; i++) {
        dl_tensor *t = &loan->tensors[i].tensor;
        t->dtype = (dl_type){DL_UINT, 8, 1};
        t->ndim = 1;
        t->shape = loan_numbers(loan) + i;
        t->shape[0] = 16;
        t->byte_offset = 16 * i;
    }
    T_OK(loan_take(loan, reader, 100));
    for (size_t i = 0; i < count; i++)
        tensors[i] = loan_tensor(loan, i);
    loan_done(loan);
    return loan;
}

static void die(dl_managed *tensor)
{
    tensor->deleter(tensor);
}

static bool can_take(struct bench *b)
{
    struct loan *loan = loan_make(b->l, 0, 0);
    side_status r = loan_take(loan, NULL, 0);

    for (int i = 0; r == SIDE_AGAIN && i < 200; i++) { /* the copy's threads may need a moment */
        usleep(100);
        r = loan_take(loan, NULL, 0);
    }
    loan_done(loan);
    loan_unname(loan);
    return r == SIDE_OK;
}

/* ---------------------------------------------------------------- lifetime */

T_TEST(slot_comes_back_with_the_last_tensor)
{
    static const int orders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    dl_managed *t[3];
    struct bench b;

    bench_open(&b, 1, 1);
    for (int k = 0; k < 6; k++) {
        struct loan *loan;
        submit(&b);
        loan = take(&b, 3, NULL, t);
        submit(&b);
        for (int i = 0; i < 3; i++) {
            assert_int_equal(atomic_load(&b.l->held), 1);
            assert_false(can_take(&b));
            assert_int_equal(*(unsigned char *)t[orders[k][i]]->tensor.data, 2 * k + 1);
            die(t[orders[k][i]]);
        }
        assert_int_equal(atomic_load(&b.l->held), 0);
        assert_false(loan_hold(loan));
        loan_unname(loan);
        assert_true(can_take(&b));
    }
    bench_close(&b);
}

T_TEST(tensors_are_where_the_leaves_say)
{
    dl_managed *t[3];
    struct bench b;
    struct loan *loan;

    bench_open(&b, 2, 1);
    submit(&b);
    loan = take(&b, 3, NULL, t);
    for (int i = 0; i < 3; i++) {
        assert_ptr_equal(t[i]->tensor.data, (char *)loan->item.slot.data + 16 * i);
        assert_int_equal(t[i]->tensor.byte_offset, 0);
        assert_int_equal(t[i]->tensor.device.type, DL_CPU);
        die(t[i]);
    }
    loan_unname(loan);
    bench_close(&b);
}

/* No tensors: the giver's use is the caller's, who ends it. */
T_TEST(loan_without_tensors)
{
    struct bench b;
    struct loan *loan;

    bench_open(&b, 1, 1);
    submit(&b);
    loan = loan_make(b.l, 0, 0);
    T_OK(loan_take(loan, NULL, 100));
    assert_true(loan_hold(loan));
    loan_done(loan);
    assert_int_equal(atomic_load(&b.l->held), 1);
    loan_done(loan);
    assert_int_equal(atomic_load(&b.l->held), 0);
    loan_unname(loan);
    bench_close(&b);
}

T_TEST(take_that_fails_leaks_nothing)
{
    struct bench b;
    struct loan *loan;

    bench_open(&b, 1, 1);
    loan = loan_make(b.l, 4, 8);
    assert_int_equal(loan_take(loan, NULL, 0), SIDE_AGAIN);
    side_feeder_cancel(b.l->feeder);
    T_STATUS(loan_take(loan, NULL, 100), SIDE_CANCELLED);
    loan_done(loan);
    loan_unname(loan);
    bench_close(&b);
}

/* The lender goes with its last loan, and only then. */
T_TEST(lender_outlives_its_maker)
{
    dl_managed *t[2];
    struct bench b;
    struct loan *loan;

    bench_open(&b, 2, 1);
    submit(&b);
    loan = take(&b, 2, NULL, t);
    loan_unname(loan);
    T_OK(lender_stop(b.l));
    lender_unref(b.l);
    sweep();
    assert_int_equal(atomic_load(&buried), 0);
    assert_int_equal(*(unsigned char *)t[1]->tensor.data, 1);
    die(t[0]);
    sweep();
    assert_int_equal(atomic_load(&buried), 0);
    die(t[1]);
    assert_int_equal(atomic_load(&buried), 0);
    sweep();
    assert_int_equal(atomic_load(&buried), 1);
    rig_close(b.dev);
}

/* ---------------------------------------------------------------- threads */

struct killer {
    pthread_barrier_t *together;
    dl_managed *mine[MOST_TENSORS];
    size_t count;
};

static void *kill_all(void *arg)
{
    struct killer *k = arg;

    pthread_barrier_wait(k->together);
    for (size_t i = 0; i < k->count; i++)
        die(k->mine[i]);
    return NULL;
}

/* Each loan's tensors die in 8 threads at once, each thread writes to its tensors' memory last: TSan sees a slot that is rewritten without having been given back. */
T_TEST(deleters_in_8_threads)
{
    enum { THREADS = 8 };
    struct killer killers[THREADS];
    dl_managed *t[MOST_TENSORS];
    pthread_t threads[THREADS];
    pthread_barrier_t together;
    struct bench b;

    bench_open(&b, 2, 1);
    pthread_barrier_init(&together, NULL, THREADS);
    for (uint64_t n = 0; n < t_seeds(100); n++) {
        struct loan *loan;
        submit(&b);
        loan = take(&b, MOST_TENSORS, NULL, t);
        assert_int_equal(loan->item.number, n);
        loan_unname(loan);
        for (size_t i = 0; i < THREADS; i++) {
            killers[i] = (struct killer){&together, {NULL}, MOST_TENSORS / THREADS};
            for (size_t k = 0; k < MOST_TENSORS / THREADS; k++) {
                killers[i].mine[k] = t[k * THREADS + i];
                memset(killers[i].mine[k]->tensor.data, 0xEE, 16);
            }
            assert_int_equal(pthread_create(&threads[i], NULL, kill_all, &killers[i]), 0);
        }
        for (size_t i = 0; i < THREADS; i++)
            pthread_join(threads[i], NULL);
        assert_int_equal(atomic_load(&b.l->held), 0);
    }
    pthread_barrier_destroy(&together);
    bench_close(&b);
}

struct late {
    dl_managed *tensor;
    atomic_bool died;
};

static void *die_late(void *arg)
{
    struct late *late = arg;

    usleep(20000);
    atomic_store(&late->died, true);
    die(late->tensor);
    return NULL;
}

T_TEST(waiting_for_a_loan_to_end)
{
    dl_managed *t[1];
    struct late late;
    pthread_t thread;
    struct bench b;

    bench_open(&b, 2, 1);
    assert_true(lender_wait(b.l, 1, 0));
    for (int i = 0; i < 5; i++) {
        submit(&b);
        loan_unname(take(&b, 1, NULL, t));
        assert_false(lender_wait(b.l, 1, 1000000));
        late.tensor = t[0];
        atomic_init(&late.died, false);
        assert_int_equal(pthread_create(&thread, NULL, die_late, &late), 0);
        assert_true(lender_wait(b.l, 1, 20000000000u));
        assert_true(atomic_load(&late.died));
        pthread_join(thread, NULL);
    }
    bench_close(&b);
}

static void *use_streams(void *arg)
{
    struct lender *l = arg;
    struct lent_stream *lent;

    /* sim wraps NULL alone, so one entry is all there is to race for. */
    for (int i = 0; i < 100; i++) {
        T_OK(lender_stream(l, NULL, NULL, NULL, &lent, NULL));
        assert_ptr_equal(lent, lender_find(l, NULL, NULL));
    }
    return lent;
}

T_TEST(streams_are_wrapped_once)
{
    pthread_t threads[4];
    void *first, *other;
    struct bench b;

    bench_open(&b, 1, 1);
    assert_null(lender_find(b.l, NULL, NULL));
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, use_streams, b.l), 0);
    pthread_join(threads[0], &first);
    for (int i = 1; i < 4; i++) {
        pthread_join(threads[i], &other);
        assert_ptr_equal(first, other);
    }
    bench_close(&b);
}

/* ---------------------------------------------------------------- streams that read */

/* Twenty batches through 2 slots. The reader of batch i queues a copy of it to row i of `seen`, and lets go at once. `second`: the reader is another stream than the one
 * that took the batch; `named`: it was named by loan_use. True: all rows are right. */
static bool rows_are_right(uint64_t seed, bool second, bool named)
{
    enum { BATCHES = 20 };
    unsigned char *seen, *rows;
    side_stream *first, *other;
    dl_managed *t[1];
    struct bench b;
    bool right = true;

    bench_open(&b, 2, seed);
    T_OK(side_stream_create(b.dev, &first));
    T_OK(side_stream_create(b.dev, &other));
    T_OK(side_device_alloc(b.dev, BATCHES * sizeof(b.data), (void **)&seen));
    for (size_t i = 0; i < BATCHES; i++) {
        struct loan *loan;
        submit(&b);
        loan = take(&b, 1, first, t);
        if (named)
            T_OK(loan_use(loan, other));
        if (named)
            T_OK(loan_use(loan, other)); /* again is fine */
        loan_unname(loan);
        T_OK(side_copy_async(second ? other : first, SIDE_COPY_D2D, seen + i * sizeof(b.data), t[0]->tensor.data,
                             sizeof(b.data)));
        die(t[0]);
    }
    T_OK(side_stream_sync(first, 0));
    T_OK(side_stream_sync(other, 0));
    rows = malloc(BATCHES * sizeof(b.data));
    T_OK(side_copy_async(first, SIDE_COPY_D2H, rows, seen, BATCHES * sizeof(b.data)));
    T_OK(side_stream_sync(first, 0));
    for (size_t i = 0; i < BATCHES * sizeof(b.data); i++)
        right = right && rows[i] == i / sizeof(b.data) + 1;
    free(rows);
    side_device_free(b.dev, seen);
    side_stream_destroy(first);
    side_stream_destroy(other);
    bench_close(&b);
    return right;
}

T_TEST(reader_is_waited_for)
{
    T_FOR_SEEDS (seed, 60)
        assert_true(rows_are_right(seed, false, false));
}

T_TEST(named_stream_is_waited_for)
{
    T_FOR_SEEDS (seed, 60)
        assert_true(rows_are_right(seed, true, true));
}

/* Controls: the two above would notice. */
T_TEST(stream_that_is_not_named_reads_wrong_rows)
{
    bool right = true;

    for (uint64_t seed = 1; right && seed <= 100; seed++)
        right = rows_are_right(seed, true, false);
    assert_false(right);
}

T_TEST(without_the_wait_for_readers_rows_are_wrong)
{
    bool right = true;

    fence_mutate(MUTATE_DROP, SITE_FEED_DEVICE);
    for (uint64_t seed = 1; right && seed <= 100; seed++)
        right = rows_are_right(seed, false, false);
    assert_false(right);
}

/* ---------------------------------------------------------------- where nothing may be done */

static side_stream *captured;

static bool is_captured(side_stream *stream)
{
    return stream == captured;
}

/* Loans of `who` (0: the stream that took, 1: one that was named, 2: one that is watched, 3: one that has nothing to do with it) in a capture. */
static void capture(int who)
{
    dl_managed *t[1];
    side_stream *streams[4];
    struct lent_stream *lent;
    struct bench b;
    struct loan *loan;

    bench_open(&b, 3, 1);
    for (int i = 0; i < 4; i++)
        T_OK(side_stream_create(b.dev, &streams[i]));
    T_OK(lender_stream(b.l, streams[2], NULL, NULL, &lent, NULL));
    atomic_store(&lent->watched, true);
    submit(&b);
    loan = take(&b, 1, streams[0], t);
    T_OK(loan_use(loan, streams[1]));
    loan_unname(loan);
    captured = streams[who];
    atomic_store(&loan_capturing, is_captured);
    die(t[0]);
    captured = NULL;
    assert_int_equal(atomic_load(&b.l->held), 0);
    assert_int_equal(atomic_load(&b.l->retired), who < 3);
    /* One slot less goes round, its memory and the lender stay. */
    for (int i = 0; i < 6; i++) {
        submit(&b);
        loan = take(&b, 1, NULL, t);
        assert_true(who == 3 || loan->item.slot.index != 0);
        loan_unname(loan);
        die(t[0]);
    }
    T_OK(lender_stop(b.l));
    lender_unref(b.l);
    sweep();
    assert_int_equal(atomic_load(&buried), who == 3);
    if (who < 3)
        T_OK(side_feeder_destroy(b.l->feeder)); /* for TSan, which wants its threads joined */
    _exit(0);                                   /* for LeakSanitizer: a retired loan is never freed */
}

T_TEST(capture_retires_the_slot)
{
    for (int who = 0; who < 4; who++) {
        int status;
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0)
            capture(who);
        assert_int_equal(waitpid(child, &status, 0), child);
        if (status != 0)
            T_FAIL("stream %d: status %d", who, status);
    }
}

/* Nothing in a child: not by its death there, not by its lender's; the parent goes on. */
T_TEST(forked_child_does_nothing)
{
    dl_managed *t[2];
    struct bench b;
    int status;
    pid_t child;

    bench_open(&b, 1, 1);
    submit(&b);
    loan_unname(take(&b, 2, NULL, t));
    child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        die(t[0]);
        die(t[1]);
        _exit(atomic_load(&b.l->held) == 1 && life_exhume() == NULL && life_forks() == 1 && !life_goes_on(b.l->forks)
                  ? 0
                  : 1);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_int_equal(life_forks(), 0);
    assert_int_equal(life_forks_made(), 1);
    die(t[0]);
    die(t[1]);
    bench_close(&b);
}

T_TEST(nothing_is_done_once_all_is_over)
{
    static struct bench b; /* what stays is reachable: no leak */
    static dl_managed *t[1];

    bench_open(&b, 1, 1);
    submit(&b);
    loan_unname(take(&b, 1, NULL, t));
    T_OK(lender_stop(b.l));
    life_end();
    die(t[0]);
    assert_int_equal(atomic_load(&b.l->held), 1);
    T_OK(side_feeder_destroy(b.l->feeder));
}

T_MAIN(T(slot_comes_back_with_the_last_tensor), T(tensors_are_where_the_leaves_say), T(loan_without_tensors),
       T(take_that_fails_leaks_nothing), T(lender_outlives_its_maker), T(deleters_in_8_threads),
       T(waiting_for_a_loan_to_end), T(streams_are_wrapped_once), T(reader_is_waited_for), T(named_stream_is_waited_for),
       T(stream_that_is_not_named_reads_wrong_rows), T(without_the_wait_for_readers_rows_are_wrong),
       T(capture_retires_the_slot), T(forked_child_does_nothing), T(nothing_is_done_once_all_is_over))
