/* SPDX-License-Identifier: MIT
 *
 * Machine profiles as text and as files: what is saved comes back to the last bit, and nothing damaged is ever taken for one. */
#include "machine_help.h"

#include <errno.h>
#include <math.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---------------------------------------------------------------- text */

static double some_number(t_rng *rng, double least, double most)
{
    return least + (most - least) * ((double)(t_rng_next(rng) >> 11) * 0x1p-53);
}

/* Whatever the numbers, they come back as they went, to the last bit. */
T_TEST(round_trip)
{
    char path[512];

    snprintf(path, sizeof(path), "%s/m.json", home());
    T_FOR_SEEDS (seed, 100) {
        t_rng rng = t_rng_make(seed);
        side_machine m = example(), back = SIDE_MACHINE_INIT;
        double *numbers[] = {&m.h2d.latency_s, &m.h2d.gbps, &m.d2h.latency_s, &m.pageable_h2d.latency_s,
                             &m.stage_gbps,    &m.queue_s,  &m.handover_s,    &m.start_s};
        for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++)
            *numbers[i] = some_number(&rng, MACHINE_GBPS_LEAST, 1) * pow(10, -(double)t_rng_below(&rng, 9));
        m.h2d.gbps = some_number(&rng, MACHINE_GBPS_LEAST, MACHINE_GBPS_MOST);
        m.path_count = (uint32_t)t_rng_below(&rng, SIDE_MACHINE_PATHS + 1);
        for (uint32_t i = 0; i < m.path_count; i++)
            m.paths[i] = (side_path_rate){(side_copy_kind)t_rng_below(&rng, 3),
                                          (side_path)(1 + t_rng_below(&rng, SIDE_PATH_COUNT - 1)),
                                          1 + (uint32_t)t_rng_below(&rng, UINT32_MAX),
                                          1 + (uint32_t)t_rng_below(&rng, UINT32_MAX),
                                          some_number(&rng, MACHINE_GBPS_LEAST, MACHINE_GBPS_MOST),
                                          some_number(&rng, 0, MACHINE_BESIDE_MOST)};
        T_OK(side_machine_save(path, &m));
        T_OK(side_machine_load(path, &back));
        assert_true(same(&m, &back));
    }
}

/* Every part of a file is refused, and every file with one byte changed, unless it says the same (blanks behind the checksum). */
T_TEST(damaged_anywhere)
{
    char path[512], text[8192], broken[8192];
    side_machine m = example();
    size_t harmless = 0;

    snprintf(path, sizeof(path), "%s/m.json", home());
    const size_t bytes = machine_write(&m, text);
    assert_true(bytes < sizeof(text));
    for (size_t n = 0; n < bytes - 1; n++) { /* without its last line break it is whole */
        side_machine back = SIDE_MACHINE_INIT;
        write_text(path, text, n);
        T_STATUS(side_machine_load(path, &back), SIDE_INVALID);
        if (strstr(side_last_error()->message, "m.json, line ") == NULL ||
            strstr(side_last_error()->message, "(offset ") == NULL)
            T_FAIL("the first %zu bytes: %s", n, side_last_error()->message);
        assert_int_equal(back.copy_engines, 0);
    }
    for (size_t i = 0; i < bytes; i++) {
        for (int change = 1; change < 256; change += T_SANITIZED ? 7 : 1) {
            side_machine *back = calloc(1, sizeof(*back));
            assert_non_null(back);
            back->size = sizeof(*back);
            memcpy(broken, text, bytes);
            broken[i] = (char)(broken[i] ^ change);
            const side_status s = machine_read("m.json", broken, bytes, back);
            if (s == SIDE_OK && !same(&m, back))
                T_FAIL("byte %zu as 0x%02x is taken, and says something else", i, (unsigned char)broken[i]);
            harmless += s == SIDE_OK;
            assert_true(s == SIDE_OK || s == SIDE_INVALID);
            free(back);
        }
    }
    assert_true(harmless < 32);
}

