/* SPDX-License-Identifier: MIT
 *
 * Chrome trace JSON, for Perfetto and chrome://tracing. Both lay the events of one thread into one another, and drop or bend those that overlap
 * without nesting; so a track ("thread") never holds two spans that overlap: the spans of a lane and stream take the first of their tracks that is
 * free, or a further one.
 */
#include "draw.h"
#include "error.h"

#include <stdio.h>
#include <string.h>

enum { TRACKS = 512 };

typedef struct track {
    uint64_t end_ns;
    side_lane lane;
    uint32_t stream;
    uint32_t ordinal; /* among the tracks of this lane and stream */
} track;

typedef struct tracks {
    size_t count;
    track all[TRACKS];
} tracks;

/* Index of the track for the span; call in order of begin. TRACKS: there are too many. */
static size_t track_place(tracks *t, const side_span *span)
{
    uint32_t ordinal = 0;
    size_t i;

    for (i = 0; i < t->count; i++) {
        if (t->all[i].lane != span->lane || t->all[i].stream != span->stream)
            continue;
        if (t->all[i].end_ns <= span->begin_ns)
            break;
        ordinal++;
    }
    if (i == TRACKS)
        return TRACKS;
    if (i == t->count) {
        t->all[i] = (track){.lane = span->lane, .stream = span->stream, .ordinal = ordinal};
        t->count++;
    }
    t->all[i].end_ns = span->end_ns;
    return i;
}

static void json_text(draw_out *out, const char *text, size_t left)
{
    uint32_t code;

    draw_str(out, "\"");
    while ((code = draw_utf8_next(&text, &left)) != 0) {
        char bytes[4];

        if (code == '"' || code == '\\')
            draw_str(out, "\\");
        if (code < 0x20 || code == 0x7F)
            draw_format(out, "\\u%04x", (unsigned)code);
        else
            draw_bytes(out, bytes, draw_utf8_put(code, bytes));
    }
    draw_str(out, "\"");
}

static void meta_put(draw_out *out, const tracks *t, const side_draw *draw)
{
    const char *device = draw->device != NULL && *draw->device != '\0' ? draw->device : "sidestream";

    draw_str(out, "{\"displayTimeUnit\":\"ns\",");
    if (draw->title != NULL) {
        draw_str(out, "\"otherData\":{\"title\":");
        json_text(out, draw->title, strlen(draw->title));
        draw_str(out, "},");
    }
    draw_str(out, "\"traceEvents\":[\n{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":1,\"args\":{\"name\":");
    json_text(out, device, strlen(device));
    draw_str(out, "}}");
    for (size_t i = 0; i < t->count; i++) {
        const track *k = &t->all[i];

        draw_format(
            out, ",\n{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":1,\"tid\":%zu,\"args\":{\"name\":\"%s, stream %u",
            i + 1, draw_lane_name(k->lane), k->stream);
        if (k->ordinal > 0)
            draw_format(out, " (%u)", k->ordinal + 1);
        draw_format(
            out,
            "\"}},\n{\"ph\":\"M\",\"name\":\"thread_sort_index\",\"pid\":1,\"tid\":%zu,\"args\":{\"sort_index\":%zu}}",
            i + 1, (size_t)k->lane * TRACKS + i);
    }
}

static void span_put(draw_out *out, const side_span *span, size_t tid)
{
    uint64_t ns = span->end_ns - span->begin_ns;

    draw_str(out, ",\n{\"ph\":\"X\",\"name\":");
    json_text(out, span->name, strnlen(span->name, sizeof(span->name)));
    draw_format(out, ",\"cat\":\"%s\",\"pid\":1,\"tid\":%zu,\"ts\":", draw_lane_name(span->lane), tid);
    draw_decimal(out, span->begin_ns, 3);
    draw_str(out, ",\"dur\":");
    draw_decimal(out, ns, 3);
    draw_str(out, ",\"args\":{");
    if (span->item != UINT64_MAX)
        draw_format(out, "\"item\":%llu,", (unsigned long long)span->item);
    draw_format(out, "\"bytes\":%llu,\"gbps\":", (unsigned long long)span->bytes);
    draw_decimal(out, draw_milli_gbps(span->bytes, ns), 3);
    draw_str(out, ",\"queued_us\":");
    draw_decimal(out, span->queued_ns, 3);
    draw_str(out, "}}");
}

side_status side_timeline_trace(const side_span *spans, size_t n, const side_draw *draw, side_write_fn *write,
                                void *user)
{
    static const char where[] = "side_timeline_trace";
    side_draw d = SIDE_DRAW_INIT;
    side_status status = options_copy(&d, sizeof(d), draw, sizeof(d), where);
    tracks t = {.count = 0};
    draw_out out;

    if (status == SIDE_OK)
        status = timeline_check(spans, n, where);
    if (status != SIDE_OK)
        return status;
    if (write == NULL)
        return error_set(SIDE_INVALID, where, "write is NULL");

    draw_window window = draw_window_for(spans, n, &d);
    for (size_t i = 0; i < n; i++)
        if (draw_window_sees(&window, &spans[i]) && track_place(&t, &spans[i]) == TRACKS)
            return error_set(SIDE_TOO_LARGE, where, "more than %d spans overlap at spans[%zu]; draw a smaller window",
                             TRACKS, i);

    draw_begin(&out, write, user);
    meta_put(&out, &t, &d);
    for (size_t i = 0; i < t.count; i++)
        t.all[i].end_ns = 0; /* place once more, onto the tracks that exist now: first fit gives the same answer */
    for (size_t i = 0; i < n; i++)
        if (draw_window_sees(&window, &spans[i]))
            span_put(&out, &spans[i], track_place(&t, &spans[i]) + 1);
    draw_str(&out, "\n]}\n");
    return draw_end(&out, where);
}
