/* SPDX-License-Identifier: MIT
 *
 * The output of casts: who may read it, folders that are there, names that cannot be, and what others put in the way. */
#include "cast_help.h"

#include <stdatomic.h>

/* ---------------------------------------------------------------- rights */

static mode_t mode_of(const char *path)
{
    struct stat there;

    assert_int_equal(lstat(path, &there), 0);
    return there.st_mode & 07777;
}

static atomic_uint seen; /* rights of whatever is written to */

static ssize_t looking_write(int fd, const void *data, size_t bytes, off_t offset)
{
    struct stat there;

    if (fstat(fd, &there) == 0)
        atomic_fetch_or(&seen, there.st_mode & 07777);
    return pwrite(fd, data, bytes, offset);
}

/* The output's bits are `want`, and nobody else could read anything before. */
static void expect_mode(struct rig *r, mode_t want)
{
    atomic_store(&seen, 0);
    os_test_pwrite = looking_write;
    T_OK(cast_once(r, NULL));
    os_test_pwrite = NULL;
    assert_int_equal(atomic_load(&seen), 0600);
    if (mode_of(r->out) != want)
        T_FAIL("%o, not %o", mode_of(r->out), want);
}

T_TEST(rights_of_a_file)
{
    static const mode_t cases[][3] = {/* input, umask, output */
                                      {0600, 022, 0600}, {0644, 022, 0644}, {0666, 022, 0644}, {0644, 077, 0600},
                                      {0444, 022, 0444}, {0640, 022, 0640}, {0700, 0, 0700},   {04755, 0, 0755}};
    struct rig r = rig_make(0);

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        assert_int_equal(chmod(r.in, cases[i][0]), 0);
        umask(cases[i][1]);
        expect_mode(&r, cases[i][2]);
        expect_whole(&r);
    }
    umask(022);
    write_bytes(r.out, "old", 3); /* one that is replaced keeps its own, of those that the input has */
    assert_int_equal(chmod(r.out, 0664) | chmod(r.in, 0660), 0);
    r.o.flags = SIDE_CAST_REPLACE;
    expect_mode(&r, 0660);
    assert_int_equal(chmod(r.out, 0644) | chmod(r.in, 0600), 0);
    expect_mode(&r, 0600);
    expect_whole(&r);
    if (geteuid() == 0) { /* of another group there may be people who must not read it */
        assert_int_equal(chown(r.in, 0, 12345), 0);
        assert_int_equal(chmod(r.in, 0640), 0);
        expect_mode(&r, 0600);
        expect_whole(&r);
        assert_int_equal(chmod(r.in, 0664), 0);
        umask(0);
        expect_mode(&r, 0664);
        expect_whole(&r);
    }
    rig_free(&r);
}

/* Stopped when it had its rights already: one that nobody may write to is gone on with, also by one who is not root. */
/* No bits at all are bits, too. */
T_TEST(a_file_of_nobody_is_replaced)
{
    struct rig r = rig_make(0);

    write_bytes(r.out, "old", 3);
    assert_int_equal(chmod(r.out, 0), 0);
    r.o.flags = SIDE_CAST_REPLACE;
    T_OK(cast_once(&r, NULL));
    assert_int_equal(mode_of(r.out), 0);
    assert_int_equal(chmod(r.out, 0600), 0);
    expect_whole(&r);
    rig_free(&r);
}

T_TEST(read_only_and_gone_on_with)
{
    struct rig r = rig_make(0);
    side_cast_stats t;

    if (geteuid() == 0)
        assert_int_equal(chown(t_tmpdir(), 65534, 65534) | chown(r.in, 65534, 65534) | seteuid(65534), 0);
    assert_int_equal(chmod(r.in, 0444), 0);
    leave_half(&r);
    assert_int_equal(chmod(r.part, 0444), 0);
    T_OK(cast_once(&r, &t));
    assert_true(t.resumed_bytes > 0);
    assert_int_equal(mode_of(r.out), 0444);
    expect_whole(&r);
    if (getuid() == 0)
        assert_int_equal(seteuid(0), 0);
    rig_free(&r);
}

/* ---------------------------------------------------------------- folders that are there */

