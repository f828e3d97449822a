/* SPDX-License-Identifier: MIT
 *
 * Pinning the caller's memory where it is.
 *
 *     pins       [------ a ------)            [- c -)
 *                          [------ b ------)
 *     segments   [------ 1 ------)[-- 2 ---)  [- 3 -)       1 has two references, 2 and 3 one
 *
 * A segment is one registration with the device, which can only be undone as a whole; a pin registers the gaps that earlier pins left and refers to
 * every segment that it touches. Where the device takes it, ranges are exact to the byte: the driver counts shared pages itself, and a segment
 * that reached into the caller's next array would break that one's copies, because drivers refuse a copy that crosses the edge of a registration.
 * A device that wants whole pages gets them, and pages are shared through the references.
 *
 * Unlike the pool's, these pages are inherited by forked children: a fork while they are pinned lets copy-on-write part them from the device's
 * mapping, in parent or child. Hence the rule: fork first. */
#include "pool_private.h"

#include "alloc.h"
#include "error.h"
#include "os.h"

#include <string.h>

struct pin_range {
    uintptr_t begin, end; /* pins: begin is what the caller named, [from, end) what is pinned for it */
    uintptr_t from;       /* pins */
    size_t refs;          /* segments */
    size_t budget; /* segments: what they count in the pool; 0 where somebody else pinned them, who also unpins them */
};

struct pin_list { /* in order of begin */
    struct pin_range *at;
    size_t count, room;
};

struct pin_table {
    pthread_mutex_t mutex; /* guards both lists; held while memory is pinned: pins wait for each other, not for allocations */
    struct pin_list pins, segments; /* segments do not overlap */
    bool whole_pages;               /* the device refused less */
};

static bool list_reserve(struct pin_list *list, size_t more)
{
    size_t room = list->room;
    struct pin_range *grown;

    while (room < list->count + more)
        room = room != 0 ? room * 2 : 16;
    if (room == list->room)
        return true;
    grown = mem_zalloc(room, sizeof(*grown));
    if (grown == NULL)
        return false;
    if (list->count > 0)
        memcpy(grown, list->at, list->count * sizeof(*grown));
    mem_free(list->at);
    list->at = grown;
    list->room = room;
    return true;
}

