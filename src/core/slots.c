/* SPDX-License-Identifier: MIT
 *
 * Slots: acquire and publish, take and release: the state machine. The picture is in slots_private.h. */
#include "slots_private.h"

#include "error.h"
#include "os.h"

#include <string.h>

#define CANCEL_POLL_NS \
    20000000u /* blocked callers look at the cancel flag this often: a signal handler can only set it */

/* ---------------------------------------------------------------- host half: waiting under the lock */

static side_status poisoned(const side_slots *t, const char *where)
{
    if (t->poison == SIDE_CANCELLED)
        return error_set(SIDE_CANCELLED, where, "cancelled");
    return error_set(t->poison, where, "an earlier call on these slots failed: %s", side_status_text(t->poison));
}

static void poison_locked(side_slots *t, side_status why)
{
    if (t->poison == SIDE_OK)
        t->poison = why;
    pthread_cond_broadcast(&t->changed);
}

/* Poisons with `why`, keeping the error detail that the thread has. */
static side_status poison_with(side_slots *t, side_status why)
{
    pthread_mutex_lock(&t->mutex);
    poison_locked(t, why);
    pthread_mutex_unlock(&t->mutex);
    return why;
}

side_status slots_wait_changed(side_slots *t, uint64_t until_ns, const char *where)
{
    const uint64_t poll = t->cancel != NULL ? os_now_ns() + CANCEL_POLL_NS : SLOTS_FOR_EVER;
    bool late = false;

    if (until_ns == SLOTS_FOR_EVER && poll == SLOTS_FOR_EVER)
        pthread_cond_wait(&t->changed, &t->mutex);
    else if (!os_cond_wait_until(&t->changed, &t->mutex, poll < until_ns ? poll : until_ns))
        late = os_now_ns() >= until_ns;
    if (t->poison != SIDE_OK)
        return poisoned(t, where);
    if (t->cancel != NULL && atomic_load(t->cancel))
        return error_set(SIDE_CANCELLED, where, "cancelled");
    return late ? SIDE_AGAIN : SIDE_OK;
}

side_status slots_begin(side_slots *t, const side_stream *stream, const char *where)
{
    if (t == NULL)
        return error_set(SIDE_INVALID, where, "slots is NULL");
    side_status s = os_fork_check(t->fork_generation, where);
    if (s == SIDE_OK && stream != NULL && stream->device != t->device)
        s = error_set(SIDE_INVALID, where, "the stream is of another device than the slots");
    if (s != SIDE_OK)
        return s;
    pthread_mutex_lock(&t->mutex);
    if (t->poison == SIDE_OK)
        return SIDE_OK;
    s = poisoned(t, where);
    pthread_mutex_unlock(&t->mutex);
    return s;
}

static side_status deadlock(const side_slots *t, const char *where, uint64_t key)
{
    return error_set(SIDE_WOULD_DEADLOCK, where,
                     "this thread itself holds what it waits for (item %llu of %u slots): release or publish it first",
                     (unsigned long long)key, t->count);
}

/* ---------------------------------------------------------------- acquire and publish */

static bool open_all_mine(const struct slot *s)
{
    for (uint32_t r = 0; r < s->reader_count; r++)
        if (s->readers[r].open && !pthread_equal(s->readers[r].owner, pthread_self()))
            return false;
    return s->open > 0;
}

static bool ring_is_reusable(const side_slots *t, const struct slot *s)
{
    return s->pins == 0 &&
           (s->state == SLOT_FREE || (s->state == SLOT_FILLED && s->open == 0 && s->released >= t->expected));
}

/* Sure to be for ever: everything that would free the slot is this thread's. (Takes still to come may be another thread's.) */
static bool ring_waits_for_itself(const side_slots *t, const struct slot *s)
{
    if (s->state == SLOT_WRITING)
        return pthread_equal(s->owner, pthread_self());
    return s->state == SLOT_FILLED && s->open + s->released >= t->expected && open_all_mine(s);
}

static uint32_t table_victim(side_slots *t)
{
    for (uint32_t i = t->recent.head; i != NO_SLOT; i = t->slots[i].next)
        if (t->slots[i].open == 0 && t->slots[i].pins == 0)
            return i;
    return NO_SLOT;
}

/* The slot that the next acquire gets, or NO_SLOT: it has to wait. */
static uint32_t candidate(side_slots *t)
{
    uint32_t i;

    if (t->policy == SIDE_RING) {
        i = (uint32_t)(t->next_write % t->count);
        return ring_is_reusable(t, &t->slots[i]) ? i : NO_SLOT;
    }
    for (i = t->free.head; i != NO_SLOT; i = t->slots[i].next)
        if (t->slots[i].pins == 0)
            return i;
    return t->policy == SIDE_TABLE ? table_victim(t) : NO_SLOT;
}

