/* SPDX-License-Identifier: MIT
 *
 * What is to be read and where it goes: parts, arenas, pieces. Linear in parts and pieces, but for sorting where parts do not come sorted; nothing is
 * allocated for each. */
#include "load_private.h"

#include "alloc.h"
#include "error.h"

#include <stdlib.h>
#include <string.h>

#define WHERE "side_load_start"

void load_plan_finish(struct load_plan *plan)
{
    mem_free(plan->files);
    mem_free(plan->parts);
    mem_free(plan->units);
    mem_free(plan->pieces);
    mem_free(plan->arenas);
    mem_free(plan->order);
    memset(plan, 0, sizeof(*plan));
}

/* ---------------------------------------------------------------- parts */

struct found {
    const char *name;
    uint64_t bytes, at;
    uint32_t file;
};

static side_status files_take(struct load_plan *plan, const side_checkpoint *ck, const side_load_options *o)
{
    const size_t count = ck != NULL ? side_checkpoint_files(ck) : o->source_count;

    plan->files = mem_zalloc(count, sizeof(*plan->files));
    if (plan->files == NULL)
        return SIDE_NO_MEMORY;
    plan->file_count = (uint32_t)count;
    for (uint32_t i = 0; i < count; i++) {
        struct load_file *f = &plan->files[i];
        side_checkpoint_file_info info;
        side_status r = SIDE_OK;

        if (ck != NULL)
            r = side_checkpoint_file(ck, i, &info);
        if (r != SIDE_OK)
            return r;
        *f = ck != NULL ? (struct load_file){.name = info.path, .bytes = info.bytes, .fd = info.fd}
                        : (struct load_file){.name = o->sources[i].name, .bytes = o->sources[i].bytes, .fd = -1};
        f->arena = LOAD_NONE;
    }
    return SIDE_OK;
}

static side_status find(const struct load_plan *plan, const side_checkpoint *ck, uint64_t tensor, struct found *found)
{
    side_tensor t;
    side_status r;

    if (ck == NULL) {
        *found = (struct found){plan->files[tensor].name, plan->files[tensor].bytes, 0, (uint32_t)tensor};
        if (found->name == NULL)
            found->name = "";
        return SIDE_OK;
    }
    r = side_checkpoint_tensor(ck, tensor, &t);
    if (r == SIDE_OK)
        *found = (struct found){t.name, t.bytes, t.offset, (uint32_t)t.file};
    return r;
}

static side_status part_take(struct load_plan *plan, const side_checkpoint *ck, const side_load_options *o, uint32_t i,
                             size_t tensors)
{
    const side_load_part whole = {.tensor = i}, *want = o->parts != NULL ? &o->parts[i] : &whole;
    struct load_part *p = &plan->parts[i];
    struct found found;
    side_status r;

    if (want->tensor >= tensors)
        return error_set(SIDE_INVALID, WHERE, "part %u is of %s %llu; there are %zu", i,
                         ck != NULL ? "tensor" : "source", (unsigned long long)want->tensor, tensors);
    r = find(plan, ck, want->tensor, &found);
    if (r != SIDE_OK)
        return r;
    if (want->begin > found.bytes || want->bytes > found.bytes - want->begin)
        return error_set(SIDE_INVALID, WHERE, "part %u is bytes %llu to %llu of %s %llu ('%.80s'), which has %llu bytes",
                         i, (unsigned long long)want->begin, (unsigned long long)(want->begin + want->bytes),
                         ck != NULL ? "tensor" : "source", (unsigned long long)want->tensor, found.name,
                         (unsigned long long)found.bytes);
    *p = (struct load_part){
        .at = found.at + want->begin,
        .bytes = want->bytes != 0 ? want->bytes : found.bytes - want->begin,
        .file = found.file,
        .arena = LOAD_NONE,
        .data = want->data,
    };
    if (p->bytes > UINT64_MAX / 4 - plan->bytes)
        return error_set(SIDE_TOO_LARGE, WHERE, "the parts are more than 2^62 bytes");
    plan->bytes += p->bytes;
    return SIDE_OK;
}

static int compare(const void *a, const void *b, void *parts)
{
    const struct load_part *p = (const struct load_part *)parts + *(const uint32_t *)a;
    const struct load_part *q = (const struct load_part *)parts + *(const uint32_t *)b;

    if (p->file != q->file)
        return p->file < q->file ? -1 : 1;
    if (p->at != q->at)
        return p->at < q->at ? -1 : 1;
    if (p->bytes != q->bytes) /* those without bytes first */
        return p->bytes < q->bytes ? -1 : 1;
    return *(const uint32_t *)a < *(const uint32_t *)b ? -1 : 1;
}

