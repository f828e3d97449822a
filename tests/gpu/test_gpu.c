/* SPDX-License-Identifier: MIT
 *
 * A real GPU, and other users of the driver in the process: graph capture, contexts, NVRTC. And the control experiment: without the wait
 * for the drained fence a ring must corrupt on the hardware, or the ring tests prove nothing. Skipped where there is no GPU. */
#include "conform/conform.h"
#include "cu.h"

#include <pthread.h>
#include <stdatomic.h>

/* ---------------------------------------------------------------- a pipeline to disturb others with */

enum { ITEMS = 30, ITEM_BYTES = 1 << 20, FLOATS = ITEM_BYTES / 4 };

static int affine(void *user, side_stream *stream, side_item *item)
{
    side_op op = affine_op(item->result, item->data, item->bytes, 2.0f, 1.0f);

    (void)user;
    return side_op_async(stream, &op) == SIDE_OK ? 0 : 1;
}

static int get(void *user, uint64_t item, const void *data, size_t bytes)
{
    const float *f = data;

    (void)user;
    for (size_t i = 0; i < bytes / sizeof(float); i++)
        if (f[i] != 2.0f * (float)item + 1.0f)
            return 3;
    return 0;
}

/* Open to close: pageable source, staging, callback sink, log. */
static void whole_run(void)
{
    side_device *device = NULL;
    side_pipeline *p = NULL;
    side_log *log = NULL;
    side_block blocks[ITEMS];
    side_pipeline_options o = SIDE_PIPELINE_OPTIONS_INIT;
    float *data = host_make((size_t)ITEMS * ITEM_BYTES);

    for (size_t i = 0; i < (size_t)ITEMS * FLOATS; i++)
        data[i] = (float)(i / FLOATS);
    for (size_t i = 0; i < ITEMS; i++)
        blocks[i] = (side_block){data + i * FLOATS, ITEM_BYTES};
    T_OK(side_device_open("cuda", &device));
    T_OK(side_log_create(device, 0, &log));
    o.item_bytes = o.result_bytes = ITEM_BYTES;
    o.source = side_source_blocks(blocks, ITEMS);
    o.sink = side_sink_callback(get, NULL);
    o.compute = affine;
    o.log = log;
    o.threads = 4;
    T_OK(side_pipeline_create(device, &o, &p));
    T_OK(side_pipeline_run(p, NULL));
    T_OK(side_pipeline_run(p, NULL));
    T_OK(side_pipeline_destroy(p));
    side_log_destroy(log);
    side_device_close(device);
    free(data);
}

/* ---------------------------------------------------------------- graph capture of another thread */

struct capture {
    const struct cu *cu;
    cu_context primary;
    int mode;
    atomic_int stage; /* 1: capturing, 2: the pipeline is through */
    const char *broken;
};

enum { GLOBAL = 0, THREAD_LOCAL = 1, RELAXED = 2, NODES = 8, GRAPH_BYTES = 4096 };

static void *capture_run(void *arg)
{
    struct capture *c = arg;
    const struct cu *cu = c->cu;
    cu_stream stream = NULL;
    cu_graph graph = NULL;
    cu_graph_exec exec = NULL;
    cu_ptr data = 0;
    unsigned char host[GRAPH_BYTES];
    int state = -1;

    CU_OK(cu->context_set(c->primary));
    CU_OK(cu->stream_create(&stream, 1)); /* non-blocking */
    CU_OK(cu->alloc(&data, GRAPH_BYTES));
    CU_OK(cu->capture_begin(stream, c->mode));
    CU_OK(cu->set(data, 1, GRAPH_BYTES, stream));
    atomic_store(&c->stage, 1);
    while (atomic_load(&c->stage) != 2)
        sleep_ms(1);
    if (cu->capture_state(stream, &state) != 0 || state != 1)
        c->broken = "the capture was invalidated";
    for (int i = 0; i < NODES && c->broken == NULL; i++)
        if (cu->set(data + (unsigned)i * 16, (unsigned char)(10 + i), 16, stream) != 0)
            c->broken = "nothing more can be captured";
    if (cu->capture_end(stream, &graph) != 0 || graph == NULL)
        c->broken = c->broken != NULL ? c->broken : "the capture does not end well";
    if (c->broken != NULL)
        return NULL;
    CU_OK(cu->graph_instantiate(&exec, graph, 0));
    CU_OK(cu->graph_launch(exec, stream));
    CU_OK(cu->stream_sync(stream));
    CU_OK(cu->to_host(host, data, GRAPH_BYTES));
    for (int i = 0; i < GRAPH_BYTES; i++)
        assert_int_equal(host[i], i < 16 * NODES ? 10 + i / 16 : 1);
    CU_OK(cu->graph_exec_destroy(exec));
    CU_OK(cu->graph_destroy(graph));
    CU_OK(cu->free(data));
    CU_OK(cu->stream_destroy(stream));
    return NULL;
}

