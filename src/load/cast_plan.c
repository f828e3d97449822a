/* SPDX-License-Identifier: MIT
 *
 * What is cast, how the new files are laid out, and in which pieces. */
#include "cast_private.h"

#include "alloc.h"
#include "error.h"

#include <stdlib.h>
#include <string.h>

static const char where[] = "side_cast_create";

bool cast_source(side_dtype type, side_type *from)
{
    switch (type) {
    case SIDE_DTYPE_F64: *from = SIDE_F64; return true;
    case SIDE_DTYPE_F32: *from = SIDE_F32; return true;
    case SIDE_DTYPE_F16: *from = SIDE_F16; return true;
    case SIDE_DTYPE_BF16: *from = SIDE_BF16; return true;
    case SIDE_DTYPE_F8_E4M3: *from = SIDE_F8E4M3; return true;
    case SIDE_DTYPE_F8_E5M2: *from = SIDE_F8E5M2; return true;
    default: return false;
    }
}

/* ---------------------------------------------------------------- pieces */

struct builder {
    struct cast_plan *plan;
    size_t most;             /* bytes of a piece, in or out */
    struct cast_piece *open; /* the last piece; NULL: begin another */
    size_t room;             /* of its extents but the last */
};

static side_status piece_open(struct builder *b, uint32_t file, bool kept, side_type from, uint64_t out_offset)
{
    struct cast_plan *plan = b->plan;
    void *items = plan->pieces;
    const side_status s = ck_reserve(&items, &plan->piece_most, plan->piece_count, 1, sizeof(*plan->pieces));

    plan->pieces = items;
    if (s != SIDE_OK)
        return s;
    b->open = &plan->pieces[plan->piece_count++];
    *b->open = (struct cast_piece){
        .file = file, .first = (uint32_t)plan->extent_count, .kept = kept, .from = from, .out_offset = out_offset};
    b->room = 0;
    plan->files[file].count++;
    return SIDE_OK;
}

static side_status extent_open(struct builder *b, uint64_t offset)
{
    struct cast_plan *plan = b->plan;
    void *items = plan->extents;
    const side_status s = ck_reserve(&items, &plan->extent_most, plan->extent_count, 1, sizeof(*plan->extents));

    plan->extents = items;
    if (s != SIDE_OK)
        return s;
    if (plan->extent_count == UINT32_MAX)
        return error_set(SIDE_TOO_LARGE, where, "over 4e9 pieces; a larger piece_bytes makes fewer");
    if (b->open->count > 0)
        b->room += reader_room(plan->extents[plan->extent_count - 1].bytes);
    plan->extents[plan->extent_count++] = (struct cast_extent){.offset = offset};
    b->open->count++;
    return SIDE_OK;
}

/* Elements that still fit into the open piece, as part of its last extent or as a new one. */
static size_t elements_left(const struct builder *b, bool joins, size_t in, size_t out)
{
    const struct cast_plan *plan = b->plan;
    const struct cast_piece *p = b->open;
    const size_t wide = in > out ? in : out, used = p->in_bytes > p->out_bytes ? p->in_bytes : p->out_bytes;
    const size_t last = p->count > 0 ? plan->extents[plan->extent_count - 1].bytes : 0;
    const size_t before = joins || p->count == 0 ? b->room : b->room + reader_room(last);
    const size_t limit = reader_room(b->most), room = before + (joins ? last : 0) + reader_room(0) + 2 * READER_ALIGN;
    size_t left = (b->most - used) / wide;

    if (!joins && p->count == CAST_EXTENTS)
        return 0;
    if (before == 0) /* a single extent always has its room */
        return left;
    if (room >= limit)
        return 0;
    return left < (limit - room) / in ? left : (limit - room) / in;
}

