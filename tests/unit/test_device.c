/* SPDX-License-Identifier: MIT
 *
 * Public calls with arguments that they must refuse: nothing is queued, nothing is set, and the detail tells what was wrong. */
#include "pipe_help.h"

#include "error.h"

#include <pthread.h>

/* Refused with this status, a message, and a place. */
#define REFUSES(expr, expected)                                \
    do {                                                       \
        T_STATUS(expr, expected);                              \
        assert_int_equal(side_last_error()->status, expected); \
        assert_true(side_last_error()->message[0] != '\0');    \
        assert_non_null(side_last_error()->where);             \
    } while (0)

/* ---------------------------------------------------------------- opening and listing */

static void refuses_spec(const char *spec, side_status expected, const char *says)
{
    side_device *dev = (void *)&spec;

    T_STATUS(side_device_open(spec, &dev), expected);
    if (strstr(side_last_error()->message, says) == NULL)
        T_FAIL("\"%s\": the message does not say '%s': %s", spec, says, side_last_error()->message);
    assert_ptr_equal(dev, (void *)&spec); /* outputs only after success */
}

T_TEST(unknown_specs)
{
    refuses_spec("gpu", SIDE_INVALID, "gpu");
    refuses_spec("", SIDE_INVALID, "expected");
    refuses_spec("simulator", SIDE_INVALID, "simulator");
    refuses_spec("sim:h300", SIDE_INVALID, "h300");
    refuses_spec("sim:h200,colour=red", SIDE_INVALID, "colour");
    refuses_spec("sim:h200,copy_engines=3", SIDE_INVALID, "copy_engines");
    refuses_spec("sim:seed=", SIDE_INVALID, "seed");
    REFUSES(side_device_open("sim", NULL), SIDE_INVALID);
    side_device_close(NULL);
}

T_TEST(auto_and_the_environment)
{
    side_device_props props;
    side_device *dev;

    setenv("SIDESTREAM_DEVICE", "sim:t4", 1);
    T_OK(side_device_open("auto", &dev));
    T_OK(side_device_get_props(dev, &props));
    assert_string_equal(props.spec, "sim:t4");
    assert_true(props.simulated);
    side_device_close(dev);
    T_OK(side_device_open(NULL, &dev));
    T_OK(side_device_get_props(dev, &props));
    assert_string_equal(props.spec, "sim:t4");
    side_device_close(dev);
    T_OK(side_device_open("sim:gh200", &dev)); /* only for auto */
    T_OK(side_device_get_props(dev, &props));
    assert_string_equal(props.spec, "sim:gh200");
    side_device_close(dev);
    setenv("SIDESTREAM_DEVICE", "nonsense", 1);
    REFUSES(side_device_open("auto", &dev), SIDE_INVALID);
}

T_TEST(list)
{
    char specs[16][64], why[128] = "x";
    size_t n = 0, all;

    T_OK(side_device_list(NULL, &n, NULL, 0)); /* how many */
    assert_true(n >= 1 && n <= 16);
    all = n;
    n = 16;
    T_OK(side_device_list(specs, &n, why, sizeof(why)));
    assert_int_equal(n, all);
    assert_string_equal(specs[n - 1], "sim");
    if (n == 1)
        assert_true(why[0] != '\0'); /* why there is no GPU */
    memset(specs, '#', sizeof(specs));
    n = 0;
    T_OK(side_device_list(specs, &n, why, 1)); /* no room: only the count */
    assert_int_equal(n, all);
    assert_int_equal(specs[0][0], '#');
    assert_int_equal(why[0], 0);
    n = 1;
    REFUSES(side_device_list(NULL, &n, NULL, 0), SIDE_INVALID);
    REFUSES(side_device_list(specs, NULL, NULL, 0), SIDE_INVALID);
}

/* ---------------------------------------------------------------- NULL, and things of two devices */

