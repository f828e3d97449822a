/* SPDX-License-Identifier: MIT
 *
 * Readiness of parts. What a part waits for is the copy that was queued last of its units': done, or a slot's that is COPYING. The host half (R7): until that
 * copy is queued, its event says nothing. */
#include "load_private.h"

#include "error.h"
#include "os.h"

static side_status part_check(const side_load *l, size_t part, const char *where)
{
    side_status r = load_enter(l, where);

    if (r == SIDE_OK && part >= l->plan.part_count)
        return error_set(SIDE_INVALID, where, "part %zu; there are %u", part, l->plan.part_count);
    return r;
}

size_t side_load_count(const side_load *load)
{
    return load != NULL ? load->plan.part_count : 0;
}

side_status side_load_get_place(side_load *load, size_t part, side_load_place *place)
{
    side_status r = part_check(load, part, "side_load_get_place");

    if (r == SIDE_OK && place == NULL)
        return error_set(SIDE_INVALID, "side_load_get_place", "place is NULL");
    if (r != SIDE_OK)
        return r;
    const struct load_part *p = &load->plan.parts[part];
    pthread_mutex_lock(&load->mutex);
    *place = (side_load_place){
        .data = load_part_data(&load->plan, p),
        .bytes = p->bytes,
        .arena = p->arena == LOAD_NONE ? SIZE_MAX : p->arena,
        .offset = p->offset,
        .moved = p->moved,
    };
    pthread_mutex_unlock(&load->mutex);
    return SIDE_OK;
}

/* The first arena that keeps the part from coming; LOAD_NONE: none. Locked, as the next ones. */
static uint32_t arena_missing(const side_load *l, size_t part)
{
    if (part != SIDE_LOAD_ALL)
        return l->plan.parts[part].arena != LOAD_NONE && load_part_data(&l->plan, &l->plan.parts[part]) == NULL
                   ? l->plan.parts[part].arena
                   : LOAD_NONE;
    for (uint32_t i = 0; i < l->plan.arena_count; i++)
        if (l->plan.arenas[i].data == NULL)
            return i;
    return LOAD_NONE;
}

static side_status wait_queued(side_load *l, size_t part, bool patient)
{
    side_status r;

    while ((r = load_failure(l)) == SIDE_OK &&
           (part == SIDE_LOAD_ALL ? l->ready < l->plan.part_count : l->plan.parts[part].left > 0)) {
        const uint32_t missing = patient || (l->options.flags & SIDE_LOAD_GIVEN) == 0 ? LOAD_NONE
                                                                                      : arena_missing(l, part);
        if (missing != LOAD_NONE)
            return error_set(SIDE_STATE, "side_load_wait", "arena %u has no memory: side_load_give_arena", missing);
        pthread_cond_wait(&l->changed, &l->mutex);
    }
    return r;
}

static side_status wait_done(side_load *l, uint64_t sequence)
{
    side_status r;

    while ((r = load_failure(l)) == SIDE_OK && sequence > l->done) /* the driver looks */
        pthread_cond_wait(&l->changed, &l->mutex);
    if (l->simulated)
        l->device->ops->clock_join(l->device->context, l->done_clock_ns);
    return r;
}

/* A stream that waits for a copy waits for those that were queued before it. */
static side_status wait_on_stream(side_load *l, uint64_t sequence, side_stream *stream)
{
    side_status r = SIDE_OK;

    if (stream->number == l->waited_stream && sequence <= l->waited)
        return SIDE_OK;
    r = fence_wait(&l->copying[sequence % l->slot_most]->cover->copied, l->device, stream, 0, SITE_LOAD_READY);
    if (r == SIDE_OK) {
        l->waited_stream = stream->number;
        l->waited = sequence;
    }
    return r;
}

side_status load_wait_part(side_load *l, size_t part, side_stream *stream, bool patient)
{
    side_status r;

    pthread_mutex_lock(&l->mutex);
    r = wait_queued(l, part, patient);
    const uint64_t sequence = part == SIDE_LOAD_ALL ? l->queued : l->plan.parts[part].sequence;
    if (r == SIDE_OK && (stream == NULL || sequence <= l->done))
        r = wait_done(l, sequence);
    else if (r == SIDE_OK)
        r = wait_on_stream(l, sequence, stream);
    pthread_mutex_unlock(&l->mutex);
    return r;
}

side_status side_load_wait(side_load *load, size_t part, side_stream *stream)
{
    side_status r = part == SIDE_LOAD_ALL ? load_enter(load, "side_load_wait")
                                          : part_check(load, part, "side_load_wait");
    bool capturing = false;

    if (r == SIDE_OK && stream != NULL && stream->device != load->device)
        return error_set(SIDE_INVALID, "side_load_wait", "the stream is of another device");
    if (r == SIDE_OK && stream != NULL)
        r = side_stream_is_capturing(stream, &capturing);
    if (r == SIDE_OK && capturing)
        return error_set(SIDE_STATE, "side_load_wait",
                         "the stream is being captured: wait before the capture, or on another stream");
    return r == SIDE_OK ? load_wait_part(load, part, stream, false) : r;
}

side_status side_load_query(side_load *load, size_t part)
{
    side_status r = part_check(load, part, "side_load_query");

    if (r != SIDE_OK)
        return r;
    const struct load_part *p = &load->plan.parts[part];
    pthread_mutex_lock(&load->mutex);
    r = load_failure(load);
    if (r == SIDE_OK && p->left > 0)
        r = SIDE_AGAIN;
    else if (r == SIDE_OK && p->sequence > load->done)
        r = fence_query(&load->copying[p->sequence % load->slot_most]->cover->copied, load->device);
    pthread_mutex_unlock(&load->mutex);
    return r;
}

side_status side_load_wait_count(side_load *load, size_t parts, double wait_s)
{
    side_load *l = load;
    side_status r = load_enter(l, "side_load_wait_count");
    uint64_t deadline;

    if (r == SIDE_OK)
        r = os_deadline(wait_s, "side_load_wait_count", &deadline);
    if (r == SIDE_OK && parts > l->plan.part_count)
        return error_set(SIDE_INVALID, "side_load_wait_count", "parts is %zu; there are %u", parts, l->plan.part_count);
    if (r != SIDE_OK)
        return r;
    pthread_mutex_lock(&l->mutex);
    while ((r = load_failure(l)) == SIDE_OK && l->ready < parts) {
        if (os_now_ns() >= deadline) {
            r = SIDE_AGAIN;
            break;
        }
        os_cond_wait_until(&l->changed, &l->mutex, deadline);
    }
    pthread_mutex_unlock(&l->mutex);
    return r;
}
