/* SPDX-License-Identifier: MIT
 * What a load did: text and JSON. */
#include "load.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const char *from_text(const side_machine *m)
{
    static const char *const texts[] = {"estimated", "measured", "of the model"};

    return texts[m->from];
}

/* Of time_s. */
static double share(double part, const side_load_stats *s)
{
    return s->time_s > 0 ? part / s->time_s : NAN;
}

static double percent(double part, const side_load_stats *s)
{
    double value = share(part, s);

    return isfinite(value) ? 100 * value : 0;
}

/* ---------------------------------------------------------------- JSON */

static json_t *routes_json(const side_load_stats *s)
{
    json_t *list = json_array();

    for (uint32_t i = 0; i < s->route_count; i++)
        json_array_append_new(list, json_pack("{s:s, s:s, s:I, s:I}", "backend", s->routes[i].name, "why",
                                              s->routes[i].why, "pieces", (json_int_t)s->routes[i].pieces, "bytes",
                                              (json_int_t)s->routes[i].bytes));
    return list;
}

static json_t *stages_json(const side_load_stats *s)
{
    return json_pack("{s:o, s:o, s:o, s:o, s:o}", "copying_s", json_number(s->copying_s), "wait_read_s",
                     json_number(s->wait_read_s), "wait_memory_s", json_number(s->wait_memory_s), "wait_pins_s",
                     json_number(s->wait_pins_s), "read_busy_s", json_number(s->read_busy_s));
}

static int report_json(const struct load_run *r)
{
    const side_load_stats *s = &r->stats;
    json_t *times = json_array(), *root;

    for (uint64_t i = 0; i < r->args.repeat; i++)
        json_array_append_new(times, json_number(r->time_s[i]));
    root = json_pack("{s:n, s:s, s:s, s:b, s:I, s:I, s:I, s:I, s:o, s:o, s:o}", "path", "device", r->props.name, "to",
                     r->args.host ? "host" : "device", "simulated", r->props.simulated, "tensors",
                     (json_int_t)r->part_count, "files", (json_int_t)side_checkpoint_files(r->checkpoint), "bytes",
                     (json_int_t)s->bytes, "moved_bytes", (json_int_t)s->moved_bytes, "open_s", json_number(r->open_s),
                     "time_s", json_number(s->time_s), "times_s", times);
    if (root == NULL)
        return print_json(NULL);
    json_t *path = json_string(r->args.path); /* NULL where it is no UTF-8 */
    json_object_set_new(root, "path", path != NULL ? path : json_null());
    json_object_set_new(root, "gbps", json_number(s->gbps));
    json_object_set_new(root, "link_gbps", json_number(s->link_gbps > 0 ? s->link_gbps : NAN));
    json_object_set_new(root, "link_from", json_string(from_text(&r->machine)));
    json_object_set_new(root, "link_share", json_number(s->link_gbps > 0 ? s->gbps / s->link_gbps : NAN));
    json_object_set_new(root, "plan_s", json_number(s->plan_s));
    json_object_set_new(root, "first_s", json_number(s->first_s));
    json_object_set_new(root, "pins_s", json_number(s->pins_s));
    json_object_set_new(root, "bottleneck", json_string(s->bottleneck));
    json_object_set_new(root, "stages", stages_json(s));
    json_object_set_new(root, "read", routes_json(s));
    json_object_set_new(root, "pieces", json_integer((json_int_t)s->pieces));
    json_object_set_new(root, "copies", json_integer((json_int_t)s->copies));
    json_object_set_new(root, "slots", json_integer(s->slots));
    json_object_set_new(root, "piece_bytes", json_integer((json_int_t)s->piece_bytes));
    json_object_set_new(root, "pinned_bytes", json_integer((json_int_t)s->pinned_bytes));
    json_object_set_new(root, "arena_bytes", json_integer((json_int_t)s->arena_bytes));
    json_object_set_new(root, "threads", json_integer(s->threads));
    json_object_set_new(root, "verified", r->verified ? json_true() : r->args.verify ? json_false() : json_null());
    return print_json(root);
}

/* ---------------------------------------------------------------- text */

static void print_rate(const struct load_run *r)
{
    const side_load_stats *s = &r->stats;

    for (uint64_t i = 0; r->args.repeat > 1 && i < r->args.repeat; i++)
        printf("load %-5llu %.3f s, %.2f GB/s\n", (unsigned long long)i + 1, r->time_s[i],
               r->time_s[i] > 0 ? (double)s->bytes / r->time_s[i] * 1e-9 : 0);
    printf("time       %.3f s, %.2f GB/s", s->time_s, s->gbps);
    if (s->link_gbps > 0 && !r->props.simulated)
        printf(": %.0f %% of the link's %.1f GB/s (%s)", 100 * s->gbps / s->link_gbps, s->link_gbps,
               from_text(&r->machine));
    if (r->props.simulated && !r->args.host)
        printf(" on this machine's clock; the device is simulated, and takes no time of it");
    printf("\nbefore     headers %.1f ms, plan %.1f ms, first piece read after %.1f ms, all pinned after %.1f ms\n",
           1e3 * r->open_s, 1e3 * s->plan_s, 1e3 * s->first_s, 1e3 * s->pins_s);
}

static int report_text(const struct load_run *r)
{
    const side_load_stats *s = &r->stats;
    const size_t files = side_checkpoint_files(r->checkpoint);
    char bytes[32], piece[32], moved[32];

    printf("loaded     %zu tensor%s, %s from %zu file%s to %s%s\n", r->part_count, r->part_count == 1 ? "" : "s",
           bytes_text(s->bytes, bytes), files, files == 1 ? "" : "s", r->args.host ? "host memory" : r->props.name,
           r->props.simulated && !r->args.host ? " (simulated)" : "");
    print_rate(r);
    if (strcmp(s->bottleneck, "too small") == 0)
        puts("limited by nothing that can be told: the load is too small");
    else if (s->bottleneck[0] != '\0')
        printf("limited by %s\n", s->bottleneck);
    if (!r->args.host)
        printf("busy       copying %.0f %%; waiting for reads %.0f %%, for memory %.0f %%, for pins %.0f %%\n",
               percent(s->copying_s, s), percent(s->wait_read_s, s), percent(s->wait_memory_s, s),
               percent(s->wait_pins_s, s));
    for (uint32_t i = 0; i < s->route_count; i++)
        printf("%-10s %s %s in %llu piece%s: %s\n", i == 0 ? "read" : "", s->routes[i].name,
               bytes_text(s->routes[i].bytes, bytes), (unsigned long long)s->routes[i].pieces,
               s->routes[i].pieces == 1 ? "" : "s", s->routes[i].why);
    printf("staging    %s pinned, pieces of %s, %u threads\n", bytes_text(s->pinned_bytes, bytes),
           bytes_text(s->piece_bytes, piece), s->threads);
    if (s->moved_bytes > 0)
        printf("aligned    %s of tensors were placed anew: the file does not align them\n",
               bytes_text(s->moved_bytes, moved));
    if (r->verified)
        puts("verified   every byte is that of the file");
    return finish_stdout();
}

int load_report(const struct load_run *r)
{
    return r->args.common.json ? report_json(r) : report_text(r);
}