side_status load_plan_parts(struct load_plan *plan, const side_checkpoint *ck, const side_load_options *o)
{
    side_status r = files_take(plan, ck, o);
    const size_t tensors = ck != NULL ? side_checkpoint_count(ck) : o->source_count;
    const size_t count = o->parts != NULL ? o->count : tensors;
    bool sorted = true;

    if (r == SIDE_OK && count >= LOAD_NONE)
        return error_set(SIDE_TOO_LARGE, WHERE, "%zu parts; it takes less than %u", count, LOAD_NONE);
    plan->parts = r == SIDE_OK ? mem_zalloc(count, sizeof(*plan->parts)) : NULL;
    plan->order = plan->parts != NULL ? mem_zalloc(count, sizeof(*plan->order)) : NULL;
    if (plan->order == NULL)
        return r != SIDE_OK ? r : SIDE_NO_MEMORY;
    plan->part_count = (uint32_t)count;
    for (uint32_t i = 0; i < count; i++) {
        r = part_take(plan, ck, o, i, tensors);
        if (r != SIDE_OK)
            return r;
        plan->order[i] = i;
        sorted = sorted && (i == 0 || compare(&plan->order[i - 1], &plan->order[i], plan->parts) < 0);
    }
    if (!sorted)
        qsort_r(plan->order, count, sizeof(*plan->order), compare, plan->parts);
    return SIDE_OK;
}

/* ---------------------------------------------------------------- arenas */

static size_t round_up(size_t value, size_t grain)
{
    return (value + grain - 1) / grain * grain;
}

/* An arena follows its file, shifted so that as many bytes as can be are aligned: which remainder do the file's parts have? */
static size_t best_remainder(const struct load_plan *plan, uint32_t from, uint32_t to, size_t align, uint64_t *weights)
{
    size_t best = 0;

    memset(weights, 0, align * sizeof(*weights));
    for (uint32_t i = from; i < to; i++) {
        const struct load_part *p = &plan->parts[plan->order[i]];
        if (p->data == NULL)
            weights[p->at % align] += p->bytes;
    }
    for (size_t i = 1; i < align; i++)
        if (weights[i] > weights[best])
            best = i;
    return best;
}

/* The parts [from, to) of the order, all of one file. Small gaps in the file are gaps in the arena; larger ones are closed. */
static void lay_out(struct load_plan *plan, uint32_t from, uint32_t to, size_t align, size_t remainder, size_t page,
                    uint32_t arena)
{
    uint64_t file_end = 0;
    size_t pos = 0;

    for (uint32_t i = from; i < to; i++) {
        struct load_part *p = &plan->parts[plan->order[i]];
        if (p->data != NULL)
            continue;
        p->arena = arena;
        p->moved = p->at % align != remainder && p->bytes != 0;
        if (p->moved)
            continue;
        if (p->bytes == 0)
            p->offset = round_up(pos, align);
        else if (pos != 0 && p->at >= file_end && p->at - file_end <= LOAD_COPY_GAP)
            p->offset = pos + (size_t)(p->at - file_end);
        else { /* of large ones also the place in a page is the file's, where direct reads go there */
            size_t grain = p->bytes >= 16 * LOAD_GRAIN && page > align ? page : align;
            p->offset = round_up(pos, grain) + (size_t)((p->at - remainder) % grain);
        }
        if (p->bytes != 0) {
            pos = p->offset + (size_t)p->bytes;
            file_end = p->at + p->bytes;
        }
    }
    for (uint32_t i = from; i < to; i++) {
        struct load_part *p = &plan->parts[plan->order[i]];
        if (p->data != NULL || !p->moved)
            continue;
        p->offset = round_up(pos, align);
        pos = p->offset + (size_t)p->bytes;
        plan->moved_bytes += p->bytes;
    }
    plan->arenas[arena] = (struct load_arena){.bytes = round_up(pos != 0 ? pos : 1, align),
                                              .file = plan->parts[plan->order[from]].file};
    plan->files[plan->arenas[arena].file].arena = arena;
    plan->arena_bytes += plan->arenas[arena].bytes;
}

