/* SPDX-License-Identifier: MIT
 *
 * Chrome's trace JSON, as side_timeline_trace writes it: complete events ("ph": "X") of the categories H2D, compute and D2H, times in microseconds,
 * args.item and args.bytes. An item may have several copies. Other events are passed over; ours must be whole. */
#include "plan.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define MOST_FILE ((off_t)256 << 20) /* the tree in memory is several times as large */

#define MOST_BYTES ((json_int_t)1 << 40) /* of a copy: as --bytes takes */
#define MOST_US    86400e6               /* of an event: as --compute takes */

enum lane { H2D, COMPUTE, D2H, LANES };
static const char *const lane_names[LANES] = {"H2D", "compute", "D2H"};

struct event {
    uint64_t item, bytes;
    double begin_s, seconds;
    enum lane lane;
};

/* What one item has. */
struct sum {
    uint64_t bytes[LANES];
    double seconds[LANES];
    size_t events[LANES];
};

static int refuse(const char *path, const char *what)
{
    say("trace '%s': %s", path, what);
    return EXIT_FAILED;
}

static int bad_event(const char *path, size_t index, const char *what)
{
    say("trace '%s': traceEvents[%zu]: %s", path, index, what);
    return EXIT_FAILED;
}

/* The lane of an event that counts; LANES: another's. */
static enum lane lane_of(const json_t *event)
{
    const char *phase = json_string_value(json_object_get(event, "ph"));
    const char *category = json_string_value(json_object_get(event, "cat"));
    int lane = 0;

    if (phase == NULL || category == NULL || strcmp(phase, "X") != 0)
        return LANES;
    while (lane < LANES && strcmp(category, lane_names[lane]) != 0)
        lane++;
    return (enum lane)lane;
}

/* *counts: false for spans that belong to no item. */
static int read_event(const char *path, size_t index, const json_t *from, struct event *event, bool *counts)
{
    const json_t *ts = json_object_get(from, "ts"), *dur = json_object_get(from, "dur");
    const json_t *args = json_object_get(from, "args");
    const json_t *item = json_object_get(args, "item"), *bytes = json_object_get(args, "bytes");

    event->lane = lane_of(from);
    *counts = event->lane != LANES && item != NULL;
    if (!*counts)
        return EXIT_DONE;
    if (!json_is_number(ts) || !json_is_number(dur) || !(json_number_value(dur) >= 0))
        return bad_event(path, index, "ts or dur is not a number of microseconds");
    if (!json_is_integer(item) || json_integer_value(item) < 0)
        return bad_event(path, index, "args.item is not a whole number");
    if (event->lane != COMPUTE && (!json_is_integer(bytes) || json_integer_value(bytes) < 0))
        return bad_event(path, index, "args.bytes is not a whole number");
    if (json_number_value(dur) > MOST_US || (event->lane != COMPUTE && json_integer_value(bytes) > MOST_BYTES))
        return bad_event(path, index, "dur is more than a day, or args.bytes more than 1 TiB");
    event->item = (uint64_t)json_integer_value(item);
    event->bytes = event->lane != COMPUTE ? (uint64_t)json_integer_value(bytes) : 0;
    event->begin_s = json_number_value(ts) * 1e-6;
    event->seconds = json_number_value(dur) * 1e-6;
    return EXIT_DONE;
}

static int by_item(const void *a, const void *b)
{
    const struct event *x = a, *y = b;

    return x->item < y->item ? -1 : x->item > y->item;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return x < y ? -1 : x > y;
}

static double median(double *values, size_t count)
{
    qsort(values, count, sizeof(*values), by_value);
    return values[count / 2];
}

static uint64_t whole(double value)
{
    return value > 0 ? (uint64_t)(value + 0.5) : 0;
}

/* events: sorted by item, at least one. `room`: for as many numbers. */
static void add_up(const struct event *events, size_t count, double *room, struct plan_trace *trace)
{
    double first = INFINITY, last = -INFINITY;
    double *of[3] = {room, room + count, room + 2 * count};
    size_t items = 0;

    for (size_t i = 0; i < count; items++) {
        struct sum sum = {.bytes = {0}};
        const uint64_t item = events[i].item;
        for (; i < count && events[i].item == item; i++) {
            sum.bytes[events[i].lane] += events[i].bytes;
            sum.seconds[events[i].lane] += events[i].seconds;
            first = fmin(first, events[i].begin_s);
            last = fmax(last, events[i].begin_s + events[i].seconds);
        }
        of[H2D][items] = (double)sum.bytes[H2D];
        of[COMPUTE][items] = sum.seconds[COMPUTE];
        of[D2H][items] = (double)sum.bytes[D2H];
    }
    trace->items = items;
    trace->item_bytes = whole(median(of[H2D], items));
    trace->compute_s = median(of[COMPUTE], items);
    trace->result_bytes = whole(median(of[D2H], items));
    trace->total_s = last - first;
}

static int read_events(const char *path, const json_t *list, struct plan_trace *trace)
{
    const size_t all = json_array_size(list);
    struct event *events = calloc(all > 0 ? all : 1, sizeof(*events));
    double *room = calloc(all > 0 ? all : 1, 3 * sizeof(*room));
    size_t count = 0, ours = 0;
    int code = EXIT_DONE;

    if (events == NULL || room == NULL) {
        say("out of host memory");
        code = EXIT_MEMORY;
    }
    for (size_t i = 0; code == EXIT_DONE && i < all; i++) {
        bool counts = false;
        code = read_event(path, i, json_array_get(list, i), &events[count], &counts);
        ours += events[count].lane != LANES;
        count += counts;
    }
    if (code == EXIT_DONE && ours == 0)
        code = refuse(
            path, "no events of category H2D, compute or D2H; want a trace of 'sidestream demo --trace' or of "
                  "side_timeline_trace. Those of other tools do not say what belongs to an item: give --items, --bytes "
                  "and --compute instead");
    if (code == EXIT_DONE && count == 0)
        code = refuse(path, "no event names its item (args.item)");
    if (code == EXIT_DONE) {
        qsort(events, count, sizeof(*events), by_item);
        add_up(events, count, room, trace);
    }
    free(events);
    free(room);
    return code;
}

int planning_trace_read(const char *path, struct plan_trace *trace)
{
    json_error_t error;
    struct stat there;
    json_t *root, *list;
    int code;

    if (stat(path, &there) != 0)
        return refuse(path, strerror(errno));
    if (!S_ISREG(there.st_mode))
        return refuse(path, "not a regular file");
    if (there.st_size > MOST_FILE)
        return refuse(path, "over 256 MiB; write a trace of fewer items");
    root = json_load_file(path, JSON_REJECT_DUPLICATES, &error);
    if (root == NULL) {
        say("trace '%s', line %d, byte %d: %s", path, error.line, error.column, error.text);
        return EXIT_FAILED;
    }
    list = json_object_get(root, "traceEvents");
    code = json_is_array(list) ? read_events(path, list, trace)
                               : refuse(path, "no list \"traceEvents\"; want Chrome's trace JSON");
    json_decref(root);
    return code;
}
