/* SPDX-License-Identifier: MIT
 *
 * The op table: every call enters (lock, scripted faults), asks the layers, and leaves. */
#include "sim.h"

#include "calls.h"
#include "model.h"

#include "alloc.h"
#include "error.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---------------------------------------------------------------- entering */

static void lose(dev_context *c)
{
    c->lost = true;
    sim_graveyard_sweep(c);
    pthread_cond_broadcast(&c->ran);
}

side_status sim_enter(dev_context *c, const char *where)
{
    pthread_mutex_lock(&c->mutex);
    uint64_t call = ++c->calls;
    if (c->lose_at != 0 && call >= c->lose_at && !c->lost)
        lose(c);
    side_status s = SIDE_OK;
    if (!c->lost && call == c->fail_at) {
        s = c->fail_status;
        if (s == SIDE_DEVICE_LOST)
            lose(c);
        else
            error_set(s, where, "%s failed: scripted, call %llu of the simulated device", where,
                      (unsigned long long)call);
    }
    if (c->lost)
        s = error_set(SIDE_DEVICE_LOST, where, "the simulated device is lost (scripted); its queued work never runs");
    if (s != SIDE_OK)
        pthread_mutex_unlock(&c->mutex);
    return s;
}

side_status sim_leave(dev_context *c, side_status status)
{
    pthread_mutex_unlock(&c->mutex);
    return status;
}

uint64_t sim_calls(dev_context *c)
{
    pthread_mutex_lock(&c->mutex);
    uint64_t n = c->calls;
    pthread_mutex_unlock(&c->mutex);
    return n;
}

void sim_fail_at(dev_context *c, uint64_t nth, side_status status)
{
    pthread_mutex_lock(&c->mutex);
    c->fail_at = nth != 0 ? c->calls + nth : 0;
    c->fail_status = status;
    pthread_mutex_unlock(&c->mutex);
}

void sim_fault_clear(dev_context *c)
{
    pthread_mutex_lock(&c->mutex);
    c->fail_at = 0;
    c->lose_at = 0;
    pthread_mutex_unlock(&c->mutex);
}

uint64_t sim_violations(dev_context *c)
{
    pthread_mutex_lock(&c->mutex);
    uint64_t n = c->violations;
    pthread_mutex_unlock(&c->mutex);
    return n;
}

size_t sim_pending(dev_context *c)
{
    pthread_mutex_lock(&c->mutex);
    size_t n = c->nodes;
    pthread_mutex_unlock(&c->mutex);
    return n;
}

/* ---------------------------------------------------------------- the device */

static unsigned count(char *why, size_t why_bytes)
{
    if (why_bytes > 0)
        why[0] = '\0';
    return 1;
}

static side_status open_context(const char *args, dev_context **context)
{
    static atomic_uint_fast64_t next_id = 1;
    struct sim_config config;
    side_status s = sim_config_parse(args, &config);

    if (s != SIDE_OK)
        return s;
    dev_context *c = mem_zalloc(1, sizeof(*c));
    if (c == NULL)
        return SIDE_NO_MEMORY;
    c->config = config;
    c->id = atomic_fetch_add(&next_id, 1);
    size_t profile = strcspn(args, ",");
    if (memchr(args, '=', profile) != NULL || profile == 0) /* no profile named */
        snprintf(c->spec, sizeof(c->spec), "sim:%s%s%s", config.profile, args[0] == '\0' || args[0] == ',' ? "" : ",",
                 args);
    else
        snprintf(c->spec, sizeof(c->spec), "sim:%s", args);
    if (strlen(args) + strlen(config.profile) + sizeof("sim:,") >
        sizeof(c->spec)) /* cut off: better without keys than with wrong ones */
        snprintf(c->spec, sizeof(c->spec), "sim:%s", config.profile);
    pthread_mutex_init(&c->mutex, NULL);
    pthread_cond_init(&c->ran, NULL);
    c->fail_at = config.fail;
    c->fail_status = (side_status) - (int)config.fail_status;
    c->lose_at = config.lose;
    c->pattern_fd = c->poison_fd = -1;
    sim_effects_open(c);
    *context = c;
    return SIDE_OK;
}

static void drop_node(struct sim_node *node)
{
    sim_node_discard(node);
}