side_status load_plan_arenas(struct load_plan *plan, const side_load_options *o, bool to_host)
{
    uint64_t *weights = mem_zalloc(o->align, sizeof(*weights));

    plan->arenas = weights != NULL ? mem_zalloc(plan->file_count, sizeof(*plan->arenas)) : NULL;
    if (plan->arenas == NULL) {
        mem_free(weights);
        return SIDE_NO_MEMORY;
    }
    for (uint32_t from = 0, to; from < plan->part_count; from = to) {
        bool any = false;
        for (to = from;
             to < plan->part_count && plan->parts[plan->order[to]].file == plan->parts[plan->order[from]].file; to++)
            any = any || plan->parts[plan->order[to]].data == NULL;
        if (any)
            lay_out(plan, from, to, o->align, best_remainder(plan, from, to, o->align, weights),
                    to_host ? LOAD_GRAIN : 0, plan->arena_count++);
    }
    mem_free(weights);
    return SIDE_OK;
}

/* ---------------------------------------------------------------- pieces */

/* Two passes: without `plan->pieces` it counts. */
struct cutter {
    struct load_plan *plan;
    size_t piece_bytes;
    bool to_host;
    struct load_piece piece; /* open; no units: none */
    uint64_t limit;          /* where it must end */
    const struct load_part *last;
    uint64_t units, pieces;
};

static void close_piece(struct cutter *c)
{
    if (c->piece.units == 0)
        return;
    if (c->plan->pieces != NULL)
        c->plan->pieces[c->pieces] = c->piece;
    c->pieces++;
    c->piece.units = 0;
}

/* Where b's byte at `at` (of the file) goes lies as far behind what `a` has as in the file: one read can serve both. */
static bool follows(const struct load_part *a, const struct load_part *b)
{
    if (a == b)
        return true;
    if (a->arena != b->arena)
        return false;
    if (a->arena != LOAD_NONE)
        return (uint64_t)(b->offset - a->offset) == b->at - a->at;
    return (uintptr_t)b->data - (uintptr_t)a->data == b->at - a->at;
}

static void add_part(struct cutter *c, uint32_t number)
{
    struct load_plan *plan = c->plan;
    struct load_part *p = &plan->parts[number];
    uint64_t at = p->at, end = p->at + p->bytes;

    p->left = 0;
    while (at < end) {
        const uint64_t piece_end = c->piece.at + c->piece.bytes;
        bool fits = c->piece.units != 0 && c->piece.file == p->file && at >= piece_end && at < c->limit &&
                    at - piece_end <= (c->to_host ? 0 : LOAD_GAP);
        if (!fits || (c->to_host && !follows(c->last, p))) {
            close_piece(c);
            c->piece = (struct load_piece){.at = at, .file = p->file, .unit = (uint32_t)c->units, .arena = LOAD_NONE};
            c->limit = (at / c->piece_bytes + 1) * c->piece_bytes;
        }
        const uint64_t to = end < c->limit ? end : c->limit;
        if (plan->units != NULL)
            plan->units[c->units] = (struct load_unit){
                .skip = at - p->at, .part = number, .at = (uint32_t)(at - c->piece.at), .bytes = (uint32_t)(to - at)};
        if (p->arena != LOAD_NONE)
            c->piece.arena = p->arena;
        c->piece.bytes = (uint32_t)(to - c->piece.at);
        c->piece.units++;
        c->units++;
        p->left++;
        c->last = p;
        at = to;
    }
}

static void cut(struct cutter *c, bool in_order)
{
    c->units = c->pieces = 0;
    c->piece.units = 0;
    for (uint32_t i = 0; i < c->plan->part_count; i++)
        add_part(c, in_order ? i : c->plan->order[i]);
    close_piece(c);
}

side_status load_plan_pieces(struct load_plan *plan, size_t piece_bytes, bool in_order, bool to_host)
{
    struct cutter c = {.plan = plan, .piece_bytes = piece_bytes, .to_host = to_host};

    if (plan->bytes / piece_bytes >= LOAD_NONE / 2) /* each part may add two */
        return error_set(SIDE_TOO_LARGE, WHERE, "%llu bytes are too many pieces of %zu; raise piece_bytes",
                         (unsigned long long)plan->bytes, piece_bytes);
    cut(&c, in_order);
    if (c.units >= LOAD_NONE)
        return error_set(SIDE_TOO_LARGE, WHERE, "%llu pieces; raise piece_bytes", (unsigned long long)c.units);
    struct load_unit *units = mem_zalloc(c.units, sizeof(*units));
    struct load_piece *pieces = units != NULL ? mem_zalloc(c.pieces, sizeof(*pieces)) : NULL;
    plan->units = units;
    plan->pieces = pieces;
    if (pieces == NULL)
        return SIDE_NO_MEMORY;
    plan->unit_count = (uint32_t)c.units;
    plan->piece_count = (uint32_t)c.pieces;
    cut(&c, in_order);
    return SIDE_OK;
}
