/* SPDX-License-Identifier: MIT
 *
 * Machine profiles: whose they are, where they lie, and what is said without one. */
#include "sim_help.h"

#include "machine_help.h"

#include <math.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---------------------------------------------------------------- the software device */

/* Virtual time that one copy takes. */
static double copy_s(dev_context *c, side_copy_kind kind, void *dst, const void *src, size_t bytes)
{
    dev_stream *stream = make_stream(c);
    dev_event *begin = make_event(c), *end = make_event(c);
    double ns = 0;

    T_OK(D.event_record(begin, stream));
    T_OK(D.copy(stream, kind, dst, src, bytes));
    T_OK(D.event_record(end, stream));
    T_OK(D.event_wait(end, UINT64_MAX));
    T_OK(D.event_elapsed(begin, end, &ns));
    D.event_destroy(begin);
    D.event_destroy(end);
    D.stream_destroy(stream);
    return ns * 1e-9;
}

static void agrees(side_rate rate, size_t bytes, double seconds)
{
    const double model = rate.latency_s + (double)bytes / (rate.gbps * 1e9);

    if (seconds < model - 1e-12 || seconds > model + 1.001e-9) /* whole nanoseconds, rounded up */
        T_FAIL("%zu bytes: the model says %.9f s, the device takes %.9f s", bytes, model, seconds);
}

T_TEST(a_model_is_exact)
{
    static const size_t sizes[] = {4096, 1 << 20, (1 << 20) + 1, 8 << 20};
    dev_context *c = open_sim(t_arg());
    side_machine m = SIDE_MACHINE_INIT;
    void *device = device_memory(c, 8 << 20), *pinned = host_memory(c, 8 << 20), *pageable = malloc(8 << 20);

    assert_non_null(pageable);
    memset(pageable, 0, 8 << 20);
    T_OK(D.model(c, &m));
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        agrees(m.h2d, sizes[i], copy_s(c, SIDE_COPY_H2D, device, pinned, sizes[i]));
        agrees(m.d2h, sizes[i], copy_s(c, SIDE_COPY_D2H, pinned, device, sizes[i]));
        agrees(m.pageable_h2d, sizes[i], copy_s(c, SIDE_COPY_H2D, device, pageable, sizes[i]));
        agrees(m.pageable_d2h, sizes[i], copy_s(c, SIDE_COPY_D2H, pageable, device, sizes[i]));
    }
    side_device_props p;
    T_OK(D.props(c, &p));
    assert_int_equal(m.copy_engines, p.copy_engines);
    const double together = m.both_gbps, most = m.h2d.gbps + m.d2h.gbps;
    assert_true(together > 0 && together <= most && (m.copy_engines == 2) == (together > most / 2 + 1e-9));
    D.host_free(c, pinned);
    D.free(c, device);
    free(pageable);
    close_sim(c);
}

/* ---------------------------------------------------------------- hardware, of a kind */

static side_link fake_link;

static side_status no_model(dev_context *c, side_machine *m)
{
    (void)c;
    (void)m;
    return SIDE_UNSUPPORTED;
}

static side_status give_link(dev_context *c, side_link *link)
{
    (void)c;
    *link = fake_link;
    return SIDE_OK;
}

/* The paths that were asked for since, and one that the device refuses. */
static struct {
    side_path asked[4], refused;
    side_status with;
    int count;
} blocks;

static side_status note_blocks(dev_stream *stream, side_copy_kind kind, const side_piece *pieces, size_t count,
                               side_path path)
{
    assert_true(blocks.count < 4);
    blocks.asked[blocks.count++] = path;
    if (path == blocks.refused)
        return blocks.with;
    return sim_device_ops.copy_blocks(stream, kind, pieces, count, path);
}

/* A software device that says it were a GPU: core cannot tell. */
static side_device *open_gpu(void)
{
    static struct side_device_ops ops;
    side_device *device = NULL;

    T_OK(side_device_open("sim", &device));
    if (ops.model == NULL) {
        ops = sim_device_ops;
        ops.model = no_model;
        ops.link = give_link;
        ops.copy_blocks = note_blocks;
    }
    fake_link = (side_link){"PCIe", 1, 16, 5, 16, 63.0};
    device->ops = &ops;
    device->props.simulated = false;
    device->props.driver_version = 13000;
    strcpy(device->props.name, "NVIDIA H200");
    strcpy(device->props.uuid, "GPU-01234567-89ab-cdef-0123-456789abcdef");
    return device;
}

