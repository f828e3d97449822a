/* SPDX-License-Identifier: MIT
 *
 * The writer of safetensors files: layout to the byte, round trips, refusals, and that a file is whole or not there. The reference implementation reads
 * and writes the same in tests/py/test_safetensors.py. */
#include "checkpoint_help.h"

#include "alloc.h"
#include "os.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

static side_tensor make(const char *name, side_dtype type, uint32_t rank, const uint64_t *dims)
{
    return (side_tensor){.name = name, .name_bytes = strlen(name), .type = type, .rank = rank, .dims = dims};
}

/* Files in the test's folder. */
static size_t files_there(void)
{
    DIR *dir = opendir(t_tmpdir());
    size_t n = 0;

    assert_non_null(dir);
    for (const struct dirent *e; (e = readdir(dir)) != NULL;)
        n += e->d_name[0] != '.';
    closedir(dir);
    return n;
}

static size_t read_file(const char *path, char *data, size_t most)
{
    FILE *f = fopen(path, "rb");
    size_t n;

    assert_non_null(f);
    n = fread(data, 1, most, f);
    fclose(f);
    return n;
}

T_TEST(layout)
{
    static const char header[] = "{\"__metadata__\":{\"z\":\"\\\"\\\\\\b\\t\\n\\f\\r\\u0001\x7f\xc3\xa4/\",\"a\":\"\"},"
                                 "\"B\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[0,8]},"
                                 "\"\":{\"dtype\":\"F32\",\"shape\":[0,3],\"data_offsets\":[8,8]},"
                                 "\"a\\n\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[8,12]},"
                                 "\"ab\":{\"dtype\":\"BF16\",\"shape\":[1],\"data_offsets\":[12,14]},"
                                 "\"abc\":{\"dtype\":\"F4\",\"shape\":[3,2],\"data_offsets\":[14,17]}}";
    static const char *const metadata[] = {"z", "\"\\\b\t\n\f\r\1\x7f\xc3\xa4/", "a", ""};
    const uint64_t one[] = {1}, none[] = {0, 3}, six[] = {3, 2};
    const side_tensor tensors[] = {make("abc", SIDE_DTYPE_F4, 2, six), make("ab", SIDE_DTYPE_BF16, 1, one),
                                   make("a\n", SIDE_DTYPE_F32, 1, one), make("B", SIDE_DTYPE_I64, 0, NULL),
                                   make("", SIDE_DTYPE_F32, 2, none)};
    side_writer_options o = SIDE_WRITER_OPTIONS_INIT;
    const char *path = in_folder("m.safetensors");
    const size_t text = sizeof(header) - 1, padded = (text + 7) / 8 * 8;
    char got[1024];
    uint64_t offset, bytes;
    side_writer *w;
    int fd;

    o.metadata = metadata;
    o.metadata_count = 2;
    T_OK(side_writer_create(path, tensors, 5, &o, &w));
    assert_false(side_writer_resumed(w));
    T_OK(side_writer_place(w, 1, &offset, &bytes, &fd));
    assert_true(offset == 8 + padded + 12 && bytes == 2 && fd >= 0);
    T_OK(side_writer_write(w, 3, 0, "01234567", 8));
    T_OK(side_writer_write(w, 0, 1, "bc", 2));
    T_OK(side_writer_write(w, 0, 0, "a", 1));
    T_OK(side_writer_write(w, 4, 0, NULL, 0));
    T_STATUS(side_writer_write(w, 0, 2, "xx", 2), SIDE_INVALID);
    T_STATUS(side_writer_write(w, 0, UINT64_MAX, "xx", 2), SIDE_INVALID);
    T_STATUS(side_writer_write(w, 0, 0, NULL, 1), SIDE_INVALID);
    T_STATUS(side_writer_write(w, 5, 0, "x", 1), SIDE_INVALID);
    assert_int_equal(access(path, F_OK), -1);
    T_OK(side_writer_finish(w));
    T_STATUS(side_writer_finish(w), SIDE_STATE);
    T_STATUS(side_writer_place(w, 0, NULL, NULL, NULL), SIDE_STATE);
    side_writer_destroy(w);
    assert_int_equal(files_there(), 1);
    assert_int_equal(read_file(path, got, sizeof(got)), 8 + padded + 17);
    assert_true((unsigned char)got[0] == (padded & 255) && (unsigned char)got[1] == padded >> 8 && got[2] == 0);
    assert_memory_equal(got + 8, header, text);
    for (size_t i = text; i < padded; i++)
        assert_int_equal(got[8 + i], ' ');
    assert_memory_equal(got + 8 + padded, "01234567\0\0\0\0\0\0abc", 17);
}

