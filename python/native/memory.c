/* SPDX-License-Identifier: MIT
 *
 * The counted handle behind buffers: who uses the memory, what wrote it last, and how it goes. */
#include "native.h"

enum { MOST_USERS = 32 };

/* Longest wait for work on memory that nobody refers to any more. */
static const double FREE_WAIT_S = 30;

struct memory *memory_hold(struct memory *memory)
{
    atomic_fetch_add_explicit(&memory->refs, 1, memory_order_relaxed);
    return memory;
}

/* The last steps, which need no GIL and do not block. */
static void memory_end(struct memory *memory)
{
    side_event_destroy(memory->written);
    for (size_t i = 0; i < memory->user_count; i++)
        stream_drop(memory->users[i]);
    free(memory->users);
    if (memory->parent != NULL)
        memory->parent_drop(memory->parent);
    device_drop(memory->device);
    free(memory);
}

/* Freeing device memory may block, and nothing in flight may use it. */
static void memory_bury(struct grave *grave)
{
    struct memory *memory = (struct memory *)(void *)((char *)grave - offsetof(struct memory, grave));
    bool idle = true;

    Py_BEGIN_ALLOW_THREADS
    for (size_t i = 0; i < memory->user_count; i++) {
        side_status s = side_stream_sync(memory->users[i]->stream, FREE_WAIT_S);
        idle = idle && (s == SIDE_OK || s == SIDE_DEVICE_LOST);
    }
    if (idle) /* else it is leaked rather than freed under work in flight */
        side_device_free(memory->device->device, memory->data);
    Py_END_ALLOW_THREADS
    memory_end(memory);
}

static void free_pinned(struct memory *memory)
{
    side_stream *streams[MOST_USERS];

    for (size_t i = 0; i < memory->user_count; i++)
        streams[i] = memory->users[i]->stream;
    side_pool_free(memory->pool, memory->data, streams, memory->user_count);
}

void memory_drop(struct memory *memory)
{
    if (memory == NULL || !life_goes_on(memory->forks))
        return;
    if (atomic_fetch_sub_explicit(&memory->refs, 1, memory_order_acq_rel) != 1)
        return;
    if (memory->kind == SIDE_MEMORY_DEVICE && !memory->lent) {
        life_bury(&memory->grave);
        return;
    }
    if (!memory->lent)
        free_pinned(memory);
    memory_end(memory);
}

struct memory *memory_make(struct device_ref *device, side_memory_kind kind, void *data, size_t bytes)
{
    struct memory *memory = calloc(1, sizeof(*memory));

    if (memory == NULL)
        return (struct memory *)(void *)PyErr_NoMemory();
    memory->refs = 1;
    memory->device = device_hold(device);
    memory->kind = kind;
    memory->forks = life_forks();
    memory->data = data;
    memory->bytes = bytes;
    memory->grave.bury = memory_bury;
    return memory;
}

/* ---------------------------------------------------------------- use */

static bool add_user(struct memory *memory, struct stream_ref *stream)
{
    struct stream_ref **users;

    for (size_t i = 0; i < memory->user_count; i++) {
        if (memory->users[i] == stream)
            return true;
    }
    if (memory->user_count == MOST_USERS)
        return false;
    users = realloc(memory->users, (memory->user_count + 1) * sizeof(struct stream_ref *));
    if (users == NULL)
        return false;
    memory->users = users;
    users[memory->user_count++] = stream_hold(stream);
    return true;
}

static side_status record_written(struct memory *memory, struct stream_ref *stream)
{
    side_status s = SIDE_OK;

    if (memory->written == NULL)
        s = side_event_create(memory->device->device, false, &memory->written);
    return s == SIDE_OK ? side_event_record(memory->written, stream->stream) : s;
}

void memory_use(struct memory *memory, struct stream_ref *stream, bool writes)
{
    bool known = memory->lent || add_user(memory, stream); /* lent memory is fenced by who lends it */

    /* What cannot be noted is waited for: it was queued already. */
    if (known && (!writes || record_written(memory, stream) == SIDE_OK))
        return;
    Py_BEGIN_ALLOW_THREADS
    if (side_stream_sync(stream->stream, FREE_WAIT_S) == SIDE_STUCK)
        memory_hold(memory); /* for ever */
    Py_END_ALLOW_THREADS
}

int memory_check(const struct memory *memory)
{
    if (memory->forks != life_forks())
        native_raise_text(SIDE_FORKED, "Buffer", "the buffer is from before a fork");
    else if (memory->ended)
        native_raise_text(SIDE_STATE, "Buffer", "the item or slot that this memory belongs to went back; use it before");
    else
        return 0;
    return -1;
}

int memory_wait_written(struct memory *memory)
{
    int r;

    if (memory->written == NULL)
        return 0;
    memory_hold(memory); /* the GIL is released meanwhile */
    r = native_wait_event(memory->written, 0);
    memory_drop(memory);
    return r;
}

bool memory_on_host(const struct memory *memory)
{
    return memory->kind != SIDE_MEMORY_DEVICE || memory->device->props.simulated;
}