static bool acquire_waits_for_itself(const side_slots *t)
{
    if (t->policy == SIDE_RING)
        return ring_waits_for_itself(t, &t->slots[t->next_write % t->count]);
    for (uint32_t i = 0; i < t->count; i++) {
        const struct slot *s = &t->slots[i];
        bool mine = (s->state == SLOT_WRITING && pthread_equal(s->owner, pthread_self())) ||
                    (t->policy == SIDE_TABLE && s->state == SLOT_FILLED && open_all_mine(s));
        if (!mine)
            return false;
    }
    return true;
}

static side_status drained_query(const struct slot *s, side_device *device)
{
    side_status r = fence_query(&s->filled, device);
    for (uint32_t i = 0; r == SIDE_OK && i < s->reader_count; i++)
        r = fence_query(&s->readers[i].drained, device);
    return r;
}

/* Takes the slot out of its list and table, into WRITING under its new key. */
static void claim(side_slots *t, uint32_t i, uint64_t key)
{
    struct slot *s = &t->slots[i];

    if (t->policy == SIDE_RING) {
        s->key = t->next_write++;
    } else {
        chain_remove(t, s->state == SLOT_FREE ? &t->free : &t->recent, i);
        if (t->policy == SIDE_TABLE) {
            if (s->state == SLOT_FILLED)
                table_erase(t, s->key);
            s->key = key;
            table_insert(t, key, i);
        } else {
            s->key = i;
        }
    }
    s->state = SLOT_WRITING;
    s->abandoned = false;
    s->owner = pthread_self();
    s->generation++;
    s->open = s->released = 0;
}

/* Device half of acquire: R1. The slot is the caller's (WRITING). */
static side_status wait_drained(side_slots *t, struct slot *s, side_stream *writer)
{
    side_status r = SIDE_OK;
    int site = t->site;

    /* Without readers nothing else orders this write after the last one. */
    if (s->reader_count == 0)
        r = fence_wait(&s->filled, t->device, writer, t->timeout_s, site);
    for (uint32_t i = 0; r == SIDE_OK && i < s->reader_count; i++)
        r = fence_wait(&s->readers[i].drained, t->device, writer, t->timeout_s, site);
    if (r != SIDE_OK)
        return r;
    s->reader_count = 0;
    if (t->validate && t->where == SIDE_MEMORY_DEVICE && writer != NULL)
        r = t->device->ops->set(writer->handle, s->data, 0xDB, t->slot_bytes);
    else if (t->validate && t->where != SIDE_MEMORY_DEVICE && writer == NULL)
        memset(s->data, 0xDB, t->slot_bytes);
    return r;
}

static void hand_out(const side_slots *t, uint32_t i, uint32_t hold, side_slot *out)
{
    const struct slot *s = &t->slots[i];
    out->data = s->data;
    out->bytes = t->slot_bytes;
    out->key = s->key;
    out->generation = s->generation;
    out->index = i;
    out->hold = hold;
}

static side_status acquire(side_slots *t, uint64_t key, side_stream *writer, uint64_t until_ns, side_slot *out,
                           const char *where)
{
    side_status r = slots_begin(t, writer, where);
    uint32_t i = NO_SLOT;

    if (r != SIDE_OK)
        return r;
    if (out == NULL)
        r = error_set(SIDE_INVALID, where, "slot is NULL");
    while (r == SIDE_OK) {
        if (t->policy == SIDE_TABLE && table_find(t, key) != NO_SLOT)
            r = error_set(SIDE_INVALID, where, "key %llu is in the table already", (unsigned long long)key);
        else if ((i = candidate(t)) != NO_SLOT)
            break;
        else if (until_ns == SLOTS_NO_WAIT)
            r = SIDE_AGAIN;
        else if (acquire_waits_for_itself(t))
            r = deadlock(t, where, t->policy == SIDE_RING ? t->next_write : key);
        else
            r = slots_wait_changed(t, until_ns, where);
    }
    if (r == SIDE_OK && until_ns == SLOTS_NO_WAIT && writer == NULL)
        r = drained_query(&t->slots[i], t->device);
    if (r == SIDE_OK)
        claim(t, i, key);
    pthread_mutex_unlock(&t->mutex);
    if (r != SIDE_OK)
        return r;
    r = wait_drained(t, &t->slots[i], writer);
    if (r != SIDE_OK)
        return poison_with(t, r);
    hand_out(t, i, 0, out);
    return SIDE_OK;
}

