/* SPDX-License-Identifier: MIT
 *
 * Cutting a source into pieces, in order: what travels as one copy. */
#include "pipeline.h"

#include "error.h"

/* SIZE_MAX where the sum does not fit. */
size_t cut_item_bytes(const side_source *s, uint64_t block, uint32_t count)
{
    size_t bytes = 0;
    for (uint32_t i = 0; i < count; i++)
        bytes = s->blocks[block + i].bytes < SIZE_MAX - bytes ? bytes + s->blocks[block + i].bytes : SIZE_MAX;
    return bytes;
}

static bool is_direct_block(const side_pipeline *p, uint64_t block)
{
    return p->feed.pinned[block] && p->options.source.blocks[block].bytes >= STAGE_DIRECT_FROM_BYTES;
}

static void cursor_enter_item(const side_pipeline *p, struct cursor *c)
{
    const side_source *s = &p->options.source;
    c->item_blocks = s->pieces != NULL ? s->pieces[c->item] : 1;
    c->item_bytes = cut_item_bytes(s, c->block, c->item_blocks);
    c->item_offset = 0;
}

static void cursor_advance(const side_pipeline *p, struct cursor *c, size_t bytes)
{
    const side_source *s = &p->options.source;
    c->item_offset += bytes;
    while (c->item_blocks > 0 && bytes >= s->blocks[c->block].bytes - c->block_offset) {
        bytes -= s->blocks[c->block].bytes - c->block_offset;
        c->block++;
        c->block_offset = 0;
        c->item_blocks--;
    }
    c->block_offset += bytes;
}

/* Packed bytes from the cursor on: up to a chunk, the item's end, or a pinned block that can go by itself. */
static size_t packed_bytes(const side_pipeline *p, const struct cursor *c)
{
    const side_source *s = &p->options.source;
    size_t bytes = 0;

    for (uint32_t i = 0; i < c->item_blocks && bytes < p->feed.chunk_bytes; i++) {
        if (is_direct_block(p, c->block + i))
            break;
        bytes += s->blocks[c->block + i].bytes - (i == 0 ? c->block_offset : 0);
    }
    return bytes < p->feed.chunk_bytes ? bytes : p->feed.chunk_bytes;
}

static side_status next_of_blocks(const side_pipeline *p, struct cursor *c, struct piece *out)
{
    const side_source *s = &p->options.source;

    if (c->item_offset == c->item_bytes && c->item_bytes != 0)
        c->item++;
    if (c->item >= s->items)
        return SIDE_END;
    if (c->item_offset == c->item_bytes)
        cursor_enter_item(p, c);
    while (c->item_blocks > 0 && s->blocks[c->block].bytes == c->block_offset) { /* empty blocks */
        c->block++;
        c->block_offset = 0;
        c->item_blocks--;
    }
    *out = (struct piece){.item = c->item, .offset = c->item_offset, .block = c->block, .block_offset = c->block_offset};
    out->direct = is_direct_block(p, c->block);
    out->bytes = out->direct ? s->blocks[c->block].bytes - c->block_offset : packed_bytes(p, c);
    out->last = out->offset + out->bytes == c->item_bytes;
    cursor_advance(p, c, out->bytes);
    return SIDE_OK;
}

static side_status next_of_file(const side_pipeline *p, struct cursor *c, struct piece *out)
{
    const side_source *s = &p->options.source;
    size_t item = p->options.item_bytes, bytes;
    uint64_t left = s->length - c->position;

    if (left == 0)
        return SIDE_END;
    bytes = item - c->item_offset < p->feed.chunk_bytes ? item - c->item_offset : p->feed.chunk_bytes;
    bytes = left < bytes ? (size_t)left : bytes;
    *out = (struct piece){.item = c->item, .offset = c->item_offset, .bytes = bytes, .position = s->offset + c->position};
    c->item_offset += bytes;
    c->position += bytes;
    out->last = c->item_offset == item || c->position == s->length;
    if (out->last) {
        c->item++;
        c->item_offset = 0;
    }
    return SIDE_OK;
}

/* A callback fills its whole item at once; how long it is shows only then. */
static side_status next_of_callback(const side_pipeline *p, struct cursor *c, struct piece *out)
{
    const side_source *s = &p->options.source;
    size_t bytes = 0;
    error_clear();
    int rc = s->fn(s->user, c->item, out->slot.data, p->options.item_bytes, &bytes);

    if (rc != 0)
        return pipeline_callback_failed("source", c->item, rc);
    if (bytes == SIDE_NO_MORE)
        return SIDE_END;
    if (bytes > p->options.item_bytes)
        return error_set(SIDE_TOO_LARGE, "source", "the source callback gave %zu bytes for item %llu; a slot takes %zu",
                         bytes, (unsigned long long)c->item, p->options.item_bytes);
    side_slot slot = out->slot;
    *out = (struct piece){.item = c->item, .bytes = bytes, .last = true, .slot = slot};
    c->item++;
    return SIDE_OK;
}

side_status cut_next(const side_pipeline *p, struct cursor *c, struct piece *out)
{
    if (p->options.source.kind == SIDE_END_CALLBACK)
        return next_of_callback(p, c, out);
    return p->options.source.kind == SIDE_END_FILE ? next_of_file(p, c, out) : next_of_blocks(p, c, out);
}

bool cut_at_item(const side_pipeline *p, const struct cursor *c)
{
    return p->options.source.kind == SIDE_END_BLOCKS ? c->item_offset == c->item_bytes : c->item_offset == 0;
}
