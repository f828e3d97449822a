/* SPDX-License-Identifier: MIT */
#include "bench_blocks.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { COUNTS = 4, MOST_SHAPES = 2 * 8 * COUNTS };
#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)

static const uint32_t counts[COUNTS] = {16, 128, 1024, 8192}, quick_counts[] = {128, 8192};
static const uint32_t sizes[] = {1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 2 << 20};
static const uint32_t quick_sizes[] = {4 << 10, 64 << 10, 1 << 20};
#define LENGTH(array) (sizeof(array) / sizeof((array)[0]))
static const double sim_gemm_s = 1.4e-3; /* what 8192^3 takes on an H200 */

static bool is_for(side_path path, side_copy_kind kind)
{
    return path != SIDE_PATH_PACK || kind == SIDE_COPY_D2H;
}

/* ---------------------------------------------------------------- shapes */

static void add_shapes(struct blocks *b, side_copy_kind kind, uint32_t size)
{
    const uint32_t *list = b->bench->args.quick ? quick_counts : counts;
    const size_t length = b->bench->args.quick ? LENGTH(quick_counts) : LENGTH(counts);
    const uint32_t most = (uint32_t)(b->most_bytes / size);
    uint32_t last = 0;

    for (size_t i = 0; i < length; i++) {
        uint32_t count = list[i] < most ? list[i] : most;

        if (count > last)
            b->shapes[b->shape_count++] = (struct blocks_shape){.kind = kind, .block_bytes = size, .count = count};
        last = count;
    }
}

static side_status choose_shapes(struct blocks *b)
{
    const struct bench *bench = b->bench;
    const uint32_t *list = bench->args.quick ? quick_sizes : sizes;
    const size_t length = bench->args.quick ? LENGTH(quick_sizes) : LENGTH(sizes);

    b->most_bytes = bench->props.simulated ? 4 * MIB : bench->args.quick ? 16 * MIB : 128 * MIB;
    b->region_bytes = bench->props.simulated ? 16 * MIB : bench->args.quick ? 256 * MIB : 1024 * MIB;
    while (b->region_bytes > 4 * MIB &&
           (2 * b->region_bytes > bench_host_room(bench) || 4 * b->region_bytes > bench_device_room(bench)))
        b->region_bytes /= 2;
    if (b->most_bytes > b->region_bytes / 2)
        b->most_bytes = b->region_bytes / 2;
    b->shapes = calloc(MOST_SHAPES, sizeof(*b->shapes));
    if (b->shapes == NULL)
        return SIDE_NO_MEMORY;
    for (int kind = SIDE_COPY_H2D; kind <= SIDE_COPY_D2H; kind++)
        for (size_t i = 0; i < length && list[i] <= b->most_bytes; i++)
            add_shapes(b, (side_copy_kind)kind, list[i]);
    return SIDE_OK;
}

/* ---------------------------------------------------------------- measuring */

/* The paths take turns, so that a drift of clocks meets all of them. */
static side_status measure_shape(struct blocks *b, struct blocks_shape *shape)
{
    const struct bench *bench = b->bench;
    const size_t alone = bench->args.samples > 0 || bench->samples < 5 ? bench->samples : 5, beside = (alone + 1) / 2;
    side_status status = SIDE_OK;

    for (size_t round = 0; round <= alone && status == SIDE_OK; round++)
        for (int path = BLOCKS_PLAIN; path < SIDE_PATH_COUNT && status == SIDE_OK; path++)
            if (is_for((side_path)path, shape->kind))
                status = blocks_alone(b, shape, (side_path)path, round > 0); /* the first one warms up */
    if (status != SIDE_OK || b->gemm.dim == 0)
        return status;
    status = bench_gemm_time(&b->gemm);
    for (size_t round = 0; round < beside && status == SIDE_OK; round++)
        for (int path = BLOCKS_PLAIN; path < SIDE_PATH_COUNT && status == SIDE_OK; path++)
            status = blocks_beside(b, shape, (side_path)path);
    return status;
}

