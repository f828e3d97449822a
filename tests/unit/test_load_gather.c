/* SPDX-License-Identifier: MIT
 *
 * When gathered slots go. The driver can be looked at only while a copy is in flight, so one of them hangs. */
#include "load_help.h"
#include "ring.h"

#include <errno.h>

static struct kept {
    struct load_rig rig;
    struct kept *next;
} * kept; /* what the library keeps is no leak as long as somebody points to it */

/* All slots are full before there is memory for them: five go at once, then eight a batch, and what is left waits. Operation `hang` never ends: in front of it
 * `back` slots come back. Then `copies` are queued, with what is left where the link has one batch alone, without it where it has two. */
static void gather(size_t slots, unsigned hang, size_t back, uint64_t copies, uint64_t ready)
{
    struct kept *k = calloc(1, sizeof(*k));
    struct load_rig *r = &k->rig;
    const size_t bytes = slots * 4096;
    void *memory = NULL;
    char keys[32];
    side_load_stats s;
    t_rng rng = t_rng_make(7);

    k->next = kept;
    kept = k;
    snprintf(keys, sizeof(keys), "hang=%u", hang);
    side_device *dev = load_device(keys, 1);
    load_rig_init(r, dev, false, 1, &rng);
    r->image[0] = realloc(r->image[0], bytes);
    r->bytes[0] = r->sources[0].bytes = bytes;
    t_rng_fill(&rng, r->image[0], bytes);
    for (size_t i = 0; i < slots; i++)
        r->parts[i] = (side_load_part){.begin = i * 4096, .bytes = 4096};
    r->o.parts = r->parts;
    r->o.count = slots;
    r->o.flags = SIDE_LOAD_GIVEN;
    r->o.pinned_bytes = bytes;
    r->o.timeout_s = 2;
    T_OK(side_device_alloc(dev, bytes, &memory));
    T_OK(side_load_start(dev, NULL, &r->o, &r->load));
    do {
        os_sleep_ns(100000);
        T_OK(side_load_get_stats(r->load, &s));
    } while (s.read_bytes < bytes);
    T_OK(side_load_give_arena(r->load, 0, memory, NULL));
    do {
        os_sleep_ns(100000);
        T_OK(side_load_get_stats(r->load, &s));
    } while (s.copied_bytes < back * 4096 && side_load_query(r->load, 0) >= 0);
    assert_int_equal(s.copied_bytes, back * 4096);
    assert_int_equal(s.copies, copies); /* what came back and what that let go are one step */
    assert_int_equal(s.ready, ready);
    size_t there = 0; /* none of the batch that hangs, whose last slot alone has an event */
    for (size_t i = 0; i < slots; i++)
        there += side_load_query(r->load, i) == SIDE_OK;
    assert_int_equal(there, back);
    for (size_t i = 0; i < slots && ready == slots; i++) /* the host goes on */
        T_OK(side_load_wait(r->load, i, r->stream));
    T_STATUS(side_load_join(r->load, NULL), SIDE_STUCK);
}

T_TEST(one_batch_in_flight_is_too_little)
{
    gather(16, 6, 5, 7, 16);
}

T_TEST(two_batches_in_flight_are_enough)
{
    gather(32, 7, 13, 8, 29);
}

/* ---------------------------------------------------------------- many slots */

/* What is done with devices that keep no virtual time: the driver asks for events, and starved copies count. */
T_TEST(loads_as_on_hardware)
{
    T_FOR_SEEDS (seed, 200) {
        t_rng rng = t_rng_make(seed);
        side_device *dev = load_device("", seed);
        struct load_rig r;
        side_load_stats s;

        dev->props.simulated = false;
        load_rig_init(&r, dev, false, 1 + t_rng_below(&rng, 40), &rng);
        r.o.flags = seed % 2 == 0 ? SIDE_LOAD_GIVEN : 0;
        r.o.pinned_bytes = (2 + t_rng_below(&rng, 60)) * 4096;
        T_OK(side_load_start(dev, NULL, &r.o, &r.load));
        if (r.o.flags != 0)
            T_OK(load_give(&r));
        T_OK(load_look(&r, &rng));
        T_OK(side_load_join(r.load, &s));
        load_rig_finish(&r);
        load_close(dev);
    }
}

