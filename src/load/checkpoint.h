/* SPDX-License-Identifier: MIT
 *
 * Checkpoints within src/load.
 *
 *     checkpoint.c    open, close, and what callers ask
 *     shards.c        index files and folders
 *     tensors.c       the table of tensors: rows, dimensions, names
 *     safetensors.c   text of a header to rows. Pure
 *     npy.c           the header of an .npy file. Pure but for reading it
 *     dtype.c         the types
 *     st_write.c      tensors to the header of a safetensors file
 *     writer.c        the file itself: beside its path, then renamed
 *
 * The table costs, beside the headers, which are kept since names lie in them: a row of 24 bytes, 8 a dimension, 4 to 6 of buckets.
 *
 *     text      ...{"name\0:{"dtype":...    the header as read; names and metadata unescaped in place
 *     rows      begin | name | dims | next  | file | type | rank
 *     buckets   hash of a name -> row + 1 -> next -> ...
 */
#ifndef LOAD_CHECKPOINT_H
#define LOAD_CHECKPOINT_H

#include "sidestream.h"

#define CK_HEADER_MOST 100000000u /* bytes of a header or an index file, as in the reference implementation */
#define CK_FILES_MOST  10000u
#define CK_TEXT_SPARE  8 /* bytes behind a text: a NUL and more */

struct ck_row {
    uint64_t begin; /* from the file's data on */
    uint32_t name;  /* in the file's text */
    uint32_t dims;  /* index of the first in the pool */
    uint32_t next;  /* row + 1 of the same bucket; 0 none */
    uint16_t file;
    uint8_t type, rank;
};

struct ck_pair {
    uint32_t key, value; /* in the file's text */
};

struct ck_file {
    char *path;
    int fd; /* -1: not open */
    char *text;
    size_t text_bytes;
    uint64_t bytes, data;
    uint64_t device, inode, mtime_ns, ctime_ns;
    size_t first, count;
    struct ck_pair *pairs;
    size_t pair_count, pair_most;
};

struct side_checkpoint {
    uint32_t flags;
    struct ck_row *rows;
    size_t row_count, row_most;
    uint64_t *dims;
    size_t dim_count, dim_most;
    uint32_t *buckets;
    size_t bucket_count;
    uint64_t seed;
    struct ck_file *files;
    size_t file_count, file_most;
    char *index; /* path of the index file that it was opened through; NULL none */
};

bool dtype_of(const char *text, size_t bytes, side_dtype *type);

/* ---- table (tensors.c) */

/* Room for `more` elements of `bytes` behind `count`: at least doubles. *items moves. */
side_status ck_reserve(void **items, size_t *most, size_t count, size_t more, size_t bytes);
/* Gives back what rows and dimensions do not use. */
side_status ck_trim(side_checkpoint *ck);
/* Product of dimensions from left to right, and their bytes. False: more than 64 bits hold. Bits that fill no whole byte: *bytes is UINT64_MAX. */
bool ck_sizes(const uint64_t *dims, uint32_t rank, uint32_t bits, uint64_t *elements, uint64_t *bytes);
/* Dimensions from `at` on; NULL while there are none at all. */
static inline const uint64_t *ck_dims(const side_checkpoint *ck, size_t at)
{
    return ck->dims != NULL ? ck->dims + at : NULL;
}
uint64_t ck_row_bytes(const side_checkpoint *ck, const struct ck_row *row);
const char *ck_row_name(const side_checkpoint *ck, const struct ck_row *row);
/* Row + 1 of that name; 0 none. */
size_t ck_find(const side_checkpoint *ck, const char *name, size_t bytes);
/* Sorts the file's rows by where their bytes are, enters their names, and checks that they cover the data: each byte belongs to one tensor. */
side_status ck_file_finish(side_checkpoint *ck, struct ck_file *file);

/* For messages: of a long path its end. */
const char *ck_shown(const char *path);
/* For messages: printable ASCII, of a long name its beginning. */
#define CK_NAME_SHOWN 88
const char *ck_escaped(const char *name, size_t bytes, char shown[CK_NAME_SHOWN]);

/* ---- files (checkpoint.c) */

bool ck_ends(const char *text, const char *with);
/* Opens file->path, which must be a regular file, and notes what it is; the caller closes file->fd. */
side_status ck_file_open(struct ck_file *file);
/* Reads `bytes` at `offset` into file->text, which is new, with room for `more` and a NUL behind. */
/* Size and time of change are those of when it was opened; else SIDE_IO: it was changed `when`, and `then` what to do. */
side_status ck_file_check(const struct ck_file *file, const char *call, const char *when, const char *then);
side_status ck_read_text(struct ck_file *file, uint64_t offset, size_t bytes, size_t more);
/* The file's beginning. *done: what there is of it. */
side_status ck_read_head(struct ck_file *file, unsigned char *head, size_t bytes, size_t *done);
/* Opens and reads one more file of the checkpoint. `file` pointers are void after it. */
side_status ck_add_file(side_checkpoint *ck, const char *path, side_checkpoint_format format);
side_status ck_row_add(side_checkpoint *ck, const struct ck_file *file, struct ck_row row); /* sets row.file */
side_status ck_dim_add(side_checkpoint *ck, uint64_t dim);

/* ---- shards.c */

side_status ck_add_index(side_checkpoint *ck, const char *path);
side_status ck_add_folder(side_checkpoint *ck, const char *path);

/* ---- formats */

/* file->text is the header; names and metadata are unescaped in it. Adds rows, in the order of the header. */
side_status st_parse(side_checkpoint *ck, struct ck_file *file);
#ifdef SIDE_TESTING
extern bool st_test_by_tokens; /* also what has the usual form */
#endif
/* Reads the header, with room for the file's name behind it, and sets all of the row but the name. */
side_status npy_parse(side_checkpoint *ck, struct ck_file *file, struct ck_row *row);

/* ---- writing (st_write.c): pure but for memory */

struct st_layout {
    uint64_t *begin, *bytes; /* of each tensor, in the order given; begin in the file */
    char *header;            /* its length in 8 bytes, then the text */
    size_t header_bytes;
    uint64_t file_bytes;
};

/* path: for messages. On failure there is nothing to free. */
side_status st_layout_make(struct st_layout *layout, const char *path, const side_tensor *tensors, size_t count,
                           const side_writer_options *options);
void st_layout_free(struct st_layout *layout);

#endif