/* A tensor's data, or part of a file, in as many pieces as it takes. in, out: bytes of an element. */
static side_status add_data(struct builder *b, uint32_t file, bool kept, side_type from, uint64_t in_offset,
                            uint64_t out_offset, uint64_t elements, size_t in, size_t out)
{
    struct cast_plan *plan = b->plan;
    side_status s = SIDE_OK;

    while (s == SIDE_OK && elements > 0) {
        struct cast_piece *p = b->open;
        const struct cast_extent *last = plan->extent_count > 0 ? &plan->extents[plan->extent_count - 1] : NULL;
        const bool same = p != NULL && p->file == file && p->kept == kept && (kept || p->from == from);
        const bool joins = same && last->offset + last->bytes == in_offset;
        size_t n = same ? elements_left(b, joins, in, out) : 0;

        if (n == 0) {
            s = piece_open(b, file, kept, from, out_offset);
            n = b->most / (in > out ? in : out);
        }
        n = n < elements ? n : (size_t)elements;
        if (s == SIDE_OK && (b->open->count == 0 || !joins))
            s = extent_open(b, in_offset);
        if (s != SIDE_OK)
            return s;
        plan->extents[plan->extent_count - 1].bytes += n * in;
        b->open->in_bytes += n * in;
        b->open->out_bytes += n * out;
        in_offset += n * in;
        out_offset += n * out;
        elements -= n;
    }
    return s;
}

/* ---------------------------------------------------------------- files */

static int by_place(const void *a, const void *b, void *of)
{
    const struct st_layout *layout = of;
    const size_t x = *(const size_t *)a, y = *(const size_t *)b;

    if (layout->begin[x] != layout->begin[y])
        return layout->begin[x] < layout->begin[y] ? -1 : 1;
    return layout->bytes[x] < layout->bytes[y] ? -1 : layout->bytes[x] > layout->bytes[y];
}

/* The file's tensors as they will be. *changed: how many are cast. */
static side_status choose(side_cast *cast, const side_checkpoint_file_info *info, side_tensor *tensors, size_t *changed)
{
    struct cast_plan *plan = &cast->plan;
    const side_cast_options *o = &cast->options;
    side_type from;

    *changed = 0;
    for (size_t i = 0; i < info->count; i++) {
        const side_status s = side_checkpoint_tensor(cast->checkpoint, info->first + i, &tensors[i]);
        if (s != SIDE_OK)
            return s;
        if (tensors[i].type != o->to && cast_source(tensors[i].type, &from) &&
            (o->select == NULL || o->select(o->select_user, &tensors[i]))) {
            tensors[i].type = o->to;
            ++*changed;
        }
        plan->choice = cast_hash(plan->choice, &(unsigned char){(unsigned char)tensors[i].type}, 1);
        plan->data_bytes += tensors[i].elements * side_dtype_bits(tensors[i].type) / 8;
    }
    plan->tensors += info->count;
    plan->cast_tensors += *changed;
    return SIDE_OK;
}

static side_status lay_out(side_cast *cast, size_t number, const side_checkpoint_file_info *info,
                           const side_tensor *tensors)
{
    struct cast_file *file = &cast->plan.files[number];
    const size_t pairs = side_checkpoint_metadata_count(cast->checkpoint, number);
    const char **metadata = mem_zalloc(2 * pairs, sizeof(*metadata));
    side_writer_options o = SIDE_WRITER_OPTIONS_INIT;
    side_status s = metadata != NULL ? SIDE_OK : SIDE_NO_MEMORY;

    for (size_t i = 0; s == SIDE_OK && i < pairs; i++)
        s = side_checkpoint_metadata(cast->checkpoint, number, i, &metadata[2 * i], &metadata[2 * i + 1]);
    o.metadata = pairs > 0 ? metadata : NULL;
    o.metadata_count = pairs;
    if (s == SIDE_OK)
        s = st_layout_make(&file->layout, info->path, tensors, info->count, &o);
    file->bytes = file->layout.file_bytes;
    mem_free(metadata);
    return s;
}

