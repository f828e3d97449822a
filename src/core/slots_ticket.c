/* SPDX-License-Identifier: MIT
 *
 * Tickets: others wait for a generation of a slot. And what holds of slots at any time. */
#include "slots_private.h"

#include "error.h"

/* ---------------------------------------------------------------- tickets */

/* Locks and pins the generation once it is published. SIDE_OK without *s: it was overwritten, so it was filled. */
static side_status ticket_pin(const side_ticket *ticket, const side_stream *stream, bool block, const char *where,
                              struct slot **s)
{
    side_status r = ticket != NULL ? slots_begin(ticket->slots, stream, where)
                                   : error_set(SIDE_INVALID, where, "ticket is NULL");
    side_slots *t = ticket != NULL ? ticket->slots : NULL;

    if (r != SIDE_OK)
        return r;
    if (ticket->index >= t->count || ticket->generation == 0 || ticket->generation > t->slots[ticket->index].generation)
        r = error_set(SIDE_INVALID, where, "the ticket is of other slots");
    struct slot *q = r == SIDE_OK ? &t->slots[ticket->index] : NULL;
    while (r == SIDE_OK && q->generation == ticket->generation && q->state == SLOT_WRITING)
        r = block ? slots_wait_changed(t, SLOTS_FOR_EVER, where) : SIDE_AGAIN;
    *s = NULL;
    if (r == SIDE_OK && q->generation == ticket->generation) {
        q->pins++;
        *s = q;
    }
    pthread_mutex_unlock(&t->mutex);
    return r;
}

static void ticket_unpin(side_slots *t, struct slot *s)
{
    pthread_mutex_lock(&t->mutex);
    s->pins--;
    pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->mutex);
}

side_status side_ticket_stream_wait(const side_ticket *ticket, side_stream *stream)
{
    struct slot *s;
    side_status r = stream != NULL ? ticket_pin(ticket, stream, true, "side_ticket_stream_wait", &s)
                                   : error_set(SIDE_INVALID, "side_ticket_stream_wait", "stream is NULL");
    if (r != SIDE_OK || s == NULL)
        return r;
    r = fence_wait(&s->filled, ticket->slots->device, stream, 0, SITE_NONE);
    ticket_unpin(ticket->slots, s);
    return r;
}

side_status side_ticket_query(const side_ticket *ticket)
{
    struct slot *s;
    side_status r = ticket_pin(ticket, NULL, false, "side_ticket_query", &s);

    if (r != SIDE_OK || s == NULL)
        return r;
    r = fence_query(&s->filled, ticket->slots->device);
    ticket_unpin(ticket->slots, s);
    return r;
}

side_status side_ticket_wait(const side_ticket *ticket, double timeout_s)
{
    struct slot *s;
    side_status r = ticket_pin(ticket, NULL, true, "side_ticket_wait", &s);

    if (r != SIDE_OK || s == NULL)
        return r;
    r = fence_wait(&s->filled, ticket->slots->device, NULL, timeout_s, SITE_NONE);
    ticket_unpin(ticket->slots, s);
    return r;
}

/* ---------------------------------------------------------------- invariants */

static bool slot_is_valid(const side_slots *t, const struct slot *s)
{
    uint32_t open = 0;

    for (uint32_t i = 0; i < s->reader_count; i++)
        open += s->readers[i].open;
    if (open != s->open && s->state != SLOT_WRITING)
        return false;
    if (s->state == SLOT_WRITING && s->open != 0)
        return false;
    if (t->policy == SIDE_RING && s->open + s->released > t->expected)
        return false;
    return t->policy != SIDE_TABLE || s->state == SLOT_FREE || table_find(t, s->key) == (uint32_t)(s - t->slots);
}

/* All counts agree with the states, every slot stands in the list that its state says. For tests and asserts. */
bool slots_is_valid(side_slots *slots)
{
    uint32_t listed = 0, due = 0;
    bool ok = true;

    pthread_mutex_lock(&slots->mutex);
    for (uint32_t i = 0; ok && i < slots->count; i++) {
        const struct slot *s = &slots->slots[i];
        ok = slot_is_valid(slots, s);
        due += slots->policy != SIDE_RING &&
               (s->state == SLOT_FREE || (slots->policy == SIDE_TABLE && s->state == SLOT_FILLED));
    }
    for (uint32_t i = slots->free.head; ok && i != NO_SLOT; i = slots->slots[i].next, listed++)
        ok = slots->slots[i].state == SLOT_FREE && listed < slots->count;
    for (uint32_t i = slots->recent.head; ok && i != NO_SLOT; i = slots->slots[i].next, listed++)
        ok = slots->slots[i].state == SLOT_FILLED && listed < slots->count;
    ok = ok && listed == due;
    pthread_mutex_unlock(&slots->mutex);
    return ok;
}
