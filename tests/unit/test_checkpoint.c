/* SPDX-License-Identifier: MIT
 *
 * Checkpoints as callers see them: what is asked and answered, files, folders and shards. What headers may hold is test_safetensors.c's. */
#include "checkpoint_help.h"

#include "alloc.h"
#include "os.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

static const char two[] = "{\"__metadata__\":{\"format\":\"pt\",\"a\\u0062\":\"\\\"\\n\"},"
                          "\"b\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[8,32]},"
                          "\"\\u0061\\\"\":{\"shape\":[],\"data_offsets\":[0,8],\"dtype\":\"I64\"}}";

T_TEST(what_is_asked)
{
    const char *path = in_folder("m.safetensors"), *key, *value;
    side_checkpoint *ck;
    side_checkpoint_file_info f;
    side_tensor t;
    size_t index;
    char bytes[8];

    write_safetensors(path, two, strlen(two), 32);
    T_OK(side_checkpoint_open(path, NULL, &ck));
    assert_int_equal(side_checkpoint_count(ck), 2);
    assert_int_equal(side_checkpoint_files(ck), 1);
    T_OK(side_checkpoint_file(ck, 0, &f));
    assert_string_equal(f.path, path);
    assert_int_equal(f.data, 8 + strlen(two));
    assert_int_equal(f.bytes, f.data + 32);
    assert_int_equal(f.count, 2);
    T_OK(side_checkpoint_tensor(ck, 0, &t));
    assert_string_equal(t.name, "a\"");
    assert_true(t.type == SIDE_DTYPE_I64 && t.rank == 0 && t.elements == 1 && t.bytes == 8 && t.offset == f.data);
    assert_int_equal(pread(f.fd, bytes, 8, (off_t)t.offset), 8);
    assert_true(bytes[0] == 0 && bytes[7] == 7);
    T_OK(side_checkpoint_tensor(ck, 1, &t));
    assert_true(t.name_bytes == 1 && t.name[0] == 'b' && t.type == SIDE_DTYPE_F32 && t.rank == 2 && t.dims[0] == 2 &&
                t.dims[1] == 3 && t.elements == 6 && t.bytes == 24 && t.file == 0 && t.offset == f.data + 8);
    T_OK(side_checkpoint_find(ck, "b and more", 1, &index));
    assert_int_equal(index, 1);
    T_STATUS(side_checkpoint_find(ck, "b", 2, &index), SIDE_NOT_FOUND);
    T_STATUS(side_checkpoint_find(ck, "", 0, &index), SIDE_NOT_FOUND);
    assert_int_equal(side_checkpoint_metadata_count(ck, 0), 2);
    T_OK(side_checkpoint_metadata(ck, 0, 0, &key, &value));
    assert_true(strcmp(key, "format") == 0 && strcmp(value, "pt") == 0);
    T_OK(side_checkpoint_metadata(ck, 0, 1, &key, &value));
    assert_true(strcmp(key, "ab") == 0 && strcmp(value, "\"\n") == 0);
    T_STATUS(side_checkpoint_tensor(ck, 2, &t), SIDE_INVALID);
    T_STATUS(side_checkpoint_file(ck, 1, &f), SIDE_INVALID);
    T_STATUS(side_checkpoint_metadata(ck, 0, 2, &key, &value), SIDE_INVALID);
    T_STATUS(side_checkpoint_metadata(ck, 1, 0, &key, &value), SIDE_INVALID);
    T_STATUS(side_checkpoint_tensor(NULL, 0, &t), SIDE_INVALID);
    T_STATUS(side_checkpoint_find(ck, NULL, 0, &index), SIDE_INVALID);
    T_STATUS(side_checkpoint_check(NULL), SIDE_INVALID);
    assert_int_equal(side_checkpoint_count(NULL) + side_checkpoint_files(NULL) + side_checkpoint_metadata_count(ck, 1),
                     0);
    side_checkpoint_close(ck);
    side_checkpoint_close(NULL);
}

