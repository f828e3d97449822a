/* SPDX-License-Identifier: MIT */
#include "demo.h"

#include <stdio.h>
#include <string.h>

static const char *math_name(side_math math)
{
    static const char *const names[] = {"fp32", "tf32", "bf16"};

    return names[math];
}

static int print_piece(void *user, const char *text, size_t bytes)
{
    return fwrite(text, 1, bytes, user) != bytes;
}

static const struct demo_row *find(const struct demo *d, demo_schedule *schedule)
{
    for (size_t i = 0; i < d->row_count; i++)
        if (d->rows[i].schedule == schedule)
            return &d->rows[i];
    return NULL;
}

/* ---------------------------------------------------------------- text */

static void print_head(const struct demo *d)
{
    const struct demo_args *a = &d->args;
    char link[96], bytes[32];

    printf("device    %s (%s), %s\n", d->props.name, d->props.spec, link_text(&d->link, link));
    if (d->props.simulated)
        printf("          simulated: times are of a model, not of hardware%s\n",
               a->dim == 1024 ? "; the problem is small because a CPU does the work" : "");
    if (d->disabled)
        puts("          SIDESTREAM_DISABLE is set: the sidestream rows are plain ordered copies");
    printf("problem   %llu x (%llu x %llu %s, %s) @ w%s\n", (unsigned long long)a->items, (unsigned long long)a->dim,
           (unsigned long long)a->dim, math_name(a->math), bytes_text(d->item_bytes, bytes),
           a->results ? ", results back to the host" : ", results stay on the device");
    printf("alone     copy in %.3f ms, compute %.3f ms", d->t * 1e3, d->c * 1e3);
    if (a->results)
        printf(", copy out %.3f ms%s", d->d * 1e3, d->props.copy_engines > 1 ? " (both directions at once)" : "");
    printf(" an item\nbound     %.3f ms: no schedule can be faster\n\n", d->bound_s * 1e3);
}

static void print_table(const struct demo *d)
{
    printf("%-24s %10s %9s %11s %13s %12s\n", "schedule", "time ms", "speed-up", "time/bound", "compute busy",
           "copy hidden");
    for (size_t i = 0; i < d->row_count; i++) {
        const struct demo_row *row = &d->rows[i];

        printf("%-24s %10.3f %8.2fx %11.3f %11.0f %% %10.0f %%\n", row->name, row->time_s * 1e3, row->speedup,
               row->bound_ratio, row->account.compute_busy * 100, row->account.copy_hidden * 100);
    }
    if (d->error_count == 0)
        printf("all results are equal, bit for bit (XXH3 %016llx)\n", (unsigned long long)d->rows[0].checksum);
    putchar('\n');
}

static int print_timelines(const struct demo_row *const *drawn, size_t count)
{
    double longest = 0;
    side_draw draw = SIDE_DRAW_INIT;

    for (size_t i = 0; i < count; i++)
        if (drawn[i]->account.total_s > longest)
            longest = drawn[i]->account.total_s;
    draw.width = stdout_columns();
    draw.ascii = stdout_ascii();
    for (size_t i = 0; i < count; i++) {
        side_status status;

        if (drawn[i]->span_count == 0)
            continue;
        draw.title = drawn[i]->name;
        draw.from_ns = drawn[i]->spans[0].begin_ns;
        draw.to_ns = draw.from_ns + (uint64_t)(longest * 1e9 + 0.5);
        status = side_timeline_text(drawn[i]->spans, drawn[i]->span_count, &draw, print_piece, stdout);
        if (status != SIDE_OK)
            return say_status(status, "drawing '%s'", drawn[i]->name);
        putchar('\n');
    }
    return EXIT_DONE;
}

static void print_streams_note(const struct demo *d)
{
    const struct demo_row *one = find(d, demo_sidestream);

    for (size_t i = 0; i < d->row_count; i++) {
        const struct demo_row *row = &d->rows[i];
        double gain = one->time_s / row->time_s - 1;

        if (row->streams <= 1)
            continue;
        if (gain > -0.005 && gain < 0.005)
            printf("%u compute streams make no difference against one.\n", row->streams);
        else
            printf("%u compute streams %s %.1f %% against one.\n", row->streams, gain > 0 ? "gain" : "cost",
                   (gain > 0 ? gain : -gain) * 100);
    }
}