/* ---------------------------------------------------------------- where */

static void path_is(side_device *device, const char *want)
{
    char path[512] = "";

    T_OK(side_machine_path(device, path, sizeof(path)));
    assert_string_equal(path, want);
}

T_TEST(where_it_lies)
{
    side_device *device = open_gpu();
    char path[512];

    home();
    setenv("HOME", "/home/me", 1);
    path_is(device, "/home/me/.cache/sidestream/machine-GPU-01234567-89ab-cdef-0123-456789abcdef.json");
    setenv("XDG_CACHE_HOME", "relative", 1);
    path_is(device, "/home/me/.cache/sidestream/machine-GPU-01234567-89ab-cdef-0123-456789abcdef.json");
    setenv("XDG_CACHE_HOME", "", 1);
    path_is(device, "/home/me/.cache/sidestream/machine-GPU-01234567-89ab-cdef-0123-456789abcdef.json");
    setenv("XDG_CACHE_HOME", "/cache", 1);
    path_is(device, "/cache/sidestream/machine-GPU-01234567-89ab-cdef-0123-456789abcdef.json");
    setenv("SIDESTREAM_MACHINE", "my.json", 1);
    path_is(device, "my.json");
    setenv("SIDESTREAM_MACHINE", "", 1);
    path_is(device, "/cache/sidestream/machine-GPU-01234567-89ab-cdef-0123-456789abcdef.json");
    for (size_t n = 0; n < strlen("/cache/sidestream/machine-GPU-01234567-89ab-cdef-0123-456789abcdef.json") + 1; n++)
        T_STATUS(side_machine_path(device, path, n), SIDE_INVALID);
    assert_non_null(strstr(side_last_error()->message, "this path takes 72"));
    unsetenv("XDG_CACHE_HOME");
    static const char *const homes[] = {NULL, "", "here"};
    for (size_t i = 0; i < 3; i++) {
        if (homes[i] == NULL)
            unsetenv("HOME");
        else
            setenv("HOME", homes[i], 1);
        T_STATUS(side_machine_path(device, path, sizeof(path)), SIDE_NOT_FOUND);
        assert_non_null(strstr(side_last_error()->message, "XDG_CACHE_HOME nor HOME"));
        assert_non_null(strstr(side_last_error()->message, "SIDESTREAM_MACHINE"));
    }
    T_STATUS(side_machine_path(NULL, path, sizeof(path)), SIDE_INVALID);
    T_STATUS(side_machine_path(device, NULL, 5), SIDE_INVALID);
    side_device_close(device);
    T_OK(side_device_open("sim:h200,seed=7", &device));
    setenv("HOME", "/home/me", 1);
    path_is(device, "/home/me/.cache/sidestream/machine-sim_h200_seed_7.json");
    side_device_close(device);
}

/* ---------------------------------------------------------------- the device's own */

static void get_says(side_machine_from from, const char *word)
{
    side_device *device = open_gpu();
    side_machine m = SIDE_MACHINE_INIT;

    said.count = 0;
    T_OK(side_machine_get(device, &m));
    T_OK(side_machine_get(device, &m));
    assert_int_equal(m.from, from);
    assert_string_equal(m.gpu, from == SIDE_MACHINE_MEASURED ? example().gpu : "NVIDIA H200");
    assert_string_equal(m.uuid, "GPU-01234567-89ab-cdef-0123-456789abcdef");
    assert_int_equal(said.count, word != NULL);
    if (word != NULL && strstr(said.text, word) == NULL)
        T_FAIL("the log does not say '%s' but '%s'", word, said.text);
    if (word != NULL && strstr(said.text, "sidestream bench --save") == NULL)
        T_FAIL("the log does not say what to do: '%s'", said.text);
    if (from == SIDE_MACHINE_ESTIMATED)
        assert_true(m.h2d.gbps > 50 && m.h2d.gbps < 60);
    side_device_close(device);
}

