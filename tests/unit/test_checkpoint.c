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
    assert_non_null(strstr(side_last_error()->message, "m.safetensors was changed"));
    side_checkpoint_close(ck);
    T_OK(side_checkpoint_open(path, NULL, &ck));
    assert_int_equal(truncate(path, 100), 0);
    T_STATUS(side_checkpoint_check(ck), SIDE_IO);
    side_checkpoint_close(ck);
}

T_MAIN(T(what_is_asked), T(types), T(changed_files))