static void check_capture(void (*beside)(void *), void *user, int mode)
{
    struct cu cu = cu_open();
    struct capture c = {.cu = &cu, .mode = mode};
    pthread_t thread;

    CU_OK(cu.retain(&c.primary, 0));
    assert_int_equal(pthread_create(&thread, NULL, capture_run, &c), 0);
    while (atomic_load(&c.stage) != 1)
        sleep_ms(1);
    beside(user);
    atomic_store(&c.stage, 2);
    pthread_join(thread, NULL);
    if (c.broken != NULL)
        T_FAIL("%s", c.broken);
    CU_OK(cu.release(0));
}

static void whole_run_beside(void *user)
{
    (void)user;
    whole_run();
}

T_TEST(a_whole_run_leaves_a_global_capture_intact)
{
    check_capture(whole_run_beside, NULL, GLOBAL);
}

T_TEST(a_whole_run_leaves_a_thread_local_capture_intact)
{
    check_capture(whole_run_beside, NULL, THREAD_LOCAL);
}

static void run_twice(void *pipeline)
{
    T_OK(side_pipeline_run(pipeline, NULL));
    T_OK(side_pipeline_run(pipeline, NULL));
}

/* What exists already only runs: the usual case. */
T_TEST(a_ready_pipeline_leaves_a_global_capture_intact)
{
    struct cu cu = cu_open();
    side_device *device = NULL;
    side_pipeline *p = NULL;
    side_block blocks[ITEMS];
    side_pipeline_options o = SIDE_PIPELINE_OPTIONS_INIT;
    float *data = host_make((size_t)ITEMS * ITEM_BYTES);

    (void)cu;
    for (size_t i = 0; i < (size_t)ITEMS * FLOATS; i++)
        data[i] = (float)(i / FLOATS);
    for (size_t i = 0; i < ITEMS; i++)
        blocks[i] = (side_block){data + i * FLOATS, ITEM_BYTES};
    T_OK(side_device_open("cuda", &device));
    o.item_bytes = o.result_bytes = ITEM_BYTES;
    o.source = side_source_blocks(blocks, ITEMS);
    o.sink = side_sink_callback(get, NULL);
    o.compute = affine;
    T_OK(side_pipeline_create(device, &o, &p));
    T_OK(side_pipeline_run(p, NULL));
    check_capture(run_twice, p, GLOBAL);
    T_OK(side_pipeline_destroy(p));
    side_device_close(device);
    free(data);
}

/* The control: an unrelaxed allocation by this thread does break it, so the tests above would notice. */
static void allocate_beside(void *user)
{
    const struct cu *cu = user;
    cu_context primary = NULL;
    cu_ptr data = 0;

    CU_OK(cu->retain(&primary, 0));
    CU_OK(cu->context_set(primary));
    if (cu->alloc(&data, 1 << 20) == 0)
        cu->free(data);
    CU_OK(cu->context_set(NULL));
    CU_OK(cu->release(0));
}

T_TEST(the_capture_tests_can_fail)
{
    struct cu cu = cu_open();
    struct capture c = {.cu = &cu, .mode = GLOBAL};
    pthread_t thread;

    CU_OK(cu.retain(&c.primary, 0));
    assert_int_equal(pthread_create(&thread, NULL, capture_run, &c), 0);
    while (atomic_load(&c.stage) != 1)
        sleep_ms(1);
    allocate_beside(&cu);
    atomic_store(&c.stage, 2);
    pthread_join(thread, NULL);
    assert_non_null(c.broken);
    fflush(NULL);
    _Exit(0); /* what the broken capture leaves behind is not worth the undoing */
}

