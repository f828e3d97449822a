/* SPDX-License-Identifier: MIT
 *
 * .npy files: versions, types and shapes that are taken, and what is refused, each with its place. */
#include "checkpoint_help.h"

/* ^ marks the place that the error names. */
static const struct {
    const char *header;
    size_t data;
    const char *word;
} rows[] = {
    {"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }   \n", 24, NULL},
    {"{'shape': (4,), 'fortran_order': False, 'descr': '|u1'}", 4, NULL},
    {"{\"shape\":(),\"fortran_order\":True,\"descr\":\"<c8\"}", 8, NULL},
    {"{'descr': '|b1', 'fortran_order': True, 'shape': (1, 5L, 1), }", 5,
     NULL}, /* one dimension alone is in both orders */
    {"{'descr': '>i1', 'fortran_order': False, 'shape': (0, 9), }", 0, NULL},
    {"{'descr': '=i8', 'fortran_order': False, 'shape': (1,), }", 8, NULL},

    {"^", 0, "not a dictionary"},
    {"^[]", 0, "not a dictionary"},
    {"{'descr': '<f4', 'fortran_order': False}^", 0, "lacks one of"},
    {"{'descr': '<f4', 'shape': (1,)}^", 4, "lacks one of"},
    {"{'descr': '<f4', 'descr'^: '<f4'}", 0, "stands twice"},
    {"{'descr': '<f4', 'fortran_order': False, 'shape': (1,), 'x'^: 1}", 4, "unknown key"},
    {"{^descr: '<f4'}", 0, "expected a key in quotes"},
    {"{'descr' ^'<f4'}", 0, "expected ':'"},
    {"{'descr': '<f4' ^'shape': (1,)}", 0, "expected ',' or '}'"},
    {"{'descr': ^[('a', '<f4')], 'fortran_order': False, 'shape': (1,)}", 4, "structured types"},
    {"{'descr': ^'>f4', 'fortran_order': False, 'shape': (1,)}", 4, "big-endian data"},
    {"{'descr': ^'|O', 'fortran_order': False, 'shape': (1,)}", 4, "Python objects"},
    {"{'descr': ^'<c16', 'fortran_order': False, 'shape': (1,)}", 16, "no type that can be loaded"},
    {"{'descr': ^'<U4', 'fortran_order': False, 'shape': (1,)}", 16, "no type that can be loaded"},
    {"{'descr': ^'f4', 'fortran_order': False, 'shape': (1,)}", 4, "no type that can be loaded"},
    {"{'descr': ^'', 'fortran_order': False, 'shape': (1,)}", 4, "no type that can be loaded"},
    {"{'descr': '<f4', 'fortran_order': ^1, 'shape': (1,)}", 4, "neither True nor False"},
    {"{'descr': '<f4', 'fortran_order': False, 'shape': ^[1]}", 4, "shape is not a tuple"},
    {"{'descr': '<f4', 'fortran_order': False, 'shape': (1)^}", 4, "a number in brackets"},
    {"{'descr': '<f4', 'fortran_order': False, 'shape': (1 ^2)}", 4, "expected ',' or ')'"},
    {"{'descr': '<f4', 'fortran_order': False, 'shape': (^-1,)}", 4, "not a whole number"},
    {"{'descr': '<f4', 'fortran_order': False, 'shape': (01^,)}", 4, "not a whole number"},
    {"{'descr': '<f4', 'fortran_order': False, 'shape': (1844674407370955161^6,)}", 4, "more than 64 bits"},
    {"{'descr': '<f4', 'fortran_order': False, 'shape': (1,)} ^x", 4, "something stands behind"},
    {"^{'descr': '<f4', 'fortran_order': True, 'shape': (2, 2)}", 16, "Fortran order"},
    {"^{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296)}", 16, "product of shape"},
    {"{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}", 7, "1 bytes of data are missing"},
    {"{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}", 9, "1 bytes behind the last tensor"},
};

/* Returns the bytes of the head. */
static size_t write_npy(const char *path, unsigned version, const char *header, size_t bytes, size_t data)
{
    unsigned char all[1024] = "\x93NUMPY";
    const size_t head = version == 1 ? 10 : 12;

    assert_true(head + bytes + data <= sizeof(all));
    all[6] = (unsigned char)version;
    all[7] = 0;
    for (size_t i = 8; i < head; i++)
        all[i] = (unsigned char)(bytes >> (8 * (i - 8)));
    memcpy(all + head, header, bytes);
    write_bytes(path, all, head + bytes + data);
    return head;
}

