/* SPDX-License-Identifier: MIT */
#include "draw.h"
#include "error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* ---------------------------------------------------------------- writer */

void draw_begin(draw_out *out, side_write_fn *write, void *user)
{
    out->write = write;
    out->user = user;
    out->failed = false;
    out->used = 0;
}

static void flush(draw_out *out)
{
    if (out->used > 0 && !out->failed && out->write(out->user, out->buffer, out->used) != 0)
        out->failed = true;
    out->used = 0;
}

void draw_bytes(draw_out *out, const char *text, size_t bytes)
{
    while (bytes > 0) {
        size_t room = sizeof(out->buffer) - out->used;
        size_t part = bytes < room ? bytes : room;

        memcpy(out->buffer + out->used, text, part);
        out->used += part;
        text += part;
        bytes -= part;
        if (out->used == sizeof(out->buffer))
            flush(out);
    }
}

void draw_str(draw_out *out, const char *text)
{
    draw_bytes(out, text, strlen(text));
}

void draw_repeat(draw_out *out, const char *text, size_t times)
{
    size_t bytes = strlen(text);

    for (size_t i = 0; i < times; i++)
        draw_bytes(out, text, bytes);
}

void draw_format(draw_out *out, const char *format, ...)
{
    char text[512];
    va_list args;
    int n;

    va_start(args, format);
    n = vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    if (n > 0)
        draw_bytes(out, text, (size_t)n < sizeof(text) ? (size_t)n : sizeof(text) - 1);
}

static size_t decimal_text(uint64_t value, unsigned decimals, char text[32])
{
    uint64_t scale = 1;

    for (unsigned i = 0; i < decimals; i++)
        scale *= 10;
    if (decimals == 0)
        return (size_t)snprintf(text, 32, "%llu", (unsigned long long)value);
    return (size_t)snprintf(text, 32, "%llu.%0*llu", (unsigned long long)(value / scale), (int)decimals,
                            (unsigned long long)(value % scale));
}

void draw_decimal(draw_out *out, uint64_t value, unsigned decimals)
{
    char text[32];

    draw_bytes(out, text, decimal_text(value, decimals, text));
}

side_status draw_end(draw_out *out, const char *where)
{
    flush(out);
    if (out->failed)
        return error_set(SIDE_IO, where, "the write callback stopped the drawing");
    return SIDE_OK;
}

/* ---------------------------------------------------------------- text from outside */

/* Bytes of the sequence that `lead` begins, with its value bits; 0: none begins so. */
static unsigned utf8_lead(unsigned char lead, uint32_t *code)
{
    if (lead < 0x80) {
        *code = lead;
        return 1;
    }
    if (lead >= 0xC2 && lead < 0xE0) {
        *code = lead & 0x1Fu;
        return 2;
    }
    if (lead >= 0xE0 && lead < 0xF0) {
        *code = lead & 0x0Fu;
        return 3;
    }
    if (lead >= 0xF0 && lead < 0xF5) {
        *code = lead & 0x07u;
        return 4;
    }
    return 0;
}

uint32_t draw_utf8_next(const char **text, size_t *left)
{
    static const uint32_t least[5] = {0, 0, 0x80, 0x800, 0x10000};
    const unsigned char *s = (const unsigned char *)*text;
    uint32_t code = 0;
    unsigned bytes, i;

    if (*left == 0 || *s == '\0')
        return 0;
    bytes = utf8_lead(*s, &code);
    for (i = 1; i < bytes && i < *left && (s[i] & 0xC0u) == 0x80; i++)
        code = code << 6 | (s[i] & 0x3Fu);
    if (bytes == 0 || i < bytes || code < least[bytes] || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) {
        *text += 1;
        *left -= 1;
        return 0xFFFD;
    }
    *text += bytes;
    *left -= bytes;
    return code;
}

size_t draw_utf8_put(uint32_t code, char *to)
{
    unsigned char *u = (unsigned char *)to;

    if (code < 0x80) {
        u[0] = (unsigned char)code;
        return 1;
    }
    if (code < 0x800) {
        u[0] = (unsigned char)(0xC0 | code >> 6);
        u[1] = (unsigned char)(0x80 | (code & 0x3F));
        return 2;
    }
    if (code < 0x10000) {
        u[0] = (unsigned char)(0xE0 | code >> 12);
        u[1] = (unsigned char)(0x80 | (code >> 6 & 0x3F));
        u[2] = (unsigned char)(0x80 | (code & 0x3F));
        return 3;
    }
    u[0] = (unsigned char)(0xF0 | code >> 18);
    u[1] = (unsigned char)(0x80 | (code >> 12 & 0x3F));
    u[2] = (unsigned char)(0x80 | (code >> 6 & 0x3F));
    u[3] = (unsigned char)(0x80 | (code & 0x3F));
    return 4;
}

