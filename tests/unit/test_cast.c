/* SPDX-License-Identifier: MIT
 *
 * Casts of checkpoints on the software device: what the new file is, byte for byte, against one made here from the definition; whatever fails, at whatever
 * point, and however the journal ends, going on gives that file. */
#include "cast_help.h"

#include "io.h"

#include <errno.h>
#include <stdatomic.h>

/* ---------------------------------------------------------------- what it is */

static bool only_named(void *user, const side_tensor *tensor)
{
    return strcmp(tensor->name, user) == 0;
}

T_TEST(every_type_piece_and_alignment)
{
    static const char *const names[] = {"BF16", "F16", "F8_E4M3", "F8_E5M2", "F32"};
    static const side_dtype types[] = {SIDE_DTYPE_BF16, SIDE_DTYPE_F16, SIDE_DTYPE_F8_E4M3, SIDE_DTYPE_F8_E5M2,
                                       SIDE_DTYPE_F32};
    static const size_t pieces[] = {4096, 16384, 0};

    for (int pad = 0; pad < 8; pad += 3) {
        struct rig r = rig_make(pad);
        for (size_t k = 0; k < 5; k++)
            for (size_t p = 0; p < 3; p++) {
                side_cast_stats t;
                free(r.expected.data);
                r.expected = make_expected(names[k], NULL);
                r.o.to = types[k];
                r.o.piece_bytes = pieces[p];
                r.o.pinned_bytes = p == 0 ? 1 : 0;
                T_OK(cast_once(&r, &t));
                assert_int_equal(t.tensors, TENSORS);
                assert_int_equal(t.cast_tensors, TENSORS - 3 - (k < 4 ? 1 : 7));
                assert_int_equal(t.pieces_done, t.pieces);
                assert_int_equal(t.read_bytes, t.bytes_in);
                assert_true(p != 0 || t.slots == 2);
                assert_true(p != 2 || t.pieces < TENSORS); /* small neighbours travel together */
                expect_whole(&r);
            }
        char one[] = "m";
        r.o.to = SIDE_DTYPE_BF16;
        r.o.select = only_named;
        r.o.select_user = one;
        free(r.expected.data);
        r.expected = make_expected("BF16", "m");
        T_OK(cast_once(&r, NULL));
        expect_whole(&r);
        rig_free(&r);
    }
}

/* Where files are written through mappings: input and output in memory, pieces that share pages. */
T_TEST(in_memory)
{
    struct rig r = rig_make(3);
    const int shm = open("/dev/shm", O_RDONLY | O_DIRECTORY);
    side_cast_stats t;

    if (shm < 0 || !io_in_memory(shm))
        T_SKIP("/dev/shm is no file system in memory");
    close(shm);
    snprintf(r.out, sizeof(r.out), "/dev/shm/cast-%ld.safetensors", (long)getpid());
    snprintf(r.part, sizeof(r.part), "%s.cast-part", r.out);
    snprintf(r.journal, sizeof(r.journal), "%s.cast-journal", r.out);
    leave_half(&r);
    T_OK(cast_once(&r, &t));
    assert_true(t.resumed_bytes > 0);
    expect_whole(&r);
    r.o.piece_bytes = 0;
    T_OK(cast_once(&r, &t));
    expect_whole(&r);
    rig_free(&r);
}

/* Nothing is cast: the file is the same, header and all. And a header alone. */
T_TEST(nothing_to_do)
{
    struct rig r = rig_make(5);
    unsigned char *first = values;
    struct image input = make_input(5);
    char none[] = "there is none";
    side_cast_stats t;

    free(values);
    values = first;
    r.o.select = only_named;
    r.o.select_user = none;
    T_OK(cast_once(&r, &t));
    assert_int_equal(t.cast_tensors, 0);
    assert_true(is_file(r.out, &input));
    unlink(r.out);
    static const char header[] = "{\"x\":{\"dtype\":\"F32\",\"shape\":[0,7],\"data_offsets\":[0,0]}}  ";
    write_safetensors(r.in, header, sizeof(header) - 1, 0);
    r.o.select = NULL;
    T_OK(cast_once(&r, &t));
    assert_int_equal(t.pieces, 0);
    char text[80];
    snprintf(text, sizeof(text), "........%-64s", "{\"x\":{\"dtype\":\"BF16\",\"shape\":[0,7],\"data_offsets\":[0,0]}}");
    memcpy(text, "\x40\0\0\0\0\0\0\0", 8);
    memcpy(r.expected.data, text, 72);
    r.expected.bytes = 72;
    assert_true(is_file(r.out, &r.expected));
    free(input.data);
    rig_free(&r);
}