T_TEST(rules)
{
    const char *path = in_folder("some.npy");

    for (size_t i = 0; i < 3 * sizeof(rows) / sizeof(rows[0]); i++) {
        const char *header = rows[i / 3].header, *mark = strchr(header, '^');
        const unsigned version = 1 + (unsigned)(i % 3);
        char text[512], place[64] = "";
        side_checkpoint *ck = NULL;

        snprintf(text, sizeof(text), "%.*s%s", mark != NULL ? (int)(mark - header) : 256, header,
                 mark != NULL ? mark + 1 : "");
        const size_t head = write_npy(path, version, text, strlen(text), rows[i / 3].data);
        if (mark != NULL)
            snprintf(place, sizeof(place), "npy, offset %zu: ", head + (size_t)(mark - header));
        const side_status s = side_checkpoint_open(path, NULL, &ck);
        const char *said = side_last_error()->message, *word = rows[i / 3].word;
        if ((s == SIDE_OK) != (word == NULL) ||
            (word != NULL && (s != SIDE_INVALID || strstr(said, word) == NULL || strstr(said, place) == NULL)))
            T_FAIL("%s, version %u: expected '%s' at '%s', got: %s", header, version, word != NULL ? word : "nothing",
                   place, said);
        side_checkpoint_close(ck);
    }
}

T_TEST(what_is_read)
{
    const char *path = in_folder("some.npy");
    side_checkpoint *ck;
    side_tensor t;

    write_npy(path, 1, rows[0].header, strlen(rows[0].header), rows[0].data);
    T_OK(side_checkpoint_open(path, NULL, &ck));
    assert_int_equal(side_checkpoint_count(ck), 1);
    T_OK(side_checkpoint_tensor(ck, 0, &t));
    assert_true(strcmp(t.name, "some") == 0 && t.type == SIDE_DTYPE_F32 && t.rank == 2 && t.dims[0] == 2 &&
                t.dims[1] == 3 && t.bytes == 24 && t.offset == 10 + strlen(rows[0].header));
    side_checkpoint_close(ck);
}

static void refuses(const char *path, const char *word)
{
    side_checkpoint *ck;

    T_STATUS(side_checkpoint_open(path, NULL, &ck), SIDE_INVALID);
    if (strstr(side_last_error()->message, word) == NULL)
        T_FAIL("expected '%s', got: %s", word, side_last_error()->message);
}

T_TEST(prefaces)
{
    const char *path = in_folder("some.npy");

    write_bytes(path, "\x93NUMPY\1\0\0", 9);
    refuses(path, "offset 0: no .npy file");
    write_bytes(path, "\x93NUMPX\1\0\0\0", 10);
    refuses(path, "offset 0: no .npy file");
    write_npy(path, 4, "", 0, 0);
    refuses(path, "offset 6: version 4.0;");
    write_bytes(path, "\x93NUMPY\1\0\1\0", 10);
    refuses(path, "offset 8: a header of 1 bytes, but the file ends before");
    write_bytes(path, "\x93NUMPY\2\0\0\0", 10);
    refuses(path, "offset 8: a header of 0 bytes, but the file ends before");
    write_bytes(path, "\x93NUMPY\2\0\xff\xff\xff\xff{}", 14);
    refuses(path, "offset 8: a header of 4294967295 bytes, but the file ends before");
    char *large = calloc(1, 10013);
    assert_non_null(large);
    memcpy(large, "\x93NUMPY\2\0\x11\x27\0\0", 12); /* 10001 */
    write_bytes(path, large, 10013);
    free(large);
    refuses(path, "offset 8: a header of 10001 bytes; 10000 are possible");
}

/* Whatever a file is changed to, it is taken or refused, and that is all. */
T_TEST(damaged)
{
    static const char some[] = "{}()',:<>|0123456789FTL \n\x93\xff";
    const char *path = in_folder("some.npy"), *header = rows[0].header;

    T_FOR_SEEDS (seed, 300) {
        t_rng rng = t_rng_make(seed);
        unsigned char all[128] = "\x93NUMPY\1";
        side_checkpoint *ck = NULL;
        const size_t n = strlen(header);
        all[8] = (unsigned char)n;
        memcpy(all + 10, header, n);
        for (uint64_t k = t_rng_below(&rng, 3) + 1; k > 0; k--)
            all[t_rng_below(&rng, 10 + n)] = (unsigned char)some[t_rng_below(&rng, sizeof(some) - 1)];
        write_bytes(path, all, (size_t)t_rng_below(&rng, 10) == 0 ? (size_t)t_rng_below(&rng, 10 + n) : 34 + n);
        const side_status s = side_checkpoint_open(path, NULL, &ck);
        assert_true(s == SIDE_OK || (s == SIDE_INVALID && strstr(side_last_error()->message, "npy, offset ") != NULL));
        side_checkpoint_close(ck);
    }
}

T_MAIN(T(damaged), T(rules), T(what_is_read), T(prefaces))
