/* SPDX-License-Identifier: MIT
 * Accounts against a model that looks at every nanosecond, the bound against schedules tried out, and the three drawings against what they promise. */
#include "t.h"

#include <jansson.h>
#include <math.h>

/* ---------------------------------------------------------------- helpers */

typedef struct text {
    char *data;
    size_t bytes, capacity;
    size_t calls, fail_at; /* fail_at 1: the first call fails */
} text;

static int text_write(void *user, const char *data, size_t bytes)
{
    text *t = user;

    if (++t->calls == t->fail_at)
        return 1;
    assert_true(t->fail_at == 0 || t->calls < t->fail_at); /* nothing is written after a refusal */
    if (t->bytes + bytes + 1 > t->capacity) {
        t->capacity = 2 * (t->bytes + bytes) + 4096;
        t->data = realloc(t->data, t->capacity);
        assert_non_null(t->data);
    }
    memcpy(t->data + t->bytes, data, bytes);
    t->bytes += bytes;
    t->data[t->bytes] = '\0';
    return 0;
}

static void text_reset(text *t)
{
    free(t->data);
    *t = (text){.data = NULL};
}

typedef side_status draw_fn(const side_span *spans, size_t n, const side_draw *draw, side_write_fn *write, void *user);

static draw_fn *const drawings[] = {side_timeline_text, side_timeline_svg, side_timeline_trace};

static int by_begin(const void *a, const void *b)
{
    const side_span *x = a, *y = b;

    return x->begin_ns < y->begin_ns ? -1 : x->begin_ns > y->begin_ns;
}

/* Random spans within [0, horizon], zero-length ones among them. */
static size_t random_spans(t_rng *rng, side_span *spans, size_t most, uint64_t horizon)
{
    static const char *const names[] = {
        "H2D", "a\"b\\c\n", "\xff\xfe<&>", "\xc3\xa9t\xc3\xa9", "", "123456789012345678901234"};
    size_t n = (size_t)t_rng_below(rng, most + 1);

    memset(spans, 0, most * sizeof(*spans));
    for (size_t i = 0; i < n; i++) {
        uint64_t a = t_rng_below(rng, horizon + 1), b = t_rng_below(rng, horizon + 1);
        const char *name = names[t_rng_below(rng, 6)];

        if (t_rng_chance(rng, 2))
            b = a + t_rng_below(rng, horizon / 16 + 1);
        spans[i].begin_ns = a < b ? a : b;
        spans[i].end_ns = a < b ? b : a;
        spans[i].lane = (side_lane)t_rng_below(rng, SIDE_LANE_COUNT);
        spans[i].stream = (uint32_t)t_rng_below(rng, 3);
        spans[i].item = t_rng_chance(rng, 8) ? UINT64_MAX : t_rng_below(rng, 30);
        spans[i].bytes = t_rng_below(rng, 1000);
        memcpy(spans[i].name, name, strnlen(name, sizeof(spans[i].name))); /* the last one leaves no NUL */
    }
    qsort(spans, n, sizeof(*spans), by_begin);
    return n;
}

/* ---------------------------------------------------------------- account */

enum { HORIZON = 300, MOST = 24 };