/* Shards "m-1" and "sub/m-2", of F32 both, with an index; r->in is the folder, and r->out a folder that is not there. */
static void make_model(struct rig *r)
{
    static const char
        index[] = "{\"metadata\":{\"total_size\":80000},\"weight_map\":{\"a\":\"m-1\",\"b\":\"sub/m-2\"}}";
    static const char a[] = "{\"a\":{\"dtype\":\"F32\",\"shape\":[10000],\"data_offsets\":[0,40000]}}     ";
    static const char b[] = "{\"b\":{\"dtype\":\"F32\",\"shape\":[10000],\"data_offsets\":[0,40000]}}     ";

    snprintf(r->in, sizeof(r->in), "%s/model", t_tmpdir());
    snprintf(r->out, sizeof(r->out), "%s/new", t_tmpdir());
    snprintf(r->part, sizeof(r->part), "%s.cast-part", r->out);
    snprintf(r->journal, sizeof(r->journal), "%s.cast-journal", r->out);
    assert_int_equal(mkdir(r->in, 0755) | mkdir(in_folder("model/sub"), 0755), 0);
    write_safetensors(in_folder("model/m-1"), a, sizeof(a) - 1, 40000);
    write_safetensors(in_folder("model/sub/m-2"), b, sizeof(b) - 1, 40000);
    write_bytes(in_folder("model/model.safetensors.index.json"), index, sizeof(index) - 1);
}

/* The folder is there, and what is unfinished lies in it. */
static void make_out(struct rig *r)
{
    assert_int_equal(mkdir(r->out, 0700), 0);
    snprintf(r->part, sizeof(r->part), "%s/.cast-part", r->out);
    snprintf(r->journal, sizeof(r->journal), "%s/.cast-journal", r->out);
}

T_TEST(a_shard_s_name_is_ours)
{
    static const char index[] = "{\"weight_map\":{\"a\":\"m-1\",\"b\":\".cast-part\"}}";
    struct rig r = rig_make(0);

    make_model(&r);
    assert_int_equal(rename(in_folder("model/sub/m-2"), in_folder("model/.cast-part")), 0);
    write_bytes(in_folder("model/model.safetensors.index.json"), index, sizeof(index) - 1);
    expect_refused(&r, SIDE_INVALID, "a shard is named \".cast-part\", which a cast cannot write");
    rig_free(&r);
}

static void expect_model(struct rig *r)
{
    side_checkpoint *ck;
    side_tensor t;

    T_OK(side_checkpoint_open(r->out, NULL, &ck));
    for (size_t i = 0; i < 2; i++) {
        T_OK(side_checkpoint_tensor(ck, i, &t));
        assert_int_equal(t.type, SIDE_DTYPE_BF16);
    }
    side_checkpoint_close(ck);
    assert_false(exists(r->part) || exists(r->journal));
    assert_int_equal(unlink(in_folder("new/m-1")) | unlink(in_folder("new/sub/m-2")) | rmdir(in_folder("new/sub")) |
                         unlink(in_folder("new/model.safetensors.index.json")),
                     0);
}

T_TEST(rights_of_a_folder)
{
    struct rig r = rig_make(0);

    make_model(&r);
    assert_int_equal(chmod(in_folder("model/m-1"), 0600) | chmod(in_folder("model/sub/m-2"), 0440) |
                         chmod(in_folder("model/model.safetensors.index.json"), 0400) |
                         chmod(in_folder("model/sub"), 0500) | chmod(in_folder("model"), 0750),
                     0);
    umask(022);
    expect_mode(&r, 0750);
    assert_int_equal(mode_of(in_folder("new/m-1")), 0600);
    assert_int_equal(mode_of(in_folder("new/sub")), 0700); /* its owner may always write to a folder */
    assert_int_equal(mode_of(in_folder("new/sub/m-2")), 0440);
    assert_int_equal(mode_of(in_folder("new/model.safetensors.index.json")), 0400);
    expect_model(&r);
    rig_free(&r);
}

T_TEST(a_folder_stays_itself)
{
    struct rig r = rig_make(0);
    struct stat before, after;
    side_cast_stats t;

    make_model(&r);
    make_out(&r);
    assert_int_equal(chmod(r.out, 02770), 0);
    assert_int_equal(stat(r.out, &before), 0);
    leave_half(&r);
    assert_false(exists(in_folder("new/m-1")));
    write_bytes(in_folder("new/config.json"), "{}", 2); /* that one may put there meanwhile */
    T_OK(cast_once(&r, &t));
    assert_true(t.resumed_bytes > 0);
    assert_int_equal(stat(r.out, &after), 0);
    assert_true(before.st_ino == after.st_ino && before.st_mode == after.st_mode);
    assert_int_equal(mode_of(in_folder("new/sub")) & 0777, 0755);
    assert_int_equal(unlink(in_folder("new/config.json")), 0);
    expect_model(&r);
    assert_int_equal(chdir(r.out), 0); /* and by the name of '.' */
    snprintf(r.out, sizeof(r.out), ".");
    T_OK(cast_once(&r, &t));
    expect_model(&r);
    /* Of another: nothing is made in it. */
    write_bytes(in_folder("new/notes"), "mine", 4);
    expect_refused(&r, SIDE_STATE, "not empty (notes)");
    r.o.flags = SIDE_CAST_RESTART;
    expect_refused(&r, SIDE_STATE, "not empty (notes)");
    assert_false(exists(r.part) || exists(r.journal));
    rig_free(&r);
}