/* ---------------------------------------------------------------- whatever fails */

static atomic_int countdown; /* to the call that fails */
static atomic_bool failed_one;

static ssize_t failing_write(int fd, const void *data, size_t bytes, off_t offset)
{
    if (atomic_fetch_sub(&countdown, 1) == 1) {
        atomic_store(&failed_one, true);
        if (bytes > 1)
            (void)!pwrite(fd, data, bytes / 2, offset); /* half of it is there */
        errno = ENOSPC;
        return -1;
    }
    return pwrite(fd, data, bytes, offset);
}

static int failing_read(enum io_call call, int fd, uint64_t offset, size_t *bytes)
{
    (void)fd;
    (void)offset;
    (void)bytes;
    if (call != IO_PREAD && call != IO_PREAD_NOWAIT && call != IO_PREAD_DIRECT && call != IO_RING_READ)
        return 0;
    if (atomic_fetch_sub(&countdown, 1) > 1)
        return 0;
    atomic_store(&failed_one, true); /* and so do all others: a reader tries another way */
    return -EIO;
}

/* Fails call after call of one cast, that each time goes on where it was. Then once for each call from the beginning. */
static void fail_each(struct rig *r, bool reads)
{
    const int step = T_SANITIZED ? 23 : 5;
    uint64_t resumed = 0;

    for (int nth = 1, left = 1000; left > 0; left--) {
        side_cast_stats t = {0};
        atomic_store(&failed_one, false);
        atomic_store(&countdown, nth);
        if (reads)
            io_test = failing_read;
        else
            os_test_pwrite = failing_write;
        const side_status s = cast_once(r, &t);
        io_test = NULL;
        os_test_pwrite = NULL;
        assert_true(t.resumed_bytes >= resumed || s == SIDE_OK);
        resumed = t.resumed_bytes;
        if (s == SIDE_OK) {
            assert_false(atomic_load(&failed_one));
            assert_true(left < 1000);
            break;
        }
        assert_int_equal(s, SIDE_IO);
        assert_true(atomic_load(&failed_one));
        assert_true(side_last_error()->os_errno == (reads ? EIO : ENOSPC));
        assert_false(exists(r->out));
        assert_int_equal(exists(r->part), exists(r->journal));
        nth += step;
    }
    expect_whole(r);
}

T_TEST(disk_full_at_any_write)
{
    struct rig r = rig_make(3);

    fail_each(&r, false);
    rig_free(&r);
}

T_TEST(read_errors_at_any_read)
{
    struct rig r = rig_make(3);

    fail_each(&r, true);
    rig_free(&r);
}

T_TEST(a_device_that_fails)
{
    struct rig r = rig_make(0);
    unsigned failures = 0;

    side_device_close(r.dev);
    for (unsigned nth = 1; nth < 2000; nth = nth + 1 + nth / 4) {
        char spec[64];
        snprintf(spec, sizeof(spec), "sim:h200,fail=%u", nth);
        if (side_device_open(spec, &r.dev) != SIDE_OK)
            continue;
        const side_status s = cast_once(&r, NULL);
        failures += s != SIDE_OK;
        assert_int_equal(exists(r.out), s == SIDE_OK);
        if (s == SIDE_OK)
            unlink(r.out);
        side_device_close(r.dev);
    }
    assert_true(failures > 3);
    T_OK(side_device_open("sim", &r.dev));
    T_OK(cast_once(&r, NULL));
    expect_whole(&r);
    rig_free(&r);
}

T_TEST(no_memory)
{
    struct rig r = rig_make(1);
    unsigned long nth = 1;

    for (;; nth++) {
        (void)mem_fail_at(nth);
        const side_status s = cast_once(&r, NULL);
        const unsigned long calls = mem_fail_at(0);
        if (calls < nth) {
            T_OK(s);
            break;
        }
        if (s == SIDE_OK) /* that one could be done without */
            assert_int_equal(unlink(r.out), 0);
        else
            assert_false(exists(r.out));
    }
    assert_true(nth > 20);
    if (exists(r.out))
        expect_whole(&r);
    rig_free(&r);
}