T_TEST(device_calls)
{
    side_device *dev = rig_device("", 1);
    side_device_props props;
    side_memory_kind kind;
    side_link link;
    size_t bytes;
    void *p = &bytes;
    char c;

    REFUSES(side_device_get_props(NULL, &props), SIDE_INVALID);
    REFUSES(side_device_get_props(dev, NULL), SIDE_INVALID);
    REFUSES(side_device_get_link(NULL, &link), SIDE_INVALID);
    REFUSES(side_device_get_link(dev, NULL), SIDE_INVALID);
    REFUSES(side_device_get_memory(NULL, &bytes, &bytes), SIDE_INVALID);
    T_OK(side_device_get_memory(dev, NULL, NULL));
    REFUSES(side_device_alloc(NULL, 1, &p), SIDE_INVALID);
    REFUSES(side_device_alloc(dev, 0, &p), SIDE_INVALID);
    REFUSES(side_device_alloc(dev, 1, NULL), SIDE_INVALID);
    REFUSES(side_device_alloc(dev, (size_t)1 << 60, &p), SIDE_NO_DEVICE_MEMORY);
    assert_ptr_equal(p, &bytes);
    side_device_free(NULL, &c);
    side_device_free(dev, NULL);
    REFUSES(side_memory_get_kind(NULL, &c, &kind), SIDE_INVALID);
    REFUSES(side_memory_get_kind(dev, NULL, &kind), SIDE_INVALID);
    REFUSES(side_memory_get_kind(dev, &c, NULL), SIDE_INVALID);
    assert_true(side_device_now_ns(NULL) > 0);
    rig_close(dev);
}

T_TEST(stream_and_event_calls)
{
    side_device *dev = rig_device("", 1), *other = rig_device("", 1);
    side_event *e, *timed, *foreign_event;
    side_stream *s, *foreign;
    double seconds = 7;

    T_OK(side_stream_create(dev, &s));
    T_OK(side_stream_create(other, &foreign));
    T_OK(side_event_create(dev, false, &e));
    T_OK(side_event_create(dev, true, &timed));
    T_OK(side_event_create(other, true, &foreign_event));
    REFUSES(side_stream_create(NULL, &s), SIDE_INVALID);
    REFUSES(side_stream_create(dev, NULL), SIDE_INVALID);
    REFUSES(side_stream_wrap(dev, NULL, NULL), SIDE_INVALID);
    REFUSES(side_stream_wrap(dev, &seconds, &s), SIDE_INVALID);
    REFUSES(side_event_create(NULL, false, &e), SIDE_INVALID);
    REFUSES(side_event_create(dev, false, NULL), SIDE_INVALID);
    REFUSES(side_stream_wait(NULL, e), SIDE_INVALID);
    REFUSES(side_stream_wait(s, NULL), SIDE_INVALID);
    REFUSES(side_stream_wait(foreign, e), SIDE_INVALID);
    REFUSES(side_event_record(NULL, s), SIDE_INVALID);
    REFUSES(side_event_record(e, NULL), SIDE_INVALID);
    REFUSES(side_event_record(e, foreign), SIDE_INVALID);
    REFUSES(side_event_query(NULL), SIDE_INVALID);
    REFUSES(side_event_wait(NULL, 0), SIDE_INVALID);
    REFUSES(side_stream_sync(NULL, 0), SIDE_INVALID);
    REFUSES(side_stream_host_fn(s, NULL, NULL, 0), SIDE_INVALID);
    T_OK(side_event_record(timed, s));
    T_OK(side_event_record(e, s));
    T_OK(side_event_wait(e, 0));
    REFUSES(side_event_elapsed(timed, e, &seconds), SIDE_STATE); /* made without timing */
    REFUSES(side_event_elapsed(timed, timed, NULL), SIDE_INVALID);
    REFUSES(side_event_elapsed(NULL, timed, &seconds), SIDE_INVALID);
    REFUSES(side_event_elapsed(timed, NULL, &seconds), SIDE_INVALID);
    T_OK(side_event_record(foreign_event, foreign));
    T_OK(side_event_wait(foreign_event, 0));
    REFUSES(side_event_elapsed(timed, foreign_event, &seconds), SIDE_INVALID); /* of another device */
    assert_true(seconds == 7);
    assert_null(side_stream_native(NULL));
    assert_null(side_stream_device(NULL));
    assert_ptr_equal(side_stream_device(s), dev);
    side_stream_destroy(NULL);
    side_event_destroy(NULL);
    side_stream_destroy(s);
    side_stream_destroy(foreign);
    side_event_destroy(e);
    side_event_destroy(timed);
    side_event_destroy(foreign_event);
    rig_close(dev);
    rig_close(other);
}

