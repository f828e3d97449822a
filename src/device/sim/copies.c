/* SPDX-License-Identifier: MIT
 *
 * Copies: of one piece, and of many by one of the paths. What a path does is the same for all: the bytes move, in any order among the pieces. What it
 * costs is the model of what was measured on an H200 (4 KiB blocks: a loop 1.5 GB/s, a batch 2.6, a gather kernel 51 and packed chunks 53 of 55.3). */
#include "calls.h"

#include "model.h"

#include "alloc.h"
#include "error.h"

#include <string.h>

static enum sim_engine engine_for(const dev_context *c, side_copy_kind kind)
{
    if (kind == SIDE_COPY_D2D)
        return SIM_COMPUTE;
    return kind == SIDE_COPY_D2H && c->config.copy_engines == 2 ? SIM_COPY_1 : SIM_COPY_0;
}

/* Which side lies where. *pageable is set where the host side is not pinned. */
static side_status check_piece(const dev_context *c, side_copy_kind kind, const side_piece *p, size_t index,
                               bool *pageable)
{
    static const char where[] = "sim.copy";

    if (p->bytes == 0)
        return SIDE_OK;
    if (kind != SIDE_COPY_D2H && !sim_is_device(c, p->dst, p->bytes))
        return error_set(SIDE_INVALID, where, "piece %zu: destination %p + %zu bytes is not device memory", index,
                         p->dst, p->bytes);
    if (kind != SIDE_COPY_H2D && !sim_is_device(c, p->src, p->bytes))
        return error_set(SIDE_INVALID, where, "piece %zu: source %p + %zu bytes is not device memory", index, p->src,
                         p->bytes);
    if (kind == SIDE_COPY_D2D)
        return SIDE_OK;
    const void *host = kind == SIDE_COPY_H2D ? p->src : p->dst;
    if (sim_memory_kind(c, host) == SIDE_MEMORY_DEVICE)
        return error_set(SIDE_INVALID, where, "piece %zu: host side %p is device memory", index, host);
    if (kind == SIDE_COPY_D2H && sim_is_read_only(c, host))
        return error_set(SIDE_INVALID, where, "piece %zu: destination %p was registered read-only", index, host);
    *pageable = !sim_is_pinned(c, host, p->bytes);
    return SIDE_OK;
}

static uint64_t copy_cost(const dev_context *c, side_copy_kind kind, size_t bytes, bool pageable)
{
    const struct sim_config *f = &c->config;

    if (kind == SIDE_COPY_D2D) /* read and written */
        return sim_add(sim_cost(bytes, f->memory_rate), sim_cost(bytes, f->memory_rate));
    uint64_t link = kind == SIDE_COPY_H2D ? f->h2d_rate : f->d2h_rate;
    return sim_cost(bytes, pageable && f->pageable_rate < link ? f->pageable_rate : link);
}

/* Queues; copies that touch pageable memory are over on return, as the driver stages them through its own buffer. */
static side_status submit_copy(dev_stream *stream, struct sim_node *node, bool pageable)
{
    dev_context *c = stream->context;

    if (!pageable) {
        sim_submit(stream, node, NULL);
        return SIDE_OK;
    }
    node->refs++;
    sim_submit(stream, node, NULL);
    side_status s = sim_wait_for(c, node, UINT64_MAX);
    sim_unref(node);
    return s == SIDE_AGAIN ? SIDE_OK : s; /* hung: a driver would not return at all */
}

side_status sim_copy(dev_stream *stream, side_copy_kind kind, void *dst, const void *src, size_t bytes)
{
    dev_context *c = stream->context;
    side_piece piece = {dst, src, bytes};
    bool pageable = false;
    side_status s = sim_enter(c, "sim.copy");

    if (s != SIDE_OK)
        return s;
    s = check_piece(c, kind, &piece, 0, &pageable);
    if (s != SIDE_OK)
        return sim_leave(c, s);
    struct sim_node *node = sim_node_make(c, SIM_COPY, engine_for(c, kind));
    if (node == NULL)
        return sim_leave(c, SIDE_NO_MEMORY);
    node->move.dst = dst;
    node->move.src = src;
    node->move.bytes = bytes;
    node->cost_ns = sim_add(kind == SIDE_COPY_D2D ? c->config.launch_ns : c->config.copy_latency_ns,
                            copy_cost(c, kind, bytes, pageable));
    return sim_leave(c, submit_copy(stream, node, pageable));
}

/* ---------------------------------------------------------------- many pieces */

enum {
    TILE = 4096,         /* what a warp of a gather kernel has in flight */
    GATHER_TILE_NS = 16, /* a round trip of 2 us, shared by 128 warps */
    MOST_OF_LINK = 930   /* 1000ths, that kernels and packed chunks get */
};

bool sim_has_path(const dev_context *c, side_copy_kind kind, side_path path)
{
    switch (path) {
    case SIDE_PATH_LOOP:
    case SIDE_PATH_BATCH: return true;
    case SIDE_PATH_GATHER: return c->config.kernels != 0;
    case SIDE_PATH_PACK: return c->config.kernels != 0 && kind == SIDE_COPY_D2H;
    case SIDE_PATH_AUTO:
    case SIDE_PATH_COUNT: return false;
    }
    return false;
}