unsigned draw_utf8_columns(uint32_t code)
{
    /* East Asian wide and emoji blocks, rounded up: a line that is too short does less harm than one that wraps. */
    static const uint32_t wide[][2] = {
        {0x1100, 0x115F}, {0x2E80, 0xA4CF}, {0xAC00, 0xD7A3},   {0xF900, 0xFAFF},   {0xFE30, 0xFE6F},
        {0xFF00, 0xFF60}, {0xFFE0, 0xFFE6}, {0x1F000, 0x1FAFF}, {0x20000, 0x3FFFD},
    };

    for (size_t i = 0; i < sizeof(wide) / sizeof(wide[0]); i++)
        if (code >= wide[i][0] && code <= wide[i][1])
            return 2;
    return 1;
}

/* ---------------------------------------------------------------- time */

draw_unit draw_unit_for(uint64_t ns)
{
    static const draw_unit units[] = {
        {"s", 1000000000u, 9},
        {"ms", 1000000u, 6},
        {"us", 1000u, 3},
        {"ns", 1u, 0},
    };
    size_t i = 0;

    while (i < 3 && ns < units[i].ns)
        i++;
    return units[i];
}

size_t draw_axis_label(const draw_axis *axis, uint64_t at_ns, char text[32])
{
    char own[32];
    uint64_t drop = 1;

    for (unsigned i = axis->decimals; i < axis->unit.digits; i++)
        drop *= 10;
    return decimal_text(at_ns / drop, axis->decimals, text != NULL ? text : own);
}

draw_axis draw_axis_for(uint64_t total_ns, double extent, double glyph, double gap)
{
    draw_axis axis = {draw_unit_for(total_ns), 1, 0};
    uint64_t power = 1;
    unsigned power_digits = 0;

    for (;;) {
        static const unsigned nice[] = {1, 2, 5};

        axis.decimals = power_digits < axis.unit.digits ? axis.unit.digits - power_digits : 0;
        for (size_t i = 0; i < 3; i++) {
            uint64_t step = power * nice[i];
            double apart = (double)step / (double)total_ns * extent;

            axis.step_ns = step;
            if (apart >= (double)draw_axis_label(&axis, total_ns, NULL) * glyph + gap)
                return axis;
        }
        if (power_digits == 18) { /* the next power may not fit in 64 bits */
            axis.step_ns = UINT64_MAX;
            return axis;
        }
        power *= 10;
        power_digits++;
    }
}

void draw_duration(draw_out *out, uint64_t ns)
{
    draw_unit unit = draw_unit_for(ns);
    uint64_t whole = ns / unit.ns, drop = unit.ns;
    unsigned decimals = 0;

    while (decimals < unit.digits && decimals < 2 && whole < (decimals == 0 ? 100u : 10u)) {
        decimals++;
        drop /= 10;
    }
    draw_decimal(out, ns / drop, decimals);
    draw_format(out, " %s", unit.name);
}

uint64_t draw_milli_gbps(uint64_t bytes, uint64_t ns)
{
    double value;

    if (ns == 0)
        return 0;
    value = (double)bytes * 1000.0 / (double)ns + 0.5;
    return value < 1e18 ? (uint64_t)value : 1000000000000000000u;
}

/* ---------------------------------------------------------------- window and rows */

draw_window draw_window_for(const side_span *spans, size_t n, const side_draw *draw)
{
    draw_window window = {draw->from_ns, draw->to_ns};

    if (window.from_ns == 0 && window.to_ns == 0 && n > 0) {
        window.from_ns = spans[0].begin_ns;
        for (size_t i = 0; i < n; i++)
            if (spans[i].end_ns > window.to_ns)
                window.to_ns = spans[i].end_ns;
    }
    if (window.to_ns <= window.from_ns) {
        window.from_ns -= window.from_ns == UINT64_MAX ? 1 : 0;
        window.to_ns = window.from_ns + 1;
    }
    return window;
}

bool draw_window_sees(const draw_window *window, const side_span *span)
{
    return span->begin_ns <= window->to_ns && span->end_ns >= window->from_ns;
}

uint32_t draw_rows_place(draw_rows *rows, const side_span *span)
{
    uint32_t row = UINT32_MAX;

    for (uint32_t i = 0; i < rows->count; i++) {
        uint64_t end = rows->end_ns[i];

        if (end > span->begin_ns && end - span->begin_ns > rows->slack_ns)
            continue;
        if (rows->stream[i] == span->stream) {
            row = i;
            break;
        }
        if (row == UINT32_MAX)
            row = i;
    }
    if (row == UINT32_MAX)
        row = rows->count < DRAW_ROWS ? rows->count++ : DRAW_ROWS - 1;
    if (span->end_ns > rows->end_ns[row])
        rows->end_ns[row] = span->end_ns;
    rows->stream[row] = span->stream;
    return row;
}

uint32_t draw_rows_count(const side_span *spans, size_t n, const draw_window *window, side_lane lane, uint64_t slack_ns)
{
    draw_rows rows = {.slack_ns = slack_ns};

    for (size_t i = 0; i < n; i++)
        if (spans[i].lane == lane && draw_window_sees(window, &spans[i]))
            draw_rows_place(&rows, &spans[i]);
    return rows.count;
}

const char *draw_lane_name(side_lane lane)
{
    static const char *const names[SIDE_LANE_COUNT] = {"H2D", "compute", "D2H"};

    return names[lane];
}
