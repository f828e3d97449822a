/* SPDX-License-Identifier: MIT
 *
 * Checkpoints: the tensors that files hold, without their data. safetensors files (one, a folder, or shards through their index file), .npy files
 * and raw ones. Headers are read strictly: what the format forbids is refused, with the file, the byte offset and the tensor.
 *
 *     side_checkpoint *ck;
 *     if (side_checkpoint_open("model.safetensors.index.json", NULL, &ck) != SIDE_OK) ...
 *     for (size_t i = 0; i < side_checkpoint_count(ck); i++) {
 *         side_tensor t;
 *         side_checkpoint_tensor(ck, i, &t);               // name, type, shape; file and offset of its bytes
 *     }
 *     side_checkpoint_close(ck);
 *
 * Tensors are numbered by file and then by where their bytes are, so that neighbours in a file are neighbours here. What a checkpoint gives out lives
 * until it is closed. It never changes after open: any threads may read it at once, forked children too.
 *
 * Files stay open, and their size and time of change are kept: side_checkpoint_check tells whether what was read since belongs together.
 */
#include "../sidestream.h" /* before the guard: it includes this file, in the order the areas need */

#ifndef SIDESTREAM_CHECKPOINT_H
#define SIDESTREAM_CHECKPOINT_H

#ifdef __cplusplus
extern "C" {
#endif

#define SIDE_RANK_MOST 64 /* dimensions of a tensor; more are refused */

/* X(name, value, bits, text): the types of safetensors, in its order: a writer puts the highest first. `text` stands in headers. */
/* clang-format off */
#define SIDE_DTYPE_MAP(X)                    \
    X(BOOL, 0, 8, "BOOL")                    \
    X(F4, 1, 4, "F4")                        \
    X(F6_E2M3, 2, 6, "F6_E2M3")              \
    X(F6_E3M2, 3, 6, "F6_E3M2")              \
    X(U8, 4, 8, "U8")                        \
    X(I8, 5, 8, "I8")                        \
    X(F8_E5M2, 6, 8, "F8_E5M2")              \
    X(F8_E4M3, 7, 8, "F8_E4M3")              \
    X(F8_E8M0, 8, 8, "F8_E8M0")              \
    X(F8_E4M3FNUZ, 9, 8, "F8_E4M3FNUZ")      \
    X(F8_E5M2FNUZ, 10, 8, "F8_E5M2FNUZ")     \
    X(I16, 11, 16, "I16")                    \
    X(U16, 12, 16, "U16")                    \
    X(F16, 13, 16, "F16")                    \
    X(BF16, 14, 16, "BF16")                  \
    X(I32, 15, 32, "I32")                    \
    X(U32, 16, 32, "U32")                    \
    X(F32, 17, 32, "F32")                    \
    X(C64, 18, 64, "C64")                    \
    X(F64, 19, 64, "F64")                    \
    X(I64, 20, 64, "I64")                    \
    X(U64, 21, 64, "U64")
/* clang-format on */

typedef enum side_dtype {
#define SIDE_X(name, value, bits, text) SIDE_DTYPE_##name = value,
    SIDE_DTYPE_MAP(SIDE_X)
#undef SIDE_X
        SIDE_DTYPE_COUNT = 22
} side_dtype;

/* "BF16"; "?" for unknown values. */
SIDE_API const char *side_dtype_name(side_dtype type);
/* Bits of an element: 4, 6, 8, 16, 32 or 64; 0 for unknown values. */
SIDE_API uint32_t side_dtype_bits(side_dtype type);
/* By its name in headers, case and all. SIDE_NOT_FOUND: there is none. */
SIDE_API side_status side_dtype_find(const char *name, side_dtype *type);

typedef enum side_checkpoint_format {
    SIDE_FORMAT_AUTO = 0, /* by name: .json an index of shards, .npy, .raw; a folder: see side_checkpoint_open; all others safetensors */
    SIDE_FORMAT_SAFETENSORS = 1,
    SIDE_FORMAT_INDEX = 2,
    SIDE_FORMAT_NPY = 3,
    SIDE_FORMAT_RAW = 4 /* one tensor of U8, named as the file: all its bytes */
} side_checkpoint_format;

typedef struct side_checkpoint_options {
    size_t size;
    side_checkpoint_format format;
    uint32_t flags; /* SIDE_CHECKPOINT_* */
} side_checkpoint_options;
/* Takes what the reference implementation takes and the format forbids: names and metadata keys twice (the last counts), unknown fields of a tensor,
 * a tensor as an array, a type as an object, "__metadata__": null; and tensors in shards that the index does not list. */
#define SIDE_CHECKPOINT_LENIENT 1u
/* Refuses blanks before the header's '{' and anything but spaces behind its '}', which the format forbids and readers take. Not with LENIENT. */
#define SIDE_CHECKPOINT_STRICT_SPEC 2u
/* clang-format off */
#define SIDE_CHECKPOINT_OPTIONS_INIT { sizeof(side_checkpoint_options), SIDE_FORMAT_AUTO, 0 }
/* clang-format on */

typedef struct side_checkpoint side_checkpoint;

typedef struct side_tensor {
    const char *name;  /* UTF-8, NUL-terminated; may be empty */
    size_t name_bytes; /* without the NUL */
    side_dtype type;
    uint32_t rank;        /* 0: a scalar */
    const uint64_t *dims; /* `rank` of them, the last runs fastest */
    uint64_t elements;    /* their product; 1 for scalars */
    uint64_t bytes;       /* elements * bits / 8 */
    size_t file;          /* number, for side_checkpoint_file */
    uint64_t offset;      /* of its first byte in that file; of any alignment */
} side_tensor;

typedef struct side_checkpoint_file_info {
    const char *path;    /* as it was opened: the folder's or the index file's path and the name in it */
    int fd;              /* open for reading, the checkpoint's own; pread it, do not close it */
    uint64_t bytes;      /* size of the file */
    uint64_t data;       /* offset of the first byte behind the header */
    size_t first, count; /* its tensors: first, first + 1, ... */
    /* Of the file when it was opened. */
    uint64_t device, inode;
    uint64_t mtime_ns, ctime_ns;
} side_checkpoint_file_info;

/* Reads all headers; blocks for that. options NULL: defaults. A folder is taken for, in this order: model.safetensors.index.json, its only
 * *.safetensors.index.json, model.safetensors, all its *.safetensors.
 * SIDE_INVALID: malformed, or no regular file. SIDE_NOT_FOUND: no such file, or none in the folder. SIDE_IO: reading failed. SIDE_STATE: the folder holds an unfinished cast. SIDE_TOO_LARGE: over 10,000
 * files. The message has the file, the byte offset, and the tensor, in so far as they apply. */
SIDE_API side_status side_checkpoint_open(const char *path, const side_checkpoint_options *options,
                                          side_checkpoint **checkpoint);
/* NULL is fine. Nothing may read through its descriptors any more. */
SIDE_API void side_checkpoint_close(side_checkpoint *checkpoint);

SIDE_API size_t side_checkpoint_count(const side_checkpoint *checkpoint);
/* SIDE_INVALID: index is not below the count. */
SIDE_API side_status side_checkpoint_tensor(const side_checkpoint *checkpoint, size_t index, side_tensor *tensor);
/* The number of the tensor of that name, in O(1). SIDE_NOT_FOUND. */
SIDE_API side_status side_checkpoint_find(const side_checkpoint *checkpoint, const char *name, size_t name_bytes,
                                          size_t *index);
SIDE_API size_t side_checkpoint_files(const side_checkpoint *checkpoint);
SIDE_API side_status side_checkpoint_file(const side_checkpoint *checkpoint, size_t index,
                                          side_checkpoint_file_info *file);
/* SIDE_OK: every file has the size and the time of change that it had when it was opened. SIDE_IO names the first that has not. */
SIDE_API side_status side_checkpoint_check(const side_checkpoint *checkpoint);

/* Pairs of a safetensors file's "__metadata__", in its order; both texts NUL-terminated. Shards repeat each other's: ask by file. */
SIDE_API size_t side_checkpoint_metadata_count(const side_checkpoint *checkpoint, size_t file);
SIDE_API side_status side_checkpoint_metadata(const side_checkpoint *checkpoint, size_t file, size_t index,
                                              const char **key, const char **value);

/* ---------------------------------------------------------------- writing
 *
 *     side_writer *w;
 *     if (side_writer_create("out.safetensors", tensors, count, NULL, &w) == SIDE_OK) {
 *         for (size_t i = 0; status == SIDE_OK && i < count; i++)
 *             status = side_writer_write(w, i, 0, data[i], tensors[i].bytes);
 *         if (status == SIDE_OK)
 *             status = side_writer_finish(w);              // only now there is an out.safetensors
 *         side_writer_destroy(w);
 *     }
 *
 * One safetensors file, laid out as the reference implementation does: highest dtype first, then by name, no gaps, the header padded to 8 bytes.
 * It is written beside the path and renamed over it when it is whole. */

typedef struct side_writer side_writer;

typedef struct side_writer_options {
    size_t size;
    const char *const *metadata; /* key, value, key, value, ...: UTF-8, written in this order */
    size_t metadata_count;       /* pairs. 0: no "__metadata__", or an empty one where metadata is not NULL */
    uint32_t flags;              /* SIDE_WRITER_* */
} side_writer_options;
/* The unfinished file is PATH.part. An unfinished one of the same header is gone on with, and stays when this one is not finished: what of its data is
 * there the caller knows. Two writers of one path at once: SIDE_STATE. */
#define SIDE_WRITER_RESUME 1u
/* clang-format off */
#define SIDE_WRITER_OPTIONS_INIT { sizeof(side_writer_options), NULL, 0, 0 }
/* clang-format on */

/* Lays out `count` tensors, of which name, name_bytes, type, rank and dims are read, and writes the header. The arrays may be reused after.
 * SIDE_INVALID: names twice, not UTF-8, with NUL, or "__metadata__"; sizes that overflow or fill no whole bytes; path is no regular file. SIDE_TOO_LARGE: a
 * header of over 100,000,000 bytes. SIDE_IO: the file system refused, or has less free than the file takes. */
SIDE_API side_status side_writer_create(const char *path, const side_tensor *tensors, size_t count,
                                        const side_writer_options *options, side_writer **writer);
/* Takes the unfinished file away, or leaves it with RESUME. NULL is fine. */
SIDE_API void side_writer_destroy(side_writer *writer);
/* Whether an unfinished file is gone on with. */
SIDE_API bool side_writer_resumed(const side_writer *writer);
/* Where in the file the data of tensor `index` (of the array given) lies, and the descriptor to write it to. Each may be NULL. */
SIDE_API side_status side_writer_place(const side_writer *writer, size_t index, uint64_t *offset, uint64_t *bytes,
                                       int *fd);
/* Writes bytes of a tensor, `begin` behind its first. Any threads at once; blocks. */
SIDE_API side_status side_writer_write(side_writer *writer, size_t index, uint64_t begin, const void *data,
                                       size_t bytes);
/* Syncs it and renames it to its path. What was not written is zeros. Once; then only destroy is left. */
SIDE_API side_status side_writer_finish(side_writer *writer);

#ifdef __cplusplus
}
#endif

#endif