/* Pieces in the order of the new file: so each is written in one go, and the disk is written from front to back. */
static side_status cut(side_cast *cast, struct builder *b, size_t number, const side_checkpoint_file_info *info,
                       const side_tensor *tensors)
{
    struct cast_file *file = &cast->plan.files[number];
    size_t *order = mem_zalloc(info->count, sizeof(*order));
    side_status s = order != NULL ? SIDE_OK : SIDE_NO_MEMORY;

    for (size_t i = 0; s == SIDE_OK && i < info->count; i++)
        order[i] = i;
    if (s == SIDE_OK)
        qsort_r(order, info->count, sizeof(*order), by_place, &file->layout);
    for (size_t k = 0; s == SIDE_OK && k < info->count; k++) {
        const size_t i = order[k];
        const uint64_t out_offset = file->layout.begin[i];
        side_tensor old;
        side_type from = SIDE_U8;

        s = side_checkpoint_tensor(cast->checkpoint, info->first + i, &old);
        if (s == SIDE_OK && old.type == tensors[i].type)
            s = add_data(b, (uint32_t)number, true, from, old.offset, out_offset, old.bytes, 1, 1);
        else if (s == SIDE_OK && cast_source(old.type, &from))
            s = add_data(b, (uint32_t)number, false, from, old.offset, out_offset, old.elements,
                         side_dtype_bits(old.type) / 8, side_dtype_bits(cast->options.to) / 8);
    }
    mem_free(order);
    return s;
}

static side_status plan_file(side_cast *cast, struct builder *b, size_t number)
{
    struct cast_plan *plan = &cast->plan;
    struct cast_file *file = &plan->files[number];
    side_checkpoint_file_info info;
    side_tensor *tensors;
    size_t changed = 0;
    side_status s = side_checkpoint_file(cast->checkpoint, number, &info);

    if (s != SIDE_OK)
        return s;
    tensors = mem_zalloc(info.count, sizeof(*tensors));
    if (tensors == NULL)
        return SIDE_NO_MEMORY;
    file->name = cast_file_name(cast, number);
    file->first = plan->piece_count;
    s = choose(cast, &info, tensors, &changed);
    if (s == SIDE_OK && changed == 0) {
        file->bytes = info.bytes;
        s = add_data(b, (uint32_t)number, true, SIDE_U8, 0, 0, info.bytes, 1, 1);
    } else if (s == SIDE_OK) {
        s = lay_out(cast, number, &info, tensors);
        if (s == SIDE_OK)
            s = cut(cast, b, number, &info, tensors);
    }
    mem_free(tensors);
    b->open = NULL;
    return s;
}

/* ---------------------------------------------------------------- all */

static void sum_up(struct cast_plan *plan)
{
    for (size_t i = 0; i < plan->piece_count; i++) {
        const struct cast_piece *p = &plan->pieces[i];
        size_t room = 0;
        for (uint32_t k = 0; k < p->count; k++)
            room += reader_room(plan->extents[p->first + k].bytes);
        room = room > p->out_bytes ? room : p->out_bytes;
        plan->slot_bytes = plan->slot_bytes > room ? plan->slot_bytes : room;
        plan->bytes_in += p->in_bytes;
        plan->bytes_out += p->out_bytes;
        if (p->kept)
            continue;
        plan->cast_bytes_in += p->in_bytes;
        plan->stage_in = plan->stage_in > p->in_bytes ? plan->stage_in : p->in_bytes;
        plan->stage_out = plan->stage_out > p->out_bytes ? plan->stage_out : p->out_bytes;
    }
    plan->slot_bytes = (plan->slot_bytes + READER_ALIGN - 1) & ~(size_t)(READER_ALIGN - 1);
}

side_status cast_plan_make(side_cast *cast)
{
    struct cast_plan *plan = &cast->plan;
    struct builder b = {.plan = plan, .most = cast->options.piece_bytes};
    side_status s = SIDE_OK;

    plan->choice = CAST_HASH;
    plan->file_count = side_checkpoint_files(cast->checkpoint);
    plan->files = mem_zalloc(plan->file_count, sizeof(*plan->files));
    if (plan->files == NULL)
        return SIDE_NO_MEMORY;
    for (size_t i = 0; i < plan->file_count; i++)
        plan->files[i].fd = -1;
    for (size_t i = 0; s == SIDE_OK && i < plan->file_count; i++)
        s = plan_file(cast, &b, i);
    sum_up(plan);
    return s;
}

void cast_plan_free(struct cast_plan *plan)
{
    for (size_t i = 0; plan->files != NULL && i < plan->file_count; i++)
        st_layout_free(&plan->files[i].layout);
    mem_free(plan->files);
    mem_free(plan->pieces);
    mem_free(plan->extents);
}