static void put_in_the_way(void *user, uint64_t done, uint64_t total)
{
    (void)done;
    (void)total;
    if (!exists(user))
        write_bytes(user, "mine", 4);
}

/* Stopped between two renames: no reader takes it for a model, and the rest is done when it is given again. */
T_TEST(half_moved)
{
    static const char *const names[] = {"new/m-1", "new/sub", "new/model.safetensors.index.json"};
    struct image mine = {(unsigned char[]){"mine"}, 4};
    side_checkpoint *ck;
    side_cast_stats t;

    struct rig r = rig_make(0);
    make_model(&r);
    make_out(&r);
    for (size_t i = 0; i < 3; i++) {
        char path[300];
        snprintf(path, sizeof(path), "%s", in_folder(names[i]));
        r.o.progress = put_in_the_way;
        r.o.progress_user = path;
        expect_refused(&r, SIDE_IO, i == 1 ? "Not a directory" : "which was made meanwhile");
        r.o.progress = NULL;
        assert_true(is_file(path, &mine));
        assert_int_equal(exists(in_folder("new/m-1")), 1);
        assert_int_equal(exists(in_folder("new/sub/m-2")), i == 2);
        T_STATUS(side_checkpoint_open(r.out, NULL, &ck), SIDE_STATE);
        assert_non_null(strstr(side_last_error()->message, "holds an unfinished cast"));
        if (i != 1)
            expect_refused(&r, SIDE_STATE, i == 0 ? "not empty (m-1)" : "not empty (model.safetensors.index.json)");
        r.o.flags = SIDE_CAST_RESTART; /* takes nothing away that is under its name */
        expect_refused(&r, SIDE_STATE, "not empty");
        r.o.flags = 0;
        assert_int_equal(unlink(path), 0);
        T_OK(cast_once(&r, &t));
        assert_int_equal(t.read_bytes, 0);
        expect_model(&r);
    }
    rig_free(&r);
}

/* Begun when there was no folder, then somebody makes one; and a file that somebody makes meanwhile. */
T_TEST(made_meanwhile)
{
    struct rig r = rig_make(0), model;
    struct image mine = {(unsigned char[]){"mine"}, 4};
    side_cast_stats t;

    r.o.progress = put_in_the_way;
    r.o.progress_user = r.out;
    expect_refused(&r, SIDE_IO, "was made meanwhile");
    r.o.progress = NULL;
    assert_true(is_file(r.out, &mine));
    assert_int_equal(unlink(r.out), 0);
    T_OK(cast_once(&r, &t));
    assert_int_equal(t.read_bytes, 0);
    expect_whole(&r);
    model = r;
    make_model(&model);
    leave_half(&model);
    assert_int_equal(mkdir(model.out, 0700), 0);
    expect_refused(&model, SIDE_STATE, "what was begun before it was there lies beside it");
    assert_int_equal(rmdir(model.out), 0);
    T_OK(cast_once(&model, &t));
    assert_true(t.resumed_bytes > 0);
    expect_model(&model);
    rig_free(&r);
}

/* A cast that was stopped between its last two steps is known by the file itself, not by what looks like it. */
T_TEST(an_old_one_is_not_the_new)
{
    struct rig r = rig_make(0);
    struct image old = {malloc(r.expected.bytes), r.expected.bytes};

    memcpy(old.data, r.expected.data, old.bytes);
    old.data[old.bytes - 1] ^= 1;
    r.o.progress = put_in_the_way;
    r.o.progress_user = r.out;
    expect_refused(&r, SIDE_IO, "was made meanwhile");
    r.o.progress = NULL;
    write_bytes(r.out, old.data, old.bytes);
    assert_int_equal(unlink(r.part), 0);
    expect_refused(&r, SIDE_STATE, "is there; name another file");
    assert_true(is_file(r.out, &old));
    r.o.flags = SIDE_CAST_REPLACE;
    T_OK(cast_once(&r, NULL));
    expect_whole(&r);
    free(old.data);
    rig_free(&r);
}