/* ---------------------------------------------------------------- contexts */

static const struct cu *watched;
static cu_context expected_context;

static void check_context(const char *expr, int line)
{
    cu_context now = NULL;

    CU_OK(watched->context_get(&now));
    if (now != expected_context)
        t_fail(__FILE__, line, "%s leaves context %p current, not %p", expr, now, expected_context);
}

/* The call leaves the thread's context as it was. */
#define KEEPS(expr) ((expr), check_context(#expr, __LINE__))

static void many_calls(void)
{
    side_device *device = NULL;
    side_device_props props;
    side_link link;
    side_stream *s = NULL, *w = NULL;
    side_event *e = NULL, *b = NULL;
    side_pool *pool = NULL;
    side_memory_kind kind;
    size_t n = 0;
    double seconds;
    void *d = NULL, *h = NULL, *huge = NULL;
    float *mine = host_make(ITEM_BYTES);

    memset(mine, 0, ITEM_BYTES);
    KEEPS(T_OK(side_device_list(NULL, &n, NULL, 0)));
    KEEPS(T_OK(side_device_open("cuda", &device)));
    KEEPS(T_OK(side_device_get_props(device, &props)));
    KEEPS(T_OK(side_device_get_link(device, &link)));
    KEEPS(T_OK(side_device_get_memory(device, &n, NULL)));
    KEEPS(T_OK(side_stream_create(device, &s)));
    KEEPS(T_OK(side_stream_wrap(device, side_stream_native(s), &w)));
    KEEPS(T_OK(side_event_create(device, true, &e)));
    KEEPS(T_OK(side_event_create(device, true, &b)));
    KEEPS(T_OK(side_device_alloc(device, ITEM_BYTES, &d)));
    KEEPS(T_STATUS(side_device_alloc(device, (size_t)1 << 41, &huge), SIDE_NO_DEVICE_MEMORY));
    KEEPS(T_OK(side_device_pool(device, &pool)));
    KEEPS(T_OK(side_pool_alloc(pool, ITEM_BYTES, &h)));
    KEEPS(T_OK(side_memory_get_kind(device, h, &kind)));
    KEEPS(T_OK(side_memory_pin(device, mine, ITEM_BYTES)));
    KEEPS(T_OK(side_event_record(b, s)));
    KEEPS(T_OK(side_copy_async(s, SIDE_COPY_H2D, d, mine, ITEM_BYTES)));
    side_piece pieces[2] = {{d, mine, 64}, {(char *)d + 64, mine + 16, 64}};
    KEEPS(T_OK(side_copy_batch(s, SIDE_COPY_H2D, pieces, 2)));
    KEEPS(T_OK(side_memset_async(w, d, 0, 64)));
    KEEPS(affine_async(s, d, d, ITEM_BYTES, 1, 1));
    KEEPS(T_OK(side_copy_async(s, SIDE_COPY_D2H, h, d, ITEM_BYTES)));
    KEEPS(T_OK(side_event_record(e, s)));
    KEEPS(T_OK(side_stream_wait(w, e)));
    KEEPS((void)side_event_query(e));
    KEEPS(T_OK(side_event_wait(e, LONG_WAIT_S)));
    KEEPS(T_OK(side_event_elapsed(b, e, &seconds)));
    KEEPS(T_OK(side_stream_sync(s, LONG_WAIT_S)));
    KEEPS(T_OK(side_memory_unpin(device, mine)));
    KEEPS(T_OK(side_pool_free(pool, h, &s, 1)));
    KEEPS(side_pool_trim(pool));
    KEEPS(side_device_free(device, d));
    KEEPS(side_event_destroy(e));
    KEEPS(side_event_destroy(b));
    KEEPS(side_stream_destroy(w));
    KEEPS(side_stream_destroy(s));
    KEEPS(side_device_close(device));
    KEEPS(whole_run());
    free(mine);
}

T_TEST(no_context_stays_none)
{
    struct cu cu = cu_open();

    watched = &cu;
    expected_context = NULL;
    many_calls();
}