side_status side_slots_acquire(side_slots *slots, uint64_t key, side_stream *writer, side_slot *slot)
{
    return acquire(slots, key, writer, SLOTS_FOR_EVER, slot, "side_slots_acquire");
}

side_status side_slots_try_acquire(side_slots *slots, uint64_t key, side_stream *writer, side_slot *slot)
{
    return acquire(slots, key, writer, SLOTS_NO_WAIT, slot, "side_slots_try_acquire");
}

side_status side_slots_acquire_for(side_slots *slots, uint64_t key, side_stream *writer, double wait_s, side_slot *slot)
{
    uint64_t until_ns = SLOTS_NO_WAIT;
    side_status r = os_deadline(wait_s, "side_slots_acquire_for", &until_ns);

    return r == SIDE_OK ? acquire(slots, key, writer, until_ns, slot, "side_slots_acquire_for") : r;
}

/* No fence covers what is queued on `stream`: nobody goes on, and it is over before the caller hears of it. */
static side_status end_failed(side_slots *t, side_status why, side_stream *stream)
{
    side_error cause;

    error_copy(&cause);
    poison_with(t, why);
    if (stream != NULL && t->drains_own && !device_stream_drain(stream, t->timeout_s)) {
        pthread_mutex_lock(&t->mutex);
        t->uncovered = true;
        pthread_mutex_unlock(&t->mutex);
    }
    error_restore(&cause);
    return why;
}

/* slots_begin for the end of an access, of which something may be queued. */
static side_status end_begin(side_slots *t, side_stream *stream, const char *where)
{
    side_status r = slots_begin(t, stream, where);
    bool ours = t != NULL && stream != NULL && stream->device == t->device;

    return r == SIDE_OK || r == SIDE_FORKED || !ours ? r : end_failed(t, r, stream);
}

/* Locks, unless it fails. The fence is the caller's, but side_slots_drain may look at it any time: it changes under the lock. */
static side_status end_record(side_slots *t, struct fence *fence, side_stream *stream)
{
    struct fence f = *fence;
    side_status r = fence_record(&f, t->device, stream);

    pthread_mutex_lock(&t->mutex);
    *fence = f;
    if (r == SIDE_OK)
        return r;
    pthread_mutex_unlock(&t->mutex);
    return end_failed(t, r, stream);
}

/* The caller's slot, if it is in `state` and of the generation that was handed out; else NULL with the detail. Locked. */
static struct slot *held(side_slots *t, const side_slot *slot, enum slot_state state, const char *where, side_status *r)
{
    if (slot == NULL || slot->index >= t->count) {
        *r = error_set(SIDE_INVALID, where, slot == NULL ? "slot is NULL" : "no such slot");
        return NULL;
    }
    struct slot *s = &t->slots[slot->index];
    if (s->generation != slot->generation) {
        *r = error_set(SIDE_STALE, where, "slot %u was rewritten since it was handed out", slot->index);
        return NULL;
    }
    if (s->state != state) {
        *r = error_set(SIDE_STATE, where, "slot %u is not %s", slot->index,
                       state == SLOT_WRITING ? "being written" : "filled");
        return NULL;
    }
    return s;
}

/* Ends writing: as an item, or as none. */
static side_status finish_write(side_slots *t, const side_slot *slot, side_stream *writer, bool abandon,
                                side_ticket *ticket, const char *where)
{
    side_status r = end_begin(t, writer, where);
    struct slot *s;

    if (r != SIDE_OK)
        return r;
    s = held(t, slot, SLOT_WRITING, where, &r);
    pthread_mutex_unlock(&t->mutex);
    if (s == NULL)
        return r;
    r = end_record(t, &s->filled, writer); /* the writer's until the state changes */
    if (r != SIDE_OK)
        return r;
    s->state = SLOT_FILLED;
    if (abandon && t->policy == SIDE_RING) {
        s->abandoned = true;
        s->released = t->expected;
    } else if (abandon) {
        s->state = SLOT_FREE;
        if (t->policy == SIDE_TABLE)
            table_erase(t, s->key);
        chain_append(t, &t->free, slot->index);
    } else if (t->policy == SIDE_TABLE) {
        chain_append(t, &t->recent, slot->index);
    }
    pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->mutex);
    if (ticket != NULL)
        *ticket = (side_ticket){t, slot->generation, slot->index};
    return SIDE_OK;
}