/* More copies than one call takes, in one piece and over several that go together. */
T_TEST(more_copies_than_a_batch)
{
    enum { PARTS = 1000, BYTES = 40 };
    static side_load_part parts[PARTS];

    for (int late = 0; late < 2; late++) {
        side_device *dev = load_device("", 1);
        t_rng rng = t_rng_make(5);
        struct load_rig r;
        void *own = NULL;

        load_rig_init(&r, dev, false, 1, &rng);
        r.bytes[0] = r.sources[0].bytes = PARTS * BYTES;
        r.image[0] = realloc(r.image[0], PARTS * BYTES);
        t_rng_fill(&rng, r.image[0], PARTS * BYTES);
        T_OK(side_device_alloc(dev, PARTS * BYTES, &own));
        for (size_t i = 0; i < PARTS; i++) /* backwards: nothing joins */
            parts[i] = (side_load_part){
                .begin = i * BYTES, .bytes = BYTES, .data = (char *)own + (PARTS - 1 - i) * BYTES};
        r.o.parts = parts;
        r.o.count = PARTS;
        r.o.piece_bytes = late ? 4096 : 65536;
        r.o.pinned_bytes = 16 * r.o.piece_bytes;
        r.o.threads = 8;
        T_OK(side_load_start(dev, NULL, &r.o, &r.load));
        T_OK(side_load_wait(r.load, SIDE_LOAD_ALL, r.stream));
        T_OK(side_copy_async(r.stream, SIDE_COPY_D2H, r.seen, own, PARTS * BYTES));
        T_OK(side_stream_sync(r.stream, 0));
        for (size_t i = 0; i < PARTS; i++)
            assert_memory_equal(r.seen + (PARTS - 1 - i) * BYTES, r.image[0] + i * BYTES, BYTES);
        T_OK(side_load_join(r.load, NULL));
        T_OK(side_load_destroy(r.load));
        r.load = NULL;
        side_device_free(dev, own);
        load_rig_finish(&r);
        load_close(dev);
    }
}

/* Every call on the device fails once while slots are gathered and arenas made: an error, or all is right. */
T_TEST(calls_fail_while_slots_are_gathered)
{
    for (unsigned n = 1; n <= (T_SANITIZED ? 200u : 2000u); n++) {
        side_device *dev = load_device("", n);
        t_rng rng = t_rng_make(n);
        struct load_rig r;

        load_rig_init(&r, dev, false, 16, &rng);
        for (size_t i = 0; i < 16; i++) {
            r.bytes[i] = r.sources[i].bytes = 12 * 4096;
            r.image[i] = realloc(r.image[i], r.bytes[i]);
            t_rng_fill(&rng, r.image[i], r.bytes[i]);
        }
        r.o.pinned_bytes = 64 * 4096;
        r.o.piece_bytes = 4096;
        r.o.threads = 8;
        T_OK(side_load_start(dev, NULL, &r.o, &r.load));
        sim_fail_at(dev->context, 1 + n % 60, SIDE_DEVICE_ERROR);
        side_status s = side_load_join(r.load, NULL);
        sim_fault_clear(dev->context);
        if (s == SIDE_OK)
            T_OK(load_look(&r, &rng));
        else
            T_STATUS(s, SIDE_DEVICE_ERROR);
        load_rig_finish(&r);
        load_close(dev);
    }
}

/* ---------------------------------------------------------------- io_uring */

static atomic_uint tables, updates, wholes, reads;
static bool without_table;

static int cold(enum io_call call, int fd, uint64_t what, size_t *bytes)
{
    (void)fd;
    if (call == IO_CACHED)
        *bytes = 0;
    if (call == IO_PREAD_NOWAIT)
        return -EAGAIN;
    atomic_fetch_add(&reads, call == IO_RING_READ);
    if (call != IO_RING_REGISTER)
        return 0;
    atomic_fetch_add(&tables, what == RING_TABLE);
    atomic_fetch_add(&updates, what == RING_TABLE_UPDATE);
    atomic_fetch_add(&wholes, what == RING_BUFFERS);
    return without_table && what == RING_TABLE ? -EINVAL : 0;
}

/* Staging is registered in a table; with kernels that have none, once, when the ring is first needed. */
T_TEST(staging_is_registered)
{
    for (int i = 0; i < 2; i++) {
        side_device *dev = load_device("", 1);
        t_rng rng = t_rng_make(5);
        struct load_rig r;

        without_table = i == 1;
        atomic_store(&tables, 0);
        atomic_store(&updates, 0);
        load_rig_init(&r, dev, true, 20, &rng);
        io_test = cold;
        T_OK(side_load_start(dev, r.ck, &r.o, &r.load));
        T_OK(load_look(&r, &rng));
        load_rig_finish(&r);
        io_test = NULL;
        load_close(dev);
        if (atomic_load(&reads) == 0)
            T_SKIP("no io_uring here");
        assert_int_equal(atomic_load(&tables), 1);
        assert_int_equal(atomic_load(&updates) > 0, i == 0);
        assert_int_equal(atomic_load(&wholes), i);
    }
}

T_MAIN(T(one_batch_in_flight_is_too_little), T(two_batches_in_flight_are_enough), T(loads_as_on_hardware),
       T(more_copies_than_a_batch), T(calls_fail_while_slots_are_gathered), T(staging_is_registered))