T_TEST(the_primary_context_stays_current)
{
    struct cu cu = cu_open();

    watched = &cu;
    CU_OK(cu.retain(&expected_context, 0));
    CU_OK(cu.context_set(expected_context));
    many_calls();
    CU_OK(cu.context_set(NULL));
    CU_OK(cu.release(0));
}

T_TEST(another_context_stays_current)
{
    struct cu cu = cu_open();

    watched = &cu;
    CU_OK(cu.context_create(&expected_context, 0, 0));
    many_calls();
    CU_OK(cu.context_destroy(expected_context));
}

/* Somebody else (a framework) lives in the primary context: opening, closing and closing again takes nothing from it. */
T_TEST(the_primary_context_is_shared)
{
    struct cu cu = cu_open();
    side_device *a = NULL, *b = NULL;
    side_stream *wrapped = NULL;
    cu_context primary = NULL, again = NULL;
    cu_stream stream = NULL;
    cu_ptr data = 0;
    unsigned char host[4096];
    unsigned flags = 0;
    int active = 0;

    CU_OK(cu.retain(&primary, 0));
    CU_OK(cu.context_set(primary));
    CU_OK(cu.stream_create(&stream, 1));
    CU_OK(cu.alloc(&data, sizeof(host)));
    CU_OK(cu.set(data, 7, sizeof(host), stream));
    T_OK(side_device_open("cuda", &a));
    T_OK(side_device_open("cuda:0", &b));
    side_device_close(a);
    T_OK(side_stream_wrap(b, stream, &wrapped)); /* its streams and its memory are usable here */
    T_OK(side_memset_async(wrapped, (char *)(uintptr_t)data + 100, 8, 100));
    T_OK(side_copy_async(wrapped, SIDE_COPY_D2H, host, (void *)(uintptr_t)data, sizeof(host)));
    T_OK(side_stream_sync(wrapped, LONG_WAIT_S));
    assert_int_equal(host[99], 7);
    assert_int_equal(host[100], 8);
    side_stream_destroy(wrapped);
    side_device_close(b);
    whole_run();
    CU_OK(cu.primary_state(0, &flags, &active));
    assert_int_equal(active, 1);
    CU_OK(cu.set(data, 9, sizeof(host), stream));
    CU_OK(cu.stream_sync(stream));
    CU_OK(cu.to_host(host, data, sizeof(host)));
    assert_int_equal(host[4095], 9);
    CU_OK(cu.retain(&again, 0));
    assert_ptr_equal(again, primary);
    CU_OK(cu.release(0));
    CU_OK(cu.free(data));
    CU_OK(cu.stream_destroy(stream));
    CU_OK(cu.context_set(NULL));
    CU_OK(cu.release(0));
    CU_OK(cu.primary_state(0, &flags, &active));
    assert_int_equal(active, 0); /* every retain of the library's was given back */
}

/* ---------------------------------------------------------------- NVRTC */

static void run_op(side_device *device, const side_op *host, void *out)
{
    side_stream *s = stream_make(device);
    size_t in[2], out_bytes;
    side_op op = *host;

    T_OK(side_op_bytes(host, in, &out_bytes));
    void *a = device_make(device, in[0]), *b = device_make(device, out_bytes);
    op.in[0] = a;
    op.out = b;
    T_OK(side_copy_async(s, SIDE_COPY_H2D, a, host->in[0], in[0]));
    T_OK(side_op_async(s, &op));
    T_OK(side_copy_async(s, SIDE_COPY_D2H, out, b, out_bytes));
    sync_stream(s);
    side_device_free(device, a);
    side_device_free(device, b);
    side_stream_destroy(s);
}

/* fatbin, NVRTC and the CPU: three times the same bits. */
static void check_three(side_device *fatbin, side_device *nvrtc, const side_op *op, const char *what)
{
    size_t in[2], bytes;
    side_op host = *op;

    T_OK(side_op_bytes(op, in, &bytes));
    unsigned char *x = host_make(bytes), *y = host_make(bytes), *z = host_make(bytes);
    host.out = z;
    T_OK(side_op_host(&host));
    run_op(nvrtc, op, y);
    check_equal(y, z, bytes, what);
    if (fatbin != NULL) {
        run_op(fatbin, op, x);
        check_equal(x, z, bytes, what);
    }
    free(x);
    free(y);
    free(z);
}