/* How much longer a product takes beside this path than beside the plain copy; 0: not measured. */
static double slow_down(const struct blocks_shape *shape, int path)
{
    const struct bench_samples *this = &shape->cells[path].gemm_s, *plain = &shape->cells[BLOCKS_PLAIN].gemm_s;

    return this->count > 0 && plain->count > 0 ? bench_median(this) / bench_median(plain) : 0;
}

static void keep_in_profile(struct blocks *b)
{
    side_machine *m = &b->bench->machine;

    m->path_count = 0;
    for (size_t i = 0; i < b->shape_count; i++) {
        const struct blocks_shape *shape = &b->shapes[i];

        for (int path = SIDE_PATH_LOOP; path < SIDE_PATH_COUNT; path++)
            if (shape->cells[path].gbps.count > 0 && m->path_count < SIDE_MACHINE_PATHS)
                m->paths[m->path_count++] = (side_path_rate){
                    .kind = shape->kind,
                    .path = (side_path)path,
                    .block_bytes = shape->block_bytes,
                    .count = shape->count,
                    .gbps = bench_median(&shape->cells[path].gbps),
                    .beside = slow_down(shape, path),
                };
    }
}

/* ---------------------------------------------------------------- the table */

/* What SIDE_PATH_AUTO takes by what was measured just now. */
static int chosen(const struct blocks *b, const struct blocks_shape *shape)
{
    return (int)side_machine_path_for(&b->bench->machine, shape->kind, shape->block_bytes, shape->count);
}

static void cell_text(const struct blocks *b, const struct blocks_shape *shape, int path, char text[64])
{
    const struct blocks_cell *cell = &shape->cells[path];
    char alone[16], beside[16], factor[16] = "-";

    if (cell->gbps.count == 0) {
        snprintf(text, 64, "%s", cell->tried ? "unsupported" : "");
        return;
    }
    bench_gbps_text(bench_median(&cell->gbps), alone);
    bench_gbps_text(cell->beside_gbps.count > 0 ? bench_median(&cell->beside_gbps) : NAN, beside);
    if (path != BLOCKS_PLAIN && slow_down(shape, path) > 0)
        snprintf(factor, sizeof(factor), "x%.2f", slow_down(shape, path));
    if (path == BLOCKS_PLAIN)
        snprintf(text, 64, "%5s %5s", alone, beside);
    else
        snprintf(text, 64, "%5s %5s %5s%s", alone, beside, factor, path == chosen(b, shape) ? "*" : "");
}

static void print_table(const struct blocks *b, side_copy_kind kind)
{
    const struct bench *bench = b->bench;

    bench_print(bench, "\n  %-16s  %-11s", kind == SIDE_COPY_H2D ? "H2D" : "D2H", "plain copy");
    for (int path = SIDE_PATH_LOOP; path < SIDE_PATH_COUNT; path++)
        if (is_for((side_path)path, kind))
            bench_print(bench, "  %-18s", side_path_name((side_path)path));
    bench_print(bench, "\n");
    for (size_t i = 0; i < b->shape_count; i++) {
        const struct blocks_shape *shape = &b->shapes[i];
        char size[32], text[64];

        if (shape->kind != kind)
            continue;
        bench_print(bench, "  %8s x %-5u", bytes_text(shape->block_bytes, size), shape->count);
        for (int path = BLOCKS_PLAIN; path < SIDE_PATH_COUNT; path++) {
            if (!is_for((side_path)path, kind))
                continue;
            cell_text(b, shape, path, text);
            bench_print(bench, path == BLOCKS_PLAIN ? "  %-11s" : "  %-18s", text);
        }
        bench_print(bench, "\n");
    }
}

static void print_unsupported(const struct blocks *b)
{
    for (int path = SIDE_PATH_LOOP; path < SIDE_PATH_COUNT; path++) {
        const char *why = NULL;

        for (size_t i = 0; i < b->shape_count && why == NULL; i++)
            if (b->shapes[i].cells[path].unsupported[0] != '\0')
                why = b->shapes[i].cells[path].unsupported;
        if (why != NULL)
            bench_print(b->bench, "  %s is not supported: %s\n", side_path_name((side_path)path), why);
    }
}