T_TEST(types)
{
    static const struct {
        const char *name;
        uint32_t bits;
    } all[] = {{"BOOL", 8},    {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6},     {"U8", 8},          {"I8", 8},
               {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},
               {"U16", 16},    {"F16", 16},    {"BF16", 16},   {"I32", 32},        {"U32", 32},        {"F32", 32},
               {"C64", 64},    {"F64", 64},    {"I64", 64},    {"U64", 64}};
    side_dtype type;

    assert_int_equal(sizeof(all) / sizeof(all[0]), SIDE_DTYPE_COUNT);
    for (unsigned i = 0; i < SIDE_DTYPE_COUNT; i++) {
        assert_string_equal(side_dtype_name((side_dtype)i), all[i].name);
        assert_int_equal(side_dtype_bits((side_dtype)i), all[i].bits);
        T_OK(side_dtype_find(all[i].name, &type));
        assert_int_equal(type, i);
    }
    assert_string_equal(side_dtype_name((side_dtype)22), "?");
    assert_int_equal(side_dtype_bits((side_dtype)-1), 0);
    T_STATUS(side_dtype_find("bf16", &type), SIDE_NOT_FOUND);
    T_STATUS(side_dtype_find(NULL, &type), SIDE_INVALID);
}

/* Files that were written to since are told, and so is which. */
T_TEST(changed_files)
{
    const char *path = in_folder("m.safetensors");
    struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_sec = 5}};
    side_checkpoint *ck;

    write_safetensors(path, two, strlen(two), 32);
    T_OK(side_checkpoint_open(path, NULL, &ck));
    T_OK(side_checkpoint_check(ck));
    assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
    T_STATUS(side_checkpoint_check(ck), SIDE_IO);
    assert_non_null(
        strstr(side_last_error()->message, "m.safetensors was changed since it was opened, by its time of "));
    side_checkpoint_close(ck);
    T_OK(side_checkpoint_open(path, NULL, &ck));
    assert_int_equal(truncate(path, 100), 0);
    T_STATUS(side_checkpoint_check(ck), SIDE_IO);
    assert_non_null(strstr(side_last_error()->message, " bytes to 100: once nobody writes to it "));
    side_checkpoint_close(ck);
}

/* ---------------------------------------------------------------- shards and folders */

#define ONE(name) "{\"" name "\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}"

static void write_text(const char *name, const char *text)
{
    write_bytes(in_folder(name), text, strlen(text));
}

static void write_one(const char *name, const char *header)
{
    write_safetensors(in_folder(name), header, strlen(header), 1);
}

static void refused(const char *path, uint32_t flags, side_status status, const char *word)
{
    side_checkpoint *ck = NULL;
    const side_status s = open_with(path, flags, &ck);

    if (s != status || strstr(side_last_error()->message, word) == NULL)
        T_FAIL("%s: expected '%s', got %d: %s", path, word, s, side_last_error()->message);
}

/* Refused with flags 0; `lenient` says what LENIENT makes of it. */
struct index_row {
    const char *text, *word;
    side_status lenient;
};

static const struct index_row indices[] = {
    {"{}", "x.json, offset 1: no weight_map", SIDE_INVALID},
    {"[]", "expected an object", SIDE_INVALID},
    {"{\"weight_map\":1}", "expected an object", SIDE_INVALID},
    {"{\"weight_map\":{\"a\":1}}", "expected a string", SIDE_INVALID},
    {"{\"weight_map\":{},\"weight_map\":{}}", "weight_map stands twice", SIDE_INVALID},
    {"{\"weight_map\":{}} x", "the end of the text", SIDE_INVALID},
    {"{\"weight_map\":{\"a\":\"/etc/passwd\"}}", "offset 20: a shard outside", SIDE_INVALID},
    {"{\"weight_map\":{\"a\":\"../a.safetensors\"}}", "a shard outside", SIDE_INVALID},
    {"{\"weight_map\":{\"a\":\"sub/../../a.safetensors\"}}", "a shard outside", SIDE_INVALID},
    {"{\"weight_map\":{\"a\":\"sub/..\"}}", "a shard outside", SIDE_INVALID},
    {"{\"weight_map\":{\"a\":\"\\u002e./a.safetensors\"}}", "a shard outside", SIDE_INVALID},
    {"{\"weight_map\":{\"a\":\"\"}}", "a shard outside", SIDE_INVALID},
    {"{\"weight_map\":{\"a\":\"a.safe\\u0000tensors\"}}", "\\u0000 in a text", SIDE_INVALID},
    {"{\"weight_map\":{\"a\":\"absent.safetensors\"}}", "absent.safetensors", SIDE_NOT_FOUND},
    {"{\"weight_map\":{\"a\":\"a.safetensors\",\"b\":\"a.safetensors\"}}",
     "offset 36: weight_map has tensor \"b\" in a.safetensors, but no shard has it", SIDE_INVALID},
    {"{\"weight_map\":{\"a\":\"b.safetensors\",\"b\":\"a.safetensors\"}}",
     "weight_map has tensor \"a\" in b.safetensors, but it is in ", SIDE_INVALID},
    {"{\"weight_map\":{\"a\":\"a.safetensors\",\"\\u0061\":\"a.safetensors\"}}",
     "tensor \"a\" stands twice in weight_map", SIDE_INVALID},
    {"{\"weight_map\":{\"a\":\"a.safetensors\",\"b\":\"again.safetensors\"}}", "tensor \"a\" is in ", SIDE_INVALID},
    {"{\"weight_map\":{\"a\":\"two.safetensors\"}}", "tensor \"b\" of ", SIDE_OK},
};

