/* SPDX-License-Identifier: MIT
 *
 * Files for tests of checkpoints: made from text, and opened. */
#ifndef CHECKPOINT_HELP_H
#define CHECKPOINT_HELP_H

#include "t.h"

static inline void write_bytes(const char *path, const void *data, size_t bytes)
{
    FILE *f = fopen(path, "wb");

    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, bytes, f), bytes);
    assert_int_equal(fclose(f), 0);
}

/* A safetensors file: the header's length, the header, and `data` bytes that count up. */
static inline void write_safetensors(const char *path, const char *header, size_t header_bytes, size_t data)
{
    unsigned char *all = malloc(8 + header_bytes + data);

    assert_non_null(all);
    for (int i = 0; i < 8; i++)
        all[i] = (unsigned char)((uint64_t)header_bytes >> (8 * i));
    memcpy(all + 8, header, header_bytes);
    for (size_t i = 0; i < data; i++)
        all[8 + header_bytes + i] = (unsigned char)i;
    write_bytes(path, all, 8 + header_bytes + data);
    free(all);
}

/* A path in the test's folder. */
static inline const char *in_folder(const char *name)
{
    static char paths[8][512];
    static unsigned next;
    char *path = paths[next++ % 8];

    snprintf(path, sizeof(paths[0]), "%s/%s", t_tmpdir(), name);
    return path;
}

static inline side_status open_with(const char *path, uint32_t flags, side_checkpoint **ck)
{
    side_checkpoint_options o = SIDE_CHECKPOINT_OPTIONS_INIT;

    o.flags = flags;
    return side_checkpoint_open(path, &o, ck);
}

#endif