static void model_account(const side_span *spans, size_t n, side_account *a)
{
    uint64_t first = UINT64_MAX, last = 0, compute = 0, h2d = 0, d2h = 0, copy = 0, hidden = 0, idle = 0;

    memset(a, 0, sizeof(*a));
    for (size_t i = 0; i < n; i++) {
        first = spans[i].begin_ns < first ? spans[i].begin_ns : first;
        last = spans[i].end_ns > last ? spans[i].end_ns : last;
        a->h2d_bytes += spans[i].lane == SIDE_LANE_H2D ? spans[i].bytes : 0;
        a->d2h_bytes += spans[i].lane == SIDE_LANE_D2H ? spans[i].bytes : 0;
    }
    for (uint64_t ns = n > 0 ? first : 0; ns < last; ns++) {
        bool runs[SIDE_LANE_COUNT] = {false};

        for (size_t i = 0; i < n; i++)
            if (spans[i].begin_ns <= ns && ns < spans[i].end_ns)
                runs[spans[i].lane] = true;
        bool copies = runs[SIDE_LANE_H2D] || runs[SIDE_LANE_D2H];
        compute += runs[SIDE_LANE_COMPUTE];
        h2d += runs[SIDE_LANE_H2D];
        d2h += runs[SIDE_LANE_D2H];
        copy += copies;
        hidden += copies && runs[SIDE_LANE_COMPUTE];
        idle += !copies && !runs[SIDE_LANE_COMPUTE];
    }
    uint64_t total = n > 0 ? last - first : 0;
    a->total_s = (double)total / 1e9;
    a->compute_busy_s = (double)compute / 1e9;
    a->h2d_busy_s = (double)h2d / 1e9;
    a->d2h_busy_s = (double)d2h / 1e9;
    a->copy_busy_s = (double)copy / 1e9;
    a->copy_hidden_s = (double)hidden / 1e9;
    a->exposed_s = (double)(copy - hidden) / 1e9;
    a->idle_s = (double)idle / 1e9;
    a->compute_busy = total > 0 ? (double)compute / (double)total : 0;
    a->link_busy = total > 0 ? (double)copy / (double)total : 0;
    a->copy_hidden = copy > 0 ? (double)hidden / (double)copy : 0;
}

T_TEST(account_matches_model)
{
    T_FOR_SEEDS (seed, 2000) {
        t_rng rng = t_rng_make(seed);
        side_span spans[MOST];
        size_t n = random_spans(&rng, spans, MOST, HORIZON);
        side_account got, want;

        model_account(spans, n, &want);
        T_OK(side_timeline_account(spans, n, &got));
        assert_memory_equal(&got, &want, sizeof(got)); /* no padding: doubles and uint64 only */
    }
}

T_TEST(account_edges)
{
    side_account a;
    side_span spans[2] = {{.begin_ns = 5, .end_ns = 5}, {.begin_ns = 5, .end_ns = 5, .lane = SIDE_LANE_COMPUTE}};

    memset(&a, 0xff, sizeof(a));
    T_OK(side_timeline_account(NULL, 0, &a));
    assert_true(a.total_s == 0 && a.compute_busy == 0 && a.copy_hidden == 0 && a.h2d_bytes == 0);
    T_OK(side_timeline_account(spans, 2, &a));
    assert_true(a.total_s == 0 && a.compute_busy == 0 && a.link_busy == 0 && a.copy_hidden == 0);

    spans[0].begin_ns = 0;
    spans[0].end_ns = UINT64_MAX;
    spans[1].end_ns = UINT64_MAX;
    T_OK(side_timeline_account(spans, 2, &a));
    assert_true(fabs(a.total_s - 18446744073.709551615) < 1e-3 && a.link_busy == 1.0);

    T_STATUS(side_timeline_account(spans, 2, NULL), SIDE_INVALID);
    T_STATUS(side_timeline_account(NULL, 1, &a), SIDE_INVALID);
    spans[1].begin_ns = 4;
    spans[0].begin_ns = 5;
    T_STATUS(side_timeline_account(spans, 2, &a), SIDE_INVALID); /* not sorted */
    spans[0].begin_ns = 1;
    spans[1].end_ns = 3;
    T_STATUS(side_timeline_account(spans, 2, &a), SIDE_INVALID); /* ends before it begins */
    spans[1].end_ns = 4;
    spans[1].lane = (side_lane)3;
    T_STATUS(side_timeline_account(spans, 2, &a), SIDE_INVALID);
}

/* ---------------------------------------------------------------- bound */

/* The shortest schedule on one copy engine, by trying every order of the copies: the next is either a copy in or the first result that is left. */
static uint64_t best_one_engine(unsigned n, unsigned in, unsigned out, uint64_t t, uint64_t c, uint64_t d,
                                uint64_t engine, uint64_t *computed)
{
    uint64_t best = UINT64_MAX;

    if (out == n)
        return engine;
    if (in < n) {
        uint64_t previous = in > 0 ? computed[in - 1] : 0, arrived = engine + t;

        computed[in] = (arrived > previous ? arrived : previous) + c;
        best = best_one_engine(n, in + 1, out, t, c, d, arrived, computed);
    }
    if (out < in) {
        uint64_t begin = engine > computed[out] ? engine : computed[out];
        uint64_t keep = computed[in];
        uint64_t other = best_one_engine(n, in, out + 1, t, c, d, begin + d, computed);

        computed[in] = keep;
        best = other < best ? other : best;
    }
    return best;
}