/* ---------------------------------------------------------------- the journal */

T_TEST(cancelled_and_gone_on_with)
{
    struct rig r = rig_make(2);
    side_cast *cast, *second = NULL;
    side_cast_stats t;

    T_OK(side_cast_create(r.in, r.out, &r.o, &cast)); /* before it runs: nothing is left of it */
    T_STATUS(side_cast_create(r.in, r.out, &r.o, &second), SIDE_STATE);
    assert_non_null(strstr(side_last_error()->message, "another process"));
    side_cast_cancel(cast);
    T_STATUS(side_cast_run(cast, r.dev, NULL), SIDE_CANCELLED);
    T_STATUS(side_cast_run(cast, r.dev, NULL), SIDE_STATE);
    side_cast_destroy(cast);
    assert_false(exists(r.out) || exists(r.part) || exists(r.journal));
    leave_half(&r);
    T_OK(cast_once(&r, &t));
    assert_true(t.resumed_bytes > 0 && t.read_bytes == t.bytes_in - t.resumed_bytes);
    expect_whole(&r);
    rig_free(&r);
}

/* Cut off anywhere, or with any byte changed: either it is gone on with, or it is refused; and never is the file another one. */
T_TEST(any_journal)
{
    struct rig r = rig_make(2);
    struct image part, journal;
    uint64_t refused = 0, resumed = 0;

    leave_half(&r);
    part = read_file(r.part);
    journal = read_file(r.journal);
    for (size_t i = 0; i < 2 * journal.bytes; i += T_SANITIZED ? 37 : 5) {
        const bool cut = i < journal.bytes;
        const size_t at = i % journal.bytes;
        side_cast_stats t = {0};
        journal.data[at] ^= cut ? 0 : 1;
        write_bytes(r.journal, journal.data, cut ? at : journal.bytes);
        journal.data[at] ^= cut ? 0 : 1;
        write_bytes(r.part, part.data, part.bytes);
        side_status s = cast_once(&r, &t);
        if (s == SIDE_STATE) {
            refused++;
            r.o.flags = SIDE_CAST_RESTART;
            if (!cut && at < 24) { /* it may be anybody's file */
                expect_refused(&r, SIDE_STATE, "is no journal of a cast; move it away");
                assert_true(is_file(r.part, &part));
                assert_int_equal(unlink(r.journal), 0);
            }
            s = cast_once(&r, &t);
            r.o.flags = 0;
            assert_int_equal(t.resumed_bytes, 0);
        }
        T_OK(s);
        resumed = t.resumed_bytes > resumed ? t.resumed_bytes : resumed;
        expect_whole(&r);
    }
    assert_true(refused > 0);
    write_bytes(r.journal, journal.data, journal.bytes);
    write_bytes(r.part, part.data, part.bytes);
    side_cast_stats t;
    T_OK(cast_once(&r, &t));
    assert_true(t.resumed_bytes > 0 && t.resumed_bytes >= resumed);
    expect_whole(&r);
    free(part.data);
    free(journal.data);
    rig_free(&r);
}

