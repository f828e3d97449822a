/* SPDX-License-Identifier: MIT
 *
 * One SVG document: panels of lanes below each other over one time scale, so that what is shorter looks shorter. It brings its own background,
 * fonts and colours, and no script or style sheet, so it shows the same on light and dark pages.
 *
 *     title
 *     panel title
 *     H2D      [ 0 ][ 1 ][ 2 ]
 *     compute       [ 0  ][ 1  ][ 2  ]
 *     panel title ...
 *              |-----|-----|-----|  axis
 *     device
 */
#include "draw.h"
#include "error.h"

#include <stdio.h>
#include <string.h>

enum {
    MARGIN = 16,
    LABEL = 64,
    TITLE = 26,
    PANEL_TITLE = 22,
    ROW = 26,
    BOX = 22,
    PANEL_GAP = 10,
    AXIS = 26,
    FOOT = 20
};
enum { MIN_WIDTH = 240, MAX_WIDTH = 16384 };

typedef struct svg_view {
    draw_out *out;
    const side_timeline_part *parts;
    size_t count;
    const side_draw *draw;
    uint64_t total_ns; /* of the time scale */
    double x0, extent; /* of the plot, in pixels */
    double per_ns;     /* pixels */
    uint64_t slack_ns;
} svg_view;

typedef struct lane_look {
    const char *fill[2], *ink[2]; /* even and odd items */
} lane_look;

static const lane_look looks[SIDE_LANE_COUNT] = {
    [SIDE_LANE_H2D] = {{"#2b64c8", "#8fb4f2"}, {"#ffffff", "#10213f"}},
    [SIDE_LANE_COMPUTE] = {{"#1d7a45", "#86cfa4"}, {"#ffffff", "#0e2c1a"}},
    [SIDE_LANE_D2H] = {{"#a8540a", "#f0b277"}, {"#ffffff", "#3a1d03"}},
};

/* Code points that XML 1.0 cannot hold become U+FFFD. */
static void xml_text(draw_out *out, const char *text, size_t left)
{
    uint32_t code;

    while ((code = draw_utf8_next(&text, &left)) != 0) {
        char bytes[4];

        switch (code) {
        case '<': draw_str(out, "&lt;"); continue;
        case '>': draw_str(out, "&gt;"); continue;
        case '&': draw_str(out, "&amp;"); continue;
        case '"': draw_str(out, "&quot;"); continue;
        case '\'': draw_str(out, "&#39;"); continue;
        default: break;
        }
        if ((code < 0x20 && code != '\t' && code != '\n') || code == 0x7F || code == 0xFFFE || code == 0xFFFF)
            code = 0xFFFD;
        draw_bytes(out, bytes, draw_utf8_put(code, bytes));
    }
}

/* name="12.34" */
static void attribute(draw_out *out, const char *name, double value)
{
    draw_format(out, " %s=\"", name);
    draw_decimal(out, value > 0 ? (uint64_t)(value * 100 + 0.5) : 0, 2);
    draw_str(out, "\"");
}

static void text_put(draw_out *out, double x, double y, const char *extra, const char *text)
{
    draw_str(out, "<text");
    attribute(out, "x", x);
    attribute(out, "y", y);
    draw_format(out, "%s>", extra);
    xml_text(out, text, strlen(text));
    draw_str(out, "</text>\n");
}

static bool has_text(const char *text)
{
    return text != NULL && *text != '\0';
}

static uint32_t part_rows(const svg_view *v, const side_timeline_part *part, const draw_window *window)
{
    uint32_t rows = 0;

    for (side_lane lane = 0; lane < SIDE_LANE_COUNT; lane++)
        rows += draw_rows_count(part->spans, part->count, window, lane, v->slack_ns);
    return rows;
}

static double part_height(const svg_view *v, const side_timeline_part *part)
{
    draw_window window = draw_window_for(part->spans, part->count, v->draw);
    uint32_t rows = part_rows(v, part, &window);

    return (has_text(part->title) ? PANEL_TITLE : 0) + (double)ROW * (rows > 0 ? rows : 1) + PANEL_GAP;
}