/* The flow shop of three lanes in order: exact. */
static uint64_t best_two_engines(unsigned n, uint64_t t, uint64_t c, uint64_t d)
{
    uint64_t in = 0, compute = 0, out = 0;

    for (unsigned i = 0; i < n; i++) {
        in += t;
        compute = (in > compute ? in : compute) + c;
        out = (compute > out ? compute : out) + d;
    }
    return out;
}

T_TEST(bound_is_reached_and_not_beaten)
{
    T_FOR_SEEDS (seed, 400) {
        t_rng rng = t_rng_make(seed);
        unsigned n = 1 + (unsigned)t_rng_below(&rng, 5);
        uint64_t t = 1 + t_rng_below(&rng, 20), c = t_rng_below(&rng, 20), d = t_rng_below(&rng, 20);
        uint64_t computed[8] = {0};
        double one = side_timeline_bound(n, (double)t, (double)c, (double)d, 1);
        double two = side_timeline_bound(n, (double)t, (double)c, (double)d, 2);

        assert_true(two == (double)best_two_engines(n, t, c, d));
        assert_true(one <= (double)best_one_engine(n, 0, 0, t, c, d, 0, computed));
        assert_true(one >= two);
        assert_true(side_timeline_bound(n, (double)t, (double)c, 0, 1) ==
                    side_timeline_bound(n, (double)t, (double)c, 0, 2));
    }
    assert_true(side_timeline_bound(0, 1, 1, 1, 2) == 0);
    assert_true(side_timeline_bound(1, 1, 2, 3, 2) == 6 && side_timeline_bound(1, 1, 2, 3, 1) == 6);
    assert_true(side_timeline_bound(10, 1, 3, 0, 2) == 9 * 3 + 4);
    assert_true(side_timeline_bound(2, 1, 1, 1, 1) == 4);
    assert_true(side_timeline_bound(10, -1, 3, 0, 2) == 30);
}

/* ---------------------------------------------------------------- trace */

typedef struct event {
    double ts, dur;
    json_int_t tid;
} event;

static int by_tid(const void *a, const void *b)
{
    const event *x = a, *y = b;

    if (x->tid != y->tid)
        return x->tid < y->tid ? -1 : 1;
    return x->ts < y->ts ? -1 : x->ts > y->ts;
}

/* Parses the trace; asserts that no two events of a thread overlap, that every thread is named, and that there are `n` events. */
static void check_trace(const text *t, const side_span *spans, size_t n)
{
    json_error_t error;
    json_t *root = json_loadb(t->data, t->bytes, JSON_REJECT_DUPLICATES, &error), *e;
    event *events = calloc(n + 1, sizeof(*events));
    size_t count = 0, i;

    if (root == NULL)
        T_FAIL("%s at %d:%d in %s", error.text, error.line, error.column, t->data);
    json_array_foreach(json_object_get(root, "traceEvents"), i, e)
    {
        json_t *args = json_object_get(e, "args");

        if (strcmp(json_string_value(json_object_get(e, "ph")), "X") != 0)
            continue;
        assert_true(count < n);
        events[count].ts = json_number_value(json_object_get(e, "ts"));
        events[count].dur = json_number_value(json_object_get(e, "dur"));
        events[count].tid = json_integer_value(json_object_get(e, "tid"));
        assert_true(fabs(events[count].ts - (double)spans[count].begin_ns / 1e3) < 1e-4);
        assert_true(fabs(events[count].dur - (double)(spans[count].end_ns - spans[count].begin_ns) / 1e3) < 1e-4);
        assert_int_equal(json_integer_value(json_object_get(args, "bytes")), spans[count].bytes);
        assert_int_equal(json_object_get(args, "item") != NULL, spans[count].item != UINT64_MAX);
        assert_true(json_is_real(json_object_get(args, "gbps")));
        count++;
    }
    assert_int_equal(count, n);
    qsort(events, count, sizeof(*events), by_tid);
    for (i = 1; i < count; i++)
        if (events[i].tid == events[i - 1].tid)
            assert_true(events[i - 1].ts + events[i - 1].dur <= events[i].ts + 1e-4);
    json_decref(root);
    free(events);
}

