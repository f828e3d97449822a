/* SPDX-License-Identifier: MIT
 *
 * Every device: streams, events, host functions. */
#include "conform.h"

#include <stdatomic.h>

/* ---------------------------------------------------------------- streams */

T_TEST(streams_keep_order)
{
    struct rig r = rig_open();
    enum { STEPS = 40 };
    const size_t bytes = 256 * KIB;
    unsigned char *host = pinned_make(r.device, bytes), *device = device_make(r.device, bytes);

    for (int round = 0; round < 5; round++) {
        for (int i = 0; i < STEPS; i++) /* each step overwrites the one before it; only the last may be seen */
            T_OK(side_memset_async(r.stream, device, i, bytes));
        T_OK(side_copy_async(r.stream, SIDE_COPY_D2H, host, device, bytes));
        T_OK(side_memset_async(r.stream, device, 0xee, bytes));
        sync_stream(r.stream);
        for (size_t i = 0; i < bytes; i++)
            if (host[i] != STEPS - 1)
                T_FAIL("round %d: byte %zu is %u", round, i, host[i]);
    }
    pinned_free(r.device, host);
    side_device_free(r.device, device);
    rig_close(&r);
}

T_TEST(streams_know_their_device)
{
    struct rig r = rig_open();

    assert_ptr_equal(side_stream_device(r.stream), r.device);
    assert_null(side_stream_device(NULL));
    assert_null(side_stream_native(NULL));
    if (r.gpu)
        assert_non_null(side_stream_native(r.stream));
    else
        assert_null(side_stream_native(r.stream));
    side_stream_destroy(NULL);
    T_STATUS(side_stream_create(NULL, &r.stream), SIDE_INVALID);
    T_STATUS(side_stream_create(r.device, NULL), SIDE_INVALID);
    T_STATUS(side_stream_sync(NULL, 1), SIDE_INVALID);
    T_STATUS(side_stream_wait(r.stream, NULL), SIDE_INVALID);
    rig_close(&r);
}

/* Work through a wrapper is work on the stream itself. */
static void check_wrapped(struct rig *r, side_stream *wrapper, side_stream *same)
{
    enum { BYTES = 4096 };
    unsigned char *host = pinned_make(r->device, BYTES), *device = device_make(r->device, BYTES);

    T_OK(side_memset_async(wrapper, device, 1, BYTES));
    spin_async(wrapper, 5 * MS);
    T_OK(side_memset_async(wrapper, device, 2, BYTES));
    T_OK(side_copy_async(same, SIDE_COPY_D2H, host, device, BYTES));
    sync_stream(same);
    assert_int_equal(host[0], 2);
    assert_int_equal(host[BYTES - 1], 2);
    pinned_free(r->device, host);
    side_device_free(r->device, device);
}

T_TEST(streams_can_be_wrapped)
{
    struct rig r = rig_open();
    side_stream *wrapper = NULL, *again = NULL;
    int here = 0;

    if (r.gpu) {
        T_OK(side_stream_wrap(r.device, side_stream_native(r.stream), &wrapper));
        assert_ptr_equal(side_stream_native(wrapper), side_stream_native(r.stream));
        check_wrapped(&r, wrapper, r.stream);
    } else {
        T_OK(side_stream_wrap(r.device, NULL, &wrapper));
        T_STATUS(side_stream_wrap(r.device, &here, &again), SIDE_INVALID);
        assert_null(again);
        check_wrapped(&r, wrapper, wrapper);
    }
    side_stream_destroy(wrapper); /* the stream below it goes on */
    check_wrapped(&r, r.stream, r.stream);
    rig_close(&r);
}