/* No tensors; metadata that is empty but there. */
T_TEST(nothing)
{
    static const char *const none[] = {NULL};
    side_writer_options o = SIDE_WRITER_OPTIONS_INIT;
    char got[64];
    side_writer *w;

    T_OK(side_writer_create(in_folder("a"), NULL, 0, NULL, &w));
    T_OK(side_writer_finish(w));
    side_writer_destroy(w);
    assert_int_equal(read_file(in_folder("a"), got, sizeof(got)), 16);
    assert_memory_equal(got, "\x08\0\0\0\0\0\0\0{}      ", 16);
    o.metadata = none;
    T_OK(side_writer_create(in_folder("b"), NULL, 0, &o, &w));
    T_OK(side_writer_finish(w));
    side_writer_destroy(w);
    assert_int_equal(read_file(in_folder("b"), got, sizeof(got)), 32);
    assert_memory_equal(got + 8, "{\"__metadata__\":{}}     ", 24);
}

/* Whatever is written is read as it was. */
T_TEST(round_trip)
{
    enum { N = 40 };

    T_FOR_SEEDS (seed, 30) {
        t_rng rng = t_rng_make(seed);
        char names[N][24], path[512];
        uint64_t dims[N][3];
        unsigned char data[64];
        side_tensor tensors[N], t;
        side_checkpoint_file_info file;
        side_checkpoint *ck;
        side_writer *w;
        size_t index;
        for (size_t i = 0; i < N; i++) {
            for (int d = 0; d < 3; d++)
                dims[i][d] = t_rng_below(&rng, 3);
            snprintf(names[i], sizeof(names[i]), "%c%c%zu", (int)t_rng_below(&rng, 127) + 1,
                     (int)t_rng_below(&rng, 127) + 1, i);
            tensors[i] = make(names[i], (side_dtype)t_rng_below(&rng, SIDE_DTYPE_COUNT), (uint32_t)t_rng_below(&rng, 3),
                              dims[i]);
            if (side_dtype_bits(tensors[i].type) % 8 != 0)
                dims[i][0] = 4, tensors[i].rank = 1;
        }
        snprintf(path, sizeof(path), "%s", in_folder("m.safetensors"));
        T_OK(side_writer_create(path, tensors, N, NULL, &w));
        for (size_t i = 0; i < N; i++) {
            T_OK(side_writer_place(w, i, NULL, &tensors[i].bytes, NULL));
            memset(data, (int)i, sizeof(data));
            T_OK(side_writer_write(w, i, 0, data, tensors[i].bytes));
        }
        T_OK(side_writer_finish(w));
        side_writer_destroy(w);
        T_OK(open_with(path, SIDE_CHECKPOINT_STRICT_SPEC, &ck));
        assert_int_equal(side_checkpoint_count(ck), N);
        T_OK(side_checkpoint_file(ck, 0, &file));
        for (size_t i = 0; i < N; i++) {
            T_OK(side_checkpoint_find(ck, names[i], strlen(names[i]), &index));
            T_OK(side_checkpoint_tensor(ck, index, &t));
            assert_true(t.type == tensors[i].type && t.rank == tensors[i].rank && t.bytes == tensors[i].bytes);
            assert_true(t.rank == 0 || memcmp(t.dims, dims[i], t.rank * sizeof(uint64_t)) == 0);
            assert_int_equal(pread(file.fd, data, t.bytes, (off_t)t.offset), t.bytes);
            for (size_t k = 0; k < t.bytes; k++)
                assert_int_equal(data[k], i);
        }
        side_checkpoint_close(ck);
    }
}