static void tooltip(draw_out *out, const side_span *span)
{
    uint64_t ns = span->end_ns - span->begin_ns;

    draw_str(out, "<title>");
    xml_text(out, span->name, strnlen(span->name, sizeof(span->name)));
    if (span->item != UINT64_MAX)
        draw_format(out, ", item %llu", (unsigned long long)span->item);
    draw_str(out, ": ");
    draw_duration(out, ns);
    if (span->bytes > 0) {
        draw_format(out, ", %llu bytes", (unsigned long long)span->bytes);
        if (ns > 0) {
            draw_str(out, ", ");
            draw_decimal(out, draw_milli_gbps(span->bytes, ns) / 100, 1);
            draw_str(out, " GB/s");
        }
    }
    draw_format(out, ", stream %u</title>", span->stream);
}

static void span_put(const svg_view *v, const side_span *span, const draw_window *window, double y)
{
    draw_out *out = v->out;
    const lane_look *look = &looks[span->lane];
    size_t odd = span->item != UINT64_MAX && span->item % 2 == 1;
    uint64_t begin = span->begin_ns > window->from_ns ? span->begin_ns : window->from_ns;
    uint64_t end = span->end_ns < window->to_ns ? span->end_ns : window->to_ns;
    double x = v->x0 + (double)(begin - window->from_ns) * v->per_ns, width = (double)(end - begin) * v->per_ns;
    char number[32];
    size_t digits = 0;

    for (uint64_t left = span->item; digits == 0 || left > 0; left /= 10)
        number[sizeof(number) - ++digits] = (char)('0' + left % 10);
    draw_str(out, "<g>");
    tooltip(out, span);
    draw_str(out, "<rect");
    attribute(out, "x", x);
    attribute(out, "y", y);
    attribute(out, "width", width > 0.5 ? width : 0.5);
    draw_format(out, " height=\"%d\" fill=\"%s\"/>", BOX, look->fill[odd]);
    if (span->item != UINT64_MAX && width >= (double)digits * 7.5 + 4) {
        draw_str(out, "<text");
        attribute(out, "x", x + width / 2);
        attribute(out, "y", y + BOX - 7);
        draw_format(out, " text-anchor=\"middle\" fill=\"%s\">", look->ink[odd]);
        draw_bytes(out, number + sizeof(number) - digits, digits);
        draw_str(out, "</text>");
    }
    draw_str(out, "</g>\n");
}

static void part_put(const svg_view *v, const side_timeline_part *part, double y)
{
    draw_window window = draw_window_for(part->spans, part->count, v->draw);

    if (has_text(part->title)) {
        text_put(v->out, MARGIN, y + 15, " font-weight=\"600\"", part->title);
        y += PANEL_TITLE;
    }
    if (part_rows(v, part, &window) == 0)
        text_put(v->out, v->x0, y + 15, "", "nothing ran");
    for (side_lane lane = 0; lane < SIDE_LANE_COUNT; lane++) {
        uint32_t count = draw_rows_count(part->spans, part->count, &window, lane, v->slack_ns);
        draw_rows rows = {.slack_ns = v->slack_ns};

        if (count > 0)
            text_put(v->out, MARGIN, y + BOX - 7, "", draw_lane_name(lane));
        for (size_t i = 0; i < part->count; i++)
            if (part->spans[i].lane == lane && draw_window_sees(&window, &part->spans[i]))
                span_put(v, &part->spans[i], &window, y + (double)ROW * draw_rows_place(&rows, &part->spans[i]));
        y += (double)ROW * count;
    }
}

/* Lines through all panels, and the labels below them. */
static void axis_put(const svg_view *v, double top, double bottom)
{
    draw_axis axis = draw_axis_for(v->total_ns, v->extent, 7.5, 24);

    for (uint64_t at = 0; at <= v->total_ns; at += axis.step_ns) {
        double x = v->x0 + (double)at * v->per_ns;
        char label[48];
        size_t length = draw_axis_label(&axis, at, label);

        draw_str(v->out, "<line");
        attribute(v->out, "x1", x);
        attribute(v->out, "x2", x);
        attribute(v->out, "y1", top);
        attribute(v->out, "y2", bottom + 4);
        draw_str(v->out, " stroke=\"#dcdfe4\"/>\n");
        if (at == 0)
            snprintf(label + length, sizeof(label) - length, " %s", axis.unit.name);
        if (x + (double)length * 3.75 <= v->x0 + v->extent + MARGIN)
            text_put(v->out, x, bottom + 17, " text-anchor=\"middle\" fill=\"#4a4f57\"", label);
        if (at + axis.step_ns < at)
            break;
    }
}