static void save_as(const char *path, side_machine m)
{
    T_OK(side_machine_save(path, &m));
}

T_TEST(whose_profile_it_is)
{
    side_device *device = open_gpu();
    const char *folder = home();
    side_machine m = SIDE_MACHINE_INIT, own = example(), other;
    char path[512], etc[512], id[600];

    snprintf(etc, sizeof(etc), "%s/etc", folder);
    machine_test_etc = etc;
    assert_int_equal(mkdir(etc, 0700), 0);
    snprintf(id, sizeof(id), "%s/machine-id", etc);
    write_text(id, "0123456789abcdef0123456789abcdef\n", 33);
    T_OK(side_machine_path(device, path, sizeof(path)));
    get_says(SIDE_MACHINE_ESTIMATED, NULL); /* no file is no news */
    T_OK(side_machine_get(device, &m));
    assert_int_equal(strncmp(m.machine, "id-", 3), 0);
    assert_null(strstr(m.machine, "0123456789abcdef0123456789abcdef")); /* that one is confidential */
    assert_int_equal(m.driver_version, 13000);
    strcpy(own.machine, m.machine);
    save_as(path, own);
    T_OK(side_machine_get(device, &m));
    assert_int_equal(m.from, SIDE_MACHINE_ESTIMATED); /* read once */
    get_says(SIDE_MACHINE_MEASURED, NULL);

    other = own;
    strcpy(other.uuid, "GPU-ffffffff-89ab-cdef-0123-456789abcdef");
    save_as(path, other);
    get_says(SIDE_MACHINE_ESTIMATED, "another GPU");
    other = own;
    other.driver_version = 12080;
    save_as(path, other);
    get_says(SIDE_MACHINE_ESTIMATED, "another driver version");
    save_as(path, own);
    write_text(id, "ffffffffffffffffffffffffffffffff\n", 33);
    get_says(SIDE_MACHINE_ESTIMATED, "another machine");
    write_text(id, "uninitialized\n", 14); /* as early in a boot: the host's name counts */
    get_says(SIDE_MACHINE_ESTIMATED, "another machine");
    write_text(id, "0123456789abcdef0123456789abcdef\n", 33);
    get_says(SIDE_MACHINE_MEASURED, NULL);

    write_text(path, "{\"sidestream_machine\": 1, \"h2d\": {}}", 36);
    get_says(SIDE_MACHINE_ESTIMATED, "(offset 34): h2d lacks latency_s");
    write_text(path, "{\"sidestream_machine\": 9}", 25);
    get_says(SIDE_MACHINE_ESTIMATED, "version 9");
    setenv("SIDESTREAM_MACHINE", "/nowhere/m.json", 1); /* whoever names one is told that it is not there */
    get_says(SIDE_MACHINE_ESTIMATED, "/nowhere/m.json");
    unsetenv("SIDESTREAM_MACHINE");
    unsetenv("HOME");
    said.count = 0;
    side_device *homeless = open_gpu();
    T_OK(side_machine_get(homeless, &m));
    assert_int_equal(said.count, 1);
    side_device_close(homeless);

    T_STATUS(side_machine_get(NULL, &m), SIDE_INVALID);
    T_STATUS(side_machine_get(device, NULL), SIDE_INVALID);
    m.size = 0;
    T_STATUS(side_machine_get(device, &m), SIDE_INVALID);
    side_device_close(device);
}

/* No file, no variable, no warning: the model. */
T_TEST(the_software_device_needs_no_file)
{
    side_device *device = NULL;
    side_machine m = SIDE_MACHINE_INIT;

    home();
    unsetenv("HOME");
    T_OK(side_device_open("sim:t4", &device));
    T_OK(side_machine_get(device, &m));
    assert_int_equal(m.from, SIDE_MACHINE_SIMULATED);
    assert_true(m.h2d.gbps == 12.3 && m.d2h.gbps == 12.8 && m.queue_s == 0);
    assert_string_equal(m.uuid, "sim:t4");
    assert_string_equal(m.gpu, "simulated T4");
    assert_int_equal(said.count, 0);
    side_device_close(device);
}