T_TEST(the_legacy_stream_can_be_wrapped)
{
    struct rig r = rig_open();
    enum { BYTES = 64 * 1024 };
    side_stream *legacy = NULL, *other = stream_make(r.device);
    side_event *before = event_make(r.device, false), *after = event_make(r.device, false);
    float *host = pinned_make(r.device, BYTES), *device = device_make(r.device, BYTES);

    T_OK(side_stream_wrap(r.device, NULL, &legacy)); /* on software devices: a stream like any other */
    for (size_t i = 0; i < BYTES / sizeof(float); i++)
        host[i] = (float)i;
    T_OK(side_copy_async(other, SIDE_COPY_H2D, device, host, BYTES));
    spin_async(other, 2 * MS);
    T_OK(side_event_record(before, other));
    T_OK(side_stream_wait(legacy, before));
    affine_async(legacy, device, device, BYTES, 2.0f, 1.0f);
    T_OK(side_event_record(after, legacy));
    T_OK(side_stream_wait(other, after));
    T_OK(side_copy_async(other, SIDE_COPY_D2H, host, device, BYTES));
    /* a batch takes a path of its own there */
    side_piece pieces[2] = {{device, host, 16}, {(char *)device + 16, (char *)host + 16, 16}};
    sync_stream(other);
    for (size_t i = 0; i < BYTES / sizeof(float); i++)
        if (host[i] != 2.0f * (float)i + 1.0f)
            T_FAIL("element %zu is %g", i, (double)host[i]);
    T_OK(side_copy_batch(legacy, SIDE_COPY_H2D, pieces, 2));
    sync_stream(legacy);
    side_stream_destroy(legacy);
    side_stream_destroy(other);
    side_event_destroy(before);
    side_event_destroy(after);
    pinned_free(r.device, host);
    side_device_free(r.device, device);
    rig_close(&r);
}

T_TEST(a_destroyed_stream_s_work_goes_on)
{
    struct rig r = rig_open();
    enum { BYTES = 1 << 20 };
    side_stream *gone = stream_make(r.device);
    side_event *done = event_make(r.device, false);
    unsigned char *host = pinned_make(r.device, BYTES), *device = device_make(r.device, BYTES);

    spin_async(gone, 20 * MS);
    T_OK(side_memset_async(gone, device, 7, BYTES));
    T_OK(side_copy_async(gone, SIDE_COPY_D2H, host, device, BYTES));
    T_OK(side_event_record(done, gone));
    side_stream_destroy(gone);
    T_OK(side_event_wait(done, LONG_WAIT_S));
    for (size_t i = 0; i < BYTES; i++)
        if (host[i] != 7)
            T_FAIL("byte %zu is %u", i, host[i]);
    side_event_destroy(done);
    pinned_free(r.device, host);
    side_device_free(r.device, device);
    rig_close(&r);
}

T_TEST(a_sync_gives_up_in_time)
{
    struct rig r = rig_open();

    spin_async(r.stream, 300 * MS);
    double begin = wall_s();
    T_STATUS(side_stream_sync(r.stream, 0.02), SIDE_STUCK);
    if (r.gpu)
        assert_true(wall_s() - begin < 0.25);
    T_OK(side_stream_sync(r.stream, 0));
    T_OK(side_stream_sync(r.stream, 0.02)); /* nothing is left */
    rig_close(&r);
}

/* ---------------------------------------------------------------- events */

T_TEST(a_never_recorded_event_counts_as_done)
{
    struct rig r = rig_open();
    side_event *e = event_make(r.device, false);

    T_OK(side_event_query(e));
    T_OK(side_event_wait(e, 0.001));
    T_OK(side_event_wait(e, 0));
    T_OK(side_stream_wait(r.stream, e));
    sync_stream(r.stream);
    side_event_destroy(e);
    side_event_destroy(NULL);
    T_STATUS(side_event_create(NULL, false, &e), SIDE_INVALID);
    T_STATUS(side_event_record(NULL, r.stream), SIDE_INVALID);
    T_STATUS(side_event_query(NULL), SIDE_INVALID);
    rig_close(&r);
}

