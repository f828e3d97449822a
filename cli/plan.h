/* SPDX-License-Identifier: MIT
 *
 * sidestream plan: what overlap will give, before any code is written.
 *
 *     plan.c         arguments and the course of events
 *     plan_trace.c   --from: what an item takes, read from a trace of a run
 *     plan_advice.c  what would help, each tried out by the model
 *     plan_report.c  text and JSON
 *     plan_svg.c     the drawing
 *
 * All figures come from side_plan_make; nothing here knows how a pipeline runs.
 */
#ifndef CLI_PLAN_H
#define CLI_PLAN_H

#include "cli.h"
#include "output.h"
#include "parse.h"

struct plan_args {
    struct common common;
    const char *from, *machine, *svg;    /* NULL: none */
    uint64_t items, bytes, result_bytes; /* 0: not given */
    uint64_t streams, depth, budget;     /* 0: default */
    double compute_s, source_s, jitter;  /* 0: not given */
    bool pageable;
};

/* Of one run. Medians over its items. */
struct plan_trace {
    uint64_t items; /* 0: there is no trace */
    uint64_t item_bytes, result_bytes;
    double compute_s; /* 0: it has no compute */
    double total_s;   /* from the first begin to the last end */
};

enum { PLAN_ADVICE = 12 };

struct plan_advice {
    const char *id; /* "dtype" */
    char text[120];
    double time_s; /* of the same work */
    double faster; /* times, against the plan */
};

struct planning {
    struct plan_args args;
    struct plan_trace trace;
    side_machine machine;
    char source[160];    /* where the machine's figures are from, for people */
    char name[160];      /* the machine */
    size_t memory_bytes; /* of the device; 0: not known */
    side_plan_work work;
    side_plan plan;
    struct plan_advice advice[PLAN_ADVICE]; /* best first */
    size_t advice_count;
    char verdict[240]; /* a sentence or two */
    struct output svg;
};

/* What the speed-ups are against: one after the other, from the memory that the work is in. */
double planning_serial(const side_plan *plan, const side_plan_work *work);
/* Share of the serial time in which the device does not compute: copies, and what goes with them. */
double planning_share(const side_plan *plan, const side_plan_work *work);
/* "1.21 ms" */
const char *planning_time_text(double seconds, char text[32]);

/* Exit codes, having said what is wrong. */
int planning_trace_read(const char *path, struct plan_trace *trace);
int planning_report(const struct planning *p);
int planning_svg(struct planning *p);

void planning_advise(struct planning *p);

#endif