side_status side_slots_publish(side_slots *slots, const side_slot *slot, side_stream *writer, side_ticket *ticket)
{
    return finish_write(slots, slot, writer, false, ticket, "side_slots_publish");
}

side_status side_slots_abandon(side_slots *slots, const side_slot *slot, side_stream *writer)
{
    return finish_write(slots, slot, writer, true, NULL, "side_slots_abandon");
}

/* ---------------------------------------------------------------- take and release */

/* SIDE_OK with the slot of a filled `key`; SIDE_AGAIN: not yet; else why never. */
static side_status find_filled(side_slots *t, uint64_t key, const char *where, uint32_t *index)
{
    uint32_t i = t->policy == SIDE_RING    ? (uint32_t)(key % t->count)
                 : t->policy == SIDE_TABLE ? table_find(t, key)
                                           : (uint32_t)key;

    if (i == NO_SLOT || (t->policy == SIDE_LIST && key >= t->count) ||
        (t->policy != SIDE_RING && t->slots[i].state == SLOT_FREE))
        return error_set(SIDE_NOT_FOUND, where, "no slot holds %llu", (unsigned long long)key);
    struct slot *s = &t->slots[i];
    *index = i;
    if (t->policy == SIDE_RING && (s->generation == 0 || s->key != key || s->state == SLOT_FREE)) {
        if (key < t->next_write)
            return error_set(SIDE_STALE, where, "item %llu was overwritten; %u slots", (unsigned long long)key,
                             t->count);
        return key >= t->end ? SIDE_END : SIDE_AGAIN;
    }
    if (s->state == SLOT_WRITING)
        return pthread_equal(s->owner, pthread_self()) ? deadlock(t, where, key) : SIDE_AGAIN;
    if (s->abandoned)
        return error_set(SIDE_CANCELLED, where, "item %llu was given up by its writer", (unsigned long long)key);
    if (t->policy == SIDE_RING && s->open + s->released >= t->expected)
        return error_set(SIDE_STATE, where, "item %llu was taken %u times already, which is all its readers",
                         (unsigned long long)key, t->expected);
    return SIDE_OK;
}

/* A reader entry for `reader`: its own of before (one record covers both), a free one, or one that has drained. */
static struct reader *reader_entry(side_slots *t, struct slot *s, side_stream *reader)
{
    uint32_t number = reader != NULL ? reader->number : 0;

    for (uint32_t i = 0; i < s->reader_count; i++)
        if (!s->readers[i].open && s->readers[i].drained.stream == number)
            return &s->readers[i];
    if (s->reader_count < SIDE_MAX_READERS)
        return &s->readers[s->reader_count++];
    for (uint32_t i = 0; i < s->reader_count; i++)
        if (!s->readers[i].open && fence_query(&s->readers[i].drained, t->device) == SIDE_OK)
            return &s->readers[i];
    return NULL;
}

static side_status take(side_slots *t, uint64_t key, side_stream *reader, uint64_t until_ns, side_slot *out,
                        const char *where)
{
    side_status r = slots_begin(t, reader, where);
    struct reader *entry = NULL;
    struct slot *s = NULL;
    uint32_t i = 0;

    if (r != SIDE_OK)
        return r;
    if (out == NULL)
        r = error_set(SIDE_INVALID, where, "slot is NULL");
    while (r == SIDE_OK) {
        r = find_filled(t, key, where, &i);
        if (r != SIDE_AGAIN || until_ns == SLOTS_NO_WAIT)
            break;
        r = slots_wait_changed(t, until_ns, where);
    }
    if (r == SIDE_OK)
        s = &t->slots[i];
    if (r == SIDE_OK && until_ns == SLOTS_NO_WAIT && reader == NULL)
        r = fence_query(&s->filled, t->device);
    if (r == SIDE_OK) { /* last: an entry says that somebody waited for `filled`, so that the next writer need not */
        entry = reader_entry(t, s, reader);
        if (entry == NULL)
            r = error_set(SIDE_TOO_LARGE, where, "%d streams read this slot already", SIDE_MAX_READERS);
    }
    if (r == SIDE_OK) {
        entry->open = true;
        entry->owner = pthread_self();
        s->open++;
        if (t->policy == SIDE_TABLE) {
            chain_remove(t, &t->recent, i);
            chain_append(t, &t->recent, i);
        }
    }
    pthread_mutex_unlock(&t->mutex);
    if (r != SIDE_OK)
        return r;
    /* Open: nobody rewrites the slot, so its filled fence stays as it is. */
    r = fence_wait(&s->filled, t->device, reader, t->timeout_s, t->site == SITE_NONE ? SITE_NONE : t->site + 1);
    if (r != SIDE_OK)
        return poison_with(t, r);
    hand_out(t, i, (uint32_t)(entry - s->readers), out);
    return SIDE_OK;
}