T_TEST(copy_calls)
{
    side_device *dev = rig_device("", 1);
    side_piece pieces[2];
    side_stream *s;
    char h[64];
    void *d;

    T_OK(side_stream_create(dev, &s));
    T_OK(side_device_alloc(dev, 64, &d));
    REFUSES(side_copy_async(NULL, SIDE_COPY_H2D, d, h, 64), SIDE_INVALID);
    REFUSES(side_copy_async(s, SIDE_COPY_H2D, NULL, h, 64), SIDE_INVALID);
    REFUSES(side_copy_async(s, SIDE_COPY_H2D, d, NULL, 64), SIDE_INVALID);
    REFUSES(side_copy_async(s, (side_copy_kind)3, d, h, 64), SIDE_INVALID);
    REFUSES(side_copy_async(s, SIDE_COPY_H2D, d, h, 65), SIDE_INVALID); /* past its end */
    T_OK(side_copy_async(s, SIDE_COPY_H2D, NULL, NULL, 0));
    pieces[0] = (side_piece){d, h, 64};
    pieces[1] = (side_piece){d, h, 0};
    REFUSES(side_copy_batch(s, SIDE_COPY_H2D, pieces, 2), SIDE_INVALID);
    pieces[1] = (side_piece){NULL, h, 1};
    REFUSES(side_copy_batch(s, SIDE_COPY_H2D, pieces, 2), SIDE_INVALID);
    REFUSES(side_copy_batch(s, SIDE_COPY_H2D, NULL, 2), SIDE_INVALID);
    REFUSES(side_copy_batch(s, (side_copy_kind)7, pieces, 1), SIDE_INVALID);
    REFUSES(side_copy_batch(NULL, SIDE_COPY_H2D, pieces, 1), SIDE_INVALID);
    T_OK(side_copy_batch(s, SIDE_COPY_H2D, NULL, 0));
    REFUSES(side_memset_async(NULL, d, 0, 1), SIDE_INVALID);
    REFUSES(side_memset_async(s, NULL, 0, 1), SIDE_INVALID);
    T_OK(side_memset_async(s, NULL, 0, 0));
    side_device_free(dev, d);
    side_stream_destroy(s);
    rig_close(dev);
}

T_TEST(op_calls)
{
    side_device *dev = rig_device("", 1);
    side_op op = SIDE_OP_INIT;
    side_stream *s;
    void *d;

    T_OK(side_stream_create(dev, &s));
    T_OK(side_device_alloc(dev, 64, &d));
    REFUSES(side_op_async(s, NULL), SIDE_INVALID);
    REFUSES(side_op_async(s, &op), SIDE_INVALID); /* no id */
    op.id = SIDE_OP_AFFINE;
    op.dim[0] = 16;
    REFUSES(side_op_async(s, &op), SIDE_INVALID); /* no pointers */
    op.in[0] = d;
    op.out = d;
    REFUSES(side_op_async(NULL, &op), SIDE_INVALID);
    T_OK(side_op_async(s, &op));
    op.dim[0] = UINT64_MAX / 2;
    REFUSES(side_op_async(s, &op), SIDE_TOO_LARGE);
    op.dim[0] = 0;
    T_OK(side_op_async(s, &op));
    op.size = 8;
    REFUSES(side_op_async(s, &op), SIDE_INVALID);
    side_device_free(dev, d);
    side_stream_destroy(s);
    rig_close(dev);
}

/* ---------------------------------------------------------------- options of a pipeline */

static int no_compute(void *user, side_stream *stream, side_item *item)
{
    (void)user;
    (void)stream;
    (void)item;
    return 0;
}

