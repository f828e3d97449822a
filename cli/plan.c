/* SPDX-License-Identifier: MIT */
#include "plan.h"
#include "signals.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    KEY_ITEMS = 256,
    KEY_BYTES,
    KEY_RESULT,
    KEY_COMPUTE,
    KEY_SOURCE,
    KEY_JITTER,
    KEY_STREAMS,
    KEY_DEPTH,
    KEY_PAGEABLE,
    KEY_BUDGET,
    KEY_FROM,
    KEY_MACHINE,
    KEY_SVG
};

#define MOST_ITEMS   UINT64_C(1000000000000)
#define MOST_BYTES   (UINT64_C(1) << 40)
#define MOST_BUDGET  (UINT64_C(1) << 46)
#define LEAST_TIME_S 1e-9
#define MOST_TIME_S  86400.0
#define MOST_JITTER  2.0
#define MOST_DEPTH   64
#define MOST_STREAMS 16

static const struct argp_option options[] = {
    {"items", KEY_ITEMS, "N", 0, "How many items, one after the other: batches, layers, pieces of a file", 1},
    {"bytes", KEY_BYTES, "B", 0, "Bytes of an item, to the device, such as 64M", 1},
    {"compute", KEY_COMPUTE, "T", 0, "Compute of an item on the device, alone, such as 1.2ms", 1},
    {"from", KEY_FROM, "TRACE", 0,
     "Take these from a trace of a run (sidestream demo --trace, side_timeline_trace); options change them", 1},
    {"result-bytes", KEY_RESULT, "R", 0, "Bytes of its result, back to the host (none)", 2},
    {"source", KEY_SOURCE, "T", 0, "Host time until the source has the next item (none: it is there)", 2},
    {"jitter", KEY_JITTER, "X", 0, "Standard deviation of compute and source over their mean, such as 0.3 or 30% (0)", 2},
    {"streams", KEY_STREAMS, "N", 0, "Compute streams, 1 to 16 (1)", 2},
    {"pageable", KEY_PAGEABLE, NULL, 0, "Host memory is pageable: threads stage it", 2},
    {"depth", KEY_DEPTH, "N", 0, "Device buffers, 1 to 64 (the plan chooses)", 3},
    {"budget", KEY_BUDGET, "BYTES", 0, "Device memory for the buffers (all that the device has)", 3},
    {"machine", KEY_MACHINE, "FILE", 0, "Plan for the machine of this profile; needs no device", 4},
    {"svg", KEY_SVG, "FILE", 0, "Draw speed-up against transfer share for 1 to 4 buffers", 4},
    {0},
};

static void want_bytes(struct argp_state *state, const char *name, const char *text, uint64_t most, uint64_t *value)
{
    char why[PARSE_WHY];

    if (!parse_bytes(text, 1, most, value, why))
        argp_error(state, "--%s: %s", name, why);
}

static void want_count(struct argp_state *state, const char *name, const char *text, uint64_t most, uint64_t *value)
{
    char why[PARSE_WHY];

    if (!parse_count(text, 1, most, value, why))
        argp_error(state, "--%s: %s", name, why);
}

static void want_time(struct argp_state *state, const char *name, const char *text, double *value)
{
    char why[PARSE_WHY];

    if (!parse_seconds(text, LEAST_TIME_S, MOST_TIME_S, value, why))
        argp_error(state, "--%s: %s", name, why);
}

static const char *want_file(struct argp_state *state, const char *name, const char *text)
{
    if (*text == '\0')
        argp_error(state, "--%s: the name is empty; want a file", name);
    return text;
}