T_TEST(trace_parses_and_never_overlaps)
{
    T_FOR_SEEDS (seed, 500) {
        t_rng rng = t_rng_make(seed);
        side_draw draw = SIDE_DRAW_INIT;
        side_span spans[60];
        text t = {.data = NULL};
        size_t n = random_spans(&rng, spans, 60, 1000);

        draw.title = "a \"title\"\n\x01\xff";
        draw.device = "\\dev\x7f";
        T_OK(side_timeline_trace(spans, n, &draw, text_write, &t));
        check_trace(&t, spans, n);
        text_reset(&t);
    }
}

T_TEST(trace_refuses_too_many_tracks)
{
    side_span *spans = calloc(513, sizeof(*spans));
    text t = {.data = NULL};

    for (size_t i = 0; i < 513; i++)
        spans[i].end_ns = 10;
    T_OK(side_timeline_trace(spans, 512, NULL, text_write, &t));
    check_trace(&t, spans, 512);
    text_reset(&t);
    T_STATUS(side_timeline_trace(spans, 513, NULL, text_write, &t), SIDE_TOO_LARGE);
    assert_int_equal(t.calls, 0);
    free(spans);
}

/* ---------------------------------------------------------------- text */

/* Valid UTF-8, every line at most `width` code points (none here is wide), no control characters, ends with a newline. */
static void check_text(const text *t, size_t width, bool ascii)
{
    const unsigned char *s = (const unsigned char *)t->data;
    size_t columns = 0, i = 0;

    assert_true(t->bytes > 0 && s[t->bytes - 1] == '\n');
    while (i < t->bytes) {
        size_t more = s[i] < 0x80 ? 0 : s[i] >= 0xF0 ? 3 : s[i] >= 0xE0 ? 2 : 1;

        assert_true(s[i] < 0x80 || (s[i] >= 0xC2 && s[i] <= 0xF4 && !ascii));
        if (s[i] == '\n') {
            columns = 0;
        } else {
            assert_true(s[i] >= 0x20 && s[i] != 0x7F);
            columns++;
        }
        assert_true(columns <= width);
        for (size_t k = 1; k <= more; k++)
            assert_true(i + k < t->bytes && (s[i + k] & 0xC0) == 0x80);
        i += 1 + more;
    }
}

T_TEST(text_keeps_width_and_utf8)
{
    T_FOR_SEEDS (seed, 500) {
        t_rng rng = t_rng_make(seed);
        uint64_t horizon = (uint64_t[]){1, 50, 5000, 123456789, UINT64_MAX / 4}[t_rng_below(&rng, 5)];
        side_draw draw = SIDE_DRAW_INIT;
        side_span spans[60];
        text t = {.data = NULL};
        size_t n = random_spans(&rng, spans, 60, horizon);

        draw.width = 24 + (uint32_t)t_rng_below(&rng, 200);
        draw.ascii = t_rng_chance(&rng, 2);
        draw.title =
            "tit\xff\tle \xe2\x82\xac\xed\xa0\x80 that is rather longer than any narrow drawing could hold on a line";
        draw.device = t_rng_chance(&rng, 2) ? "NVIDIA H200" : NULL;
        if (t_rng_chance(&rng, 3)) {
            draw.from_ns = t_rng_below(&rng, horizon);
            draw.to_ns = draw.from_ns + t_rng_below(&rng, horizon);
        }
        T_OK(side_timeline_text(spans, n, &draw, text_write, &t));
        check_text(&t, draw.width, draw.ascii);
        text_reset(&t);
    }
}

static side_span span_of(side_lane lane, uint32_t stream, uint64_t item, uint64_t begin, uint64_t end)
{
    side_span s = {.begin_ns = begin, .end_ns = end, .item = item, .lane = lane, .stream = stream};

    return s;
}

