/* SPDX-License-Identifier: MIT
 * Loads, on every device: what side_load(3) promises, through the public API alone. */
#include "conform.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <unistd.h>

enum { TENSORS = 40 };

struct model {
    char path[300];
    size_t bytes[TENSORS], at[TENSORS], total;
    unsigned char *data;
    side_checkpoint *ck;
};

/* Every third tensor ends on an odd byte, so that those behind it are not aligned; one is of 9 MiB, some are empty. */
static void model_make(struct model *m)
{
    char *header = calloc(1, 200 * TENSORS);
    size_t n = 1;

    memset(m, 0, sizeof(*m));
    header[0] = '{';
    for (size_t i = 0; i < TENSORS; i++) {
        m->bytes[i] = i == 5 ? 9 * MIB : i % 10 == 3 ? 0 : i * 4096 + (i % 3 == 0 ? 1 : 0);
        m->at[i] = m->total;
        m->total += m->bytes[i];
        n += (size_t)sprintf(header + n, "%s\"t%zu\":{\"dtype\":\"U8\",\"shape\":[%zu],\"data_offsets\":[%zu,%zu]}",
                             i > 0 ? "," : "", i, m->bytes[i], m->at[i], m->total);
    }
    header[n++] = '}';
    m->data = host_make(m->total);
    fill(m->data, m->total, 7);
    snprintf(m->path, sizeof(m->path), "%s/model.safetensors", t_tmpdir());
    FILE *f = fopen(m->path, "wb");
    const uint64_t length = n;
    assert_non_null(f);
    assert_int_equal(fwrite(&length, 8, 1, f) + fwrite(header, n, 1, f) + fwrite(m->data, m->total, 1, f), 3);
    assert_int_equal(fclose(f), 0);
    free(header);
    T_OK(side_checkpoint_open(m->path, NULL, &m->ck));
}

static void model_free(struct model *m)
{
    side_checkpoint_close(m->ck);
    unlink(m->path);
    free(m->data);
}

/* The device's tensors, as a stream sees them that waited for each. */
static void check_parts(struct rig *r, struct model *m, side_load *load)
{
    unsigned char *seen = pinned_make(r->device, m->total);
    side_tensor t;

    for (size_t i = TENSORS; i-- > 0;) { /* those that come last first */
        side_load_place at;
        T_OK(side_load_wait(load, i, r->stream));
        T_OK(side_load_get_place(load, i, &at));
        T_OK(side_checkpoint_tensor(m->ck, i, &t));
        assert_int_equal(at.bytes, t.bytes);
        assert_int_equal((uintptr_t)at.data % 16, 0);
        const size_t k = (size_t)strtoul(t.name + 1, NULL, 10);
        T_OK(side_copy_async(r->stream, SIDE_COPY_D2H, seen + m->at[k], at.data, m->bytes[k]));
    }
    sync_stream(r->stream);
    check_equal(seen, m->data, m->total, "tensors");
    pinned_free(r->device, seen);
}

T_TEST(a_model_arrives)
{
    static const side_load_backend backends[] = {SIDE_LOAD_AUTO, SIDE_LOAD_PREAD, SIDE_LOAD_DIRECT, SIDE_LOAD_URING};
    struct rig r = rig_open();
    struct model m;

    model_make(&m);
    for (int i = 0; i < 4; i++) {
        side_load_options o = SIDE_LOAD_OPTIONS_INIT;
        side_load_stats s;
        side_load *load = NULL;
        o.backend = backends[i];
        o.piece_bytes = i == 0 ? 0 : 256 * KIB;
        o.pinned_bytes = i == 0 ? 0 : 2 * MIB;
        side_status status = side_load_start(r.device, m.ck, &o, &load);
        if (status == SIDE_UNSUPPORTED && i >= 2) /* the file system has no O_DIRECT, or the kernel no io_uring for us */
            continue;
        T_OK(status);
        check_parts(&r, &m, load);
        T_OK(side_load_join(load, &s));
        assert_int_equal(s.copied_bytes, m.total);
        assert_true(s.moved_bytes > 0 && s.moved_bytes < m.total);
        assert_true(s.pinned_bytes <= (i == 0 ? 128 * MIB : 2 * MIB));
        T_OK(side_load_destroy(load));
    }
    model_free(&m);
    rig_close(&r);
}

/* Slices to memory of the caller's, in its order, behind what it has queued; and the sums of whole tensors. */
T_TEST(slices_and_sums)
{
    struct rig r = rig_open();
    struct model m;
    side_load_options o = SIDE_LOAD_OPTIONS_INIT;
    side_load_part parts[8];
    side_load *load = NULL;
    uint64_t hash;

    model_make(&m);
    unsigned char *mine = device_make(r.device, 8 * MIB), *seen = pinned_make(r.device, 8 * MIB);
    T_OK(side_memset_async(r.stream, mine, 0, 8 * MIB));
    o.parts = parts;
    o.count = 8;
    o.flags = SIDE_LOAD_IN_ORDER;
    o.memory_stream = r.stream;
    for (size_t i = 0; i < 8; i++) /* of the 9 MiB, from behind */
        parts[i] = (side_load_part){.tensor = 5, .begin = (8 - i) * MIB + 13, .bytes = MIB - 13, .data = mine + i * MIB};
    side_tensor t;
    T_OK(side_checkpoint_tensor(m.ck, 5, &t));
    assert_string_equal(t.name, "t5");
    T_OK(side_load_start(r.device, m.ck, &o, &load));
    T_OK(side_load_wait(load, SIDE_LOAD_ALL, r.stream));
    T_OK(side_copy_async(r.stream, SIDE_COPY_D2H, seen, mine, 8 * MIB));
    sync_stream(r.stream);
    T_OK(side_load_join(load, NULL));
    for (size_t i = 0; i < 8; i++)
        check_equal(seen + i * MIB, m.data + m.at[5] + (8 - i) * MIB + 13, MIB - 13, "slice");
    T_OK(side_load_destroy(load));

    o = (side_load_options)SIDE_LOAD_OPTIONS_INIT;
    o.flags = SIDE_LOAD_CHECKSUM;
    side_status status = side_load_start(r.device, m.ck, &o, &load);
    if (status != SIDE_UNSUPPORTED) { /* no kernels */
        T_OK(status);
        T_OK(side_load_join(load, NULL));
        for (size_t i = 0; i < TENSORS; i++) {
            T_OK(side_checkpoint_tensor(m.ck, i, &t));
            const size_t k = (size_t)strtoul(t.name + 1, NULL, 10);
            T_OK(side_load_get_checksum(load, i, &hash));
            assert_int_equal(hash, XXH3_64bits(m.data + m.at[k], m.bytes[k]));
        }
        T_OK(side_load_destroy(load));
    }
    pinned_free(r.device, seen);
    side_device_free(r.device, mine);
    model_free(&m);
    rig_close(&r);
}

T_MAIN(EVERY(a_model_arrives), EVERY(slices_and_sums))