/* The text with `from` replaced by `to`, and without its checksum, which would tell. */
static void replaced(char *text, size_t room, const char *from, const char *to)
{
    static char whole[8192];
    side_machine m = example();

    whole[machine_write(&m, whole)] = '\0';
    char *check = strstr(whole, ",\n  \"check\"");
    assert_non_null(check);
    strcpy(check, "\n}\n");
    char *at = strstr(whole, from);
    if (at == NULL)
        T_FAIL("'%s' is not in the text", from);
    snprintf(text, room, "%.*s%s%s", (int)(at - whole), whole, to, at + strlen(from));
}

static void refuses(const char *from, const char *to, const char *word)
{
    char text[8192];
    side_machine m = SIDE_MACHINE_INIT;

    replaced(text, sizeof(text), from, to);
    if (machine_read("file", text, strlen(text), &m) != SIDE_INVALID)
        T_FAIL("'%s' for '%s' is taken", to, from);
    if (strstr(side_last_error()->message, word) == NULL || strstr(side_last_error()->message, "(offset ") == NULL)
        T_FAIL("'%s' for '%s': no '%s' in: %s", to, from, word, side_last_error()->message);
}

T_TEST(what_a_profile_may_not_say)
{
    char text[8192];
    side_machine m = SIDE_MACHINE_INIT, want = example();

    replaced(text, sizeof(text), "101", "101"); /* by hand, without a checksum: fine */
    T_OK(machine_read("file", text, strlen(text), &m));
    assert_true(same(&m, &want));

    refuses("\"sidestream_machine\": 1", "\"sidestream_machine\": 2", "a profile of version 2; this program");
    refuses("\"sidestream_machine\": 1", "\"sidestream_machine\": 0", "version 0");
    refuses("\"sidestream_machine\": 1,", "", "no machine profile");
    refuses("\"sidestream_machine\": 1", "\"sidestream_machine\": 1.0", "whole number");
    refuses("\"both_gbps\": 101", "\"both_gbps\": -101", "out of range");
    refuses("\"both_gbps\": 101", "\"both_gbps\": 1e6", "out of range");
    refuses("\"both_gbps\": 101", "\"both_gbps\": 1e999", "double");
    refuses("\"both_gbps\": 101", "\"both_gbps\": \"101\"", "expected a number");
    refuses("\"both_gbps\": 101", "\"both_gbps\": null", "expected a number");
    refuses("\"both_gbps\": 101,", "", "lacks \"both_gbps\"");
    refuses("\"both_gbps\": 101,", "\"both_gbps\": 101, \"both_gbps\": 102,", "twice");
    refuses("\"both_gbps\": 101,", "\"both_gbps\": 101, \"colour\": 1,", "does not have");
    refuses("55.31234567890123", "0", "out of range");
    refuses("55.31234567890123", "-5", "out of range");
    refuses("55.31234567890123", "100001", "out of range");
    refuses("{\"latency_s\": 2.9e-06, \"gbps\": 55.31234567890123}", "{\"gbps\": 55}", "h2d lacks latency_s");
    refuses("{\"latency_s\": 2.9e-06, \"gbps\": 55.31234567890123}", "{\"latency_s\": 0}", "h2d lacks gbps");
    refuses("\"latency_s\": 2.9e-06", "\"latency_s\": 2.9", "out of range");
    refuses("\"latency_s\": 2.9e-06", "\"latency\": 2.9e-6", "does not have");
    refuses("\"measured\"", "\"guessed\"", "not measured, estimated or simulated");
    refuses("\"id-", "\"\\u001b[2J", "printable");
    refuses("\"id-", "\"\xc3\xa9", "printable");
    refuses("\"id-", "\"0123456789012345678901234567890123456789012345678901234567890123", "over 63 bytes");
    refuses("\"driver_version\": 13000", "\"driver_version\": 13000.5", "whole number");
    refuses("\"copy_engines\": 2", "\"copy_engines\": 0", "out of range");
    refuses("\"copy_engines\": 2", "\"copy_engines\": 3", "out of range");
    refuses("\"kind\": \"h2d\"", "\"kind\": \"h2h\"", "not h2d");
    refuses("\"gather\"", "\"auto\"", "no path");
    refuses("\"gather\"", "\"teleport\"", "no path");
    refuses("\"block_bytes\": 4096", "\"block_bytes\": 0", "out of range");
    refuses("\"block_bytes\": 4096", "\"block_bytes\": 4294967296", "out of range");
    refuses("\"block_bytes\": 4096, ", "", "the path lacks block_bytes");
    refuses("\"beside\": 1.09", "\"beside\": 1001", "out of range");
    refuses("\"beside\": 1.09", "\"beyond\": 1", "does not have");
    refuses("\"paths\": [", "\"paths\": [5, ", "expected a path");
    refuses("\n}\n", "\n}\n{}", "the end of the text");
    refuses("\n}\n", "", "the text ends");
}

