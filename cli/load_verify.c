/* SPDX-License-Identifier: MIT
 * What lies at the destination against the files, byte by byte: read back through a pinned buffer, and from the file by plain reads. */
#include "load.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { CHUNK = 4 << 20, TIMEOUT_S = 30 };

struct verify {
    struct load_run *run;
    side_stream *stream;
    side_pool *pool;
    void *pinned;
    char *file;
};

/* All of it; false at the end of the file too. */
static bool read_all(int fd, char *data, size_t bytes, uint64_t offset)
{
    while (bytes > 0) {
        ssize_t n = pread(fd, data, bytes, (off_t)offset);
        if (n <= 0 && !(n < 0 && errno == EINTR))
            return false;
        if (n > 0) {
            data += n;
            offset += (uint64_t)n;
            bytes -= (size_t)n;
        }
    }
    return true;
}

static int verify_chunk(struct verify *v, const side_tensor *t, int fd, const char *data, uint64_t at, size_t bytes)
{
    const char *got = data;
    side_status status = SIDE_OK;

    if (!v->run->args.host) {
        status = side_copy_async(v->stream, SIDE_COPY_D2H, v->pinned, data, bytes);
        if (status == SIDE_OK)
            status = side_stream_sync(v->stream, TIMEOUT_S);
        got = v->pinned;
    }
    if (status != SIDE_OK)
        return say_status(status, "reading '%.100s' back", t->name);
    if (!read_all(fd, v->file, bytes, t->offset + at)) {
        say("verifying '%.100s': its file cannot be read again: %s", t->name, strerror(errno));
        return EXIT_FAILED;
    }
    if (memcmp(got, v->file, bytes) == 0)
        return EXIT_DONE;
    while (*got == v->file[got - (v->run->args.host ? data : (const char *)v->pinned)])
        got++;
    say("'%.100s' differs from its file from byte %llu on", t->name,
        (unsigned long long)(at + (uint64_t)(got - (v->run->args.host ? data : (const char *)v->pinned))));
    return EXIT_FAILED;
}

static int verify_all(struct verify *v, side_load *load)
{
    struct load_run *r = v->run;
    side_checkpoint_file_info file;
    side_load_place place;
    side_tensor t;
    int code = EXIT_DONE;

    for (size_t i = 0; code == EXIT_DONE && i < r->part_count; i++) {
        side_status status = side_checkpoint_tensor(r->checkpoint, r->parts[i].tensor, &t);
        if (status == SIDE_OK)
            status = side_checkpoint_file(r->checkpoint, t.file, &file);
        if (status == SIDE_OK)
            status = side_load_get_place(load, i, &place);
        if (status != SIDE_OK)
            return say_status(status, "verifying");
        for (uint64_t at = 0; code == EXIT_DONE && at < t.bytes; at += CHUNK)
            code = verify_chunk(v, &t, file.fd, (const char *)place.data + at, at,
                                t.bytes - at < CHUNK ? (size_t)(t.bytes - at) : CHUNK);
    }
    return code;
}

int load_verify(struct load_run *r, side_load *load)
{
    struct verify v = {.run = r, .file = malloc(CHUNK)};
    side_status status = v.file != NULL ? SIDE_OK : SIDE_NO_MEMORY;
    int code;

    if (status == SIDE_OK)
        status = side_stream_create(r->device, &v.stream);
    if (status == SIDE_OK)
        status = side_device_pool(r->device, &v.pool);
    if (status == SIDE_OK)
        status = side_pool_alloc(v.pool, CHUNK, &v.pinned);
    code = status == SIDE_OK ? verify_all(&v, load) : say_status(status, "verifying");
    if (code == EXIT_STUCK)
        return code;
    if (v.pinned != NULL)
        side_pool_free(v.pool, v.pinned, NULL, 0);
    side_stream_destroy(v.stream);
    free(v.file);
    r->verified = code == EXIT_DONE;
    return code;
}