side_status side_slots_take(side_slots *slots, uint64_t key, side_stream *reader, side_slot *slot)
{
    return take(slots, key, reader, SLOTS_FOR_EVER, slot, "side_slots_take");
}

side_status side_slots_try_take(side_slots *slots, uint64_t key, side_stream *reader, side_slot *slot)
{
    return take(slots, key, reader, SLOTS_NO_WAIT, slot, "side_slots_try_take");
}

side_status side_slots_take_for(side_slots *slots, uint64_t key, side_stream *reader, double wait_s, side_slot *slot)
{
    uint64_t until_ns = SLOTS_NO_WAIT;
    side_status r = os_deadline(wait_s, "side_slots_take_for", &until_ns);

    return r == SIDE_OK ? take(slots, key, reader, until_ns, slot, "side_slots_take_for") : r;
}

side_status side_slots_release(side_slots *slots, const side_slot *slot, side_stream *reader)
{
    const char *where = "side_slots_release";
    side_slots *t = slots;
    side_status r = end_begin(t, reader, where);
    struct slot *s;

    if (r != SIDE_OK)
        return r;
    s = held(t, slot, SLOT_FILLED, where, &r);
    if (s != NULL && (slot->hold >= s->reader_count || !s->readers[slot->hold].open))
        r = error_set(SIDE_STATE, where, "slot %u is not taken", slot->index);
    pthread_mutex_unlock(&t->mutex);
    if (r != SIDE_OK)
        return r;
    r = end_record(t, &s->readers[slot->hold].drained, reader); /* the reader's while open */
    if (r != SIDE_OK)
        return r;
    s->readers[slot->hold].open = false;
    s->open--;
    s->released++;
    pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->mutex);
    return SIDE_OK;
}

side_status side_slots_give_back(side_slots *slots, const side_slot *slot)
{
    const char *where = "side_slots_give_back";
    side_status r = slots_begin(slots, NULL, where);
    struct slot *s;

    if (r != SIDE_OK)
        return r;
    s = held(slots, slot, SLOT_FILLED, where, &r);
    if (s != NULL && slots->policy == SIDE_RING)
        r = error_set(SIDE_STATE, where, "a ring frees its slots itself");
    else if (s != NULL && s->open > 0)
        r = error_set(SIDE_STATE, where, "slot %u is being read", slot->index);
    else if (s != NULL) {
        if (slots->policy == SIDE_TABLE) {
            table_erase(slots, s->key);
            chain_remove(slots, &slots->recent, slot->index);
        }
        s->state = SLOT_FREE;
        chain_append(slots, &slots->free, slot->index);
        pthread_cond_broadcast(&slots->changed);
    }
    pthread_mutex_unlock(&slots->mutex);
    return r;
}

/* ---------------------------------------------------------------- ends */

void side_slots_poison(side_slots *slots, side_status why)
{
    if (slots != NULL && os_fork_generation() == slots->fork_generation)
        poison_with(slots, why < 0 ? why : SIDE_CANCELLED);
}

void slots_wake(side_slots *slots)
{
    pthread_mutex_lock(&slots->mutex);
    pthread_cond_broadcast(&slots->changed);
    pthread_mutex_unlock(&slots->mutex);
}

bool slots_is_past(side_slots *slots, uint64_t number)
{
    bool past;

    pthread_mutex_lock(&slots->mutex);
    past = number >= slots->end;
    pthread_mutex_unlock(&slots->mutex);
    return past;
}

void slots_close(side_slots *slots)
{
    pthread_mutex_lock(&slots->mutex);
    slots->end = slots->next_write;
    pthread_cond_broadcast(&slots->changed);
    pthread_mutex_unlock(&slots->mutex);
}

side_status slots_restart(side_slots *slots)
{
    side_status r = slots_begin(slots, NULL, "slots_restart");

    if (r != SIDE_OK)
        return r;
    for (uint32_t i = 0; i < slots->count; i++)
        if (!ring_is_reusable(slots, &slots->slots[i]))
            r = error_set(SIDE_STATE, "slots_restart", "slot %u is still in use", i);
    for (uint32_t i = 0; r == SIDE_OK && i < slots->count; i++)
        slots->slots[i].state = SLOT_FREE;
    if (r == SIDE_OK) {
        slots->next_write = 0;
        slots->end = UINT64_MAX;
    }
    pthread_mutex_unlock(&slots->mutex);
    return r;
}