static void refuses(const side_tensor *tensors, size_t count, const side_writer_options *o, const char *word)
{
    side_writer *w;

    T_STATUS(side_writer_create(in_folder("m.safetensors"), tensors, count, o, &w), SIDE_INVALID);
    if (strstr(side_last_error()->message, word) == NULL)
        T_FAIL("expected '%s', got: %s", word, side_last_error()->message);
    assert_int_equal(files_there(), 0);
}

T_TEST(refusals)
{
    static const char *const bad_utf8[] = {"a", "\xff"}, *const twice[] = {"a", "1", "a", "2"}, *const null[] = {"a", NULL};
    const uint64_t large[] = {1ull << 62, 4}, three[] = {3}, huge[] = {1ull << 60};
    side_writer_options o = SIDE_WRITER_OPTIONS_INIT;
    side_tensor t[2] = {make("a", SIDE_DTYPE_U8, 0, NULL), make("a", SIDE_DTYPE_F32, 0, NULL)}, many[8];
    side_writer *w;

    refuses(t, 2, NULL, "tensor \"a\" stands twice");
    t[1] = make("\xc3", SIDE_DTYPE_U8, 0, NULL);
    refuses(t, 2, NULL, "is not UTF-8");
    t[1] = (side_tensor){.name = "x\0y", .name_bytes = 3};
    refuses(t, 2, NULL, "\\u0000 in a text");
    t[1] = make("__metadata__", SIDE_DTYPE_U8, 0, NULL);
    refuses(t, 2, NULL, "tensor 1: a tensor cannot be named __metadata__");
    t[1] = make("b\n", (side_dtype)22, 0, NULL);
    refuses(t, 2, NULL, "tensor 1 \"b\\x0a\": dtype 22 is unknown");
    t[1] = make("b", SIDE_DTYPE_U8, 65, large);
    refuses(t, 2, NULL, "65 dimensions");
    t[1] = make("b", SIDE_DTYPE_U8, 2, large);
    refuses(t, 2, NULL, "more bytes than 64 bits hold");
    t[1] = make("b", SIDE_DTYPE_F4, 1, three);
    refuses(t, 2, NULL, "3 elements of 4 bits fill no whole");
    t[1] = make("b", SIDE_DTYPE_U8, 1, NULL);
    refuses(t, 2, NULL, "tensor 1: dims is NULL");
    for (size_t i = 0; i < 8; i++)
        many[i] = make(&"abcdefgh"[i], SIDE_DTYPE_U8, 1, huge);
    refuses(many, 8, NULL, "all together have more bytes");
    o.metadata_count = 1;
    refuses(t, 1, &o, "metadata is NULL");
    o.metadata = null;
    refuses(t, 1, &o, "metadata 0: the value is NULL");
    o.metadata = bad_utf8;
    refuses(t, 1, &o, "is not UTF-8");
    o.metadata = twice;
    o.metadata_count = 2;
    refuses(t, 1, &o, "the key stands twice");
    o = (side_writer_options)SIDE_WRITER_OPTIONS_INIT;
    o.flags = 8;
    refuses(t, 1, &o, "flags 0x8");
    T_STATUS(side_writer_create(t_tmpdir(), t, 1, NULL, &w), SIDE_INVALID);
    T_STATUS(side_writer_create("/dev/null", t, 1, NULL, &w), SIDE_INVALID);
    T_STATUS(side_writer_create(in_folder("no/such/folder"), t, 1, NULL, &w), SIDE_IO);
    T_STATUS(side_writer_create(NULL, t, 1, NULL, &w), SIDE_INVALID);
    T_STATUS(side_writer_create("x", NULL, 1, NULL, &w), SIDE_INVALID);
    T_STATUS(side_writer_create("x", t, 1, NULL, NULL), SIDE_INVALID);
    T_STATUS(side_writer_finish(NULL), SIDE_INVALID);
    t[0] = make("a", SIDE_DTYPE_U8, 1, (const uint64_t[]){1ull << 60});
    T_STATUS(side_writer_create(in_folder("m.safetensors"), t, 1, NULL, &w), SIDE_IO);
    assert_non_null(strstr(side_last_error()->message, "are free there"));
    assert_int_equal(files_there(), 0);
}