static void auto_takes(side_device *device, size_t bytes, side_status refuse, side_path first, side_path then)
{
    side_stream *stream = NULL;
    void *data = NULL;
    char from[256] = "";

    T_OK(side_device_alloc(device, sizeof(from), &data));
    T_OK(side_stream_create(device, &stream));
    const side_piece pieces[2] = {{data, from, bytes}, {(char *)data + 128, from + 128, bytes}};
    blocks.count = 0;
    blocks.refused = refuse != SIDE_OK ? first : SIDE_PATH_AUTO;
    blocks.with = refuse;
    const side_status s = side_copy_blocks(stream, SIDE_COPY_H2D, pieces, 2, SIDE_PATH_AUTO);
    assert_int_equal(s, refuse == SIDE_DEVICE_ERROR ? SIDE_DEVICE_ERROR : SIDE_OK);
    assert_int_equal(blocks.count, then != SIDE_PATH_AUTO ? 2 : 1);
    assert_int_equal(blocks.asked[0], first);
    assert_true(then == SIDE_PATH_AUTO || blocks.asked[1] == then);
    T_OK(side_stream_sync(stream, 0));
    side_stream_destroy(stream);
    side_device_free(device, data);
}

/* side_copy_blocks asks the profile, and takes a batch where the device does not want that path. */
T_TEST(paths_are_taken)
{
    side_device *device = open_gpu();
    side_machine m = SIDE_MACHINE_INIT, own = example();
    char path[512];

    snprintf(path, sizeof(path), "%s/m.json", home());
    auto_takes(device, 16, SIDE_OK, SIDE_PATH_BATCH, SIDE_PATH_AUTO); /* an estimate has no table */
    T_OK(side_machine_get(device, &m));
    side_device_close(device);
    strcpy(own.machine, m.machine);
    own.path_count = 2;
    own.paths[0] = (side_path_rate){SIDE_COPY_H2D, SIDE_PATH_LOOP, 16, 2, 5, 1};
    own.paths[1] = (side_path_rate){SIDE_COPY_H2D, SIDE_PATH_GATHER, 128, 2, 50, 1};
    save_as(path, own);
    setenv("SIDESTREAM_MACHINE", path, 1);
    device = open_gpu();
    auto_takes(device, 16, SIDE_OK, SIDE_PATH_LOOP, SIDE_PATH_AUTO);
    auto_takes(device, 128, SIDE_UNSUPPORTED, SIDE_PATH_GATHER, SIDE_PATH_BATCH);
    auto_takes(device, 128, SIDE_INVALID, SIDE_PATH_GATHER, SIDE_PATH_BATCH);
    auto_takes(device, 128, SIDE_DEVICE_ERROR, SIDE_PATH_GATHER, SIDE_PATH_AUTO); /* it may have been queued */
    side_device_close(device);
}

static pthread_barrier_t together;

static void *get_it(void *arg)
{
    side_machine m = SIDE_MACHINE_INIT;

    pthread_barrier_wait(&together);
    for (int i = 0; i < 5; i++)
        T_OK(side_machine_get(arg, &m));
    assert_int_equal(m.from, SIDE_MACHINE_ESTIMATED);
    return NULL;
}

/* Many at once: the file is read once, so there is one warning. */
T_TEST(threads)
{
    enum { THREADS = 8 };
    pthread_t thread[THREADS];

    home();
    setenv("SIDESTREAM_MACHINE", "/nowhere/m.json", 1);
    pthread_barrier_init(&together, NULL, THREADS);
    for (int round = 0; round < 100; round++) {
        side_device *device = open_gpu();
        said.count = 0;
        for (int i = 0; i < THREADS; i++)
            assert_int_equal(pthread_create(&thread[i], NULL, get_it, device), 0);
        for (int i = 0; i < THREADS; i++)
            pthread_join(thread[i], NULL);
        assert_int_equal(said.count, 1);
        side_device_close(device);
    }
    pthread_barrier_destroy(&together);
}