T_TEST(pipeline_options)
{
    struct {
        side_pipeline_options o;
        unsigned char tail[16];
    } longer;
    side_device *dev = rig_device("", 1), *other = rig_device("", 1);
    side_pipeline_options good = SIDE_PIPELINE_OPTIONS_INIT, o;
    side_pipeline *p = NULL;
    side_stream *streams[2] = {NULL, NULL};
    char h[100];
    side_block block = {h, 100}, empty = {NULL, 0}, null = {NULL, 1}, large = {h, 101};
    void *d;
    side_block device_block;

    T_OK(side_device_alloc(dev, 100, &d));
    device_block = (side_block){d, 100};
    good.item_bytes = good.result_bytes = 100;
    good.source = side_source_blocks(&block, 1);
    good.sink = side_sink_blocks(&block, 1);
    good.compute = no_compute;
    REFUSES(side_pipeline_create(NULL, &good, &p), SIDE_INVALID);
    REFUSES(side_pipeline_create(dev, NULL, &p), SIDE_INVALID);
    REFUSES(side_pipeline_create(dev, &good, NULL), SIDE_INVALID);
#define BAD(status, ...)                                    \
    do {                                                    \
        o = good;                                           \
        __VA_ARGS__;                                        \
        REFUSES(side_pipeline_create(dev, &o, &p), status); \
        assert_null(p);                                     \
    } while (0)
    BAD(SIDE_INVALID, o.size = 0);
    BAD(SIDE_INVALID, o.item_bytes = 0);
    BAD(SIDE_INVALID, o.item_bytes = SIZE_MAX / 2);
    BAD(SIDE_INVALID, o.result_bytes = 0);
    BAD(SIDE_INVALID, o.sink.kind = SIDE_END_NONE);
    BAD(SIDE_INVALID, o.source.kind = SIDE_END_NONE);
    BAD(SIDE_INVALID, o.source.kind = (side_end_kind)9);
    BAD(SIDE_INVALID, o.sink.kind = (side_end_kind)9);
    BAD(SIDE_INVALID, o.source.blocks = NULL);
    BAD(SIDE_INVALID, o.sink.blocks = NULL);
    BAD(SIDE_INVALID, o.source = side_source_callback(NULL, NULL));
    BAD(SIDE_INVALID, o.sink = side_sink_callback(NULL, NULL));
    BAD(SIDE_INVALID, o.source = side_source_file(-1, 0, 1));
    BAD(SIDE_INVALID, o.sink = side_sink_file(-1, 0));
    BAD(SIDE_INVALID, o.source = side_source_blocks(&null, 1));
    BAD(SIDE_INVALID, o.source = side_source_blocks(&empty, 1)); /* an item of no bytes */
    BAD(SIDE_TOO_LARGE, o.source = side_source_blocks(&large, 1));
    BAD(SIDE_INVALID, o.source = side_source_blocks(&device_block, 1));
    BAD(SIDE_INVALID, o.sink = side_sink_blocks(&device_block, 1));
    BAD(SIDE_INVALID, o.sink = side_sink_blocks(&null, 1));
    BAD(SIDE_INVALID, o.depth = 65);
    BAD(SIDE_INVALID, o.streams = 17);
    BAD(SIDE_INVALID, o.window = 100000);
    BAD(SIDE_INVALID, o.threads = 100000);
    BAD(SIDE_INVALID, o.timeout_s = -1);
    BAD(SIDE_INVALID, o.timeout_s = 0.0 / 0.0);
    BAD(SIDE_INVALID, o.streams = 2, o.compute_streams = streams);
    T_OK(side_stream_create(dev, &streams[0]));
    T_OK(side_stream_create(other, &streams[1]));
    BAD(SIDE_INVALID, o.streams = 2, o.compute_streams = streams);
#undef BAD
    memset(&longer, 0, sizeof(longer));
    longer.o = good;
    longer.o.size = sizeof(longer);
    longer.tail[15] = 1;
    REFUSES(side_pipeline_create(dev, &longer.o, &p), SIDE_UNSUPPORTED);
    longer.tail[15] = 0;
    rig_small_pool();
    T_OK(side_pipeline_create(dev, &longer.o, &p));
    T_OK(side_pipeline_destroy(p));
    T_OK(side_pipeline_destroy(NULL));
    REFUSES(side_pipeline_run(NULL, NULL), SIDE_INVALID);
    REFUSES(side_pipeline_rewind(NULL), SIDE_INVALID);
    REFUSES(side_pipeline_get_stats(NULL, NULL), SIDE_INVALID);
    side_stream_destroy(streams[0]);
    side_stream_destroy(streams[1]);
    side_device_free(dev, d);
    rig_close(dev);
    rig_close(other);
}

/* ---------------------------------------------------------------- status and detail */

