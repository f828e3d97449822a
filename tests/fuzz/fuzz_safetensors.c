/* SPDX-License-Identifier: MIT
 * Headers of safetensors files: whatever is taken has a table that holds what the reader promises, is read again from what the writer makes of it, and
 * is taken by the modes that take more. jansson takes its text too. The first byte of the input chooses how large the data is. */
#include "alloc.h"
#include "checkpoint.h"
#include "error.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void expect(bool held)
{
    if (!held)
        abort();
}

/* A checkpoint of one file that is not there, of a header and `bytes` of data. NULL where it is refused. */
static side_checkpoint *read_text(const char *text, size_t size, uint64_t bytes, uint32_t flags)
{
    side_checkpoint *ck = mem_zalloc(1, sizeof(*ck));
    struct ck_file *file = mem_zalloc(1, sizeof(*file));
    side_status s;

    expect(ck != NULL && file != NULL);
    ck->flags = flags;
    ck->files = file;
    ck->file_count = 1;
    *file = (struct ck_file){
        .fd = -1, .path = mem_zalloc(1, 8), .text = mem_zalloc(1, size + CK_TEXT_SPARE), .text_bytes = size};
    file->bytes = 8 + size + bytes;
    file->data = 8 + size;
    expect(file->path != NULL && file->text != NULL);
    strcpy(file->path, "input");
    if (size != 0)
        memcpy(file->text, text, size);
    error_clear();
    s = st_parse(ck, file);
    if (s == SIDE_OK)
        s = ck_file_finish(ck, file);
    if (s == SIDE_OK)
        return ck;
    const side_error *e = side_last_error();
    expect(s == SIDE_INVALID && e->status == s && strncmp(e->message, "input, offset ", 14) == 0);
    for (const char *c = e->message; *c != '\0'; c++)
        expect(*c >= 0x20 && *c < 0x7f);
    side_checkpoint_close(ck);
    return NULL;
}

/* The shorter way through tensors of the usual form, and the way through tokens, give the same. */
static void check_ways(const char *text, size_t size, uint64_t bytes, uint32_t flags, const side_checkpoint *ck)
{
    side_error error = *side_last_error();

    st_test_by_tokens = true;
    side_checkpoint *other = read_text(text, size, bytes, flags);
    st_test_by_tokens = false;
    expect((ck == NULL) == (other == NULL));
    if (ck == NULL)
        expect(strcmp(error.message, side_last_error()->message) == 0);
    for (size_t i = 0; ck != NULL && i < side_checkpoint_count(ck); i++) {
        side_tensor a, b;
        expect(side_checkpoint_tensor(ck, i, &a) == SIDE_OK && side_checkpoint_tensor(other, i, &b) == SIDE_OK);
        expect(strcmp(a.name, b.name) == 0 && a.type == b.type && a.offset == b.offset && a.bytes == b.bytes &&
               a.rank == b.rank && (a.rank == 0 || memcmp(a.dims, b.dims, a.rank * sizeof(*a.dims)) == 0));
    }
    side_checkpoint_close(other);
}

/* Rows cover the data in order, and every name is found. */
static void check_table(const side_checkpoint *ck)
{
    uint64_t at = ck->files[0].data;

    for (size_t i = 0; i < side_checkpoint_count(ck); i++) {
        side_tensor t;
        size_t index;
        uint64_t n = 1;
        expect(side_checkpoint_tensor(ck, i, &t) == SIDE_OK && t.offset == at && t.file == 0 && t.rank <= SIDE_RANK_MOST);
        for (uint32_t d = 0; d < t.rank; d++)
            n *= t.dims[d];
        expect(n == t.elements && n * side_dtype_bits(t.type) / 8 == t.bytes);
        expect(side_checkpoint_find(ck, t.name, t.name_bytes, &index) == SIDE_OK && index == i);
        at += t.bytes;
    }
    expect(at == ck->files[0].bytes);
}

/* The writer's header of the same tensors has the same tensors. */
static void check_writer(const side_checkpoint *ck)
{
    const size_t count = side_checkpoint_count(ck), pairs = side_checkpoint_metadata_count(ck, 0);
    side_tensor *tensors = calloc(count + 1, sizeof(*tensors));
    const char **metadata = calloc(2 * pairs + 1, sizeof(*metadata));
    side_writer_options o = SIDE_WRITER_OPTIONS_INIT;
    struct st_layout layout;

    expect(tensors != NULL && metadata != NULL);
    for (size_t i = 0; i < count; i++)
        expect(side_checkpoint_tensor(ck, i, &tensors[i]) == SIDE_OK);
    for (size_t i = 0; i < pairs; i++)
        expect(side_checkpoint_metadata(ck, 0, i, &metadata[2 * i], &metadata[2 * i + 1]) == SIDE_OK);
    o.metadata = pairs > 0 ? metadata : NULL;
    o.metadata_count = pairs;
    expect(st_layout_make(&layout, "input", tensors, count, &o) == SIDE_OK);
    side_checkpoint *again = read_text(layout.header + 8, layout.header_bytes - 8,
                                       layout.file_bytes - layout.header_bytes, SIDE_CHECKPOINT_STRICT_SPEC);
    expect(again != NULL && side_checkpoint_count(again) == count && side_checkpoint_metadata_count(again, 0) == pairs);
    for (size_t i = 0; i < count; i++) {
        side_tensor t;
        size_t index;
        expect(side_checkpoint_find(again, tensors[i].name, tensors[i].name_bytes, &index) == SIDE_OK);
        expect(side_checkpoint_tensor(again, index, &t) == SIDE_OK && t.type == tensors[i].type &&
               t.bytes == tensors[i].bytes && t.rank == tensors[i].rank && t.offset == layout.begin[i]);
    }
    side_checkpoint_close(again);
    st_layout_free(&layout);
    free(tensors);
    free(metadata);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *text = (const char *)data + 1;
    json_error_t error;

    if (size == 0)
        return 0;
    const uint64_t bytes = data[0];
    side_checkpoint *letter = read_text(text, size - 1, bytes, SIDE_CHECKPOINT_STRICT_SPEC);
    side_checkpoint *plain = read_text(text, size - 1, bytes, 0);
    check_ways(text, size - 1, bytes, 0, plain);
    side_checkpoint *lenient = read_text(text, size - 1, bytes, SIDE_CHECKPOINT_LENIENT);
    check_ways(text, size - 1, bytes, SIDE_CHECKPOINT_LENIENT, lenient);

    expect((letter == NULL || plain != NULL) && (plain == NULL || lenient != NULL));
    if (plain != NULL) {
        json_t *same = json_loadb(text, size - 1, JSON_REJECT_DUPLICATES, &error);
        /* Its integers have 63 bits. */
        expect(same != NULL || json_error_code(&error) == json_error_numeric_overflow);
        json_decref(same);
        check_table(plain);
        check_writer(plain);
    }
    if (lenient != NULL)
        check_table(lenient);
    side_checkpoint_close(letter);
    side_checkpoint_close(plain);
    side_checkpoint_close(lenient);
    expect(mem_live() == 0);
    return 0;
}
