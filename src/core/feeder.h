/* SPDX-License-Identifier: MIT
 *
 * The inside of a feeder, shared by its files:
 *   feeder.c       create and destroy, threads, the first failure, cancel, statistics
 *   feeder_put.c   submit: checks and packs a batch; where it can, queues its copies right there
 *   feeder_move.c  what the stager (stage.h) asks of a feeder: cut, fill, issue
 *   feeder_take.c  next, discard, copied
 *   feeder_time.c  timing events, and whom a stall is laid to
 *
 *                    submitted             slotted                 issued                taken
 *      submit --> waits for a slot --> its copies are queued --> ready to be taken --> the caller's, in `slots`
 *
 *   taken <= issued <= slotted <= submitted: numbers of the next batch at each stage; slotted - issued <= 1, the issuer's. A batch's record lies at
 *   number % batch_count; it is used again once the batch is taken, its sources are read and its times summed up.
 *
 * Lock: mutex guards all that is not said to belong to somebody. It is never held while something is queued or waited for, but for its own conditions; questions
 * (event queries) are asked inside. Order: stager.pop, stager.issue, then mutex, then a slots' mutex.
 *
 * Who issues. Normally whoever is the stager's issuer. The submitter itself, where the batch has direct pieces alone, nothing is before it and a slot is free:
 * `inline_busy` says so, and there is no piece then that the stager could issue.
 */
#ifndef CORE_FEEDER_H
#define CORE_FEEDER_H

#include "stage.h"

#define FEEDER_GAP_BYTES 4096u /* fewer bytes between two pieces are copied along */

/* A piece of the caller's, in order of offsets. */
struct part {
    const char *data;
    size_t bytes, offset;
    bool direct; /* pinned and large: no staging */
};

struct parts {
    struct part *at;
    size_t count, capacity;
    size_t end, sum; /* of the last one; of all bytes */
    size_t direct;   /* how many */
};

struct batch {
    uint64_t number;
    struct parts parts;  /* constant from submit until it is taken and read */
    bool is_cut;         /* all of it was given to the stager */
    uint32_t unfilled;   /* staged pieces that are cut and not yet read */
    bool reads;          /* the device reads sources itself, until `copied` */
    bool fenced;         /* `copied` is recorded; the issuer's before */
    struct fence copied; /* the end of its copies. With timing its event keeps time */
    side_slot slot;
    uint64_t submitted_ns, slot_asked_ns, slot_got_ns, issued_ns; /* the device's host clock */
    /* timing; written by the issuer (begun) and by next */
    dev_event *begun;         /* copy stream, before its first copy */
    dev_event *asked, *ready; /* reader: what it had queued at next; behind its wait */
    bool has_begun, measured;
    uint32_t reader; /* number of the stream; 0: the host */
    uint64_t asked_ns, ready_ns;
    uint64_t lost_ns[3]; /* the host was blocked: no batch, no slot, staging */
};

enum { LOST_SOURCE, LOST_SLOT, LOST_STAGE };

/* Where the stager's cut stands. */
struct feeder_cursor {
    uint64_t batch;
    size_t part, skip;
};

struct side_feeder {
    side_device *device;
    unsigned fork_generation;
    side_feeder_options options; /* with defaults filled in */
    side_stream *copy;
    bool own_copy;
    side_slots *slots;
    struct stager stager; /* its host ring is made at the first piece that needs it */
    size_t chunk_bytes;
    struct parts scratch; /* the submitter's */
    atomic_ullong copies, direct_bytes;

    atomic_bool cancelled;
    atomic_bool interrupted; /* blocked acquires return: cancelled, or discarding */
    atomic_bool failed;      /* `failure` is set */
    pthread_mutex_t mutex;   /* guards what follows */
    pthread_cond_t work;     /* a batch for cut */
    pthread_cond_t arrived;  /* a batch for next */
    pthread_cond_t room;     /* for submit; also what settling and discard wait for */
    side_error failure;      /* the first; status SIDE_OK: none */
    struct batch *batches;
    uint32_t batch_count;
    uint64_t submitted, slotted, issued, taken;
    uint64_t copied;  /* batches whose sources are read, as far as was asked */
    uint64_t dropped; /* batches below that are not taken are not wanted */
    uint64_t timed;   /* batches below are in the sums, or will not be */
    struct feeder_cursor cursor;
    uint32_t in_hand; /* pieces that are cut and not issued */
    bool open;        /* the issuer has a slot that is not published */
    bool inline_busy, discarding, closed;
    bool settled, settling, stuck;
    pthread_t threads[STAGE_MAX_THREADS];
    uint32_t thread_count, live;
    side_feeder_stats stats;

    /* next's alone */
    dev_event *asked; /* of the batch to be taken next */
    bool has_asked, asked_is_recorded;
    uint32_t asked_by;
    uint64_t asked_ns;
};

static inline struct batch *feeder_batch(side_feeder *f, uint64_t number)
{
    return &f->batches[number % f->batch_count];
}

static inline uint64_t feeder_now(side_feeder *f)
{
    return f->device->ops->now(f->device->context);
}

/* ---- feeder.c */

/* SIDE_INVALID for NULL, SIDE_FORKED in a child. */
side_status feeder_enter(const side_feeder *f, const char *where);
/* SIDE_OK, the first failure, or SIDE_CANCELLED. Locked. */
side_status feeder_check(side_feeder *f);
/* The same, for the stager: unlocked. */
side_status feeder_check_unlocked(void *feeder);
/* The first failure wins. Poisons the slots, but where the feeder was cancelled: then takers go on. Returns status; keeps the thread's error detail. */
side_status feeder_fail(side_feeder *f, side_status status);
/* For every return: where the feeder has failed or was cancelled, what reads sources or is queued ends before (R5); SIDE_STUCK if it does not. */
side_status feeder_return(side_feeder *f, side_status status);
/* At least `count` fill threads. Locked. */
side_status feeder_threads(side_feeder *f, uint32_t count);

/* ---- feeder_move.c */

extern const struct stager_ops feeder_stager_ops;
/* A slot was acquired for the batch; its copies follow on the copy stream. Not locked; the issuer alone. */
void feeder_begin(side_feeder *f, struct batch *b, const side_slot *slot, uint64_t asked_ns);
side_status feeder_copy(side_feeder *f, const struct batch *b, size_t offset, const void *src, size_t bytes,
                        bool direct);
/* All copies of the batch are queued: publishes it. */
side_status feeder_publish(side_feeder *f, struct batch *b);

/* ---- feeder_take.c */

/* Raises f->copied as far as is known without waiting. Locked. */
side_status feeder_advance(side_feeder *f);
/* Blocks until the batch's copies, which are fenced, are done. Not locked. */
side_status feeder_wait_copied(side_feeder *f, struct batch *b);

/* ---- feeder_time.c. Measuring fails nothing: what cannot be measured is left out. */

void timing_begin(side_feeder *f, struct batch *b);   /* issuer, before the first copy */
void timing_ask(side_feeder *f, side_stream *reader); /* next, first thing */
/* next, last thing before the batch is the caller's: locked after the device wait and the stamp that timing_ready gives. */
bool timing_ready(side_feeder *f, struct batch *b, side_stream *reader);
void timing_taken(side_feeder *f, struct batch *b, side_stream *reader, bool stamped);
/* Adds up the batches below `end` whose events are done; `drop`: gives up the others of them. Locked. */
void timing_sum(side_feeder *f, uint64_t end, bool drop);
void timing_finish(side_feeder *f);

#endif