static void close_context(dev_context *c)
{
    /* Nodes that are through went already (streams and events are gone); what is left lies in the list of those that did not run, or ran and
     * lies in a heap, or waits for one that does. */
    sim_time_place(c, NULL, UINT64_MAX);
    while (c->unrun_first != NULL) {
        struct sim_node *node = c->unrun_first;
        c->unrun_first = node->next;
        drop_node(node);
    }
    for (int e = 0; e < SIM_ENGINES; e++)
        mem_free(c->heap[e].at);
    mem_free(c->ready.at);
    mem_free(c->clocks);
    sim_memory_close(c);
    pthread_cond_destroy(&c->ran);
    pthread_mutex_destroy(&c->mutex);
    mem_free(c);
}

static side_status props(dev_context *c, side_device_props *out)
{
    const struct sim_config *f = &c->config;
    side_status s = sim_enter(c, "sim.props");

    if (s != SIDE_OK)
        return s;
    side_device_props p = {.simulated = true,
                           .compute_major = f->compute_major,
                           .compute_minor = f->compute_minor,
                           .copy_engines = (int)f->copy_engines,
                           .multiprocessors = f->multiprocessors,
                           .can_register = !f->refuse_register && !f->refuse_pinning,
                           .numa_node = -1,
                           .memory_bytes = f->memory_bytes,
                           .kernels = f->kernels != 0};
    snprintf(p.spec, sizeof(p.spec), "%s", c->spec);
    snprintf(p.name, sizeof(p.name), "%s", f->title);
    snprintf(p.uuid, sizeof(p.uuid), "SIM-%s", f->profile);
    snprintf(p.kernels_from, sizeof(p.kernels_from), "%s", f->kernels ? "simulated" : "switched off by kernels=0");
    *out = p;
    return sim_leave(c, SIDE_OK);
}

static side_status get_link(dev_context *c, side_link *out)
{
    side_status s = sim_enter(c, "sim.link");

    if (s != SIDE_OK)
        return s;
    side_link l = {.generation = c->config.link_generation,
                   .width = c->config.link_width,
                   .max_generation = c->config.link_generation,
                   .max_width = c->config.link_width,
                   .peak_gbps = c->config.link_gbps};
    snprintf(l.kind, sizeof(l.kind), "%s", c->config.link);
    *out = l;
    return sim_leave(c, SIDE_OK);
}

static side_status memory(dev_context *c, size_t *free_bytes, size_t *total_bytes)
{
    side_status s = sim_enter(c, "sim.memory");

    if (s != SIDE_OK)
        return s;
    *free_bytes = c->config.memory_bytes - c->used_bytes;
    *total_bytes = c->config.memory_bytes;
    return sim_leave(c, SIDE_OK);
}

/* Equal blocks that lie apart. Nothing here slows compute down, whatever runs beside. */
static void model_paths(const dev_context *c, side_machine *machine)
{
    uint32_t n = 0;

    for (uint32_t block = 1024; block <= 1 << 20; block *= 4)
        for (uint32_t count = 16; count <= 4096; count *= 16)
            for (int kind = SIDE_COPY_H2D; kind <= SIDE_COPY_D2D; kind++)
                for (int path = SIDE_PATH_LOOP; path < SIDE_PATH_COUNT; path++) {
                    const struct sim_blocks blocks = {.count = count,
                                                      .full = count,
                                                      .bytes = (size_t)count * block,
                                                      .tiles = (size_t)count * ((block + 4095) / 4096),
                                                      .runs = count};
                    if (!sim_has_path(c, (side_copy_kind)kind, (side_path)path))
                        continue;
                    machine->paths[n++] = (side_path_rate){
                        .kind = (side_copy_kind)kind,
                        .path = (side_path)path,
                        .block_bytes = block,
                        .count = count,
                        .gbps = (double)blocks.bytes /
                                (double)sim_blocks_cost(c, (side_copy_kind)kind, (side_path)path, &blocks),
                        .beside = 1};
                }
    machine->path_count = n;
}