T_TEST(of_other_inputs_or_options)
{
    struct rig r = rig_make(2);
    char none[] = "m";
    struct image part;
    side_cast_stats t;

    leave_half(&r);
    part = read_file(r.part);
    r.o.to = SIDE_DTYPE_F16;
    expect_refused(&r, SIDE_STATE, "was begun to BF16, not F16");
    r.o.to = SIDE_DTYPE_BF16;
    r.o.piece_bytes = 8192;
    expect_refused(&r, SIDE_STATE, "in pieces of 4096 bytes, not 8192");
    r.o.piece_bytes = 4096;
    r.o.select = only_named;
    r.o.select_user = none;
    expect_refused(&r, SIDE_STATE, "with other tensors selected");
    r.o.select = NULL;
    const struct timespec times[2] = {{1, 0}, {1, 0}};
    struct stat before;
    assert_int_equal(stat(r.in, &before), 0);
    assert_int_equal(utimensat(AT_FDCWD, r.in, times, 0), 0);
    expect_refused(
        &r, SIDE_STATE,
        "before in.safetensors was changed: its time of change is another: go on as it was begun, or begin anew");
    assert_true(is_file(r.part, &part)); /* all those have changed nothing */
    const struct timespec back[2] = {before.st_atim, before.st_mtim};
    assert_int_equal(utimensat(AT_FDCWD, r.in, back, 0), 0);
    assert_int_equal(rename(r.journal, r.out), 0);
    unlink(r.out);
    expect_refused(&r, SIDE_STATE, "is there without a journal");
    assert_true(is_file(r.part, &part) && !exists(r.out));
    r.o.flags = SIDE_CAST_RESTART;
    T_OK(cast_once(&r, &t));
    r.o.flags = 0;
    expect_whole(&r);
    /* The unfinished file is gone, or is another size: what the journal says of it is not so. */
    leave_half(&r);
    assert_int_equal(truncate(r.part, 100), 0);
    T_OK(cast_once(&r, &t));
    assert_int_equal(t.resumed_bytes, 0);
    expect_whole(&r);
    free(part.data);
    rig_free(&r);
}

/* Ended between its renaming and the journal's end: there is nothing left to do. */
T_TEST(ended_after_the_renaming)
{
    struct rig r = rig_make(2);
    side_cast_stats t;
    side_cast *cast;

    T_OK(side_cast_create(r.in, r.out, &r.o, &cast));
    assert_int_equal(mkdir(r.out, 0700), 0);
    T_STATUS(side_cast_run(cast, r.dev, NULL), SIDE_IO); /* a file cannot be renamed to a folder */
    side_cast_destroy(cast);
    assert_int_equal(rmdir(r.out), 0);
    assert_int_equal(rename(r.part, r.out), 0);
    T_OK(cast_once(&r, &t));
    assert_int_equal(t.pieces_done, t.pieces);
    expect_whole(&r);
    rig_free(&r);
}

/* ---------------------------------------------------------------- shards, and what is refused */

T_TEST(shards)
{
    static const char
        index[] = "{\n  \"metadata\": {\n    \"total_parameters\": 5, \"total_size\": 99\n  },\n  \"weight_map\": {\n"
                  "    \"a\": \"m-1.safetensors\",\n    \"b\": \"sub/m-2.safetensors\"}}\n";
    static const char expected[] =
        "{\n  \"metadata\": {\n    \"total_parameters\": 5, \"total_size\": 14\n  },\n  \"weight_map\": {\n"
        "    \"a\": \"m-1.safetensors\",\n    \"b\": \"sub/m-2.safetensors\"}}\n";
    static const char header[] = "{\"a\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,12]}}";
    static const char other[] = "{\"b\":{\"dtype\":\"I32\",\"shape\":[2],\"data_offsets\":[0,8]}}   ";
    struct rig r = rig_make(0);
    struct image image;
    side_cast_stats t;

    snprintf(r.in, sizeof(r.in), "%s", in_folder("model"));
    assert_int_equal(mkdir(r.in, 0700) | mkdir(in_folder("model/sub"), 0700), 0);
    write_safetensors(in_folder("model/m-1.safetensors"), header, sizeof(header) - 1, 12);
    write_safetensors(in_folder("model/sub/m-2.safetensors"), other, sizeof(other) - 1, 8);
    write_bytes(in_folder("model/model.safetensors.index.json"), index, sizeof(index) - 1);
    expect_refused(&r, SIDE_OK, "");
    image = (struct image){(unsigned char *)strdup(expected), sizeof(expected) - 1};
    assert_true(is_file(in_folder("out.safetensors/model.safetensors.index.json"), &image));
    free(image.data);
    image = read_file(in_folder("model/sub/m-2.safetensors")); /* nothing is cast of it: as it was, spaces and all */
    assert_true(is_file(in_folder("out.safetensors/sub/m-2.safetensors"), &image));
    free(image.data);
    side_checkpoint *ck;
    side_tensor tensor;
    T_OK(side_checkpoint_open(r.out, NULL, &ck));
    T_OK(side_checkpoint_tensor(ck, 0, &tensor));
    assert_int_equal(tensor.type, SIDE_DTYPE_BF16);
    side_checkpoint_close(ck);
    assert_false(exists(r.part) || exists(r.journal));
    /* A folder that is not empty stays; by its index file it is the same. */
    r.o.flags = SIDE_CAST_REPLACE;
    expect_refused(&r, SIDE_STATE, "not empty");
    r.o.flags = 0;
    assert_false(exists(r.part) || exists(r.journal));
    snprintf(r.in, sizeof(r.in), "%s", in_folder("model/model.safetensors.index.json"));
    snprintf(r.out, sizeof(r.out), "%s/", in_folder("other"));
    assert_int_equal(mkdir(r.out, 0700), 0);
    T_OK(cast_once(&r, &t));
    assert_int_equal(t.files, 2);
    assert_true(exists(in_folder("other/sub/m-2.safetensors")));
    rig_free(&r);
}