void sim_blocks_add(struct sim_blocks *blocks, const side_piece *piece, bool pageable)
{
    blocks->count++;
    if (piece->bytes == 0)
        return;
    blocks->full++;
    blocks->tiles += (piece->bytes - 1) / TILE + 1;
    blocks->runs += piece->dst != blocks->end || blocks->end == NULL;
    blocks->end = (char *)piece->dst + piece->bytes;
    *(pageable ? &blocks->pageable_bytes : &blocks->bytes) += piece->bytes;
}

/* A gather kernel runs on a few multiprocessors beside everything else, and so do those that pack: they take the copy direction, and of compute nothing, where
 * they really slow a kernel that fills the GPU down by some 7 %. Device to device all is compute. */
uint64_t sim_blocks_cost(const dev_context *c, side_copy_kind kind, side_path path, const struct sim_blocks *blocks)
{
    const struct sim_config *f = &c->config;
    const uint64_t start = kind == SIDE_COPY_D2D ? f->launch_ns : f->copy_latency_ns;
    const uint64_t moved = copy_cost(c, kind, blocks->bytes, false);
    const uint64_t near_link = kind == SIDE_COPY_D2D ? moved : sim_cost(moved, MOST_OF_LINK);
    const uint64_t pageable = blocks->pageable_bytes > 0 ? copy_cost(c, kind, blocks->pageable_bytes, true) : 0;
    const uint64_t tiles = blocks->tiles * GATHER_TILE_NS;
    uint64_t cost;

    switch (path) {
    case SIDE_PATH_LOOP: return sim_add(sim_add(blocks->full * start, moved), pageable);
    case SIDE_PATH_GATHER: return sim_add(f->launch_ns, tiles > near_link ? tiles : near_link);
    case SIDE_PATH_PACK:
        cost = sim_add(f->launch_ns + start, near_link);
        return sim_add(cost, blocks->runs > 1 ? (blocks->runs - 1) * f->piece_ns : 0);
    case SIDE_PATH_BATCH:
    case SIDE_PATH_AUTO:
    case SIDE_PATH_COUNT:
    default:
        cost = sim_add(start, blocks->count > 1 ? (blocks->count - 1) * f->piece_ns : 0);
        return sim_add(sim_add(cost, moved), pageable);
    }
}

/* What the device says to the path, before it looks at the pieces. */
static side_status check_path(const dev_stream *stream, side_copy_kind kind, side_path path)
{
    static const char where[] = "sim.copy_blocks";

    if (!sim_has_path(stream->context, kind, path))
        return error_set(SIDE_UNSUPPORTED, where, "path %s: %s", side_path_name(path),
                         stream->context->config.kernels ? "from device to host alone"
                                                         : "kernels are switched off by kernels=0");
    if (stream->capturing && (path == SIDE_PATH_GATHER || path == SIDE_PATH_PACK))
        return error_set(SIDE_UNSUPPORTED, where, "path %s does not go into a captured stream", side_path_name(path));
    return SIDE_OK;
}

static side_status check_pieces(const dev_stream *stream, side_copy_kind kind, const side_piece *pieces, size_t count,
                                side_path path, struct sim_blocks *blocks)
{
    side_status s = check_path(stream, kind, path);

    for (size_t i = 0; i < count && s == SIDE_OK; i++) {
        bool pageable = false;
        s = check_piece(stream->context, kind, &pieces[i], i, &pageable);
        if (s == SIDE_OK && pageable && (path == SIDE_PATH_GATHER || path == SIDE_PATH_PACK))
            s = error_set(SIDE_INVALID, "sim.copy_blocks",
                          "piece %zu: path %s wants pinned memory, and %p is not pinned", i, side_path_name(path),
                          kind == SIDE_COPY_H2D ? pieces[i].src : pieces[i].dst);
        if (s == SIDE_OK)
            sim_blocks_add(blocks, &pieces[i], pageable);
    }
    return s;
}

side_status sim_copy_blocks(dev_stream *stream, side_copy_kind kind, const side_piece *pieces, size_t count,
                            side_path path)
{
    dev_context *c = stream->context;
    struct sim_blocks blocks = {0};
    side_status s = sim_enter(c, "sim.copy_blocks");

    if (s != SIDE_OK || count == 0)
        return s != SIDE_OK ? s : sim_leave(c, SIDE_OK);
    s = check_pieces(stream, kind, pieces, count, path, &blocks);
    if (s != SIDE_OK)
        return sim_leave(c, s);
    struct sim_node *node = sim_node_make(c, SIM_PIECES, engine_for(c, kind));
    if (node == NULL)
        return sim_leave(c, SIDE_NO_MEMORY);
    node->cost_ns = sim_blocks_cost(c, kind, path, &blocks);
    node->move.pieces = mem_zalloc(count, sizeof(*pieces));
    if (node->move.pieces == NULL) {
        sim_node_discard(node);
        return sim_leave(c, SIDE_NO_MEMORY);
    }
    memcpy(node->move.pieces, pieces, count * sizeof(*pieces));
    node->move.bytes = count;
    return sim_leave(c, submit_copy(stream, node, blocks.pageable_bytes > 0));
}