T_TEST(a_forked_child)
{
    side_device *device = open_gpu();
    side_machine m = SIDE_MACHINE_INIT;
    char path[512];
    int code = -1;

    home();
    T_OK(side_machine_get(device, &m));
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) /* files are nobody's: those calls go on */
        _exit(side_machine_get(device, &m) == SIDE_FORKED &&
                      side_machine_path(device, path, sizeof(path)) == SIDE_FORKED &&
                      side_machine_load("/nowhere", &m) == SIDE_NOT_FOUND
                  ? 0
                  : 1);
    assert_int_equal(waitpid(child, &code, 0), child);
    assert_true(WIFEXITED(code) && WEXITSTATUS(code) == 0);
    side_device_close(device);
}

/* Each allocation fails once: an error, or all is well; what is kept is right afterwards. */
T_TEST(no_memory)
{
    side_device *device = open_gpu();
    side_machine m = example(), back = SIDE_MACHINE_INIT;
    char path[512];
    side_status s = SIDE_NO_MEMORY;

    snprintf(path, sizeof(path), "%s/m.json", home());
    T_OK(side_machine_save(path, &m));
    setenv("SIDESTREAM_MACHINE", path, 1);
    for (unsigned long nth = 1; s != SIDE_OK; nth++) {
        mem_fail_at(nth);
        s = side_machine_save(path, &m);
        mem_fail_at(0);
        assert_true(s == SIDE_OK || s == SIDE_NO_MEMORY);
        assert_true(nth < 10);
    }
    s = SIDE_NO_MEMORY;
    for (unsigned long nth = 1; s != SIDE_OK; nth++) {
        mem_fail_at(nth);
        s = side_machine_load(path, &back);
        mem_fail_at(0);
        assert_true((s == SIDE_OK && same(&m, &back)) || (s == SIDE_NO_MEMORY && back.copy_engines == 0));
        assert_true(nth < 10);
    }
    s = SIDE_NO_MEMORY;
    for (unsigned long nth = 1; s != SIDE_OK; nth++) {
        mem_fail_at(nth);
        s = side_machine_get(device, &back);
        mem_fail_at(0);
        assert_true(s == SIDE_OK || s == SIDE_NO_MEMORY);
        assert_true(nth < 10);
    }
    side_device_close(device);
}

/* ---------------------------------------------------------------- estimates */

static side_machine estimate(side_link link, bool integrated, int copy_engines)
{
    side_device_props p = {.copy_engines = copy_engines, .integrated = integrated};
    side_machine m = SIDE_MACHINE_INIT;

    m.from = SIDE_MACHINE_MEASURED;
    machine_estimate(&p, &link, &m);
    assert_int_equal(m.from, SIDE_MACHINE_ESTIMATED);
    T_OK(machine_check(&m, "estimate")); /* in range, so that it can be saved */
    assert_true(m.both_gbps <= m.h2d.gbps + m.d2h.gbps);
    assert_true(m.pageable_h2d.gbps <= m.h2d.gbps && m.stage_gbps <= m.h2d.gbps);
    return m;
}

static void about(double got, double want)
{
    if (fabs(got - want) > 0.05 * want)
        T_FAIL("%g is not about %g", got, want);
}

T_TEST(estimates)
{
    about(estimate((side_link){"PCIe", 5, 16, 5, 16, 63.0}, false, 2).h2d.gbps, 55.3); /* measured, H200 */
    about(estimate((side_link){"PCIe", 5, 16, 5, 16, 63.0}, false, 2).both_gbps, 101);
    about(estimate((side_link){"PCIe", 1, 16, 4, 16, 31.5}, false, 2).h2d.gbps, 25); /* idle, downshifted */
    about(estimate((side_link){"PCIe", 3, 16, 3, 16, 15.75}, false, 1).h2d.gbps, 12.6);
    about(estimate((side_link){"PCIe", 3, 16, 3, 16, 15.75}, false, 1).both_gbps, 12.6); /* in turn */
    about(estimate((side_link){"PCIe", 3, 1, 3, 1, 0.985}, false, 1).pageable_h2d.gbps, 0.79);
    about(estimate((side_link){"NVLink-C2C", 0, 0, 0, 0, 450}, false, 2).h2d.gbps, 419);
    about(estimate((side_link){"NVLink-C2C", 0, 0, 0, 0, 450}, false, 2).stage_gbps, 50);
    about(estimate((side_link){"none", 0, 0, 0, 0, 0}, true, 1).h2d.gbps, 40);
    about(estimate((side_link){"", 0, 0, 0, 0, 0}, false, 2).h2d.gbps, 25);
}