/* Stopped after the first shard was moved, and the second one lost: it is cast again. */
T_TEST(half_moved_and_half_lost)
{
    struct rig r = rig_make(0);
    char path[300];

    make_model(&r);
    make_out(&r);
    snprintf(path, sizeof(path), "%s", in_folder("new/sub"));
    r.o.progress = put_in_the_way;
    r.o.progress_user = path;
    expect_refused(&r, SIDE_IO, "Not a directory");
    r.o.progress = NULL;
    assert_int_equal(unlink(path) | unlink(in_folder("new/.cast-part/sub/m-2")), 0);
    T_OK(cast_once(&r, NULL));
    expect_model(&r);
    rig_free(&r);
}

/* ---------------------------------------------------------------- what is not ours */

T_TEST(names_that_cannot_be)
{
    struct rig r = rig_make(0);

    assert_int_equal(symlink("nowhere", in_folder("link")), 0);
    snprintf(r.out, sizeof(r.out), "%s/link", t_tmpdir());
    expect_refused(&r, SIDE_INVALID, "is a link to nowhere, which is not there; remove the link");
    snprintf(r.out, sizeof(r.out), "%s/folder/", t_tmpdir());
    expect_refused(&r, SIDE_INVALID, "is not there, and the input one file; name a file in a folder");
    snprintf(r.out, sizeof(r.out), "%s/in.safetensors/", t_tmpdir());
    expect_refused(&r, SIDE_INVALID, "is the input itself");
    snprintf(r.out, sizeof(r.out), "%s/in.safetensors/x", t_tmpdir());
    expect_refused(&r, SIDE_IO, "Not a directory");
    assert_false(exists(in_folder("link.cast-part")) || exists(in_folder("folder")) ||
                 exists(in_folder("link.cast-journal")) || exists(in_folder("nowhere")));
    struct image input = read_file(r.in);
    snprintf(r.out, sizeof(r.out), "%s/next", t_tmpdir());
    assert_int_equal(symlink("victim", in_folder("next.cast-journal")), 0); /* nothing is written through a link */
    expect_refused(&r, SIDE_IO, "cannot write");
    assert_false(exists(in_folder("victim")));
    assert_int_equal(unlink(in_folder("next.cast-journal")), 0);
    snprintf(r.in, sizeof(r.in), "%s/next.cast-part", t_tmpdir());
    write_bytes(r.in, input.data, input.bytes);
    for (int i = 0; i < 2; i++) {
        r.o.flags = i != 0 ? SIDE_CAST_RESTART : 0;
        expect_refused(&r, SIDE_INVALID, "next.cast-part, which is the unfinished one of output");
        assert_true(is_file(r.in, &input) && !exists(in_folder("next.cast-journal")));
    }
    r.o.flags = 0;
    free(input.data);
    write_bytes(in_folder("a.npy"), "\x93NUMPY\1\0\x76\0{", 11);
    snprintf(r.in, sizeof(r.in), "%s/a.npy", t_tmpdir());
    snprintf(r.out, sizeof(r.out), "%s/new", t_tmpdir());
    expect_refused(&r, SIDE_INVALID, "is a .npy file; cast takes safetensors");
    rig_free(&r);
}