T_TEST(nvrtc_gives_what_the_fatbin_gives)
{
    struct cu cu = cu_open();
    enum { COUNT = 1 << 20 };
    static const side_type types[] = {SIDE_F32, SIDE_F16, SIDE_BF16};
    side_device *fatbin = NULL, *nvrtc = NULL;
    side_device_props props;
    float *floats = host_make(COUNT * sizeof(float));
    unsigned char *bits = host_make(COUNT * sizeof(float));

    (void)cu;
    T_OK(side_device_open("cuda", &fatbin));
    T_OK(side_device_get_props(fatbin, &props));
    if (strcmp(props.kernels_from, "fatbin") != 0) { /* built without nvcc: NVRTC against the CPU alone */
        side_device_close(fatbin);
        fatbin = NULL;
    }
    setenv("SIDESTREAM_NO_FATBIN", "1", 1);
    T_OK(side_device_open("cuda", &nvrtc));
    T_OK(side_device_get_props(nvrtc, &props));
    if (!props.kernels)
        T_SKIP("no NVRTC: %s", props.kernels_from);
    assert_int_equal(strncmp(props.kernels_from, "NVRTC", 5), 0);
    fill_floats(floats, COUNT, 1);
    fill(bits, COUNT * sizeof(float), 2);
    for (int i = 0; i < 3; i++)
        for (int k = 0; k < 3; k++) {
            side_op op = SIDE_OP_INIT;
            op.id = SIDE_OP_CAST;
            op.type[0] = types[i];
            op.type[1] = types[k];
            op.dim[0] = COUNT - 3;
            op.in[0] = bits;
            check_three(fatbin, nvrtc, &op, "cast");
        }
    side_op op = affine_op(NULL, floats, (COUNT - 1) * sizeof(float), 3.1415927f, -0.7f);
    check_three(fatbin, nvrtc, &op, "affine");
    op = (side_op)SIDE_OP_INIT;
    op.id = SIDE_OP_XXH3_BLOCKS;
    op.dim[0] = COUNT * sizeof(float) / 1024;
    op.in[0] = bits;
    check_three(fatbin, nvrtc, &op, "xxh3");
    free(floats);
    free(bits);
    side_device_close(fatbin);
    side_device_close(nvrtc);
}

/* ---------------------------------------------------------------- the control: without the wait, it must corrupt */

enum { RING = 2, LOOPS = 1000, RING_BYTES = 64 * 1024, RING_FLOATS = RING_BYTES / 4 };

struct race {
    struct rig rig;
    side_stream *in, *out;
    float *source, *results, *back;
};

static struct race race_make(void)
{
    struct race r = {.rig = rig_open()};

    r.in = stream_make(r.rig.device);
    r.out = stream_make(r.rig.device);
    r.source = pinned_make(r.rig.device, (size_t)LOOPS * RING_BYTES);
    r.back = pinned_make(r.rig.device, (size_t)LOOPS * RING_BYTES);
    r.results = device_make(r.rig.device, (size_t)LOOPS * RING_BYTES);
    for (size_t i = 0; i < (size_t)LOOPS * RING_FLOATS; i++)
        r.source[i] = (float)(i / RING_FLOATS);
    spin_async(r.out, 1);
    affine_async(r.out, r.results, r.results, 64, 0, 0);
    sync_stream(r.out);
    return r;
}

/* The consumer: 50 us late, then reads its slot into its own place. */
static void race_consume(struct race *r, size_t i, const void *slot)
{
    spin_async(r->out, 50000);
    affine_async(r->out, r->results + i * RING_FLOATS, slot, RING_BYTES, 1, 0);
}

/* How many items arrived as another one. */
static size_t race_count(struct race *r)
{
    size_t bad = 0;

    T_OK(side_copy_async(r->out, SIDE_COPY_D2H, r->back, r->results, (size_t)LOOPS * RING_BYTES));
    sync_stream(r->in);
    sync_stream(r->out);
    for (size_t i = 0; i < LOOPS; i++) {
        bool good = true;
        for (size_t k = 0; k < RING_FLOATS; k++)
            good = good && r->back[i * RING_FLOATS + k] == (float)i;
        bad += !good;
    }
    return bad;
}

