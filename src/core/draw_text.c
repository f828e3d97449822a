/* SPDX-License-Identifier: MIT
 *
 *     double buffer, 3 items
 *     H2D     │00██▒▒1▒▒██2██
 *     compute │      ███0███▒▒▒1▒▒▒███2███
 *             └┬─────────┬─────────┬──────
 *          ms  0         10        20
 *     NVIDIA H200
 *
 * Neighbouring items differ in shade; each run of columns of one item carries its digit once. A row is drawn at a time: its columns live on the
 * stack, and which span goes to which row is worked out again for each row.
 */
#include "draw.h"
#include "error.h"

#include <stdio.h>
#include <string.h>

enum { LABEL = 8, MIN_WIDTH = 24, MAX_WIDTH = 1000 };

typedef struct cell {
    uint64_t item;      /* that fills most of the column */
    double fill;        /* share of the column that it fills */
    uint64_t open_item; /* being summed */
    double open_fill;
    double total; /* all items */
} cell;

typedef struct text_view {
    draw_out *out;
    const side_span *spans;
    size_t n;
    draw_window window;
    size_t columns; /* of time */
    double per_ns;  /* columns */
    bool ascii;
} text_view;

static void cell_add(cell *c, uint64_t item, double fill)
{
    if (c->open_fill <= 0 || c->open_item != item) {
        c->open_item = item;
        c->open_fill = 0;
    }
    c->open_fill += fill;
    c->total += fill;
    if (c->open_fill > c->fill) {
        c->fill = c->open_fill;
        c->item = item;
    }
}

static double column_of(const text_view *v, uint64_t ns)
{
    if (ns <= v->window.from_ns)
        return 0;
    if (ns >= v->window.to_ns)
        return (double)v->columns;
    return (double)(ns - v->window.from_ns) * v->per_ns;
}

static size_t column_at(const text_view *v, double x)
{
    size_t col = (size_t)x;

    return col < v->columns ? col : v->columns - 1;
}

static void span_fill(const text_view *v, const side_span *span, cell *cells)
{
    double begin = column_of(v, span->begin_ns), end = column_of(v, span->end_ns);

    for (size_t col = column_at(v, begin); col < v->columns && (double)col < end; col++) {
        double from = begin > (double)col ? begin : (double)col;
        double to = end < (double)(col + 1) ? end : (double)(col + 1);

        if (to > from)
            cell_add(&cells[col], span->item, to - from);
    }
}

/* A span that fills no column by half still shows, in the column of its middle, if nothing else fills that. */
static void span_show(const text_view *v, const side_span *span, cell *cells)
{
    cell *c = &cells[column_at(v, (column_of(v, span->begin_ns) + column_of(v, span->end_ns)) / 2)];

    if (c->total < 0.5 - 1e-9) {
        c->total = 1;
        c->item = span->item;
    }
}

static void row_fill(const text_view *v, side_lane lane, uint32_t row, uint64_t slack_ns, cell *cells)
{
    for (int pass = 0; pass < 2; pass++) {
        draw_rows rows = {.slack_ns = slack_ns};

        for (size_t i = 0; i < v->n; i++) {
            const side_span *span = &v->spans[i];

            if (span->lane != lane || !draw_window_sees(&v->window, span) || draw_rows_place(&rows, span) != row)
                continue;
            if (pass == 0)
                span_fill(v, span, cells);
            else
                span_show(v, span, cells);
        }
    }
}

static const char *shade(const text_view *v, uint64_t item)
{
    if (item == UINT64_MAX)
        return v->ascii ? "%" : "▓";
    if (item % 2 == 0)
        return v->ascii ? "#" : "█";
    return v->ascii ? "=" : "▒";
}

static void row_put(const text_view *v, const cell *cells)
{
    size_t col = 0, used = v->columns;

    while (used > 0 && cells[used - 1].total < 0.5 - 1e-9)
        used--;
    while (col < used) {
        size_t end = col;
        bool busy = cells[col].total >= 0.5 - 1e-9;
        uint64_t item = cells[col].item;

        while (end < used && (cells[end].total >= 0.5 - 1e-9) == busy && (!busy || cells[end].item == item))
            end++;
        if (!busy) {
            draw_repeat(v->out, " ", end - col);
        } else if (item == UINT64_MAX) {
            draw_repeat(v->out, shade(v, item), end - col);
        } else {
            char digit = (char)('0' + item % 10);
            size_t before = (end - col - 1) / 2;

            draw_repeat(v->out, shade(v, item), before);
            draw_bytes(v->out, &digit, 1);
            draw_repeat(v->out, shade(v, item), end - col - 1 - before);
        }
        col = end;
    }
    draw_str(v->out, "\n");
}

