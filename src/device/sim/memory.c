/* SPDX-License-Identifier: MIT
 *
 * Device memory (host memory with a limit) and what the device knows about host memory.
 *
 * Small allocations come from the allocation seam. Large ones are private mappings of one small file that holds the pattern, again and
 * again, so that 100 GB of device memory cost what is written, and still never read as zero.
 */
#include "model.h"
#include "sim.h"

#include "alloc.h"
#include "error.h"
#include "ops.h"

#include <assert.h>
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAPPED_FROM   ((size_t)16 << 20)
#define PATTERN_BYTES ((size_t)16 << 20)
enum { ALIGN = 256, POISON = 0xdb, CUDA_ALREADY_REGISTERED = 712, CUDA_NOT_REGISTERED = 713 };

/* ---------------------------------------------------------------- ranges */

/* Index of the first range that begins after `address`. */
static size_t upper(const struct sim_ranges *r, uintptr_t address)
{
    size_t low = 0, high = r->count;

    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (r->at[middle].begin <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static struct sim_range *find(const struct sim_ranges *r, const void *data)
{
    uintptr_t address = (uintptr_t)data;
    size_t i = upper(r, address);

    return i > 0 && address - r->at[i - 1].begin < r->at[i - 1].bytes ? &r->at[i - 1] : NULL;
}

static bool reserve(struct sim_ranges *r, size_t count)
{
    if (count <= r->capacity)
        return true;
    size_t n = count * 2 + 14;
    struct sim_range *at = mem_zalloc(n, sizeof(*at));
    if (at == NULL)
        return false;
    if (r->count > 0)
        memcpy(at, r->at, r->count * sizeof(*at));
    mem_free(r->at);
    r->at = at;
    r->capacity = n;
    return true;
}

static void insert(struct sim_ranges *r, size_t i, const struct sim_range *range)
{
    assert(r->count < r->capacity);
    memmove(&r->at[i + 1], &r->at[i], (r->count - i) * sizeof(*r->at));
    r->at[i] = *range;
    r->count++;
}

static struct sim_range take_out(struct sim_ranges *r, size_t i)
{
    struct sim_range range = r->at[i];

    r->count--;
    memmove(&r->at[i], &r->at[i + 1], (r->count - i) * sizeof(*r->at));
    return range;
}

bool sim_is_device(const dev_context *c, const void *data, size_t bytes)
{
    const struct sim_range *r = find(&c->ranges, data);

    return r != NULL && r->kind == SIM_RANGE_DEVICE && bytes <= r->bytes - ((uintptr_t)data - r->begin);
}

bool sim_is_pinned(const dev_context *c, const void *data, size_t bytes)
{
    uintptr_t at = (uintptr_t)data;

    do { /* neighbouring registrations count as one, as for a DMA */
        size_t i = upper(&c->ranges, at);
        if (i == 0)
            return false;
        const struct sim_range *r = &c->ranges.at[i - 1];
        size_t offset = at - r->begin;
        if (offset >= r->bytes || r->kind == SIM_RANGE_DEVICE)
            return false;
        size_t here = r->bytes - offset;
        if (bytes <= here)
            return true;
        bytes -= here;
        at += here;
    } while (true);
}

bool sim_is_read_only(const dev_context *c, const void *data)
{
    const struct sim_range *r = find(&c->ranges, data);

    return r != NULL && r->read_only;
}

side_memory_kind sim_memory_kind(const dev_context *c, const void *data)
{
    const struct sim_range *r = find(&c->ranges, data);

    if (r == NULL)
        return SIDE_MEMORY_PAGEABLE;
    return r->kind == SIM_RANGE_DEVICE ? SIDE_MEMORY_DEVICE : SIDE_MEMORY_PINNED;
}

/* ---------------------------------------------------------------- pages */

static size_t round_up(size_t bytes, size_t to)
{
    return (bytes + to - 1) / to * to;
}

/* A file of PATTERN_BYTES that holds one byte value; kept in *fd. */
static bool pattern_file(int *fd, uint8_t value)
{
    if (*fd >= 0)
        return true;
    int file = memfd_create("sidestream-sim", MFD_CLOEXEC);
    if (file < 0)
        return false;
    void *map = MAP_FAILED;
    if (ftruncate(file, (off_t)PATTERN_BYTES) == 0)
        map = mmap(NULL, PATTERN_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (map == MAP_FAILED) {
        close(file);
        return false;
    }
    memset(map, value, PATTERN_BYTES);
    munmap(map, PATTERN_BYTES);
    *fd = file;
    return true;
}

/* Puts copies of the file, made on write, over [at, at + bytes), which is mapped and whole pages. */
static bool map_pattern(void *at, size_t bytes, int fd)
{
    for (size_t done = 0; done < bytes; done += PATTERN_BYTES) {
        size_t part = bytes - done < PATTERN_BYTES ? bytes - done : PATTERN_BYTES;
        if (mmap((char *)at + done, part, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, fd, 0) ==
            MAP_FAILED)
            return false;
    }
    return true;
}

static bool device_block(dev_context *c, size_t bytes, struct sim_range *range)
{
    if (bytes < MAPPED_FROM) {
        range->block = mem_zalloc(1, bytes + ALIGN);
        if (range->block == NULL)
            return false;
        uintptr_t raw = (uintptr_t)range->block;
        size_t skip = (ALIGN - raw % ALIGN) % ALIGN;
        range->begin = raw + skip;
        memset((char *)range->block + skip, c->pattern, bytes);
        return true;
    }
    size_t whole = round_up(bytes, (size_t)sysconf(_SC_PAGESIZE));
    void *at = mmap(NULL, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED || !pattern_file(&c->pattern_fd, c->pattern) || !map_pattern(at, whole, c->pattern_fd)) {
        error_set_errno(SIDE_NO_MEMORY, "sim.alloc", errno, "no address space for %zu bytes of simulated device memory",
                        bytes);
        if (at != MAP_FAILED)
            munmap(at, whole);
        return false;
    }
    range->begin = (uintptr_t)at;
    range->mapped = true;
    return true;
}

static void give_back(const struct sim_range *range)
{
    if (range->mapped) /* the address came from mmap */
        munmap((void *)range->begin, round_up(range->bytes, (size_t)sysconf(_SC_PAGESIZE)));
    else
        mem_free(range->block);
}

static void poison(dev_context *c, const struct sim_range *range)
{
    void *at = (void *)range->begin;

    if (range->mapped && range->bytes >= MAPPED_FROM && pattern_file(&c->poison_fd, POISON) &&
        map_pattern(at, round_up(range->bytes, (size_t)sysconf(_SC_PAGESIZE)), c->poison_fd))
        return;
    memset(at, POISON, range->bytes);
}

/* ---------------------------------------------------------------- use after free */

static bool meets(const struct sim_range *range, const void *data, size_t bytes)
{
    uintptr_t begin = (uintptr_t)data;

    return bytes > 0 && begin < range->begin + range->bytes && range->begin < begin + bytes;
}

static bool touches(const struct sim_node *node, const struct sim_range *range)
{
    size_t in[2] = {0, 0}, out = 0;

    switch ((enum sim_kind)node->kind) {
    case SIM_SET: return meets(range, node->move.dst, node->move.bytes);
    case SIM_COPY:
        return meets(range, node->move.dst, node->move.bytes) || meets(range, node->move.src, node->move.bytes);
    case SIM_PIECES:
        for (size_t i = 0; i < node->move.bytes; i++) {
            const side_piece *p = &node->move.pieces[i];
            if (meets(range, p->dst, p->bytes) || meets(range, p->src, p->bytes))
                return true;
        }
        return false;
    case SIM_OP:
        return ops_bytes(&node->op, in, &out) == SIDE_OK &&
               (meets(range, node->op.in[0], in[0]) || meets(range, node->op.in[1], in[1]) ||
                meets(range, node->op.out, out));
    case SIM_WAIT:
    case SIM_RECORD:
    case SIM_HOST_FN: return false;
    }
    return false;
}

static void check_unused(dev_context *c, const struct sim_range *range, const char *call)
{
    if (!c->config.check || c->lost)
        return;
    for (const struct sim_node *node = c->unrun_first; node != NULL; node = node->next) {
        if (touches(node, range)) {
            c->violations++;
            log_message(SIDE_LEVEL_WARN, "sim",
                        "%s of %zu bytes at %#zx: operation %llu of stream %llu, queued before, still uses them", call,
                        range->bytes, (size_t)range->begin, (unsigned long long)node->seq,
                        (unsigned long long)node->stream);
            return;
        }
    }
}

void sim_graveyard_sweep(dev_context *c)
{
    size_t n = 0;

    while (n < c->graveyard.count &&
           (c->lost || c->unrun_first == NULL || c->unrun_first->seq >= c->graveyard.at[n].freed_at)) {
        give_back(&c->graveyard.at[n]);
        n++;
    }
    if (n > 0) {
        c->graveyard.count -= n;
        memmove(c->graveyard.at, c->graveyard.at + n, c->graveyard.count * sizeof(*c->graveyard.at));
    }
}

/* Poisons it, and gives it back once nothing queued so far can touch it. */
static void bury(dev_context *c, struct sim_range *range)
{
    range->freed_at = c->next_seq;
    if (c->unrun_first == NULL || c->lost) {
        give_back(range);
        return;
    }
    poison(c, range);
    if (reserve(&c->graveyard, c->graveyard.count + 1))
        insert(&c->graveyard, c->graveyard.count, range);
    else
        log_message(SIDE_LEVEL_WARN, "sim", "%zu bytes of freed memory are leaked: no memory to remember them",
                    range->bytes);
}

/* ---------------------------------------------------------------- calls */

side_status sim_alloc(dev_context *c, size_t bytes, void **data)
{
    size_t left = c->config.memory_bytes - c->used_bytes;
    struct sim_range range = {.bytes = bytes != 0 ? bytes : 1, .kind = SIM_RANGE_DEVICE};

    if (range.bytes > left)
        return error_set(SIDE_NO_DEVICE_MEMORY, "sim.alloc",
                         "asked for %zu bytes, %zu of %zu are free on the simulated device", bytes, left,
                         (size_t)c->config.memory_bytes);
    if (!reserve(&c->ranges, c->ranges.count + 1) || !device_block(c, range.bytes, &range))
        return SIDE_NO_MEMORY;
    insert(&c->ranges, upper(&c->ranges, range.begin), &range);
    c->used_bytes += range.bytes;
    *data = (void *)range.begin;
    return SIDE_OK;
}

/* The range that begins at data; NULL after a warning where there is none of that kind. */
static struct sim_range *owned(dev_context *c, const void *data, enum sim_range_kind kind)
{
    struct sim_range *range = find(&c->ranges, data);

    if (range == NULL || range->begin != (uintptr_t)data || range->kind != kind)
        return NULL;
    return range;
}

static void free_owned(dev_context *c, const void *data, enum sim_range_kind kind, const char *call)
{
    struct sim_range *found = owned(c, data, kind);

    if (data == NULL)
        return;
    if (found == NULL) {
        c->violations++;
        log_message(SIDE_LEVEL_WARN, "sim", "%s of %p, which is no such allocation", call, data);
        return;
    }
    struct sim_range range = take_out(&c->ranges, (size_t)(found - c->ranges.at));
    check_unused(c, &range, call);
    if (kind == SIM_RANGE_DEVICE)
        c->used_bytes -= range.bytes;
    bury(c, &range);
}

void sim_free(dev_context *c, void *data)
{
    free_owned(c, data, SIM_RANGE_DEVICE, "free");
}

void sim_host_free(dev_context *c, void *data)
{
    free_owned(c, data, SIM_RANGE_HOST, "host_free");
}

side_status sim_host_register(dev_context *c, void *data, size_t bytes, bool read_only)
{
    static const char where[] = "sim.host_register";
    struct sim_range range = {
        .begin = (uintptr_t)data, .bytes = bytes, .kind = SIM_RANGE_REGISTERED, .read_only = read_only};
    size_t page = (size_t)sysconf(_SC_PAGESIZE);

    if (c->config.refuse_register || c->config.refuse_pinning)
        return error_set(SIDE_DEVICE_ERROR, where, "registering host memory is refused (scripted)");
    if (bytes == 0 || range.begin % page != 0 || bytes % page != 0)
        return error_set(SIDE_INVALID, where, "%p + %zu bytes are not whole pages", data, bytes);
    if (msync(data, bytes, MS_ASYNC) != 0)
        return error_set_errno(SIDE_DEVICE_ERROR, where, errno, "%p + %zu bytes are not mapped", data, bytes);
    size_t i = upper(&c->ranges, range.begin);
    const struct sim_range *other = NULL;
    if (i > 0 && c->ranges.at[i - 1].begin + c->ranges.at[i - 1].bytes > range.begin)
        other = &c->ranges.at[i - 1];
    else if (i < c->ranges.count && c->ranges.at[i].begin < range.begin + bytes)
        other = &c->ranges.at[i];
    if (other != NULL)
        return error_set_device(SIDE_DEVICE_ERROR, where, CUDA_ALREADY_REGISTERED,
                                "%p + %zu bytes: part of it is already registered (%#zx + %zu)", data, bytes,
                                (size_t)other->begin, other->bytes);
    if (!reserve(&c->ranges, c->ranges.count + 1))
        return SIDE_NO_MEMORY;
    insert(&c->ranges, i, &range);
    return SIDE_OK;
}

side_status sim_host_unregister(dev_context *c, void *data)
{
    const struct sim_range *range = owned(c, data, SIM_RANGE_REGISTERED);

    if (range == NULL)
        return error_set_device(SIDE_DEVICE_ERROR, "sim.host_unregister", CUDA_NOT_REGISTERED,
                                "no registration begins at %p", data);
    check_unused(c, range, "host_unregister");
    take_out(&c->ranges, (size_t)(range - c->ranges.at));
    return SIDE_OK;
}

side_status sim_host_alloc(dev_context *c, size_t bytes, void **data)
{
    struct sim_range range = {.bytes = bytes != 0 ? bytes : 1, .kind = SIM_RANGE_HOST, .mapped = true};

    if (c->config.refuse_pinning)
        return error_set(SIDE_DEVICE_ERROR, "sim.host_alloc", "pinned memory is refused (scripted)");
    if (!reserve(&c->ranges, c->ranges.count + 1))
        return SIDE_NO_MEMORY;
    void *at = mmap(NULL, range.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED)
        return error_set_errno(SIDE_NO_MEMORY, "sim.host_alloc", errno, "no %zu bytes of host memory", bytes);
    range.begin = (uintptr_t)at;
    insert(&c->ranges, upper(&c->ranges, range.begin), &range);
    *data = at;
    return SIDE_OK;
}

void sim_memory_close(dev_context *c)
{
    for (size_t i = 0; i < c->graveyard.count; i++)
        give_back(&c->graveyard.at[i]);
    for (size_t i = 0; i < c->ranges.count; i++)
        if (c->ranges.at[i].kind != SIM_RANGE_REGISTERED)
            give_back(&c->ranges.at[i]);
    mem_free(c->graveyard.at);
    mem_free(c->ranges.at);
    if (c->pattern_fd >= 0)
        close(c->pattern_fd);
    if (c->poison_fd >= 0)
        close(c->poison_fd);
}
