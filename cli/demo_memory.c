/* SPDX-License-Identifier: MIT */
#include "demo.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

enum { POISON = 0xA5 };

/* Bytes the system could give now; UINT64_MAX where it does not say. */
static uint64_t memory_available(void)
{
    unsigned long long kib = 0;
    char line[128];
    FILE *file = fopen("/proc/meminfo", "r");

    if (file == NULL)
        return UINT64_MAX;
    while (fgets(line, sizeof(line), file) != NULL)
        if (sscanf(line, "MemAvailable: %llu kB", &kib) == 1)
            break;
    fclose(file);
    return kib > 0 ? (uint64_t)kib * 1024 : UINT64_MAX;
}

static int too_little(const char *what, uint64_t need, uint64_t have)
{
    char a[32], b[32];

    say("the demo needs %s of %s memory and %s is free; lower --items, --dim or --depth", bytes_text(need, a), what,
        bytes_text(have, b));
    return EXIT_MEMORY;
}

/* Before anything is taken, so that the answer comes at once and names what to lower. */
static int check_memory(struct demo *d)
{
    const struct demo_args *a = &d->args;
    uint64_t slots = 2, n = a->items, device, host, available = memory_available();
    size_t free_bytes, total_bytes;
    side_status status;

    for (size_t i = 0; i < a->depths; i++)
        slots += a->depth[i];
    for (size_t i = 0; i < a->stream_counts; i++)
        slots += a->streams[i] > 1 ? a->depth[0] : 0;
    slots += slots - 2 > a->depth[0] ? a->depth[0] : 0; /* the pipeline that is logged is one more */
    device = d->item_bytes * (slots + 1) + d->result_bytes * (n + (a->results ? slots : 0));
    host = 2 * n * d->item_bytes + (a->results ? 2 * n * d->result_bytes : 0);
    status = side_device_get_memory(d->device, &free_bytes, &total_bytes);
    if (status != SIDE_OK)
        return say_status(status, "cannot ask for free device memory");
    if (device > free_bytes)
        return too_little("device", device, free_bytes);
    if (d->props.simulated) /* its device memory is the host's */
        host += device;
    if (host > available)
        return too_little("host", host, available);
    return EXIT_DONE;
}