static void print(const struct blocks *b)
{
    const struct bench *bench = b->bench;

    bench_print(bench,
                "\nblocks: GB/s of a whole call, alone and beside matrix products; x: what a product then takes, over "
                "what it takes beside a plain copy; *: the path that the library chooses\n");
    if (b->gemm.dim > 0)
        bench_print(bench, "  the products are %llu x %llu bf16, %.3g ms each alone%s\n",
                    (unsigned long long)b->gemm.dim, (unsigned long long)b->gemm.dim, b->gemm.seconds * 1e3,
                    bench->props.simulated ? ", as told" : "");
    else
        bench_print(bench, "  no products beside: %s\n", b->gemm.why);
    print_table(b, SIDE_COPY_H2D);
    print_table(b, SIDE_COPY_D2H);
    print_unsupported(b);
}

static json_t *cell_json(const struct blocks *b, const struct blocks_shape *shape, int path)
{
    const struct blocks_cell *cell = &shape->cells[path];
    const double slower = path == BLOCKS_PLAIN ? 0 : slow_down(shape, path);
    json_t *row = json_pack("{s:s, s:i, s:i, s:s}", "kind", shape->kind == SIDE_COPY_H2D ? "h2d" : "d2h", "block_bytes",
                            (int)shape->block_bytes, "count", (int)shape->count, "path",
                            path == BLOCKS_PLAIN ? "plain" : side_path_name((side_path)path));

    if (cell->gbps.count == 0) {
        json_object_set_new(row, "unsupported", json_string(cell->unsupported));
        return row;
    }
    json_object_set_new(row, "gbps", bench_samples_json(&cell->gbps));
    if (cell->beside_gbps.count > 0)
        json_object_set_new(row, "beside_gbps", bench_samples_json(&cell->beside_gbps));
    if (cell->gemm_s.count > 0)
        json_object_set_new(row, "product_s", bench_samples_json(&cell->gemm_s));
    if (slower > 0)
        json_object_set_new(row, "slow_down", json_number(slower));
    if (path != BLOCKS_PLAIN)
        json_object_set_new(row, "chosen", json_boolean(path == chosen(b, shape)));
    return row;
}

static void report(struct blocks *b)
{
    json_t *rows = json_array();

    print(b);
    for (size_t i = 0; i < b->shape_count; i++)
        for (int path = BLOCKS_PLAIN; path < SIDE_PATH_COUNT; path++)
            if (is_for((side_path)path, b->shapes[i].kind))
                json_array_append_new(rows, cell_json(b, &b->shapes[i], path));
    bench_json(b->bench, "blocks",
               json_pack("{s:I, s:o, s:s?, s:o}", "product_dim", (json_int_t)b->gemm.dim, "product_s",
                         b->gemm.dim > 0 ? json_number(b->gemm.seconds) : json_null(), "no_products",
                         b->gemm.dim > 0 ? NULL : b->gemm.why, "rows", rows));
}

/* ---------------------------------------------------------------- the suite */

int bench_blocks(struct bench *bench)
{
    struct blocks *b = calloc(1, sizeof(*b));
    side_status status;

    if (b == NULL)
        return bench_failed(bench, SIDE_NO_MEMORY, "blocks");
    b->bench = bench;
    status = choose_shapes(b);
    if (status == SIDE_OK)
        status = blocks_take(b);
    if (status == SIDE_OK)
        status = bench_gemm_make(bench, 8192, sim_gemm_s, &b->gemm);
    for (size_t i = 0; i < b->shape_count && status == SIDE_OK; i++)
        status = measure_shape(b, &b->shapes[i]);
    if (status == SIDE_OK) {
        keep_in_profile(b);
        report(b);
    }
    blocks_free(b);
    return status == SIDE_OK ? EXIT_DONE : bench_failed(bench, status, "blocks");
}