T_TEST(index_files)
{
    side_checkpoint *ck;
    side_checkpoint_file_info f;
    side_tensor t;
    size_t index;

    write_one("a.safetensors", ONE("a"));
    write_one("again.safetensors", ONE("a"));
    assert_int_equal(mkdir(in_folder("sub"), 0700), 0);
    write_one("sub/b.safetensors", ONE("b"));
    assert_int_equal(symlink("sub/b.safetensors", in_folder("b.safetensors")), 0);
    write_one("two.safetensors", "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
                                 "\"b\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[1,1]}}");
    for (size_t i = 0; i < sizeof(indices) / sizeof(indices[0]); i++) {
        write_text("x.json", indices[i].text);
        refused(in_folder("x.json"), 0, indices[i].lenient == SIDE_NOT_FOUND ? SIDE_NOT_FOUND : SIDE_INVALID,
                indices[i].word);
        T_STATUS(open_with(in_folder("x.json"), SIDE_CHECKPOINT_LENIENT, &ck), indices[i].lenient);
        if (indices[i].lenient == SIDE_OK)
            side_checkpoint_close(ck);
    }
    /* Links and folders below are followed; files come in order of their names. */
    write_text("x.json", "{\"metadata\":{\"total_size\":2},\"weight_map\":{\"\\u0062\":\"sub/./"
                         "b.safetensors\",\"a\":\"a.safetensors\"},\"more\":[]}");
    T_OK(side_checkpoint_open(in_folder("x.json"), NULL, &ck));
    assert_int_equal(side_checkpoint_files(ck), 2);
    T_OK(side_checkpoint_find(ck, "b", 1, &index));
    T_OK(side_checkpoint_tensor(ck, index, &t));
    T_OK(side_checkpoint_file(ck, t.file, &f));
    assert_true(index == 1 && f.first == 1 && f.count == 1);
    assert_string_equal(f.path + strlen(t_tmpdir()), "/sub/./b.safetensors");
    side_checkpoint_close(ck);
}

static size_t count_of(const char *path)
{
    side_checkpoint *ck;
    size_t n;

    T_OK(side_checkpoint_open(path, NULL, &ck));
    n = side_checkpoint_count(ck) + 10 * side_checkpoint_files(ck);
    side_checkpoint_close(ck);
    return n;
}

/* What of a folder is its model. */
T_TEST(folders)
{
    const char *folder = t_tmpdir();

    refused(folder, 0, SIDE_NOT_FOUND, "no *.safetensors in the folder");
    write_text("pytorch_model.bin", "x");
    write_text(".hidden.safetensors", "x");
    write_one("b.safetensors", ONE("b"));
    assert_int_equal(count_of(folder), 11);
    write_one("c.safetensors", ONE("c"));
    assert_int_equal(count_of(folder), 22);
    assert_int_equal(count_of(in_folder("")), 22);
    write_one("d.safetensors", ONE("c"));
    refused(folder, 0, SIDE_INVALID, "tensor \"c\" is in ");
    write_one("model.safetensors", ONE("c"));
    assert_int_equal(count_of(folder), 11);
    write_text("v.safetensors.index.json", "{\"weight_map\":{\"b\":\"b.safetensors\",\"c\":\"c.safetensors\"}}");
    assert_int_equal(count_of(folder), 22);
    write_text("w.safetensors.index.json", "{\"weight_map\":{}}");
    refused(folder, 0, SIDE_INVALID, "2 index files, v.safetensors.index.json and others; name the one to open");
    write_text("model.safetensors.index.json", "{\"weight_map\":{}}");
    assert_int_equal(count_of(folder), 0);
}