/* The first range that begins after `address`. */
static size_t list_after(const struct pin_list *list, uintptr_t address)
{
    size_t low = 0, high = list->count;

    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (list->at[middle].begin > address)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* The first segment that ends after `address`. */
static size_t segment_from(const struct pin_list *segments, uintptr_t address)
{
    size_t i = list_after(segments, address);
    return i > 0 && segments->at[i - 1].end > address ? i - 1 : i;
}

static void list_insert(struct pin_list *list, size_t i, struct pin_range range)
{
    memmove(&list->at[i + 1], &list->at[i], (list->count - i) * sizeof(range));
    list->at[i] = range;
    list->count++;
}

static void list_remove(struct pin_list *list, size_t i)
{
    list->count--;
    memmove(&list->at[i], &list->at[i + 1], (list->count - i) * sizeof(list->at[0]));
}

static void *address_data(uintptr_t address)
{
    return (void *)address; /* NOLINT: it came from a pointer */
}

/* ---------------------------------------------------------------- segments */

/* Whether all of the range is pinned already, by none of our segments; looks at each page. */
static bool is_foreign(side_device *device, uintptr_t begin, uintptr_t end)
{
    side_memory_kind kind;

    for (uintptr_t at = begin; at < end; at = (at / PAGES_BYTES + 1) * PAGES_BYTES)
        if (device->ops->memory_kind(device->context, address_data(at), &kind) != SIDE_OK || kind != SIDE_MEMORY_PINNED)
            return false;
    return device->ops->memory_kind(device->context, address_data(end - 1), &kind) == SIDE_OK &&
           kind == SIDE_MEMORY_PINNED;
}

static size_t budget_of(uintptr_t begin, uintptr_t end)
{
    return pool_round(end, PAGES_BYTES) - begin / PAGES_BYTES * PAGES_BYTES;
}

static void budget_return(side_pool *pool, size_t bytes)
{
    pthread_mutex_lock(&pool->mutex);
    region_unreserve(pool, bytes);
    pthread_mutex_unlock(&pool->mutex);
}

/* Pins a range that no segment touches; *budget as in pin_range. */
static side_status segment_pin(side_device *device, uintptr_t begin, uintptr_t end, size_t *budget)
{
    side_pool *pool = device->pool;
    size_t bytes = budget_of(begin, end);
    side_status s, again;
    side_error why;

    pthread_mutex_lock(&pool->mutex);
    s = region_reserve(pool, bytes);
    pthread_mutex_unlock(&pool->mutex);
    if (s != SIDE_OK)
        return s;
    *budget = bytes;
    s = device->ops->host_register(device->context, address_data(begin), end - begin, false);
    if (s == SIDE_OK)
        return SIDE_OK;
    error_copy(&why);
    if (is_foreign(device, begin, end)) {
        *budget = 0;
        s = SIDE_OK;
    } else if (s == SIDE_UNSUPPORTED || s == SIDE_DEVICE_ERROR || s == SIDE_INVALID) {
        /* Perhaps the memory is mapped read-only. */
        again = device->ops->host_register(device->context, address_data(begin), end - begin, true);
        s = again == SIDE_OK ? SIDE_OK : s;
    }
    if (s != SIDE_OK)
        *budget = 0;
    if (*budget == 0)
        budget_return(pool, bytes);
    return s == SIDE_OK ? SIDE_OK : error_restore(&why);
}

/* Drops segments in [begin, end) that nothing refers to. SIDE_OK, or the first failure; a segment that cannot be unpinned stays in the list, so that
 * its budget stays taken. */
static side_status segments_sweep(side_device *device, struct pin_list *segments, uintptr_t begin, uintptr_t end)
{
    side_status first = SIDE_OK, s;

    for (size_t i = segment_from(segments, begin); i < segments->count && segments->at[i].begin < end;) {
        struct pin_range *r = &segments->at[i];
        s = r->refs > 0 || r->budget == 0 ? SIDE_OK
                                          : device->ops->host_unregister(device->context, address_data(r->begin));
        if (r->refs > 0 || s != SIDE_OK) {
            first = first == SIDE_OK ? s : first;
            i++;
            continue;
        }
        if (r->budget > 0)
            budget_return(device->pool, r->budget);
        list_remove(segments, i);
    }
    return first;
}

/* Registers what of the range is in no segment yet; the new segments have no references. */
static side_status segments_fill(side_device *device, struct pin_list *segments, uintptr_t begin, uintptr_t end)
{
    uintptr_t at = begin;
    side_status s;

    for (size_t i = segment_from(segments, begin); at < end; i++) {
        uintptr_t gap_end = i < segments->count && segments->at[i].begin < end ? segments->at[i].begin : end;
        if (at < gap_end) {
            struct pin_range gap = {.begin = at, .end = gap_end};
            if (!list_reserve(segments, 1))
                return SIDE_NO_MEMORY;
            s = segment_pin(device, at, gap_end, &gap.budget);
            if (s != SIDE_OK)
                return s;
            list_insert(segments, i, gap);
        }
        at = segments->at[i].end;
    }
    return SIDE_OK;
}

/* ---------------------------------------------------------------- pins */

static void segments_refer(struct pin_list *segments, uintptr_t begin, uintptr_t end, int by)
{
    for (size_t i = segment_from(segments, begin); i < segments->count && segments->at[i].begin < end; i++)
        segments->at[i].refs += (size_t)by;
}

/* With the table's mutex held. On failure nothing is left behind. */
static side_status pin_range_add(side_device *device, struct pin_table *table, struct pin_range pin)
{
    side_error why;
    side_status s = list_reserve(&table->pins, 1) ? SIDE_OK : SIDE_NO_MEMORY;

    if (s == SIDE_OK)
        s = segments_fill(device, &table->segments, pin.from, pin.end);
    if (s == SIDE_OK) {
        segments_refer(&table->segments, pin.from, pin.end, 1);
        list_insert(&table->pins, list_after(&table->pins, pin.begin), pin);
        return SIDE_OK;
    }
    error_copy(&why);
    segments_sweep(device, &table->segments, pin.from, pin.end);
    return error_restore(&why);
}

static side_status pin_add(side_device *device, struct pin_table *table, uintptr_t begin, uintptr_t end)
{
    struct pin_range exact = {.begin = begin, .end = end, .from = begin}, whole = exact;
    side_status s = SIDE_INVALID;

    whole.from = begin / PAGES_BYTES * PAGES_BYTES;
    whole.end = pool_round(end, PAGES_BYTES);
    if (!table->whole_pages)
        s = pin_range_add(device, table, exact);
    if (s == SIDE_INVALID && (table->whole_pages || whole.from != exact.from || whole.end != exact.end)) {
        s = pin_range_add(device, table, whole);
        table->whole_pages = table->whole_pages || s == SIDE_OK;
    }
    return s;
}

static side_status pin_remove(side_device *device, struct pin_table *table, size_t i)
{
    struct pin_range pin = table->pins.at[i];

    list_remove(&table->pins, i);
    segments_refer(&table->segments, pin.from, pin.end, -1);
    return segments_sweep(device, &table->segments, pin.from, pin.end);
}

/* ---------------------------------------------------------------- public */

/* The device's table, and its pool, which lends the budget: both made at first use. */
static side_status table_get(side_device *device, struct pin_table **table)
{
    side_pool *pool;
    side_status s = side_device_pool(device, &pool);
    struct pin_table *t;

    if (s != SIDE_OK)
        return s;
    pthread_mutex_lock(&device->mutex);
    t = atomic_load(&device->pins);
    if (t == NULL) {
        t = mem_zalloc(1, sizeof(*t));
        if (t != NULL) {
            pthread_mutex_init(&t->mutex, NULL);
            atomic_store(&device->pins, t);
        }
    }
    pthread_mutex_unlock(&device->mutex);
    *table = t;
    return t != NULL ? SIDE_OK : SIDE_NO_MEMORY;
}

side_status side_memory_pin(side_device *device, const void *data, size_t bytes)
{
    uintptr_t begin = (uintptr_t)data, end = begin + bytes;
    side_status s = device_check(device, "side_memory_pin");
    struct pin_table *table;
    side_error kept;

    if (s != SIDE_OK)
        return s;
    if (data == NULL || bytes == 0 || end < begin)
        return error_set(SIDE_INVALID, "side_memory_pin", "no memory: data %p, bytes %zu", data, bytes);
    if (!device->props.can_register)
        return error_set(SIDE_UNSUPPORTED, "side_memory_pin",
                         "%s cannot pin memory in place; copy into the pool's instead", device->props.name);
    s = table_get(device, &table);
    if (s != SIDE_OK)
        return s;

    error_copy(&kept);
    pthread_mutex_lock(&table->mutex);
    s = pin_add(device, table, begin, end);
    pthread_mutex_unlock(&table->mutex);
    if (s == SIDE_OK)
        error_restore(&kept); /* what was tried in vain on the way is not the caller's error */
    return s;
}

side_status side_memory_unpin(side_device *device, const void *data)
{
    side_status s = device_check(device, "side_memory_unpin");
    struct pin_table *table;
    size_t i;

    if (s != SIDE_OK)
        return s;
    table = atomic_load(&device->pins);
    if (table == NULL)
        return error_set(SIDE_INVALID, "side_memory_unpin", "%p is not pinned by side_memory_pin", data);
    pthread_mutex_lock(&table->mutex);
    i = list_after(&table->pins, (uintptr_t)data); /* behind the latest pin of that address */
    if (i == 0 || table->pins.at[i - 1].begin != (uintptr_t)data)
        s = error_set(SIDE_INVALID, "side_memory_unpin", "%p is not pinned by side_memory_pin, or was unpinned already",
                      data);
    else
        s = pin_remove(device, table, i - 1);
    pthread_mutex_unlock(&table->mutex);
    return s;
}

#ifdef SIDE_TESTING
size_t pool_copy_span(side_device *device, const void *data, size_t bytes)
{
    struct pin_table *table = atomic_load_explicit(&device->pins, memory_order_acquire);
    uintptr_t begin = (uintptr_t)data, edge;
    size_t i;

    if (table == NULL || bytes == 0)
        return bytes;
    pthread_mutex_lock(&table->mutex);
    i = segment_from(&table->segments, begin);
    edge = begin + bytes;
    if (i < table->segments.count) {
        const struct pin_range *r = &table->segments.at[i];
        uintptr_t next = begin < r->begin ? r->begin : r->end;
        edge = next < edge ? next : edge;
    }
    pthread_mutex_unlock(&table->mutex);
    return edge - begin;
}
#endif

void pool_device_finish(side_device *device)
{
    struct pin_table *table = atomic_load(&device->pins);

    if (os_fork_generation() != device->fork_generation)
        return;
    if (table != NULL) {
        if (table->pins.count > 0)
            log_message(SIDE_LEVEL_INFO, "pool", "%zu pins were left to the device's close", table->pins.count);
        for (size_t i = 0; i < table->segments.count; i++)
            table->segments.at[i].refs = 0;
        segments_sweep(device, &table->segments, 0, UINTPTR_MAX);
        pthread_mutex_destroy(&table->mutex);
        mem_free(table->pins.at);
        mem_free(table->segments.at);
        mem_free(table);
        atomic_store(&device->pins, NULL);
    }
    side_pool_destroy(device->pool);
    device->pool = NULL;
}