T_TEST(text_picture)
{
    side_draw draw = SIDE_DRAW_INIT;
    text t = {.data = NULL};
    side_span spans[] = {
        span_of(SIDE_LANE_H2D, 0, 0, 1000000, 6000000),
        span_of(SIDE_LANE_H2D, 0, 1, 6000000, 11000000),
        span_of(SIDE_LANE_COMPUTE, 1, 0, 6000000, 9000000),
        span_of(SIDE_LANE_COMPUTE, 2, 1, 8000000, 16000000),
    };

    draw.width = 39; /* 30 columns of 0.5 ms */
    draw.ascii = true;
    draw.title = "two items";
    draw.device = "device";
    T_OK(side_timeline_text(spans, 4, &draw, text_write, &t));
    assert_string_equal(t.data, "two items\n"
                                "H2D     |####0#####====1=====\n"
                                "compute |          ##0###\n"
                                "        |              =======1========\n"
                                "        +|---------|---------|---------\n"
                                "      ms 0         5         10\n"
                                "device\n");
    text_reset(&t);
}

T_TEST(text_shows_what_is_too_short)
{
    side_draw draw = SIDE_DRAW_INIT;
    text t = {.data = NULL};
    side_span spans[] = {
        span_of(SIDE_LANE_COMPUTE, 0, UINT64_MAX, 0, 1000000),
        span_of(SIDE_LANE_D2H, 1, 7, 500000, 500001),
    };

    T_OK(side_timeline_text(spans, 2, &draw, text_write, &t));
    assert_non_null(strstr(t.data, "7"));
    assert_null(strstr(t.data, "H2D"));
    text_reset(&t);
    T_OK(side_timeline_text(NULL, 0, NULL, text_write, &t));
    assert_string_equal(t.data, "(nothing ran)\n");
    text_reset(&t);
}

/* ---------------------------------------------------------------- svg */

/* Tags balance, attributes are quoted, text holds no bare < or &. Enough of XML for what the drawing can produce. */
static void check_svg(const char *s)
{
    char open[16][16];
    size_t depth = 0;

    while (*s != '\0') {
        if (*s == '&') {
            assert_true(strncmp(s, "&lt;", 4) == 0 || strncmp(s, "&gt;", 4) == 0 || strncmp(s, "&amp;", 5) == 0 ||
                        strncmp(s, "&quot;", 6) == 0 || strncmp(s, "&#39;", 5) == 0);
        }
        if (*s++ != '<')
            continue;
        bool closes = *s == '/';
        const char *end = s; /* not strchr: under AddressSanitizer it looks for the string's end each time */
        size_t length = 0;

        while (*end != '>' && *end != '\0')
            end++;
        assert_true(*end == '>');
        s += closes;
        while (s[length] != ' ' && s[length] != '/' && s[length] != '>')
            length++;
        assert_true(length > 0 && length < 16);
        if (closes) {
            assert_true(depth > 0);
            depth--;
            assert_true(strlen(open[depth]) == length && strncmp(open[depth], s, length) == 0);
        } else if (end[-1] != '/') {
            assert_true(depth < 16);
            memcpy(open[depth], s, length);
            open[depth++][length] = '\0';
        }
        for (const char *q = s; q < end; q++)
            assert_true(*q != '<');
        s = end + 1;
    }
    assert_int_equal(depth, 0);
}

T_TEST(svg_is_well_formed)
{
    T_FOR_SEEDS (seed, 300) {
        t_rng rng = t_rng_make(seed);
        side_draw draw = SIDE_DRAW_INIT;
        side_span spans[60], more[60];
        text t = {.data = NULL};
        side_timeline_part parts[2] = {{spans, 0, "one <1>"}, {more, 0, NULL}};

        parts[0].count = random_spans(&rng, spans, 60, 1000);
        parts[1].count = random_spans(&rng, more, 60, UINT64_MAX / 2);
        draw.title = "a < b && \"c\" \x02\xff";
        draw.device = "it's";
        T_OK(side_timeline_svg(spans, parts[0].count, &draw, text_write, &t));
        check_svg(t.data);
        text_reset(&t);
        T_OK(side_timeline_svg_stack(parts, (size_t)t_rng_below(&rng, 3), &draw, text_write, &t));
        check_svg(t.data);
        text_reset(&t);
    }
}

/* ---------------------------------------------------------------- all three */