T_TEST(too_many_paths)
{
    side_machine m = example(), back = SIDE_MACHINE_INIT;
    char *text = malloc(MACHINE_TEXT_BYTES);

    assert_non_null(text);
    m.path_count = SIDE_MACHINE_PATHS;
    for (uint32_t i = 0; i < m.path_count; i++) /* the longest there are */
        m.paths[i] = (side_path_rate){SIDE_COPY_D2H, SIDE_PATH_GATHER, UINT32_MAX, UINT32_MAX, 1.0 / 3e2, 1.0 / 3e8};
    const size_t bytes = machine_write(&m, text);
    assert_true(bytes < MACHINE_TEXT_BYTES / 2);
    T_OK(machine_read("file", text, bytes, &back));
    assert_true(same(&m, &back));
    back = (side_machine)SIDE_MACHINE_INIT;
    memmove(strstr(text, "\"paths\": [") + 10 + 6, strstr(text, "\"paths\": [") + 10,
            bytes - (size_t)(strstr(text, "\"paths\": [") + 10 - text));
    memcpy(strstr(text, "\"paths\": [") + 10, "{},{},", 6);
    T_STATUS(machine_read("file", text, bytes + 6, &back), SIDE_INVALID);
    free(text);
}

/* What was changed after it was saved is no measurement. */
T_TEST(a_checksum_tells)
{
    char text[8192];
    side_machine m = example(), back = SIDE_MACHINE_INIT;
    size_t bytes = machine_write(&m, text);

    T_OK(machine_read("file", text, bytes, &back));
    text[bytes] = '\0';
    strstr(text, "101")[0] = '2';
    T_STATUS(machine_read("file", text, bytes, &back), SIDE_INVALID);
    assert_non_null(strstr(side_last_error()->message, "not what was saved"));
}

/* ---------------------------------------------------------------- files */

static void refuses_to_save(side_machine m, const char *field)
{
    char path[512];
    struct stat there;

    snprintf(path, sizeof(path), "%s/no.json", t_tmpdir());
    T_STATUS(side_machine_save(path, &m), SIDE_INVALID);
    if (strstr(side_last_error()->message, field) == NULL)
        T_FAIL("no '%s' in: %s", field, side_last_error()->message);
    assert_int_equal(stat(path, &there), -1);
}

/* What load would refuse is not saved. */
T_TEST(save_checks)
{
#define BAD(field, value, says)     \
    do {                            \
        side_machine b = example(); \
        b.field = (value);          \
        refuses_to_save(b, says);   \
    } while (0)
    BAD(h2d.gbps, 0, "machine.h2d.gbps is 0");
    BAD(h2d.gbps, (double)NAN, "machine.h2d.gbps");
    BAD(h2d.latency_s, -1e-9, "machine.h2d.latency_s");
    BAD(d2h.gbps, (double)INFINITY, "machine.d2h.gbps");
    BAD(both_gbps, -1, "machine.both_gbps");
    BAD(pageable_h2d.gbps, -1, "machine.pageable_h2d.gbps");
    BAD(stage_gbps, 1e9, "machine.stage_gbps");
    BAD(pin_s_per_gib, (double)NAN, "machine.pin_s_per_gib");
    BAD(queue_s, 2, "machine.queue_s");
    BAD(copy_engines, 0, "machine.copy_engines");
    BAD(driver_version, -1, "machine.driver_version");
    BAD(from, (side_machine_from)7, "machine.from");
    BAD(gpu[3], '\n', "machine.gpu");
    BAD(path_count, SIDE_MACHINE_PATHS + 1, "machine.path_count");
    BAD(paths[1].gbps, 0, "machine.paths[1]");
    BAD(paths[0].path, SIDE_PATH_AUTO, "machine.paths[0]");
    BAD(paths[0].block_bytes, 0, "machine.paths[0]");
    BAD(size, 8, "machine.size");
#undef BAD
    side_machine endless = example();
    memset(endless.uuid, 'x', sizeof(endless.uuid));
    refuses_to_save(endless, "machine.uuid");
    T_STATUS(side_machine_save(NULL, &endless), SIDE_INVALID);
    T_STATUS(side_machine_save("x", NULL), SIDE_INVALID);
}