T_TEST(a_query_says_not_yet)
{
    struct rig r = rig_open();
    side_event *e = event_make(r.device, false);

    spin_async(r.stream, 200 * MS);
    T_OK(side_event_record(e, r.stream));
    T_STATUS(side_event_query(e), SIDE_AGAIN);
    double begin = wall_s();
    T_STATUS(side_event_wait(e, 0.02), SIDE_STUCK);
    if (r.gpu) {
        assert_true(wall_s() - begin >= 0.019);
        assert_true(wall_s() - begin < 0.15);
    }
    T_STATUS(side_event_query(e), SIDE_AGAIN);
    T_OK(side_event_wait(e, LONG_WAIT_S));
    T_OK(side_event_query(e));
    T_OK(side_event_wait(e, 0.001));
    side_event_destroy(e);
    rig_close(&r);
}

T_TEST(a_record_replaces_the_point)
{
    struct rig r = rig_open();
    side_event *e = event_make(r.device, false);

    T_OK(side_event_record(e, r.stream));
    sync_stream(r.stream);
    T_OK(side_event_query(e));
    spin_async(r.stream, 100 * MS);
    T_OK(side_event_query(e)); /* what is queued after the record is not covered */
    T_OK(side_event_record(e, r.stream));
    T_STATUS(side_event_query(e), SIDE_AGAIN);
    T_OK(side_event_wait(e, LONG_WAIT_S));
    side_event_destroy(e);
    rig_close(&r);
}

/* A wait keeps the point as of its call: recorded anew later, behind a long spin, the event does not hold the waiting stream up. */
T_TEST(a_wait_keeps_the_old_point)
{
    struct rig r = rig_open();
    enum { BYTES = 4096 };
    side_stream *waits = stream_make(r.device);
    side_event *e = event_make(r.device, false), *reached = event_make(r.device, false);
    unsigned char *host = pinned_make(r.device, BYTES), *device = device_make(r.device, BYTES);

    memset(host, 0, BYTES);
    T_OK(side_memset_async(r.stream, device, 1, BYTES)); /* also loads what is loaded at first use */
    spin_async(r.stream, 1);
    sync_stream(r.stream);
    spin_async(r.stream, 10 * MS);
    T_OK(side_memset_async(r.stream, device, 5, BYTES));
    T_OK(side_event_record(e, r.stream));
    T_OK(side_stream_wait(waits, e));
    T_OK(side_copy_async(waits, SIDE_COPY_D2H, host, device, BYTES));
    T_OK(side_event_record(reached, waits));
    spin_async(r.stream, 400 * MS);
    T_OK(side_event_record(e, r.stream));
    T_OK(side_event_wait(reached, LONG_WAIT_S));
    T_STATUS(side_event_query(e), SIDE_AGAIN); /* the long spin still runs */
    assert_int_equal(host[0], 5);              /* and the old point was waited for */
    assert_int_equal(host[BYTES - 1], 5);
    sync_stream(r.stream);
    side_event_destroy(e);
    side_event_destroy(reached);
    side_stream_destroy(waits);
    pinned_free(r.device, host);
    side_device_free(r.device, device);
    rig_close(&r);
}

T_TEST(a_wait_before_the_record_waits_for_nothing)
{
    struct rig r = rig_open();
    side_stream *waits = stream_make(r.device);
    side_event *e = event_make(r.device, false), *reached = event_make(r.device, false);

    spin_async(r.stream, 1);
    sync_stream(r.stream);
    spin_async(r.stream, 300 * MS);
    T_OK(side_stream_wait(waits, e)); /* never recorded at the time of the call */
    T_OK(side_event_record(reached, waits));
    T_OK(side_event_record(e, r.stream));
    T_OK(side_event_wait(reached, LONG_WAIT_S));
    T_STATUS(side_event_query(e), SIDE_AGAIN);
    sync_stream(r.stream);
    side_event_destroy(e);
    side_event_destroy(reached);
    side_stream_destroy(waits);
    rig_close(&r);
}