static void document_put(const svg_view *v, double width, double height)
{
    const side_draw *d = v->draw;
    double y = MARGIN, top;

    draw_str(v->out, "<svg xmlns=\"http://www.w3.org/2000/svg\" role=\"img\"");
    attribute(v->out, "width", width);
    attribute(v->out, "height", height);
    draw_format(v->out,
                " viewBox=\"0 0 %u %u\" font-family=\"system-ui,sans-serif\" font-size=\"12\" fill=\"#16181d\">\n",
                (unsigned)width, (unsigned)height);
    draw_str(v->out, "<title>");
    xml_text(v->out, has_text(d->title) ? d->title : "timeline", has_text(d->title) ? strlen(d->title) : 8);
    draw_str(v->out, "</title>\n<rect x=\"0.5\" y=\"0.5\"");
    attribute(v->out, "width", width - 1);
    attribute(v->out, "height", height - 1);
    draw_str(v->out, " rx=\"6\" fill=\"#ffffff\" stroke=\"#c9cdd3\"/>\n");
    if (has_text(d->title)) {
        text_put(v->out, MARGIN, y + 13, " font-size=\"15\" font-weight=\"600\"", d->title);
        y += TITLE;
    }
    top = y;
    for (size_t i = 0; i < v->count; i++)
        y += part_height(v, &v->parts[i]);
    axis_put(v, top, y - PANEL_GAP);
    y = top;
    for (size_t i = 0; i < v->count; i++) {
        part_put(v, &v->parts[i], y);
        y += part_height(v, &v->parts[i]);
    }
    if (has_text(d->device))
        text_put(v->out, MARGIN, y + AXIS + 4, " fill=\"#4a4f57\"", d->device);
    draw_str(v->out, "</svg>\n");
}

static side_status svg_put(const side_timeline_part *parts, size_t count, const side_draw *draw, side_write_fn *write,
                           void *user, const char *where)
{
    side_draw d = SIDE_DRAW_INIT;
    side_status status = options_copy(&d, sizeof(d), draw, sizeof(d), where);
    draw_out out;
    double height;

    if (status != SIDE_OK)
        return status;
    if (parts == NULL && count > 0)
        return error_set(SIDE_INVALID, where, "parts is NULL but count is %zu", count);
    if (d.width == 0)
        d.width = 960;
    if (d.width < MIN_WIDTH || d.width > MAX_WIDTH)
        return error_set(SIDE_INVALID, where, "width is %u pixels; %d..%d are possible", d.width, MIN_WIDTH, MAX_WIDTH);
    if (write == NULL)
        return error_set(SIDE_INVALID, where, "write is NULL");

    svg_view v = {.out = &out, .parts = parts, .count = count, .draw = &d, .total_ns = 1, .x0 = MARGIN + LABEL};
    for (size_t i = 0; i < count; i++) {
        status = timeline_check(parts[i].spans, parts[i].count, where);
        if (status != SIDE_OK)
            return status;
        draw_window window = draw_window_for(parts[i].spans, parts[i].count, &d);
        if (window.to_ns - window.from_ns > v.total_ns)
            v.total_ns = window.to_ns - window.from_ns;
    }
    v.extent = (double)d.width - v.x0 - MARGIN;
    v.per_ns = v.extent / (double)v.total_ns;
    v.slack_ns = (uint64_t)(0.5 / v.per_ns);
    height = 2 * MARGIN + (has_text(d.title) ? TITLE : 0) + AXIS - PANEL_GAP + (has_text(d.device) ? FOOT : 0);
    for (size_t i = 0; i < count; i++)
        height += part_height(&v, &parts[i]);
    draw_begin(&out, write, user);
    document_put(&v, d.width, height);
    return draw_end(&out, where);
}

side_status side_timeline_svg(const side_span *spans, size_t n, const side_draw *draw, side_write_fn *write, void *user)
{
    side_timeline_part part = {.spans = spans, .count = n};

    return svg_put(&part, 1, draw, write, user, "side_timeline_svg");
}

side_status side_timeline_svg_stack(const side_timeline_part *parts, size_t count, const side_draw *draw,
                                    side_write_fn *write, void *user)
{
    return svg_put(parts, count, draw, write, user, "side_timeline_svg_stack");
}
