/* SPDX-License-Identifier: MIT
 *
 * What the three drawings of a timeline share: a buffered writer that remembers failure, text made safe, the time axis, and rows for spans
 * that overlap. Pure like timeline.c: no clock, no threads, no allocation. Numbers are formatted from integers, because printf's decimal point
 * is the locale's.
 */
#ifndef CORE_DRAW_H
#define CORE_DRAW_H

#include "sidestream.h"

/* Sorted by begin, end >= begin, known lanes; else SIDE_INVALID naming the span. */
side_status timeline_check(const side_span *spans, size_t n, const char *where);

/* ---- writer */

typedef struct draw_out {
    side_write_fn *write;
    void *user;
    bool failed; /* the callback refused: nothing more is given to it */
    size_t used;
    char buffer[4096];
} draw_out;

void draw_begin(draw_out *out, side_write_fn *write, void *user);
void draw_bytes(draw_out *out, const char *text, size_t bytes);
void draw_str(draw_out *out, const char *text);
void draw_repeat(draw_out *out, const char *text, size_t times);
void draw_format(draw_out *out, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* value / 10^decimals, e.g. 12345, 3 -> "12.345" */
void draw_decimal(draw_out *out, uint64_t value, unsigned decimals);
/* Hands over the rest. SIDE_IO if the callback ever refused. */
side_status draw_end(draw_out *out, const char *where);

/* ---- text from outside */

/* The next code point at *text, at most `left` bytes; U+FFFD for what is not UTF-8. Advances both; 0 at the end or at a NUL. */
uint32_t draw_utf8_next(const char **text, size_t *left);
/* Writes at most 4 bytes, no NUL; returns how many. */
size_t draw_utf8_put(uint32_t code, char *to);
/* Columns of a terminal. */
unsigned draw_utf8_columns(uint32_t code);

/* ---- time */

typedef struct draw_unit {
    const char *name;
    uint64_t ns;
    unsigned digits; /* ns is 10^digits */
} draw_unit;

/* The largest unit of which `ns` is at least one. */
draw_unit draw_unit_for(uint64_t ns);

typedef struct draw_axis {
    draw_unit unit;
    uint64_t step_ns;  /* 1, 2 or 5 times a power of ten */
    unsigned decimals; /* of a label, in units */
} draw_axis;

/* The finest axis over total_ns on `extent` columns or pixels whose labels, each `glyph` wide a character, keep `gap` between them. */
draw_axis draw_axis_for(uint64_t total_ns, double extent, double glyph, double gap);
/* Length of the label in characters; text may be NULL. */
size_t draw_axis_label(const draw_axis *axis, uint64_t at_ns, char text[32]);

/* "12.3 ms": three significant digits. */
void draw_duration(draw_out *out, uint64_t ns);
/* In thousandths of a GB/s. */
uint64_t draw_milli_gbps(uint64_t bytes, uint64_t ns);

/* ---- window and rows */

typedef struct draw_window {
    uint64_t from_ns, to_ns; /* to > from */
} draw_window;

draw_window draw_window_for(const side_span *spans, size_t n, const side_draw *draw);
bool draw_window_sees(const draw_window *window, const side_span *span);

#define DRAW_ROWS 16 /* of one lane; what does not fit shares the last */

/* Places the spans of one lane: on the row of their stream where it is free, else on any free row, else on a new one. Spans that overlap by less
 * than slack_ns count as apart: device clocks jitter. */
typedef struct draw_rows {
    uint64_t slack_ns;
    uint32_t count;
    uint64_t end_ns[DRAW_ROWS];
    uint32_t stream[DRAW_ROWS];
} draw_rows;

/* Row of the span; call in order of begin. */
uint32_t draw_rows_place(draw_rows *rows, const side_span *span);
/* Rows that the lane takes; 0 where it has no spans in the window. */
uint32_t draw_rows_count(const side_span *spans, size_t n, const draw_window *window, side_lane lane, uint64_t slack_ns);

const char *draw_lane_name(side_lane lane);

#endif