T_TEST(events_order_streams)
{
    struct rig r = rig_open();
    enum { STREAMS = 4, STEPS = 40, COUNT = 16 * 1024 };
    side_stream *streams[STREAMS];
    side_event *events[STREAMS];
    float *device = device_make(r.device, COUNT * sizeof(float)), *host = pinned_make(r.device, COUNT * sizeof(float));

    for (int i = 0; i < STREAMS; i++) {
        streams[i] = stream_make(r.device);
        events[i] = event_make(r.device, false);
    }
    for (size_t i = 0; i < COUNT; i++)
        host[i] = (float)(i % 97);
    /* x -> 2x+1 and x -> (x-1)/2 by turns: any other order gives other numbers */
    T_OK(side_copy_async(streams[0], SIDE_COPY_H2D, device, host, COUNT * sizeof(float)));
    T_OK(side_event_record(events[0], streams[0]));
    for (int i = 1; i <= STEPS; i++) {
        side_stream *s = streams[i % STREAMS];
        T_OK(side_stream_wait(s, events[(i - 1) % STREAMS]));
        if (i % 3 == 0)
            spin_async(s, MS / 4);
        affine_async(s, device, device, COUNT * sizeof(float), i % 2 != 0 ? 2.0f : 0.5f, i % 2 != 0 ? 1.0f : -0.5f);
        if (i == STEPS - 1)
            affine_async(s, device, device, COUNT * sizeof(float), 1.0f, 3.0f);
        T_OK(side_event_record(events[i % STREAMS], s));
    }
    T_OK(side_stream_wait(r.stream, events[STEPS % STREAMS]));
    T_OK(side_copy_async(r.stream, SIDE_COPY_D2H, host, device, COUNT * sizeof(float)));
    sync_stream(r.stream);
    for (size_t i = 0; i < COUNT; i++)
        if (host[i] != (float)(i % 97) + 1.5f)
            T_FAIL("element %zu is %g", i, (double)host[i]);
    for (int i = 0; i < STREAMS; i++) {
        side_stream_destroy(streams[i]);
        side_event_destroy(events[i]);
    }
    pinned_free(r.device, host);
    side_device_free(r.device, device);
    rig_close(&r);
}

T_TEST(elapsed_needs_two_timed_and_done_events)
{
    struct rig r = rig_open();
    side_event *a = event_make(r.device, true), *b = event_make(r.device, true), *plain = event_make(r.device, false);
    double s = -1;

    T_STATUS(side_event_elapsed(a, b, &s), SIDE_STATE); /* never recorded */
    spin_async(r.stream, 1);
    sync_stream(r.stream);
    T_OK(side_event_record(a, r.stream));
    spin_async(r.stream, 100 * MS);
    T_OK(side_event_record(b, r.stream));
    T_OK(side_event_record(plain, r.stream));
    T_STATUS(side_event_elapsed(a, b, &s), SIDE_STATE); /* not done */
    assert_true(s == -1);
    sync_stream(r.stream);
    T_STATUS(side_event_elapsed(a, plain, &s), SIDE_STATE);
    T_STATUS(side_event_elapsed(plain, b, &s), SIDE_STATE);
    assert_true(s == -1);
    T_OK(side_event_elapsed(a, b, &s));
    assert_true(s >= 0.0999);
    assert_true(s < (r.gpu ? 0.12 : 0.1001));
    T_STATUS(side_event_elapsed(a, b, NULL), SIDE_INVALID);
    T_STATUS(side_event_elapsed(NULL, b, &s), SIDE_INVALID);
    side_event_destroy(a);
    side_event_destroy(b);
    side_event_destroy(plain);
    rig_close(&r);
}