/* Whatever the name: only what a cast made is taken away. */
T_TEST(restart_spares_strangers)
{
    struct image notes = {(unsigned char[]){"my notes"}, 8};
    struct rig r = rig_make(0), model;

    r.o.flags = SIDE_CAST_RESTART;
    write_bytes(r.part, "my notes", 8); /* a file, without a journal */
    expect_refused(&r, SIDE_STATE, "out.safetensors.cast-part is of no cast that is known here: move it away");
    assert_true(is_file(r.part, &notes) && !exists(r.journal));
    assert_int_equal(unlink(r.part), 0);
    write_bytes(r.journal, "my notes", 8); /* a journal that is none */
    for (int i = 0; i < 2; i++) {
        expect_refused(&r, SIDE_STATE, "is no journal of a cast; move it away");
        assert_true(is_file(r.journal, &notes));
        r.o.flags = 0;
    }
    assert_int_equal(unlink(r.journal), 0);
    model = r;
    make_model(&model);
    model.o.flags = SIDE_CAST_RESTART;
    assert_int_equal(mkdir(model.part, 0755), 0);
    write_bytes(in_folder("new.cast-part/notes.txt"), "my notes", 8); /* a folder, without a journal */
    expect_refused(&model, SIDE_STATE, "new.cast-part/notes.txt is of no cast");
    assert_true(is_file(in_folder("new.cast-part/notes.txt"), &notes) && !exists(model.journal));
    assert_int_equal(unlink(in_folder("new.cast-part/notes.txt")), 0);
    write_bytes(in_folder("new.cast-part/m-1"), "my notes", 8); /* by a name of ours, but not as we make it */
    expect_refused(&model, SIDE_STATE, "new.cast-part/m-1 is of no cast");
    assert_int_equal(unlink(in_folder("new.cast-part/m-1")), 0);
    T_OK(cast_once(&model, NULL)); /* an empty one costs nobody anything */
    expect_model(&model);
    assert_int_equal(rmdir(model.out), 0);
    model.o.flags = 0;
    leave_half(&model); /* with a journal, also of other options: but for what is not of it */
    write_bytes(in_folder("new.cast-part/sub/notes.txt"), "my notes", 8);
    model.o.piece_bytes = 8192;
    model.o.flags = SIDE_CAST_RESTART;
    expect_refused(&model, SIDE_STATE, "new.cast-part/sub/notes.txt is of no cast");
    assert_true(exists(in_folder("new.cast-part/m-1")) && exists(model.journal));
    assert_int_equal(unlink(in_folder("new.cast-part/sub/notes.txt")), 0);
    T_OK(cast_once(&model, NULL));
    expect_model(&model);
    /* What is in the way is said before anything is taken away. */
    model.o.flags = 0;
    assert_int_equal(rmdir(model.out), 0);
    leave_half(&model);
    assert_int_equal(mkdir(model.out, 0755), 0);
    write_bytes(in_folder("new/notes"), "my notes", 8);
    model.o.flags = SIDE_CAST_RESTART;
    expect_refused(&model, SIDE_STATE, "not empty (notes)");
    assert_true(exists(model.part) && exists(model.journal));
    rig_free(&r);
}

/* Which shard, and how it differs. */
T_TEST(a_shard_was_changed)
{
    static const char
        index[] = "{\"metadata\":{\"total_size\":80000}, \"weight_map\":{\"a\":\"m-1\",\"b\":\"sub/m-2\"}}";
    static const char other[] = "{\"c\":{\"dtype\":\"F32\",\"shape\":[10000],\"data_offsets\":[0,40000]}}     ";
    struct rig r = rig_make(0);
    struct stat before;

    make_model(&r);
    leave_half(&r);
    assert_int_equal(stat(in_folder("model/sub/m-2"), &before), 0);
    const struct timespec times[2] = {{1, 0}, {1, 0}}, back[2] = {before.st_atim, before.st_mtim};
    assert_int_equal(utimensat(AT_FDCWD, in_folder("model/sub/m-2"), times, 0), 0);
    expect_refused(&r, SIDE_STATE, "begun before sub/m-2 was changed: its time of change is another");
    assert_int_equal(utimensat(AT_FDCWD, in_folder("model/sub/m-2"), back, 0), 0);
    write_bytes(in_folder("model/model.safetensors.index.json"), index, sizeof(index) - 1);
    expect_refused(&r, SIDE_STATE, "model.safetensors.index.json was changed since");
    assert_int_equal(unlink(in_folder("model/model.safetensors.index.json")), 0);
    assert_int_equal(rename(in_folder("model/m-1"), in_folder("model/x.safetensors")), 0);
    expect_refused(&r, SIDE_STATE, "from another input");
    /* Of a single file: other tensors in it are a change of the file, no other selection. */
    snprintf(r.in, sizeof(r.in), "%s/in.safetensors", t_tmpdir());
    snprintf(r.out, sizeof(r.out), "%s/one", t_tmpdir());
    snprintf(r.part, sizeof(r.part), "%s.cast-part", r.out);
    snprintf(r.journal, sizeof(r.journal), "%s.cast-journal", r.out);
    leave_half(&r);
    write_safetensors(r.in, other, sizeof(other) - 1, 40000);
    expect_refused(&r, SIDE_STATE, "begun when in.safetensors had ");
    rig_free(&r);
}

T_MAIN(T(rights_of_a_file), T(read_only_and_gone_on_with), T(rights_of_a_folder), T(a_folder_stays_itself),
       T(half_moved), T(made_meanwhile), T(an_old_one_is_not_the_new), T(half_moved_and_half_lost),
       T(a_file_of_nobody_is_replaced), T(a_shard_s_name_is_ours), T(names_that_cannot_be), T(restart_spares_strangers),
       T(a_shard_was_changed))