static const char why[] = "The textbook queues copy i+1 after compute i, so the copy's wait for the compute stream "
                          "covers compute i, and the two\n"
                          "never overlap; reordered, copy i+1 is queued first, the same wait covers only compute i-1, "
                          "and it runs beside compute i.\n";

static int print_text(const struct demo *d, const struct demo_row *const *drawn)
{
    int code;

    print_head(d);
    print_table(d);
    code = print_timelines(drawn, 3);
    if (code != EXIT_DONE)
        return code;
    fputs(why, stdout);
    print_streams_note(d);
    return finish_stdout();
}

/* ---------------------------------------------------------------- JSON */

static json_t *row_json(const struct demo_row *row)
{
    char checksum[17];

    snprintf(checksum, sizeof(checksum), "%016llx", (unsigned long long)row->checksum);
    return json_pack("{s:s, s:o, s:i, s:o, s:o, s:o, s:o, s:o, s:s}", "name", row->name, "depth",
                     row->depth > 0 ? json_integer(row->depth) : json_null(), "streams",
                     row->depth > 0 ? (int)row->streams : 1, "time_s", json_number(row->time_s), "speedup",
                     json_number(row->speedup), "bound_ratio", json_number(row->bound_ratio), "compute_busy",
                     json_number(row->account.compute_busy), "copy_hidden", json_number(row->account.copy_hidden),
                     "checksum", checksum);
}

static int print_object(const struct demo *d)
{
    const struct demo_args *a = &d->args;
    json_t *schedules = json_array(), *errors = json_array();

    for (size_t i = 0; i < d->row_count; i++)
        json_array_append_new(schedules, row_json(&d->rows[i]));
    for (size_t i = 0; i < d->error_count; i++)
        json_array_append_new(errors, json_string(d->errors[i]));
    return print_json(
        json_pack("{s:s, s:s, s:b, s:I, s:s, s:I, s:I, s:I, s:I, s:b, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}",
                  "device", d->props.spec, "name", d->props.name, "simulated", d->props.simulated, "dim",
                  (json_int_t)a->dim, "math", math_name(a->math), "items", (json_int_t)a->items, "item_bytes",
                  (json_int_t)d->item_bytes, "result_bytes", (json_int_t)d->result_bytes, "repeats",
                  (json_int_t)a->repeats, "results", a->results, "transfer_s", json_number(d->t), "compute_s",
                  json_number(d->c), "result_s", a->results ? json_number(d->d) : json_null(), "transfer_alone_s",
                  json_number(d->t_alone), "result_alone_s", a->results ? json_number(d->d_alone) : json_null(),
                  "bound_s", json_number(d->bound_s), "schedules", schedules, "errors", errors));
}

/* ---------------------------------------------------------------- files */

static int write_svg(const struct demo *d, const struct demo_row *const *drawn, struct output *file)
{
    side_timeline_part parts[3];
    side_draw draw = SIDE_DRAW_INIT;
    side_status status;

    for (size_t i = 0; i < 3; i++)
        parts[i] = (side_timeline_part){drawn[i]->spans, drawn[i]->span_count, drawn[i]->name};
    draw.title = "x @ w over a list of host matrices";
    draw.device = d->props.name;
    status = side_timeline_svg_stack(parts, 3, &draw, output_write, file);
    if (status == SIDE_OK)
        return output_commit(file);
    return output_failed(file, status);
}

static int write_trace(const struct demo *d, const struct demo_row *ours, struct output *file)
{
    side_draw draw = SIDE_DRAW_INIT;
    side_status status;

    draw.title = ours->name;
    draw.device = d->props.name;
    status = side_timeline_trace(ours->spans, ours->span_count, &draw, output_write, file);
    if (status == SIDE_OK)
        return output_commit(file);
    return output_failed(file, status);
}

int demo_report(struct demo *d)
{
    const struct demo_row *drawn[3] = {find(d, demo_textbook), find(d, demo_reordered), find(d, demo_sidestream)};
    int code = d->args.common.json ? print_object(d) : print_text(d, drawn);

    if (code == EXIT_DONE && d->args.svg != NULL)
        code = write_svg(d, drawn, &d->svg);
    if (code == EXIT_DONE && d->args.trace != NULL)
        code = write_trace(d, drawn[2], &d->trace);
    return d->code != EXIT_DONE ? d->code : code;
}