T_TEST(status_names)
{
#define X(name, value, text)                            \
    assert_string_equal(side_status_name(name), #name); \
    assert_string_equal(side_status_text(name), text);  \
    assert_int_equal(name, value);
    SIDE_STATUS_MAP(X)
#undef X
    assert_string_equal(side_status_name(SIDE_OK), "SIDE_OK");
    assert_non_null(side_status_name((side_status)-1000));
    assert_non_null(side_status_text((side_status)-1000));
}

static void *fresh_thread(void *arg)
{
    (void)arg;
    assert_int_equal(side_last_error()->status, SIDE_OK);
    REFUSES(side_device_open("b", NULL), SIDE_INVALID);
    return NULL;
}

/* Each thread has its own. */
T_TEST(the_detail_is_the_thread_s)
{
    pthread_t thread;
    side_device *dev;

    assert_int_equal(side_last_error()->status, SIDE_OK);
    REFUSES(side_device_open("a spec of mine", &dev), SIDE_INVALID);
    assert_int_equal(pthread_create(&thread, NULL, fresh_thread, NULL), 0);
    pthread_join(thread, NULL);
    assert_non_null(strstr(side_last_error()->message, "a spec of mine"));
    T_OK(side_device_open("sim", &dev)); /* success leaves it */
    assert_non_null(strstr(side_last_error()->message, "a spec of mine"));
    side_device_close(dev);
}

/* AUTO takes what the profile says is the fastest, and another path where that one cannot be taken; all with the same bytes. */
T_TEST(auto_path)
{
    enum { N = 1000, BLOCK = 4096 };
    side_device *d = NULL;
    side_stream *stream = NULL;
    side_pool *pool = NULL;
    void *host = NULL, *device = NULL;
    unsigned char *pageable = malloc(N * BLOCK);
    static side_piece pieces[N + 1];
    uint64_t took[2][SIDE_PATH_COUNT] = {{0}};

    assert_non_null(pageable);
    for (int capture = 0; capture < 2; capture++) {
        T_OK(side_device_open("sim", &d));
        T_OK(side_stream_create(d, &stream));
        T_OK(side_device_pool(d, &pool));
        T_OK(side_pool_alloc(pool, N * BLOCK, &host));
        T_OK(side_device_alloc(d, N * BLOCK, &device));
        sim_capture(stream->handle, capture != 0);
        for (int path = SIDE_PATH_AUTO; path < SIDE_PATH_GATHER; path++) {
            for (size_t i = 0; i < N; i++)
                pieces[i] = (side_piece){(char *)device + i * BLOCK, (char *)host + (N - 1 - i) * BLOCK, BLOCK};
            memset(host, path + 1, N * BLOCK);
            const uint64_t at = side_device_now_ns(d);
            T_OK(side_copy_blocks(stream, SIDE_COPY_H2D, pieces, N + 1, (side_path)path)); /* the last one is empty */
            T_OK(side_stream_sync(stream, 10));
            took[capture][path] = side_device_now_ns(d) - at;
            T_OK(side_copy_async(stream, SIDE_COPY_D2H, pageable, device, N * BLOCK));
            assert_true(pageable[0] == path + 1 && pageable[N * BLOCK - 1] == path + 1);
        }
        for (size_t i = 0; i < N; i++)
            pieces[i].src = pageable + i * BLOCK;
        T_OK(side_copy_blocks(stream, SIDE_COPY_H2D, pieces, N, SIDE_PATH_AUTO));
        pieces[N - 1].dst = host; /* which no path takes */
        REFUSES(side_copy_blocks(stream, SIDE_COPY_H2D, pieces, N, SIDE_PATH_AUTO), SIDE_INVALID);
        T_OK(side_stream_sync(stream, 10));
        T_OK(side_pool_free(pool, host, NULL, 0));
        side_device_free(d, device);
        side_stream_destroy(stream);
        side_device_close(d);
    }
    free(pageable);
    assert_true(took[0][SIDE_PATH_AUTO] * 5 < took[0][SIDE_PATH_BATCH]); /* by a gather kernel */
    assert_int_equal(took[1][SIDE_PATH_AUTO], took[1][SIDE_PATH_BATCH]); /* which does not go into a graph */
}

T_MAIN(T(auto_path), T(unknown_specs), T(auto_and_the_environment), T(list), T(device_calls), T(stream_and_event_calls),
       T(copy_calls), T(op_calls), T(pipeline_options), T(status_names), T(the_detail_is_the_thread_s))