static void check_all(struct argp_state *state, const struct plan_args *a)
{
    const char *lacks = a->items == 0 ? "--items" : a->bytes == 0 ? "--bytes" : a->compute_s <= 0 ? "--compute" : NULL;

    if (a->from == NULL && lacks != NULL)
        argp_error(state,
                   "%s is missing; want --items=N --bytes=B --compute=T, such as --items=100 --bytes=64M "
                   "--compute=1.2ms, or --from=TRACE",
                   lacks);
    if (a->machine != NULL && a->common.device != NULL)
        argp_error(state, "--machine and --device each name a machine; give one of them");
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    struct plan_args *a = state->input;
    char why[PARSE_WHY];

    switch (key) {
    case ARGP_KEY_INIT: state->child_inputs[0] = &a->common; return 0;
    case KEY_ITEMS: want_count(state, "items", arg, MOST_ITEMS, &a->items); return 0;
    case KEY_BYTES: want_bytes(state, "bytes", arg, MOST_BYTES, &a->bytes); return 0;
    case KEY_RESULT: want_bytes(state, "result-bytes", arg, MOST_BYTES, &a->result_bytes); return 0;
    case KEY_COMPUTE: want_time(state, "compute", arg, &a->compute_s); return 0;
    case KEY_SOURCE: want_time(state, "source", arg, &a->source_s); return 0;
    case KEY_JITTER:
        if (!parse_ratio(arg, MOST_JITTER, &a->jitter, why))
            argp_error(state, "--jitter: %s", why);
        return 0;
    case KEY_STREAMS: want_count(state, "streams", arg, MOST_STREAMS, &a->streams); return 0;
    case KEY_DEPTH: want_count(state, "depth", arg, MOST_DEPTH, &a->depth); return 0;
    case KEY_PAGEABLE: a->pageable = true; return 0;
    case KEY_BUDGET: want_bytes(state, "budget", arg, MOST_BUDGET, &a->budget); return 0;
    case KEY_FROM: a->from = want_file(state, "from", arg); return 0;
    case KEY_MACHINE: a->machine = want_file(state, "machine", arg); return 0;
    case KEY_SVG: a->svg = want_file(state, "svg", arg); return 0;
    case ARGP_KEY_ARG: argp_error(state, "'%.60s' is too much; plan takes options only", arg); return 0;
    case ARGP_KEY_END: check_all(state, a); return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

double planning_serial(const side_plan *plan, const side_plan_work *work)
{
    return work->pageable && plan->pageable_s > 0 ? plan->pageable_s : plan->serial_s;
}

double planning_share(const side_plan *plan, const side_plan_work *work)
{
    const double share = 1 - (double)work->items * work->compute_s / planning_serial(plan, work);

    return share > 0 ? share : 0;
}

/* ---------------------------------------------------------------- the work */

static int fill_work(struct planning *p)
{
    const struct plan_args *a = &p->args;
    int code = a->from != NULL ? planning_trace_read(a->from, &p->trace) : EXIT_DONE;
    const struct plan_trace *t = &p->trace;

    if (code != EXIT_DONE)
        return code;
    p->work = (side_plan_work)SIDE_PLAN_WORK_INIT;
    p->work.items = a->items != 0 ? a->items : t->items;
    p->work.item_bytes = (size_t)(a->bytes != 0 ? a->bytes : t->item_bytes);
    p->work.result_bytes = (size_t)(a->result_bytes != 0 ? a->result_bytes : t->result_bytes);
    p->work.compute_s = a->compute_s > 0 ? a->compute_s : t->compute_s;
    p->work.source_s = a->source_s;
    p->work.jitter = a->jitter;
    p->work.streams = (uint32_t)a->streams;
    p->work.depth = (uint32_t)a->depth;
    p->work.pageable = a->pageable;
    p->work.budget_bytes = (size_t)a->budget;
    if (p->work.item_bytes == 0) {
        say("trace '%s' has no copies to the device (events of category H2D with bytes); give --bytes", a->from);
        return EXIT_FAILED;
    }
    if (p->work.compute_s <= 0) {
        say("trace '%s' has no compute (events of category compute); give --compute", a->from);
        return EXIT_FAILED;
    }
    return EXIT_DONE;
}

/* ---------------------------------------------------------------- the machine */

static void name_source(struct planning *p)
{
    const side_machine *m = &p->machine;

    if (m->from == SIDE_MACHINE_MEASURED)
        snprintf(p->source, sizeof(p->source), "measured%s%s", m->taken[0] != '\0' ? " " : "", m->taken);
    else if (m->from == SIDE_MACHINE_SIMULATED)
        snprintf(p->source, sizeof(p->source), "simulated: of a model, not of hardware");
    else
        snprintf(p->source, sizeof(p->source), "estimated from the link; 'sidestream bench --save' measures them");
}

static int machine_from_file(struct planning *p)
{
    side_status status = side_machine_load(p->args.machine, &p->machine);

    if (status != SIDE_OK) {
        (void)say_status(status, "--machine");
        return status == SIDE_NO_MEMORY ? EXIT_MEMORY : EXIT_FAILED;
    }
    snprintf(p->name, sizeof(p->name), "%s (profile %.40s)", p->machine.gpu, p->args.machine);
    return EXIT_DONE;
}

static int machine_from_device(struct planning *p)
{
    side_device *device = NULL;
    side_device_props props;
    side_link link;
    char text[96];
    int code = open_device(&p->args.common, &device);
    side_status status;

    if (code != EXIT_DONE)
        return code;
    status = side_machine_get(device, &p->machine);
    if (status == SIDE_OK)
        status = side_device_get_props(device, &props);
    if (status == SIDE_OK)
        status = side_device_get_link(device, &link);
    if (status == SIDE_OK) {
        snprintf(p->name, sizeof(p->name), "%.60s (%s), %.24s", props.name, props.spec, link_text(&link, text));
        p->memory_bytes = props.memory_bytes;
    } else {
        code = say_status(status, "cannot ask the device what it is");
    }
    side_device_close(device);
    return code;
}

static int make_plan(struct planning *p)
{
    char bytes[32];
    side_status status;

    if (p->memory_bytes != 0 && (p->work.budget_bytes == 0 || p->work.budget_bytes > p->memory_bytes))
        p->work.budget_bytes = p->memory_bytes;
    p->plan = (side_plan)SIDE_PLAN_INIT;
    status = side_plan_make(&p->machine, &p->work, &p->plan);
    if (status == SIDE_TOO_LARGE) {
        say("no plan: %s; %s", side_last_error()->message,
            p->args.budget != 0 ? "--budget sets it" : "it is the device's memory");
        return EXIT_USAGE;
    }
    if (status != SIDE_OK)
        return say_status(status, "no plan");
    if (p->args.budget > p->memory_bytes && p->memory_bytes != 0)
        say("--budget is more than the device has; planning for its %s", bytes_text(p->memory_bytes, bytes));
    return EXIT_DONE;
}

/* Advice that was cut short is none. */
static int interrupted(void)
{
    say("interrupted");
    return EXIT_INTERRUPTED;
}

int command_plan(int argc, char **argv)
{
    static const struct argp_child children[] = {{&common_argp, 0, NULL, 0}, {0}};
    static const struct argp argp = {
        options,
        parse,
        NULL,
        "Says what overlap of copies and compute will give, before any code is written: time, speed-up, what limits, "
        "how "
        "many buffers are enough, and what would help instead. Runs nothing on the device; the figures are those that "
        "'sidestream bench --save' measured, or estimates.\v" EXIT_HELP,
        children,
        NULL,
        NULL,
    };
    struct planning *p = calloc(1, sizeof(*p));
    int code;

    if (p == NULL) {
        say("out of host memory");
        return EXIT_MEMORY;
    }
    p->svg.fd = p->svg.place = -1;
    p->machine = (side_machine)SIDE_MACHINE_INIT;
    argp_parse(&argp, argc, argv, 0, NULL, &p->args);
    code = fill_work(p);
    if (code == EXIT_DONE)
        code = p->args.machine != NULL ? machine_from_file(p) : machine_from_device(p);
    if (code == EXIT_DONE) {
        name_source(p);
        code = make_plan(p);
    }
    if (code == EXIT_DONE && p->args.svg != NULL)
        code = output_open(&p->svg, p->args.svg, NULL);
    if (code == EXIT_DONE) {
        planning_advise(p);
        code = signals_interrupted() ? interrupted() : planning_report(p);
    }
    if (code == EXIT_DONE && p->args.svg != NULL)
        code = planning_svg(p);
    output_abort(&p->svg);
    free(p);
    return code;
}