T_TEST(what_is_in_the_way)
{
    struct rig r = rig_make(0);
    struct image old = read_file(r.in);
    side_cast *cast = NULL;
    struct stat there;

    T_OK(cast_once(&r, NULL));
    assert_int_equal(chmod(r.out, 0640), 0);
    expect_refused(&r, SIDE_STATE, "is there; name another file, or ask that it be replaced (--force)");
    assert_false(exists(r.part) || exists(r.journal));
    r.o.flags = SIDE_CAST_REPLACE;
    T_OK(cast_once(&r, NULL));
    assert_int_equal(stat(r.out, &there), 0);
    assert_int_equal(there.st_mode & 07777, 0640);
    expect_whole(&r);
    snprintf(r.out, sizeof(r.out), "%s", r.in);
    expect_refused(&r, SIDE_INVALID, "is the input itself");
    assert_true(is_file(r.in, &old));
    snprintf(r.out, sizeof(r.out), "%s", t_tmpdir());
    expect_refused(&r, SIDE_INVALID, "is a folder, and the input one file");
    snprintf(r.out, sizeof(r.out), "%s/none/out", t_tmpdir());
    expect_refused(&r, SIDE_IO, "No such file or directory");
    snprintf(r.out, sizeof(r.out), "%s/out", t_tmpdir());
    side_cast_options o = r.o;
    o.to = SIDE_DTYPE_I32;
    T_STATUS(side_cast_create(r.in, r.out, &o, &cast), SIDE_INVALID);
    o.to = SIDE_DTYPE_F16;
    o.piece_bytes = 5000;
    T_STATUS(side_cast_create(r.in, r.out, &o, &cast), SIDE_INVALID);
    T_STATUS(side_cast_create(in_folder("absent"), r.out, &r.o, &cast), SIDE_NOT_FOUND);
    T_STATUS(side_cast_create(r.in, "", &r.o, &cast), SIDE_INVALID);
    T_STATUS(side_cast_create(r.in, r.out, NULL, &cast), SIDE_INVALID);
    assert_false(exists(r.out));
    free(old.data);
    rig_free(&r);
}

/* An input that is changed while it is read. */
static void touch(void *user, uint64_t done, uint64_t total)
{
    const struct timespec times[2] = {{1, 0}, {1, 0}};

    (void)done;
    (void)total;
    assert_int_equal(utimensat(AT_FDCWD, user, times, 0), 0);
}

T_TEST(changed_meanwhile)
{
    struct rig r = rig_make(0);

    r.o.progress = touch;
    r.o.progress_user = r.in;
    expect_refused(
        &r, SIDE_IO,
        "in.safetensors was changed while it was cast, by its time of change: what is done is of the old one; "
        "once it stays as it is, begin anew (--restart)");
    assert_false(exists(r.out));
    r.o.progress = NULL;
    expect_refused(&r, SIDE_STATE, "before in.safetensors was changed: its time of change is another");
    rig_free(&r);
}

T_MAIN(T_LONG(every_type_piece_and_alignment, 60), T(in_memory), T(nothing_to_do), T(disk_full_at_any_write),
       T(read_errors_at_any_read), T(a_device_that_fails), T(no_memory), T(cancelled_and_gone_on_with),
       T_LONG(any_journal, 60), T(of_other_inputs_or_options), T(ended_after_the_renaming), T(shards),
       T(what_is_in_the_way), T(changed_meanwhile))