/* The host's share costs no virtual time: queueing, staging threads and pinning take none, and work that waits begins where the awaited ends. */
static side_status model(dev_context *c, side_machine *machine)
{
    const struct sim_config *f = &c->config;
    side_status s = sim_enter(c, "sim.model");

    if (s != SIDE_OK)
        return s;
    const double latency_s = (double)f->copy_latency_ns * 1e-9, h2d = (double)f->h2d_rate / 1000,
                 d2h = (double)f->d2h_rate / 1000, pageable = (double)f->pageable_rate / 1000;
    machine->copy_engines = (int)f->copy_engines;
    machine->h2d = (side_rate){latency_s, h2d};
    machine->d2h = (side_rate){latency_s, d2h};
    /* of equal bytes both ways */
    machine->both_gbps = f->copy_engines > 1 ? 2 * (h2d < d2h ? h2d : d2h) : 2 * h2d * d2h / (h2d + d2h);
    machine->pageable_h2d = (side_rate){latency_s, pageable < h2d ? pageable : h2d};
    machine->pageable_d2h = (side_rate){latency_s, pageable < d2h ? pageable : d2h};
    machine->stage_gbps = h2d;
    machine->pin_s_per_gib = machine->queue_s = machine->handover_s = machine->start_s = 0;
    model_paths(c, machine);
    return sim_leave(c, SIDE_OK);
}

static uint64_t now(dev_context *c)
{
    pthread_mutex_lock(&c->mutex);
    uint64_t ns = *sim_clock(c);
    pthread_mutex_unlock(&c->mutex);
    return ns;
}

static void clock_join(dev_context *c, uint64_t ns)
{
    pthread_mutex_lock(&c->mutex);
    uint64_t *clock = sim_clock(c);
    if (*clock < ns)
        *clock = ns;
    pthread_mutex_unlock(&c->mutex);
}

/* ---------------------------------------------------------------- memory */

static side_status alloc(dev_context *c, size_t bytes, void **data)
{
    side_status s = sim_enter(c, "sim.alloc");

    return s != SIDE_OK ? s : sim_leave(c, sim_alloc(c, bytes, data));
}

static void free_memory(dev_context *c, void *data)
{
    pthread_mutex_lock(&c->mutex);
    sim_free(c, data);
    pthread_mutex_unlock(&c->mutex);
}

static side_status host_register(dev_context *c, void *data, size_t bytes, bool read_only)
{
    side_status s = sim_enter(c, "sim.host_register");

    return s != SIDE_OK ? s : sim_leave(c, sim_host_register(c, data, bytes, read_only));
}

static side_status host_unregister(dev_context *c, void *data)
{
    side_status s = sim_enter(c, "sim.host_unregister");

    return s != SIDE_OK ? s : sim_leave(c, sim_host_unregister(c, data));
}

static side_status host_alloc(dev_context *c, size_t bytes, void **data)
{
    side_status s = sim_enter(c, "sim.host_alloc");

    return s != SIDE_OK ? s : sim_leave(c, sim_host_alloc(c, bytes, data));
}

static void host_free(dev_context *c, void *data)
{
    pthread_mutex_lock(&c->mutex);
    sim_host_free(c, data);
    pthread_mutex_unlock(&c->mutex);
}

static side_status memory_kind(dev_context *c, const void *data, side_memory_kind *kind)
{
    side_status s = sim_enter(c, "sim.memory_kind");

    if (s != SIDE_OK)
        return s;
    *kind = sim_memory_kind(c, data);
    return sim_leave(c, SIDE_OK);
}

const struct side_device_ops sim_device_ops = {
    .abi = SIDE_DEVICE_ABI,
    .kind = "sim",
    .count = count,
    .open = open_context,
    .close = close_context,
    .props = props,
    .link = get_link,
    .memory = memory,
    .model = model,
    .now = now,
    .clock_join = clock_join,
    .alloc = alloc,
    .free = free_memory,
    .host_register = host_register,
    .host_unregister = host_unregister,
    .host_alloc = host_alloc,
    .host_free = host_free,
    .memory_kind = memory_kind,
    .stream_create = sim_stream_create,
    .stream_wrap = sim_stream_wrap,
    .stream_destroy = sim_stream_destroy,
    .stream_native = sim_stream_native,
    .stream_wait = sim_stream_wait,
    .stream_query = sim_stream_query,
    .stream_is_capturing = sim_stream_is_capturing,
    .event_create = sim_event_create,
    .event_destroy = sim_event_destroy,
    .event_record = sim_event_record,
    .event_query = sim_event_query,
    .event_wait = sim_event_wait,
    .event_elapsed = sim_event_elapsed,
    .copy = sim_copy,
    .copy_blocks = sim_copy_blocks,
    .set = sim_set,
    .op = sim_op,
    .host_fn = sim_host_fn,
};