T_TEST(folders_and_modes)
{
    const char *folder = home();
    char path[512], link_path[512];
    side_machine m = example(), back = SIDE_MACHINE_INIT;
    struct stat there;

    umask(0);
    snprintf(path, sizeof(path), "%s/a/b/c.json", folder);
    T_OK(side_machine_save(path, &m));
    assert_int_equal(stat(path, &there), 0);
    assert_int_equal(there.st_mode & 0777, 0600);
    path[strlen(path) - strlen("/c.json")] = '\0';
    assert_int_equal(stat(path, &there), 0);
    assert_int_equal(there.st_mode & 0777, 0700);
    strcat(path, "/c.json");

    snprintf(link_path, sizeof(link_path), "%s/link.json", folder); /* followed, not replaced */
    assert_int_equal(symlink(path, link_path), 0);
    m.both_gbps = 99;
    T_OK(side_machine_save(link_path, &m));
    assert_int_equal(lstat(link_path, &there), 0);
    assert_true(S_ISLNK(there.st_mode));
    T_OK(side_machine_load(path, &back));
    assert_true(back.both_gbps == 99);

    assert_int_equal(chdir(folder), 0); /* relative names */
    T_OK(side_machine_save("d.json", &m));
    T_OK(side_machine_save("e/f.json", &m));
    T_OK(side_machine_load("e/f.json", &back));
}

static void save_fails(const char *path, side_status status)
{
    side_machine m = example();

    T_STATUS(side_machine_save(path, &m), status);
    if (strlen(path) < 100 && strstr(side_last_error()->message, path) == NULL)
        T_FAIL("the message does not name %s: %s", path, side_last_error()->message);
}

T_TEST(places_that_take_no_file)
{
    const char *folder = home();
    char path[600], far[8192];
    struct stat there;
    side_machine m = SIDE_MACHINE_INIT;

    save_fails(folder, SIDE_INVALID);
    save_fails("/dev/full", SIDE_INVALID); /* and is not replaced by a file */
    assert_true(stat("/dev/full", &there) == 0 && S_ISCHR(there.st_mode));
    T_STATUS(side_machine_save("", &m), SIDE_INVALID);
    snprintf(path, sizeof(path), "%s/file", folder);
    write_text(path, "x", 1);
    T_STATUS(side_machine_load(path, &m), SIDE_INVALID);
    strcat(path, "/below.json");
    T_STATUS(side_machine_load(path, &m), SIDE_NOT_FOUND);
    side_machine good = example();
    T_STATUS(side_machine_save(path, &good), SIDE_IO); /* a file where a folder should be */
    T_STATUS(side_machine_save("/proc/nothing/m.json", &good), SIDE_IO);
    assert_non_null(strstr(side_last_error()->message, "/proc/nothing"));
    memset(far, 'x', sizeof(far));
    far[0] = '/';
    far[sizeof(far) - 1] = '\0';
    save_fails(far, SIDE_INVALID);

    T_STATUS(side_machine_load(folder, &m), SIDE_INVALID);
    T_STATUS(side_machine_load("/dev/zero", &m), SIDE_INVALID);
    T_STATUS(side_machine_load("/nowhere/m.json", &m), SIDE_NOT_FOUND);
    T_STATUS(side_machine_load("", &m), SIDE_INVALID);
    T_STATUS(side_machine_load(NULL, &m), SIDE_INVALID);
    T_STATUS(side_machine_load("x", NULL), SIDE_INVALID);
    snprintf(path, sizeof(path), "%s/fifo", folder); /* nobody writes: does not hang */
    assert_int_equal(mkfifo(path, 0600), 0);
    T_STATUS(side_machine_load(path, &m), SIDE_INVALID);
    snprintf(path, sizeof(path), "%s/big", folder);
    write_text(path, "{", 1);
    assert_int_equal(truncate(path, (off_t)1 << 40), 0);
    T_STATUS(side_machine_load(path, &m), SIDE_INVALID);
    m.size = 3;
    T_STATUS(side_machine_load(path, &m), SIDE_INVALID);
    if (geteuid() != 0) {
        snprintf(path, sizeof(path), "%s/shut", folder);
        assert_int_equal(mkdir(path, 0500), 0);
        strcat(path, "/m.json");
        T_STATUS(side_machine_save(path, &good), SIDE_IO);
    }
}

