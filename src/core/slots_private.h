/* SPDX-License-Identifier: MIT
 *
 * The inside of slots, shared by its files:
 *   slots.c        acquire and publish, take and release: the state machine
 *   slots_make.c   create, drain, destroy
 *   slots_table.c  free list, recency list, key table
 *   slots_ticket.c waiting for a generation from outside; invariants
 *
 *                 acquire             publish             take n x / release n x
 *      FREE ----------------> WRITING --------> FILLED ----------------------------> FREE     ring: after `readers` releases
 *        ^                       |                 |                                          list: after give_back
 *        +------- abandon -------+                 +--- acquire of another key (eviction) --> WRITING   table
 *
 * Lock: slots->mutex guards the states, counts and lists. The fences of a slot belong to whoever the state says: `filled` to the writer while WRITING, a
 * reader's `drained` to that reader while open, all of them to the next writer in WRITING. So what queues or waits on the device runs outside the lock; only questions (fence_query) are asked inside.
 *
 * A failed device call poisons the whole object: what was queued is no longer covered by a fence, so nobody may go on.
 */
#ifndef CORE_SLOTS_PRIVATE_H
#define CORE_SLOTS_PRIVATE_H

#include "slots.h"

#define NO_SLOT UINT32_MAX

enum slot_state { SLOT_FREE, SLOT_WRITING, SLOT_FILLED };

struct reader {
    struct fence drained;
    pthread_t owner;
    bool open;
};

struct slot {
    void *data;
    uint64_t key, generation;
    enum slot_state state;
    bool abandoned; /* RING: the item never came */
    struct fence filled;
    struct reader readers[SIDE_MAX_READERS]; /* of this generation; of the previous one while its next writer waits for them */
    uint32_t reader_count;                   /* entries in use */
    uint32_t open, released;                 /* takes not yet released; releases so far */
    uint32_t pins;                           /* tickets being waited for: the generation may not change */
    pthread_t owner;                         /* who acquired */
    uint32_t prev, next;                     /* free list (LIST, TABLE), or recency list (TABLE, FILLED) */
};

struct chain {
    uint32_t head, tail;
};

struct side_slots {
    side_device *device;
    unsigned fork_generation;
    enum side_policy policy;
    uint32_t count, expected;
    size_t slot_bytes;
    side_memory_kind where;
    double timeout_s;
    int site;
    const atomic_bool *cancel;
    bool validate;
    bool drains_own; /* a record that fails waits for its stream; false: the owner drains all streams */
    side_pool *pool; /* PINNED and ours */
    void *slab;      /* ours, or NULL */
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    side_status poison;        /* SIDE_OK: none */
    bool uncovered;            /* work is queued that no fence covers, and that did not drain: the memory is kept */
    uint64_t next_write;       /* RING */
    uint64_t end;              /* RING: first number that will not come */
    struct chain free, recent; /* recent: oldest use first */
    uint32_t *buckets;         /* TABLE: key -> slot, open addressing, twice as many as slots */
    uint32_t bucket_count;
    struct slot *slots;
};

/* slots_table.c; all under the lock */
void chain_append(side_slots *t, struct chain *c, uint32_t i);
void chain_remove(side_slots *t, struct chain *c, uint32_t i);
uint32_t table_find(const side_slots *t, uint64_t key); /* NO_SLOT: absent */
void table_insert(side_slots *t, uint64_t key, uint32_t i);
void table_erase(side_slots *t, uint64_t key); /* present */

/* slots.c */
/* Locks, unless it returns an error: NULL, fork, a stream (NULL: none) of another device, poison. */
side_status slots_begin(side_slots *t, const side_stream *stream, const char *where);
/* How long a call waits for its turn: not at all, for ever, or until then (os_now_ns). */
#define SLOTS_NO_WAIT  0u
#define SLOTS_FOR_EVER UINT64_MAX
/* Sleeps until something changed. SIDE_OK: look again; SIDE_AGAIN: `until_ns` is over; else poison or cancel. */
side_status slots_wait_changed(side_slots *t, uint64_t until_ns, const char *where);

#endif