static void lanes_put(const text_view *v)
{
    uint64_t slack_ns = (uint64_t)(0.25 / v->per_ns);
    cell cells[MAX_WIDTH];

    for (side_lane lane = 0; lane < SIDE_LANE_COUNT; lane++) {
        uint32_t rows = draw_rows_count(v->spans, v->n, &v->window, lane, slack_ns);

        for (uint32_t row = 0; row < rows; row++) {
            memset(cells, 0, v->columns * sizeof(cells[0]));
            row_fill(v, lane, row, slack_ns, cells);
            draw_format(v->out, "%-*s%s", LABEL, row == 0 ? draw_lane_name(lane) : "", v->ascii ? "|" : "│");
            row_put(v, cells);
        }
    }
}

static void axis_put(const text_view *v)
{
    uint64_t total = v->window.to_ns - v->window.from_ns;
    draw_axis axis = draw_axis_for(total, (double)v->columns, 1, 4);
    char line[MAX_WIDTH + 32];
    uint64_t at = 0;

    memset(line, ' ', sizeof(line));
    draw_format(v->out, "%*s%s", LABEL, "", v->ascii ? "+" : "└");
    for (size_t col = 0; col < v->columns; col++) {
        size_t tick = at <= total ? (size_t)((double)at * v->per_ns + 0.5) : v->columns;

        if (col != tick) {
            draw_str(v->out, v->ascii ? "-" : "─");
            continue;
        }
        draw_str(v->out, v->ascii ? "|" : "┬");
        char label[32];
        size_t length = draw_axis_label(&axis, at, label);
        if (col + length <= v->columns)
            memcpy(line + col, label, length);
        at = at + axis.step_ns < at ? UINT64_MAX : at + axis.step_ns;
    }
    draw_format(v->out, "\n%*s ", LABEL, axis.unit.name);
    size_t used = v->columns;
    while (used > 0 && line[used - 1] == ' ')
        used--;
    draw_bytes(v->out, line, used);
    draw_str(v->out, "\n");
}

/* One line of at most `width` columns, whatever bytes it is given. */
static void line_put(draw_out *out, const char *text, size_t width, bool ascii)
{
    size_t left, columns = 0;
    uint32_t code;

    if (text == NULL || *text == '\0')
        return;
    left = strlen(text);
    while ((code = draw_utf8_next(&text, &left)) != 0) {
        char bytes[4];

        if (code < 0x20 || (code >= 0x7F && code < 0xA0))
            code = ' ';
        if (ascii && code >= 0x7F)
            code = '?';
        columns += draw_utf8_columns(code);
        if (columns > width)
            break;
        draw_bytes(out, bytes, draw_utf8_put(code, bytes));
    }
    draw_str(out, "\n");
}

side_status side_timeline_text(const side_span *spans, size_t n, const side_draw *draw, side_write_fn *write, void *user)
{
    static const char where[] = "side_timeline_text";
    side_draw d = SIDE_DRAW_INIT;
    side_status status = options_copy(&d, sizeof(d), draw, sizeof(d), where);
    size_t seen = 0;
    draw_out out;

    if (status == SIDE_OK)
        status = timeline_check(spans, n, where);
    if (status != SIDE_OK)
        return status;
    if (d.width == 0)
        d.width = 80;
    if (d.width < MIN_WIDTH || d.width > MAX_WIDTH)
        return error_set(SIDE_INVALID, where, "width is %u columns; %d..%d are possible", d.width, MIN_WIDTH, MAX_WIDTH);
    if (write == NULL)
        return error_set(SIDE_INVALID, where, "write is NULL");

    text_view v = {.out = &out, .spans = spans, .n = n, .columns = d.width - LABEL - 1, .ascii = d.ascii};
    v.window = draw_window_for(spans, n, &d);
    v.per_ns = (double)v.columns / (double)(v.window.to_ns - v.window.from_ns);
    for (size_t i = 0; i < n; i++)
        seen += draw_window_sees(&v.window, &spans[i]);

    draw_begin(&out, write, user);
    line_put(&out, d.title, d.width, d.ascii);
    if (seen == 0) {
        draw_str(&out, "(nothing ran)\n");
    } else {
        lanes_put(&v);
        axis_put(&v);
    }
    line_put(&out, d.device, d.width, d.ascii);
    return draw_end(&out, where);
}