static void race_free(struct race *r)
{
    side_stream_destroy(r->in);
    side_stream_destroy(r->out);
    pinned_free(r->rig.device, r->source);
    pinned_free(r->rig.device, r->back);
    side_device_free(r->rig.device, r->results);
    rig_close(&r->rig);
}

/* By hand. `drained` false: the copy into a slot does not wait for the reader of what was there. */
static size_t race_by_hand(bool drained)
{
    struct race r = race_make();
    side_event *filled[RING], *read[RING];
    char *ring = device_make(r.rig.device, RING * (size_t)RING_BYTES);

    for (int k = 0; k < RING; k++) {
        filled[k] = event_make(r.rig.device, false);
        read[k] = event_make(r.rig.device, false);
    }
    for (size_t i = 0; i < LOOPS; i++) {
        char *slot = ring + i % RING * RING_BYTES;
        if (drained)
            T_OK(side_stream_wait(r.in, read[i % RING]));
        T_OK(side_copy_async(r.in, SIDE_COPY_H2D, slot, r.source + i * RING_FLOATS, RING_BYTES));
        T_OK(side_event_record(filled[i % RING], r.in));
        T_OK(side_stream_wait(r.out, filled[i % RING]));
        race_consume(&r, i, slot);
        T_OK(side_event_record(read[i % RING], r.out));
    }
    const size_t bad = race_count(&r);
    for (int k = 0; k < RING; k++) {
        side_event_destroy(filled[k]);
        side_event_destroy(read[k]);
    }
    side_device_free(r.rig.device, ring);
    race_free(&r);
    return bad;
}

static size_t race_ours(void)
{
    struct race r = race_make();
    side_slots_options o = SIDE_SLOTS_OPTIONS_INIT;
    side_slots *ring = NULL;
    side_slot slot;

    o.count = RING;
    o.slot_bytes = RING_BYTES;
    T_OK(side_slots_create(r.rig.device, &o, &ring));
    for (size_t i = 0; i < LOOPS; i++) {
        T_OK(side_slots_acquire(ring, 0, r.in, &slot));
        T_OK(side_copy_async(r.in, SIDE_COPY_H2D, slot.data, r.source + i * RING_FLOATS, RING_BYTES));
        T_OK(side_slots_publish(ring, &slot, r.in, NULL));
        T_OK(side_slots_take(ring, i, r.out, &slot));
        race_consume(&r, i, slot.data);
        T_OK(side_slots_release(ring, &slot, r.out));
    }
    const size_t bad = race_count(&r);
    T_OK(side_slots_destroy(ring));
    race_free(&r);
    return bad;
}

T_TEST(a_ring_without_the_wait_corrupts_and_ours_does_not)
{
    cu_open();
    const size_t without = race_by_hand(false), with = race_by_hand(true), ours = race_ours();

    printf("of %d items: without the wait %zu wrong, with it %zu, a ring of slots %zu\n", LOOPS, without, with, ours);
    fflush(stdout);
    assert_int_equal(ours, 0);
    assert_int_equal(with, 0);
    assert_true(without > LOOPS / 10);
}

T_MAIN(T_ARG(a_whole_run_leaves_a_global_capture_intact, "cuda"),
       T_ARG(a_whole_run_leaves_a_thread_local_capture_intact, "cuda"),
       T_ARG(a_ready_pipeline_leaves_a_global_capture_intact, "cuda"), T_ARG(the_capture_tests_can_fail, "cuda"),
       T_ARG(no_context_stays_none, "cuda"), T_ARG(the_primary_context_stays_current, "cuda"),
       T_ARG(another_context_stays_current, "cuda"), T_ARG(the_primary_context_is_shared, "cuda"),
       T_ARG(nvrtc_gives_what_the_fatbin_gives, "cuda"),
       T_LONG_ARG(a_ring_without_the_wait_corrupts_and_ours_does_not, 60, "cuda"))
