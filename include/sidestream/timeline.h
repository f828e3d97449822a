/* SPDX-License-Identifier: MIT
 *
 * Op log and timeline: what ran when, what overlapped, what the bound is.
 *
 *     side_log_create(dev, &log);  o.log = log;  side_pipeline_run(...);
 *     side_log_spans(log, spans, &n);                      // resolves event times; blocks until the logged work is done
 *     side_timeline_account(spans, n, &account);           // pure
 *     side_timeline_text(spans, n, &draw, write, user);    // Unicode lanes; also _svg and _trace
 */
#include "../sidestream.h" /* before the guard: it includes this file, in the order the areas need */

#ifndef SIDESTREAM_TIMELINE_H
#define SIDESTREAM_TIMELINE_H

#ifdef __cplusplus
extern "C" {
#endif

typedef enum side_lane { SIDE_LANE_H2D = 0, SIDE_LANE_COMPUTE = 1, SIDE_LANE_D2H = 2, SIDE_LANE_COUNT = 3 } side_lane;

typedef struct side_span {
    uint64_t begin_ns, end_ns; /* on the device, from the log's origin */
    uint64_t queued_ns;        /* when the host queued it, same origin */
    uint64_t bytes;
    uint64_t item;                                         /* number of the item it belongs to; UINT64_MAX none */
    uint64_t read_begin, read_end, write_begin, write_end; /* address ranges, 0,0 where unknown */
    side_lane lane;
    uint32_t stream; /* small number, one a stream, in order of first use */
    char name[24];   /* "H2D", "matmul", "compute" */
} side_span;

typedef struct side_log side_log;

/* Records are kept until side_log_clear; one takes about 200 bytes and two timing events. `capacity` spans at most (0: 65536); later ones are counted
 * as dropped. Logging is off where no log is given. */
SIDE_API side_status side_log_create(side_device *device, size_t capacity, side_log **log);
SIDE_API void side_log_destroy(side_log *log);
/* Forgets what was logged, done or not, and sets a new origin. Spans that are open are dropped. */
SIDE_API side_status side_log_clear(side_log *log);
/* Bracket work that the caller queues itself: span begins at what `stream` reaches next. end must name the same stream. */
SIDE_API side_status side_log_begin(side_log *log, side_stream *stream, side_lane lane, const char *name, uint64_t item,
                                    uint64_t bytes, uint32_t *span);
SIDE_API side_status side_log_end(side_log *log, side_stream *stream, uint32_t span);
/* Blocks until logged work is done, at most 30 s for each span (SIDE_STUCK). count in: capacity of spans (which may be NULL with 0), out: spans there are. Sorted by begin. */
SIDE_API side_status side_log_spans(side_log *log, side_span *spans, size_t *count);
SIDE_API uint64_t side_log_dropped(side_log *log);

/* ---- pure: no clock, no threads, no allocation */

typedef struct side_account {
    double total_s;        /* first begin to last end */
    double compute_busy_s; /* at least one compute span runs */
    double h2d_busy_s, d2h_busy_s;
    double copy_busy_s;   /* at least one copy runs, either direction */
    double copy_hidden_s; /* copy time under which compute runs */
    double exposed_s;     /* copy runs, compute does not */
    double idle_s;        /* neither runs */
    double compute_busy;  /* shares of total: 0..1 */
    double link_busy;     /* copy_busy_s / total_s */
    double copy_hidden;   /* copy_hidden_s / copy_busy_s; 0 where there are no copies */
    uint64_t h2d_bytes, d2h_bytes;
} side_account;

/* Spans must be sorted by begin_ns, else SIDE_INVALID. n may be 0: all zero. */
SIDE_API side_status side_timeline_account(const side_span *spans, size_t n, side_account *account);
/* The least time in which n uniform items can pass t (H2D), c (compute) and d (D2H; 0: no such lane) seconds a lane:
 * (n-1)*max(t,c,d) + t+c+d. copy_engines 1: H2D and D2H share one lane; max of n*(t+d), t+n*c+d, n*t+c+d and t+c+n*d, which is the
 * same where d is 0 and else a lower bound. */
SIDE_API double side_timeline_bound(uint64_t n, double t, double c, double d, int copy_engines);
/* The same for two copy engines on a link that both directions slow each other on. t, d: of one direction alone; both: seconds in which the link moves an
 * item in and a result out at once (taken for at least the longer of t and d, at most their sum). */
SIDE_API double side_timeline_bound_shared(uint64_t n, double t, double c, double d, double both);

/* Receives text in pieces; returns 0, or non-zero to stop (the call then returns SIDE_IO). */
typedef int side_write_fn(void *user, const char *text, size_t bytes);

typedef struct side_draw {
    size_t size;
    uint32_t width;          /* text: columns, 0: 80. svg: pixels, 0: 960 */
    bool ascii;              /* text: no Unicode */
    const char *title;       /* NULL: none */
    const char *device;      /* NULL: none; drawn below */
    uint64_t from_ns, to_ns; /* window; 0,0: everything */
} side_draw;
/* clang-format off */
#define SIDE_DRAW_INIT { sizeof(side_draw), 0, false, NULL, NULL, 0, 0 }
/* clang-format on */

/* Lanes H2D / compute / D2H over time. One column stands for an interval and belongs to the item that filled most of it; a run of an item's
 * columns carries the number (mod 10) once, neighbours differ in shade. Width 24..1000. Spans of a lane that overlap take further rows. */
SIDE_API side_status side_timeline_text(const side_span *spans, size_t n, const side_draw *draw, side_write_fn *write,
                                        void *user);
/* One self-contained SVG document. Width 240..16384. */
SIDE_API side_status side_timeline_svg(const side_span *spans, size_t n, const side_draw *draw, side_write_fn *write,
                                       void *user);

typedef struct side_timeline_part {
    const side_span *spans;
    size_t count;
    const char *title; /* NULL: none */
} side_timeline_part;
/* Timelines below each other in one document, over one time scale; each begins at its own first span. */
SIDE_API side_status side_timeline_svg_stack(const side_timeline_part *parts, size_t count, const side_draw *draw,
                                             side_write_fn *write, void *user);
/* Chrome trace JSON ("X" events, one thread a lane and stream; overlapping spans of one lane and stream get tracks of their own). Spans that
 * the window cuts are whole. SIDE_TOO_LARGE: over 512 tracks. */
SIDE_API side_status side_timeline_trace(const side_span *spans, size_t n, const side_draw *draw, side_write_fn *write,
                                         void *user);

#ifdef __cplusplus
}
#endif
#endif
