/* SPDX-License-Identifier: MIT
 *
 * What the software device is made of. Everything here belongs to one context and is guarded by its mutex; functions are called with it held
 * unless they say otherwise.
 *
 * Everything queued is a node, waits and records included. A node has at most two predecessors: the one before it in its stream, and the
 * record that a wait captured.
 *
 *     stream 1   [copy]-->[record]-->[copy]-->...          both layers walk the same edges, each with its own
 *                            |                             counter of predecessors that are not through yet;
 *     stream 2   [op]---->[wait]---->[op]---->...          a node goes when both layers are through with it
 */
#ifndef DEVICE_SIM_MODEL_H
#define DEVICE_SIM_MODEL_H

#include "sidestream_device.h"

#include <pthread.h>

enum sim_engine { SIM_COMPUTE, SIM_COPY_0, SIM_COPY_1, SIM_NO_ENGINE, SIM_ENGINES };

/* ---- spec.c: what a device looks like */

/* Rates are integers, so that every machine computes the same: 1000ths of GB/s (bytes per us) and 1000ths of TFLOP/s (operations per ns). */
struct sim_config {
    const char *profile, *title, *link;
    int link_generation, link_width;
    double link_gbps;
    int compute_major, compute_minor, multiprocessors;
    uint64_t copy_engines, memory_bytes;
    uint64_t h2d_rate, d2h_rate, pageable_rate, memory_rate;
    uint64_t flops[3]; /* by side_math */
    uint64_t copy_latency_ns, piece_ns, launch_ns, query_ns;
    uint64_t seed, kernels, check;
    uint64_t fail, lose, hang; /* N, 0: never */
    uint64_t fail_status;      /* a side_status, negated */
    uint64_t refuse_register, refuse_pinning;
};
/* No lock. */
side_status sim_config_parse(const char *args, struct sim_config *config);

/* ---- the queue */

struct sim_node;
struct sim_edge {
    struct sim_node *to;
    struct sim_edge *next; /* of the same predecessor */
};

enum sim_kind { SIM_WAIT, SIM_RECORD, SIM_COPY, SIM_PIECES, SIM_SET, SIM_OP, SIM_HOST_FN };

struct sim_node {
    uint64_t seq;    /* order of submission */
    uint64_t stream; /* number of the stream: the stream itself may be gone */
    uint64_t cost_ns;
    uint64_t ready_ns;            /* so far known: submission time, ends of placed predecessors */
    uint64_t end_ns;              /* valid once placed */
    struct sim_node *prev, *next; /* of context.unrun */
    struct sim_node *settle;      /* effects.c: stack of markers that became ready */
    struct sim_edge in[2];        /* from the predecessors; hooked into their `out` */
    struct sim_edge *out;
    uint32_t refs; /* 1 until run and placed, 1 as a stream's tail, 1 an event that recorded it, 1 a thread that waits */
    uint8_t run_waits, time_waits; /* predecessors not through, by layer */
    uint8_t kind, engine;
    bool hung; /* never finishes; so do all that depend on it */
    bool ran, placed;
    union {
        struct {
            void *dst;
            const void *src;
            size_t bytes;
            side_piece *pieces; /* SIM_PIECES: ours; `bytes` is how many */
            int value;
        } move;
        side_op op;
        struct {
            side_host_fn *fn;
            void *user;
        } call;
    };
};

struct sim_nodes { /* array, or binary heap by (ready_ns, seq) */
    struct sim_node **at;
    size_t count, capacity;
};

/* ---- memory.c: address ranges we know, sorted and disjoint */

enum sim_range_kind { SIM_RANGE_DEVICE, SIM_RANGE_REGISTERED, SIM_RANGE_HOST };

struct sim_range {
    uintptr_t begin;
    size_t bytes;
    void *block;       /* what to give back; NULL for mapped and registered ones */
    uint64_t freed_at; /* in the graveyard: operations before this one may still touch it */
    enum sim_range_kind kind;
    bool read_only, mapped;
};

struct sim_ranges {
    struct sim_range *at;
    size_t count, capacity;
};

struct sim_clock {
    uint64_t thread, ns;
};

struct dev_context {
    struct sim_config config;
    char spec[64];
    uint64_t id; /* never used twice in a process */

    pthread_mutex_t mutex; /* guards all below, streams, events and nodes */
    pthread_cond_t ran;    /* a host function returned, or the device got lost */

    uint64_t calls, fail_at, lose_at;
    side_status fail_status;
    bool lost;

    uint64_t next_seq, next_stream, queued; /* queued: operations, for hang */
    struct sim_node *unrun_first, *unrun_last;
    size_t unrun, nodes; /* nodes: neither run nor placed, or one of them */

    /* time.c */
    struct sim_nodes heap[SIM_ENGINES];
    size_t unplaced[SIM_ENGINES];
    uint64_t free_ns[SIM_ENGINES];
    struct sim_clock *clocks;
    size_t clock_count, clock_capacity;
    struct sim_clock spare_clock; /* shared by threads for whose clock there was no memory */

