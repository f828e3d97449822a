/* SPDX-License-Identifier: MIT
 *
 * Machine profiles: what they say without a file, what a file may hold, and that nothing else is ever taken for one. */
#include "sim_help.h"

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
    const double said = rate.latency_s + (double)bytes / (rate.gbps * 1e9);

    if (seconds < said - 1e-12 || seconds > said + 1.001e-9) /* whole nanoseconds, rounded up */
        T_FAIL("%zu bytes: the model says %.9f s, the device takes %.9f s", bytes, said, seconds);
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

T_MAIN(T_ARG(a_model_is_exact, "h200"), T_ARG(a_model_is_exact, "gh200"), T_ARG(a_model_is_exact, "one-copy-engine"),
       T_ARG(a_model_is_exact, "t4,pageable_gbps=50,copy_latency_ns=0"))