/* ---------------------------------------------------------------- paths */

T_TEST(paths_from_the_table)
{
    static const side_path_rate rows[] = {
        {SIDE_COPY_H2D, SIDE_PATH_BATCH, 4096, 1000, 2.6, 1.0},
        {SIDE_COPY_H2D, SIDE_PATH_GATHER, 4096, 1000, 51, 1.04},
        {SIDE_COPY_H2D, SIDE_PATH_BATCH, 65536, 1000, 40, 1.0},
        {SIDE_COPY_H2D, SIDE_PATH_GATHER, 65536, 1000, 51, 1.06},
        {SIDE_COPY_H2D, SIDE_PATH_LOOP, 65536, 10, 30, 0},
        {SIDE_COPY_H2D, SIDE_PATH_GATHER, 65536, 10, 20, 0},
        {SIDE_COPY_D2H, SIDE_PATH_GATHER, 4096, 1000, 52, 2.5},
        {SIDE_COPY_D2H, SIDE_PATH_PACK, 4096, 1000, 50, 1.03},
        {SIDE_COPY_D2H, SIDE_PATH_BATCH, 4096, 1000, 7.9, 1.0},
        {SIDE_COPY_D2H, SIDE_PATH_LOOP, 4096, 1000, 60, 0},
    };
    side_machine m = SIDE_MACHINE_INIT;

    assert_int_equal(side_machine_path_for(&m, SIDE_COPY_H2D, 4096, 10), SIDE_PATH_BATCH); /* empty */
    assert_int_equal(side_machine_path_for(NULL, SIDE_COPY_H2D, 4096, 10), SIDE_PATH_BATCH);
    m.path_count = sizeof(rows) / sizeof(rows[0]);
    memcpy(m.paths, rows, sizeof(rows));
    assert_int_equal(side_machine_path_for(&m, SIDE_COPY_H2D, 4096, 1000), SIDE_PATH_GATHER);
    assert_int_equal(side_machine_path_for(&m, SIDE_COPY_H2D, 0, 0), SIDE_PATH_GATHER);
    assert_int_equal(side_machine_path_for(&m, SIDE_COPY_H2D, 16000, 1000), SIDE_PATH_GATHER); /* nearer to 4096 */
    assert_int_equal(side_machine_path_for(&m, SIDE_COPY_H2D, 17000, 1000), SIDE_PATH_BATCH); /* over 5 % slower beside */
    assert_int_equal(side_machine_path_for(&m, SIDE_COPY_H2D, SIZE_MAX, SIZE_MAX), SIDE_PATH_BATCH);
    assert_int_equal(side_machine_path_for(&m, SIDE_COPY_H2D, 65536, 20),
                     SIDE_PATH_LOOP); /* none measured beside: the fastest */
    assert_int_equal(side_machine_path_for(&m, SIDE_COPY_D2H, 4096, 1000), SIDE_PATH_PACK);
    assert_int_equal(side_machine_path_for(&m, SIDE_COPY_D2D, 4096, 1000), SIDE_PATH_BATCH); /* nothing of this kind */
}

T_MAIN(T_ARG(a_model_is_exact, "h200"), T_ARG(a_model_is_exact, "gh200"), T_ARG(a_model_is_exact, "one-copy-engine"),
       T_ARG(a_model_is_exact, "t4,pageable_gbps=50,copy_latency_ns=0"), T(where_it_lies), T(whose_profile_it_is),
       T(the_software_device_needs_no_file), T(paths_are_taken), T(threads), T(a_forked_child), T(no_memory),
       T(estimates), T(paths_from_the_table))