/* splitmix64: any seed will do, and it is fast enough for gigabytes. */
static uint64_t random_next(uint64_t *state)
{
    uint64_t z = *state += 0x9E3779B97F4A7C15u;

    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

/* Numbers in [-1, 1): 1.xxx with a random fraction, doubled, less 3. */
static void fill_random(void *data, size_t bytes, side_type type, uint64_t seed)
{
    size_t count = bytes / 8;

    for (size_t i = 0; i < count; i++) {
        uint64_t r = random_next(&seed);
        uint32_t word[2] = {0x3F800000u | (uint32_t)(r & 0x7FFFFF), 0x3F800000u | (uint32_t)(r >> 32 & 0x7FFFFF)};
        float x[2];

        memcpy(x, word, sizeof(x));
        x[0] = 2 * x[0] - 3;
        x[1] = 2 * x[1] - 3;
        if (type == SIDE_F32) {
            memcpy((char *)data + i * 8, x, 8);
        } else { /* bf16 is the upper half; both halves of r are random enough for two more */
            uint16_t half[4];

            memcpy(word, x, sizeof(word));
            half[0] = (uint16_t)(word[0] >> 16);
            half[1] = (uint16_t)(word[1] >> 16);
            half[2] = (uint16_t)(half[0] ^ (r >> 56 & 0x3F));
            half[3] = (uint16_t)(half[1] ^ (r >> 24 & 0x3F));
            memcpy((char *)data + i * 8, half, 8);
        }
    }
}

static side_status pinned_blocks(struct demo *d, size_t bytes, side_block **blocks)
{
    *blocks = calloc(d->args.items, sizeof(**blocks));
    if (*blocks == NULL)
        return SIDE_NO_MEMORY;
    for (size_t i = 0; i < d->args.items; i++) {
        side_status status = side_pool_alloc(d->pool, bytes, &(*blocks)[i].data);

        if (status != SIDE_OK)
            return status;
        (*blocks)[i].bytes = bytes;
    }
    return SIDE_OK;
}

static side_status pageable_blocks(struct demo *d, size_t bytes, side_block **blocks)
{
    *blocks = calloc(d->args.items, sizeof(**blocks));
    if (*blocks == NULL)
        return SIDE_NO_MEMORY;
    for (size_t i = 0; i < d->args.items; i++) {
        (*blocks)[i].data = malloc(bytes);
        if ((*blocks)[i].data == NULL)
            return SIDE_NO_MEMORY;
        memset((*blocks)[i].data, POISON, bytes); /* touched: page faults are no part of what is measured */
        (*blocks)[i].bytes = bytes;
    }
    return SIDE_OK;
}

static side_status take_host(struct demo *d)
{
    const side_type type = d->args.math == SIDE_MATH_BF16 ? SIDE_BF16 : SIDE_F32;
    side_status status = pinned_blocks(d, d->item_bytes, &d->pinned);

    if (status == SIDE_OK)
        status = pageable_blocks(d, d->item_bytes, &d->pageable);
    if (status == SIDE_OK && d->args.results)
        status = pinned_blocks(d, d->result_bytes, &d->pinned_out);
    if (status == SIDE_OK && d->args.results)
        status = pageable_blocks(d, d->result_bytes, &d->pageable_out);
    if (status == SIDE_OK)
        status = side_pool_alloc(d->pool, d->result_bytes > d->item_bytes ? d->result_bytes : d->item_bytes,
                                 &d->staging);
    if (status != SIDE_OK)
        return status;
    for (size_t i = 0; i < d->args.items; i++) {
        fill_random(d->pinned[i].data, d->item_bytes, type, i + 1);
        memcpy(d->pageable[i].data, d->pinned[i].data, d->item_bytes);
    }
    fill_random(d->staging, d->item_bytes, type, 0); /* w */
    return SIDE_OK;
}

static side_status take_device(struct demo *d)
{
    side_status status = side_device_alloc(d->device, d->item_bytes, &d->weight);

    for (size_t i = 0; i < 2 && status == SIDE_OK; i++)
        status = side_device_alloc(d->device, d->item_bytes, &d->in[i]);
    d->out = calloc(d->args.items, sizeof(*d->out));
    if (d->out == NULL)
        return SIDE_NO_MEMORY;
    for (size_t i = 0; i < d->args.items && status == SIDE_OK; i++)
        status = side_device_alloc(d->device, d->result_bytes, &d->out[i]);
    if (status == SIDE_OK)
        status = side_stream_create(d->device, &d->transfer);
    if (status == SIDE_OK)
        status = side_stream_create(d->device, &d->compute);
    if (status == SIDE_OK)
        status = side_stream_create(d->device, &d->back);
    if (status == SIDE_OK)
        status = side_event_create(d->device, false, &d->filled);
    if (status == SIDE_OK)
        status = side_event_create(d->device, false, &d->computed);
    for (size_t i = 0; i < 2 && status == SIDE_OK; i++) {
        status = side_event_create(d->device, true, &d->begin[i]);
        if (status == SIDE_OK)
            status = side_event_create(d->device, true, &d->end[i]);
    }
    if (status == SIDE_OK)
        status = side_copy_async(d->transfer, SIDE_COPY_H2D, d->weight, d->staging, d->item_bytes);
    return status == SIDE_OK ? demo_sync(d) : status;
}

static int memory_failed(const struct demo *d, side_status status, const char *which)
{
    bool lower = exit_for(status) == EXIT_MEMORY; /* less would not help a device that is lost */

    return say_status(status, "%s memory for %llu items%s", which, (unsigned long long)d->args.items,
                      lower ? " (lower --items or --dim)" : "");
}

int demo_memory_take(struct demo *d)
{
    int code = check_memory(d);
    side_status status;

    if (code != EXIT_DONE)
        return code;
    status = side_device_pool(d->device, &d->pool);
    if (status == SIDE_OK)
        status = take_host(d);
    if (status != SIDE_OK)
        return memory_failed(d, status, "host");
    status = take_device(d);
    if (status != SIDE_OK)
        return memory_failed(d, status, "device");
    return EXIT_DONE;
}

static void free_blocks(struct demo *d, side_block *blocks, bool pinned)
{
    for (size_t i = 0; blocks != NULL && i < d->args.items; i++) {
        if (!pinned)
            free(blocks[i].data);
        else if (blocks[i].data != NULL)
            side_pool_free(d->pool, blocks[i].data, NULL, 0);
    }
    free(blocks);
}

void demo_memory_free(struct demo *d)
{
    for (size_t i = 0; i < 2; i++) {
        side_event_destroy(d->begin[i]);
        side_event_destroy(d->end[i]);
        side_device_free(d->device, d->in[i]);
    }
    side_event_destroy(d->filled);
    side_event_destroy(d->computed);
    side_stream_destroy(d->transfer);
    side_stream_destroy(d->compute);
    side_stream_destroy(d->back);
    side_device_free(d->device, d->weight);
    for (size_t i = 0; d->out != NULL && i < d->args.items; i++)
        side_device_free(d->device, d->out[i]);
    free(d->out);
    if (d->staging != NULL)
        side_pool_free(d->pool, d->staging, NULL, 0);
    free_blocks(d, d->pinned, true);
    free_blocks(d, d->pinned_out, true);
    free_blocks(d, d->pageable, false);
    free_blocks(d, d->pageable_out, false);
}

side_status demo_poison(struct demo *d)
{
    side_status status = SIDE_OK;

    for (size_t i = 0; i < d->args.items && status == SIDE_OK; i++) {
        status = side_memset_async(d->compute, d->out[i], POISON, d->result_bytes);
        if (d->args.results) {
            memset(d->pinned_out[i].data, POISON, d->result_bytes);
            memset(d->pageable_out[i].data, POISON, d->result_bytes);
        }
    }
    for (size_t i = 0; i < 2 && status == SIDE_OK; i++)
        status = side_memset_async(d->compute, d->in[i], POISON, d->item_bytes);
    return status == SIDE_OK ? demo_sync(d) : status;
}

side_status demo_checksum(struct demo *d, uint64_t *checksum)
{
    XXH3_state_t state;

    XXH3_64bits_reset(&state);
    for (size_t i = 0; i < d->args.items; i++) {
        const void *data = d->args.results ? d->host_out[i].data : d->staging;

        if (!d->args.results) {
            side_status status = side_copy_async(d->back, SIDE_COPY_D2H, d->staging, d->out[i], d->result_bytes);

            if (status == SIDE_OK)
                status = side_stream_sync(d->back, 60);
            if (status != SIDE_OK)
                return status;
        }
        XXH3_64bits_update(&state, data, d->result_bytes);
    }
    *checksum = XXH3_64bits_digest(&state);
    return SIDE_OK;
}