static mode_t seen; /* rights of whatever is written to */

static ssize_t looking_pwrite(int fd, const void *data, size_t bytes, off_t offset)
{
    struct stat there;

    assert_int_equal(fstat(fd, &there), 0);
    seen |= there.st_mode & 07777;
    return pwrite(fd, data, bytes, offset);
}

/* Nobody may read of the new file who could not read the old one. */
T_TEST(replaces_a_private_one)
{
    const side_tensor t = make("a", SIDE_DTYPE_U8, 0, NULL);
    side_writer_options o = SIDE_WRITER_OPTIONS_INIT;
    const char *path = in_folder("m.safetensors");
    struct stat there;
    side_writer *w;

    umask(0);
    write_bytes(path, "old", 3);
    assert_int_equal(chmod(path, 0600), 0);
    for (int i = 0; i < 2; i++) {
        o.flags = i == 0 ? 0 : SIDE_WRITER_RESUME;
        seen = 0;
        os_test_pwrite = looking_pwrite;
        T_OK(side_writer_create(path, &t, 1, &o, &w));
        T_OK(side_writer_write(w, 0, 0, "x", 1));
        T_OK(side_writer_finish(w));
        side_writer_destroy(w);
        os_test_pwrite = NULL;
        assert_int_equal(seen, 0600);
        assert_int_equal(stat(path, &there), 0);
        assert_int_equal(there.st_mode & 07777, 0600);
    }
}

/* An old file stays until the new one is whole; its mode and the link to it stay. */
T_TEST(replaces)
{
    const side_tensor t = make("a", SIDE_DTYPE_U8, 0, NULL);
    const char *path = in_folder("m.safetensors"), *link = in_folder("link");
    struct stat there;
    char got[128];
    side_writer *w;

    write_bytes(path, "old", 3);
    assert_int_equal(chmod(path, 0640), 0);
    assert_int_equal(symlink("m.safetensors", link), 0);
    T_OK(side_writer_create(link, &t, 1, NULL, &w));
    assert_int_equal(files_there(), 3);
    side_writer_destroy(w);
    assert_true(files_there() == 2 && read_file(path, got, sizeof(got)) == 3);
    T_OK(side_writer_create(link, &t, 1, NULL, &w));
    T_OK(side_writer_finish(w));
    side_writer_destroy(w);
    assert_int_equal(lstat(link, &there), 0);
    assert_true(S_ISLNK(there.st_mode) && files_there() == 2);
    assert_int_equal(stat(path, &there), 0);
    assert_int_equal(there.st_mode & 07777, 0640);
    assert_true(there.st_size > 3);
    umask(027);
    T_OK(side_writer_create(in_folder("new"), &t, 1, NULL, &w));
    T_OK(side_writer_finish(w));
    side_writer_destroy(w);
    assert_int_equal(stat(in_folder("new"), &there), 0);
    assert_int_equal(there.st_mode & 07777, 0640);
}