T_TEST(write_failing_at_every_call)
{
    t_rng rng = t_rng_make(1);
    side_span spans[600];
    size_t n = 0;

    while (n < 300)
        n = random_spans(&rng, spans, 600, 100000);
    for (size_t d = 0; d < 3; d++) {
        for (size_t at = 1;; at++) {
            text t = {.fail_at = at};
            side_status status = drawings[d](spans, n, NULL, text_write, &t);
            bool all = t.calls < at;

            text_reset(&t);
            if (all) {
                T_OK(status);
                assert_true(d == 0 || at > 5);
                break;
            }
            assert_int_equal(status, SIDE_IO);
            assert_int_equal(side_last_error()->status, SIDE_IO);
        }
    }
}

T_TEST(arguments)
{
    side_span bad[2] = {{.begin_ns = 5, .end_ns = 6}, {.begin_ns = 4, .end_ns = 6}};
    side_draw draw = SIDE_DRAW_INIT;
    text t = {.data = NULL};

    for (size_t d = 0; d < 3; d++) {
        T_STATUS(drawings[d](bad, 2, NULL, text_write, &t), SIDE_INVALID);
        T_STATUS(drawings[d](NULL, 1, NULL, text_write, &t), SIDE_INVALID);
        T_STATUS(drawings[d](bad, 1, NULL, NULL, NULL), SIDE_INVALID);
        draw.size = 3;
        T_STATUS(drawings[d](bad, 1, &draw, text_write, &t), SIDE_INVALID);
        draw.size = sizeof(draw);
    }
    draw.width = 23;
    T_STATUS(side_timeline_text(bad, 1, &draw, text_write, &t), SIDE_INVALID);
    draw.width = 1001;
    T_STATUS(side_timeline_text(bad, 1, &draw, text_write, &t), SIDE_INVALID);
    draw.width = 239;
    T_STATUS(side_timeline_svg(bad, 1, &draw, text_write, &t), SIDE_INVALID);
    assert_int_equal(t.calls, 0);
}

T_TEST(many_spans_and_huge_times)
{
    enum { N = 100000 };
    side_span *spans = calloc(N, sizeof(*spans));
    side_account a;

    for (size_t i = 0; i < N; i++) {
        spans[i] = span_of((side_lane)(i % 3), (uint32_t)(i % 7), i, i * (UINT64_MAX / N),
                           i * (UINT64_MAX / N) + UINT64_MAX / N);
        strcpy(spans[i].name, "x");
    }
    T_OK(side_timeline_account(spans, N, &a));
    assert_true(a.idle_s < 1 && a.copy_hidden < 1e-9);
    for (size_t d = 0; d < 3; d++) {
        text t = {.data = NULL};

        T_OK(drawings[d](spans, N, NULL, text_write, &t));
        if (d == 0)
            check_text(&t, 80, false);
        else if (d == 1)
            check_svg(t.data);
        text_reset(&t);
    }
    free(spans);
}

/* By hand, for copies of 1 a direction that take 1.1 together; and the plain formula where they do not slow each other. */
T_TEST(bound_of_a_shared_link)
{
    static const struct {
        uint64_t n;
        double c, bound;
    } cases[] = {{1, 0.5, 2.5}, {2, 0.5, 3.55}, {3, 0.5, 4.65}, {2, 1, 4}, {2, 2, 6}, {2, 0, 3.1}, {0, 1, 0}};

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        assert_true(fabs(side_timeline_bound_shared(cases[i].n, 1, cases[i].c, 1, 1.1) - cases[i].bound) < 1e-12);
    assert_true(side_timeline_bound_shared(10, 1, 3, 0.5, 0) == side_timeline_bound(10, 1, 3, 0.5, 2));
    assert_true(side_timeline_bound_shared(10, 3, 1, 2, 3) == side_timeline_bound(10, 3, 1, 2, 2));
    /* Slower together than by turns: then they take turns. */
    assert_true(side_timeline_bound_shared(10, 3, 0, 2, 99) == side_timeline_bound_shared(10, 3, 0, 2, 5));
    assert_true(side_timeline_bound_shared(10, -1, 2, -1, 1) == 20);
}

T_MAIN(T(account_matches_model), T(account_edges), T(bound_is_reached_and_not_beaten), T(bound_of_a_shared_link),
       T(trace_parses_and_never_overlaps), T(trace_refuses_too_many_tracks), T(text_keeps_width_and_utf8),
       T(text_picture), T(text_shows_what_is_too_short), T(svg_is_well_formed), T(write_failing_at_every_call),
       T(arguments), T_LONG(many_spans_and_huge_times, 60))