extern ssize_t (*os_test_pwrite)(int fd, const void *data, size_t bytes, off_t offset);
static size_t disk_left;

static ssize_t full_disk(int fd, const void *data, size_t bytes, off_t offset)
{
    if (disk_left == 0) {
        errno = ENOSPC;
        return -1;
    }
    const ssize_t n = pwrite(fd, data, bytes < disk_left ? bytes : disk_left, offset);
    disk_left -= n > 0 ? (size_t)n : 0;
    return n;
}

static size_t files_in(const char *folder)
{
    char command[600];
    size_t n = 0;

    snprintf(command, sizeof(command), "ls -A '%s' | wc -l", folder);
    FILE *f = popen(command, "r");
    assert_non_null(f);
    assert_int_equal(fscanf(f, "%zu", &n), 1);
    pclose(f);
    return n;
}

/* Whatever fits of the new file, the old one stays, and nothing beside it. */
T_TEST(a_full_disk)
{
    const char *folder = home();
    char path[512];
    struct stat there;
    side_machine m = example(), back = SIDE_MACHINE_INIT;

    snprintf(path, sizeof(path), "%s/m.json", folder);
    T_OK(side_machine_save(path, &m));
    m.both_gbps = 50;
    os_test_pwrite = full_disk;
    assert_int_equal(stat(path, &there), 0);
    for (size_t room = 0; room + 1 < (size_t)there.st_size; room += 100) { /* the new one is a digit shorter */
        disk_left = room;
        T_STATUS(side_machine_save(path, &m), SIDE_IO);
        assert_int_equal(side_last_error()->os_errno, ENOSPC);
        assert_non_null(strstr(side_last_error()->message, "m.json"));
    }
    os_test_pwrite = NULL;
    T_OK(side_machine_load(path, &back));
    assert_true(back.both_gbps == 101);
    assert_int_equal(files_in(folder), 1);
}

static void *save_often(void *arg)
{
    side_machine m = example();

    m.both_gbps = *(const double *)arg;
    for (int i = 0; i < 50; i++)
        T_OK(side_machine_save("shared.json", &m));
    return NULL;
}

/* Two that save and one that reads: the reader sees one or the other, whole. */
T_TEST(saved_at_once)
{
    static const double values[] = {11, 22};
    pthread_t thread[2];
    side_machine m = example(), back = SIDE_MACHINE_INIT;
    const char *folder = home();

    assert_int_equal(chdir(folder), 0);
    T_OK(side_machine_save("shared.json", &m));
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&thread[i], NULL, save_often, (void *)(uintptr_t)&values[i]), 0);
    for (int i = 0; i < 100; i++) {
        T_OK(side_machine_load("shared.json", &back));
        assert_true(back.both_gbps == 11 || back.both_gbps == 22 || back.both_gbps == 101);
    }
    pthread_join(thread[0], NULL);
    pthread_join(thread[1], NULL);
    assert_int_equal(files_in(folder), 1);
}

T_MAIN(T(round_trip), T_LONG(damaged_anywhere, 60), T(what_a_profile_may_not_say), T(too_many_paths),
       T(a_checksum_tells), T(save_checks), T(folders_and_modes), T(places_that_take_no_file), T(a_full_disk),
       T(saved_at_once))