    /* effects.c */
    struct sim_nodes ready;
    size_t running; /* host functions */
    uint64_t rng;
    uint64_t favourite; /* stream */
    uint32_t favour;    /* of 8: how often the favourite goes on */
    uint32_t eager;     /* 0 nothing runs at submission, 3 everything does */

    /* memory.c */
    struct sim_ranges ranges;
    struct sim_ranges graveyard; /* FIFO by freed_at */
    size_t used_bytes;
    uint64_t violations;
    uint8_t pattern;
    int pattern_fd, poison_fd; /* -1 until needed */
};

struct dev_stream {
    dev_context *context;
    uint64_t number;
    struct sim_node *tail; /* last node, NULL: nothing queued ever */
    bool capturing;        /* says so; nothing else is different */
};

struct dev_event {
    dev_context *context;
    bool timing;
    struct sim_node *record; /* NULL: never recorded */
};

/* ---- queue.c */

/* Room is made for it in both layers, so that sim_submit cannot fail. NULL: out of memory. */
struct sim_node *sim_node_make(dev_context *c, enum sim_kind kind, enum sim_engine engine);
/* Before submission only. */
void sim_node_discard(struct sim_node *node);
/* Takes the node. `awaited` may be NULL. */
void sim_submit(dev_stream *stream, struct sim_node *node, struct sim_node *awaited);
void sim_unref(struct sim_node *node);
/* One of the layers is through with the node: it goes when both are. */
void sim_node_through(dev_context *c, struct sim_node *node);
bool sim_nodes_reserve(struct sim_nodes *nodes, size_t capacity);

/* ---- time.c */

uint64_t *sim_clock(dev_context *c);               /* the calling thread's; valid until the mutex is dropped */
uint64_t sim_add(uint64_t a, uint64_t b);          /* saturates */
uint64_t sim_cost(uint64_t amount, uint64_t rate); /* bytes at 1000ths of GB/s, in ns, rounded up */
uint64_t sim_matmul_cost(const uint64_t dim[3], uint64_t rate);
void sim_time_push(dev_context *c, struct sim_node *node); /* all predecessors are placed */
/* Places what starts up to `limit`, stopping early at `target` (may be NULL). */
void sim_time_place(dev_context *c, const struct sim_node *target, uint64_t limit);
/* Ready to be told: placed, and not after the calling thread's clock. */
bool sim_time_reached(dev_context *c, const struct sim_node *node);

/* ---- calls.c */

/* The caller's clock goes to the node's end, and its effects are done; SIDE_AGAIN after timeout_ns. The node is kept alive meanwhile: the lock may be dropped. */
side_status sim_wait_for(dev_context *c, struct sim_node *node, uint64_t timeout_ns);

/* ---- copies.c */

/* What many pieces come to, as far as their cost goes. */
struct sim_blocks {
    size_t count, full;           /* all; those with bytes */
    size_t bytes, pageable_bytes; /* pinned or device memory; pageable */
    size_t tiles;                 /* of at most 4 KiB */
    size_t runs;                  /* whose destinations do not go on where the piece before ended */
    const void *end;              /* of the last destination */
};
void sim_blocks_add(struct sim_blocks *blocks, const side_piece *piece, bool pageable);
/* No lock: the configuration alone decides. */
bool sim_has_path(const dev_context *c, side_copy_kind kind, side_path path);
uint64_t sim_blocks_cost(const dev_context *c, side_copy_kind kind, side_path path, const struct sim_blocks *blocks);

/* ---- effects.c */

void sim_effects_open(dev_context *c);
void sim_effects_push(dev_context *c, struct sim_node *node); /* all predecessors have run */
void sim_effects_some(dev_context *c);
/* Drops the mutex while host functions run. SIDE_OK, SIDE_AGAIN (hung), SIDE_DEVICE_LOST. */
side_status sim_effects_until(dev_context *c, const struct sim_node *node);
uint64_t sim_random(dev_context *c, uint64_t bound);

/* ---- memory.c */

/* The whole range is device memory / pinned (and writable, where asked). */
bool sim_is_device(const dev_context *c, const void *data, size_t bytes);
bool sim_is_pinned(const dev_context *c, const void *data, size_t bytes);
bool sim_is_read_only(const dev_context *c, const void *data);
void sim_graveyard_sweep(dev_context *c);
void sim_memory_close(dev_context *c); /* no lock */

side_status sim_alloc(dev_context *c, size_t bytes, void **data);
void sim_free(dev_context *c, void *data);
side_status sim_host_register(dev_context *c, void *data, size_t bytes, bool read_only);
side_status sim_host_unregister(dev_context *c, void *data);
side_status sim_host_alloc(dev_context *c, size_t bytes, void **data);
void sim_host_free(dev_context *c, void *data);
side_memory_kind sim_memory_kind(const dev_context *c, const void *data);

#endif