T_TEST(a_pending_event_may_be_destroyed)
{
    struct rig r = rig_open();
    side_stream *waits = stream_make(r.device);
    side_event *e = event_make(r.device, false);

    spin_async(r.stream, 20 * MS);
    T_OK(side_event_record(e, r.stream));
    T_OK(side_stream_wait(waits, e));
    side_event_destroy(e);
    sync_stream(waits);
    side_stream_destroy(waits);
    rig_close(&r);
}

/* ---------------------------------------------------------------- host functions */

struct order {
    atomic_int next;
    int seen[64];
};
struct turn {
    struct order *order;
    int number;
};

static void note(void *user)
{
    struct turn *t = user;

    t->order->seen[atomic_fetch_add(&t->order->next, 1)] = t->number;
}

T_TEST(host_functions_run_in_order)
{
    struct rig r = rig_open();
    enum { CALLS = 32 };
    static struct order order;
    static struct turn turns[CALLS];
    const size_t bytes = MIB;
    unsigned char *device = device_make(r.device, bytes), *host = pinned_make(r.device, bytes);

    for (int i = 0; i < CALLS; i++) {
        turns[i] = (struct turn){&order, i};
        if (i % 4 == 0)
            spin_async(r.stream, MS);
        if (i % 4 == 2) {
            T_OK(side_memset_async(r.stream, device, i, bytes));
            T_OK(side_copy_async(r.stream, SIDE_COPY_D2H, host, device, bytes));
        }
        T_OK(side_stream_host_fn(r.stream, note, &turns[i], 1000));
    }
    sync_stream(r.stream);
    assert_int_equal(atomic_load(&order.next), CALLS);
    for (int i = 0; i < CALLS; i++)
        assert_int_equal(order.seen[i], i);
    assert_int_equal(host[0], 30);
    T_STATUS(side_stream_host_fn(r.stream, NULL, NULL, 0), SIDE_INVALID);
    pinned_free(r.device, host);
    side_device_free(r.device, device);
    rig_close(&r);
}

struct seen {
    const unsigned char *at;
    int value;
};

static void look(void *user)
{
    struct seen *s = user;

    s->value = *s->at;
}

/* It sees what earlier work of the stream wrote to host memory, and later work waits for it. */
T_TEST(host_functions_are_part_of_the_stream)
{
    struct rig r = rig_open();
    const size_t bytes = 8 * MIB;
    unsigned char *device = device_make(r.device, bytes), *host = pinned_make(r.device, bytes);
    struct seen seen[3] = {{host + bytes - 1, -1}, {host + bytes - 1, -1}, {host + bytes - 1, -1}};

    memset(host, 0, bytes);
    for (int i = 0; i < 3; i++) {
        T_OK(side_memset_async(r.stream, device, 10 + i, bytes));
        T_OK(side_copy_async(r.stream, SIDE_COPY_D2H, host, device, bytes));
        T_OK(side_stream_host_fn(r.stream, look, &seen[i], 100));
    }
    sync_stream(r.stream);
    for (int i = 0; i < 3; i++)
        assert_int_equal(seen[i].value, 10 + i);
    pinned_free(r.device, host);
    side_device_free(r.device, device);
    rig_close(&r);
}

T_MAIN(EVERY(streams_keep_order), EVERY(streams_know_their_device), EVERY(streams_can_be_wrapped),
       EVERY(the_legacy_stream_can_be_wrapped), EVERY(a_destroyed_stream_s_work_goes_on), EVERY(a_sync_gives_up_in_time),
       EVERY(a_never_recorded_event_counts_as_done), EVERY(a_query_says_not_yet), EVERY(a_record_replaces_the_point),
       EVERY(a_wait_keeps_the_old_point), EVERY(a_wait_before_the_record_waits_for_nothing), EVERY(events_order_streams),
       EVERY(elapsed_needs_two_timed_and_done_events), EVERY(a_pending_event_may_be_destroyed),
       EVERY(host_functions_run_in_order), EVERY(host_functions_are_part_of_the_stream))