T_TEST(raw_files)
{
    side_checkpoint_options o = SIDE_CHECKPOINT_OPTIONS_INIT;
    side_checkpoint *ck;
    side_tensor t;

    write_text("some.raw", "12345");
    T_OK(side_checkpoint_open(in_folder("some.raw"), NULL, &ck));
    T_OK(side_checkpoint_tensor(ck, 0, &t));
    assert_true(strcmp(t.name, "some.raw") == 0 && t.type == SIDE_DTYPE_U8 && t.rank == 1 && t.dims[0] == 5 &&
                t.bytes == 5 && t.offset == 0 && side_checkpoint_count(ck) == 1);
    side_checkpoint_close(ck);
    write_text("empty", "");
    o.format = SIDE_FORMAT_RAW;
    T_OK(side_checkpoint_open(in_folder("empty"), &o, &ck));
    T_OK(side_checkpoint_tensor(ck, 0, &t));
    assert_int_equal(t.bytes, 0);
    side_checkpoint_close(ck);
    T_STATUS(side_checkpoint_open(t_tmpdir(), &o, &ck), SIDE_INVALID);
    /* Who asks for safetensors is not told to name the file otherwise. */
    write_text("v.npy", "\x93NUMPY\1 and more");
    o.format = SIDE_FORMAT_SAFETENSORS;
    T_STATUS(side_checkpoint_open(in_folder("v.npy"), &o, &ck), SIDE_INVALID);
    assert_non_null(strstr(side_last_error()->message, "v.npy is no safetensors file; it is a .npy file"));
}

/* ---------------------------------------------------------------- faults */

T_TEST(bad_options)
{
    side_checkpoint_options o = SIDE_CHECKPOINT_OPTIONS_INIT;
    side_checkpoint *ck;

    T_STATUS(open_with(".", SIDE_CHECKPOINT_LENIENT | SIDE_CHECKPOINT_STRICT_SPEC, &ck), SIDE_INVALID);
    T_STATUS(open_with(".", 4, &ck), SIDE_INVALID);
    o.format = (side_checkpoint_format)5;
    T_STATUS(side_checkpoint_open(".", &o, &ck), SIDE_INVALID);
    T_STATUS(side_checkpoint_open(".", NULL, NULL), SIDE_INVALID);
    T_STATUS(side_checkpoint_open(NULL, NULL, &ck), SIDE_INVALID);
}

/* Whatever allocation fails, nothing is left. */
T_TEST(no_memory)
{
    const char *folder = t_tmpdir();
    const long live = mem_live();
    side_checkpoint *ck = NULL;
    unsigned long n = 0;
    side_status s;

    write_safetensors(in_folder("a.safetensors"), two, strlen(two), 32);
    write_one("b.safetensors", ONE("c"));
    write_text("x.safetensors.index.json",
               "{\"weight_map\":{\"b\":\"a.safetensors\",\"a\\\"\":\"a.safetensors\",\"c\":\"b.safetensors\"}}");
    do {
        mem_fail_at(++n);
        s = side_checkpoint_open(folder, NULL, &ck);
        if (s != SIDE_OK)
            assert_int_equal(s, SIDE_NO_MEMORY);
        assert_true(s == SIDE_OK || mem_live() == live);
    } while (s != SIDE_OK);
    assert_true(n > 15);
    mem_fail_at(0);
    side_checkpoint_close(ck);
    assert_int_equal(mem_live(), live);
}

static int reads, breaks_at;
static bool cut; /* else EIO */

static ssize_t breaking_pread(int fd, void *data, size_t bytes, off_t offset)
{
    if (++reads == breaks_at) {
        errno = EIO;
        return cut ? 0 : -1;
    }
    return pread(fd, data, bytes > 5 ? 5 : bytes, offset); /* short */
}

/* Short reads are continued; errors and files that end early are told. */
T_TEST(reads_that_fail)
{
    const char *path = in_folder("m.safetensors");
    side_checkpoint *ck;

    write_safetensors(path, two, strlen(two), 32);
    os_test_pread = breaking_pread;
    T_OK(side_checkpoint_open(path, NULL, &ck));
    side_checkpoint_close(ck);
    for (breaks_at = 1; breaks_at <= 4; breaks_at++) {
        reads = 0, cut = false;
        T_STATUS(side_checkpoint_open(path, NULL, &ck), SIDE_IO);
        assert_int_equal(side_last_error()->os_errno, EIO);
        assert_non_null(strstr(side_last_error()->message, "m.safetensors"));
        reads = 0, cut = true;
        T_STATUS(side_checkpoint_open(path, NULL, &ck), breaks_at > 2 ? SIDE_IO : SIDE_INVALID);
    }
    os_test_pread = NULL;
}

T_MAIN(T(what_is_asked), T(types), T(changed_files), T(index_files), T(folders), T(raw_files), T(bad_options),
       T(no_memory), T(reads_that_fail))