/* What was begun is gone on with, if it has the same header; by one at a time. */
T_TEST(resumes)
{
    const uint64_t dims[] = {4};
    side_tensor t = make("a", SIDE_DTYPE_U8, 1, dims);
    side_writer_options o = SIDE_WRITER_OPTIONS_INIT;
    const char *path = in_folder("m.safetensors");
    char got[256];
    side_writer *w, *other;

    o.flags = SIDE_WRITER_RESUME;
    T_OK(side_writer_create(path, &t, 1, &o, &w));
    assert_false(side_writer_resumed(w));
    T_OK(side_writer_write(w, 0, 0, "12", 2));
    T_STATUS(side_writer_create(path, &t, 1, &o, &other), SIDE_STATE);
    side_writer_destroy(w);
    T_OK(side_writer_create(path, &t, 1, &o, &w));
    assert_true(side_writer_resumed(w));
    T_OK(side_writer_write(w, 0, 2, "34", 2));
    T_OK(side_writer_finish(w));
    side_writer_destroy(w);
    const size_t n = read_file(path, got, sizeof(got));
    assert_memory_equal(got + n - 4, "1234", 4);
    assert_int_equal(files_there(), 1);
    /* Another header: from the beginning. */
    T_OK(side_writer_create(path, &t, 1, &o, &w));
    T_OK(side_writer_write(w, 0, 0, "12", 2));
    side_writer_destroy(w);
    t.name = "b";
    T_OK(side_writer_create(path, &t, 1, &o, &w));
    assert_false(side_writer_resumed(w));
    T_OK(side_writer_finish(w));
    side_writer_destroy(w);
    assert_int_equal(read_file(path, got, sizeof(got)), n);
    assert_memory_equal(got + n - 4, "\0\0\0\0", 4);
}

T_TEST(no_memory)
{
    const side_tensor t[] = {make("a", SIDE_DTYPE_U8, 0, NULL), make("b", SIDE_DTYPE_F64, 0, NULL)};
    static const char *const metadata[] = {"k", "v"};
    side_writer_options o = SIDE_WRITER_OPTIONS_INIT;
    const long live = mem_live();
    side_writer *w = NULL;
    unsigned long n = 0;
    side_status s;

    o.metadata = metadata;
    o.metadata_count = 1;
    do {
        mem_fail_at(++n);
        s = side_writer_create(in_folder("m.safetensors"), t, 2, &o, &w);
        assert_true(s == SIDE_OK || (s == SIDE_NO_MEMORY && mem_live() == live && files_there() == 0));
    } while (s != SIDE_OK);
    assert_true(n > 10);
    mem_fail_at(0);
    side_writer_destroy(w);
    assert_int_equal(mem_live(), live);
}

static int writes, breaks_at;

static ssize_t breaking_pwrite(int fd, const void *data, size_t bytes, off_t offset)
{
    if (++writes == breaks_at) {
        errno = ENOSPC;
        return -1;
    }
    return pwrite(fd, data, bytes > 7 ? 7 : bytes, offset);
}

/* Short writes are continued; a full disk leaves nothing. */
T_TEST(writes_that_fail)
{
    const uint64_t dims[] = {20};
    const side_tensor t = make("a", SIDE_DTYPE_U8, 1, dims);
    side_writer *w = NULL;
    side_status s = SIDE_IO;

    os_test_pwrite = breaking_pwrite;
    for (breaks_at = 1; s != SIDE_OK; breaks_at++) {
        writes = 0;
        w = NULL;
        s = side_writer_create(in_folder("m.safetensors"), &t, 1, NULL, &w);
        if (s == SIDE_OK)
            s = side_writer_write(w, 0, 0, "01234567890123456789", 20);
        if (s == SIDE_OK)
            s = side_writer_finish(w);
        assert_true(s == SIDE_OK || (s == SIDE_IO && side_last_error()->os_errno == ENOSPC));
        side_writer_destroy(w);
        assert_int_equal(files_there(), s == SIDE_OK);
    }
    assert_true(breaks_at > 10);
    os_test_pwrite = NULL;
}

T_MAIN(T(layout), T(nothing), T(round_trip), T(refusals), T(replaces), T(replaces_a_private_one), T(resumes),
       T(no_memory), T(writes_that_fail))
