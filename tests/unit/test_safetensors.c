/* SPDX-License-Identifier: MIT
 *
 * Headers of safetensors files: what is taken and what is refused, each with its own error at its own place, by default, leniently and by the letter of
 * the format. The reference implementation is beside it in tests/py/test_safetensors.py. */
#include "checkpoint.h"
#include "checkpoint_help.h"

#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define DEFAULT 1u
#define LENIENT 2u
#define LETTER  4u /* STRICT_SPEC */
#define ALL     (DEFAULT | LENIENT | LETTER)

#define X4    "\"x\":{\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[0,4]}"
#define Y4    "\"y\":{\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[4,8]}"
#define TX(t) "\"x\":{" t "}"

/* In `header` ^ marks the place that the error names, and is taken out. */
struct row {
    const char *header;
    size_t data;
    unsigned takes;   /* modes */
    const char *word; /* of the error in the other modes */
    const char *tensor;
    size_t bytes; /* of the header; 0: a string */
};

static const struct row rows[] = {
    /* taken */
    {"{}", 0, ALL, NULL, NULL, 0},
    {"{\"__metadata__\":{}}", 0, ALL, NULL, NULL, 0},
    {"{\"__metadata__\":{\"a\":\"b\"}}      ", 0, ALL, NULL, NULL, 0},
    {"{" X4 "}", 4, ALL, NULL, NULL, 0},
    {"{" X4 "," Y4 "}", 8, ALL, NULL, NULL, 0},
    {"{" Y4 "," X4 "}", 8, ALL, NULL, NULL, 0},
    {"{ \"x\" : { \"shape\" : [ ] , \"data_offsets\" : [ 0 , 8 ] , \"dtype\" : \"F64\" } }", 8, ALL, NULL, NULL, 0},
    {"{" TX("\"dtype\":\"\\u0046\\u0033\\u0032\",\"sh\\u0061pe\":[1],\"data_offsets\":[0,4]") "}", 4, ALL, NULL, NULL, 0},
    {"{\"\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, ALL, NULL, NULL, 0},
    {"{\"z\":{\"dtype\":\"F32\",\"shape\":[0,5],\"data_offsets\":[0,0]}}", 0, ALL, NULL, NULL, 0},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[4,4]}," X4
     ",\"b\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},\"c\":{\"dtype\":\"U8\",\"shape\":[0],\"data_"
     "offsets\":[4,4]}}",
     4, ALL, NULL, NULL, 0},
    {"{" TX("\"dtype\":\"F32\",\"shape\":[0,9223372036854775808,4],\"data_offsets\":[0,0]") "}", 0, ALL, NULL, NULL, 0},
    {"{" TX("\"dtype\":\"F4\",\"shape\":[3,2],\"data_offsets\":[0,3]") "}", 3, ALL, NULL, NULL, 0},
    {"{" TX("\"dtype\":\"F6_E2M3\",\"shape\":[4],\"data_offsets\":[0,3]") "}", 3, ALL, NULL, NULL, 0},
    {"{" TX("\"dtype\":\"BOOL\",\"shape\":[3],\"data_offsets\":[0,3]") "}", 3, ALL, NULL, NULL, 0},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},\"b\":{\"dtype\":\"F64\",\"shape\":[1],\"data_"
     "offsets\":[1,9]}}",
     9, ALL, NULL, NULL, 0},
    {"{\"\xc3\xa4\\ud83d\\ude00\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, ALL, NULL, NULL, 0},
    {"{" TX("\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,"
            "1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,1]") "}",
     1, ALL, NULL, NULL, 0},

    /* what readers take and the format forbids */
    {"^ {" X4 "}", 4, DEFAULT | LENIENT, "does not begin with '{'", NULL, 0},
    {"^\t\r\n {" X4 "}", 4, DEFAULT | LENIENT, "does not begin with '{'", NULL, 0},
    {"{" X4 "} ^\t\r\n", 4, DEFAULT | LENIENT, "something else than a space", NULL, 0},

    /* what the reference takes */
    {"{" X4 ",\"^x\":{\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, LENIENT,
     "stands twice, at offset 10 too", "x", 0},
    {"{" X4 ",\"^\\u0078\":{\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, LENIENT, "stands twice", "x",
     0},
    {"{\"x\":{\"dtype\":\"I32\",\"shape\":[0],\"data_offsets\":[4,4]},\"^x\":{\"dtype\":\"I32\",\"shape\":[1],\"data_"
     "offsets\":[0,4]}}",
     4, LENIENT, "stands twice", "x", 0},
    {"{\"__metadata__\":{\"a\":\"1\",\"b\":\"\",\"^\\u0061\":\"2\"}}", 0, LENIENT,
     "the key stands twice in __metadata__", NULL, 0},
    {"{\"__metadata__\":^null}", 0, LENIENT, "__metadata__ is not an object", NULL, 0},
    {"{" TX("\"dtype\":\"I32\",\"^more\":{\"a\":[{}]},\"shape\":[1],\"data_offsets\":[0,4]") "}", 4, LENIENT,
     "unknown field", "x", 0},
    {"{" TX("\"dtype\":\"I32\",\"^a\":1,\"a\":2,\"shape\":[1],\"data_offsets\":[0,4]") "}", 4, LENIENT, "unknown field",
     "x", 0},
    {"{\"x\":^[\"I32\",[1],[0,4]]}", 4, LENIENT, "not an object with dtype", "x", 0},
    {"{" TX("\"dtype\":^{\"I32\":null},\"shape\":[1],\"data_offsets\":[0,4]") "}", 4, LENIENT, "dtype is not a text",
     "x", 0},

    /* refused: the text */
    {"^", 0, 0, "", NULL, 0},
    {"^[]", 0, 0, "", NULL, 0},
    {"^null", 0, 0, "", NULL, 0},
    {"^\xef\xbb\xbf{}", 0, 0, "", NULL, 0},
    {"{" X4 "}^\0\0\0", 4, 0, "", NULL, sizeof("{" X4 "}^\0\0\0") - 1},
    {"{" X4 "}^{}", 4, 0, "", NULL, 0},
    {"{" X4 "}^,", 4, 0, "", NULL, 0},
    {"{" X4 ",^}", 4, 0, "a key in quotes", NULL, 0},
    {"{" X4 "^", 4, 0, "',' or '}'", NULL, 0},
    {"{^/* */" X4 "}", 4, 0, "a key in quotes", NULL, 0},
    {"{^'x':{}}", 0, 0, "a key in quotes", NULL, 0},
    {"{\"x^\n\":{}}", 0, 0, "", NULL, 0},
    {"{\"x^\\q\":{}}", 0, 0, "", NULL, 0},
    {"{\"x^\\ud800\":{}}", 0, 0, "surrogate", NULL, 0},
    {"{\"x^\xed\xa0\x80\":{}}", 0, 0, "is not UTF-8", NULL, 0},
    {"{\"x^\xc0\xaf\":{}}", 0, 0, "is not UTF-8", NULL, 0},
    {"{\"x^\xff\":{}}", 0, 0, "is not UTF-8", NULL, 0},
    {"{\"^x\\u0000y\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, 0, "\\u0000", NULL, 0},
    {"{\"__metadata__\":{\"^a\\u0000\":\"\"}}", 0, 0, "\\u0000", NULL, 0},
    {"{\"__metadata__\":{\"a\":\"^\\u0000\"}}", 0, 0, "\\u0000", NULL, 0},

    /* metadata */
    {"{\"__metadata__\":{\"a\":^1}}", 0, 0, "expected a string, not a number", NULL, 0},
    {"{\"__metadata__\":{\"a\":^{}}}", 0, 0, "expected a string, not an object", NULL, 0},
    {"{\"__metadata__\":^[]}", 0, 0, "__metadata__ is not an object", NULL, 0},
    {"{\"__metadata__\":{},\"^__metadata__\":{}}", 0, 0, "__metadata__ stands twice", NULL, 0},
    {"{\"format\":\"^pt\"}", 0, 0, "not an object with dtype", "format", 0},

    /* a tensor's fields */
    {"{\"x\":^1}", 0, 0, "not an object with dtype", "x", 0},
    {"{\"x\":^null}", 0, 0, "not an object with dtype", "x", 0},
    {"{" TX("\"shape\":[1],\"data_offsets\":[0,4]^") "}", 4, 0, "has no dtype", "x", 0},
    {"{" TX("\"dtype\":\"I32\",\"data_offsets\":[0,4]^") "}", 4, 0, "has no shape", "x", 0},
    {"{" TX("\"dtype\":\"I32\",\"shape\":[1]^") "}", 4, 0, "has no data_offsets", "x", 0},
    {"{" TX("\"dtype\":\"I32\",\"^dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[0,4]") "}", 4, 0,
     "dtype stands twice", "x", 0},
    {"{" TX("\"dtype\":\"I32\",\"shape\":[1],\"^sh\\u0061pe\":[1],\"data_offsets\":[0,4]") "}", 4, 0,
     "shape stands twice", "x", 0},
    {"{" TX("\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[0,4],\"^data_offsets\":[0,4]") "}", 4, 0,
     "data_offsets stands twice", "x", 0},
    {"{" TX("\"dtype\":\"^i32\",\"shape\":[1],\"data_offsets\":[0,4]") "}", 4, 0, "\"i32\" is no dtype", "x", 0},
    {"{" TX("\"dtype\":\"^F8\",\"shape\":[4],\"data_offsets\":[0,4]") "}", 4, 0, "\"F8\" is no dtype", "x", 0},
    {"{" TX("\"dtype\":\"^\",\"shape\":[4],\"data_offsets\":[0,4]") "}", 4, 0, "\"\" is no dtype", "x", 0},
    {"{" TX("\"dtype\":^7,\"shape\":[4],\"data_offsets\":[0,4]") "}", 4, 0, "dtype is not a text", "x", 0},
    {"{" TX("\"dtype\":\"I32\",\"shape\":^1,\"data_offsets\":[0,4]") "}", 4, 0, "expected an array, not a number", "x",
     0},
    {"{" TX("\"dtype\":\"I32\",\"shape\":[^1.0],\"data_offsets\":[0,4]") "}", 4, 0, "whole number", "x", 0},
    {"{" TX("\"dtype\":\"I32\",\"shape\":[^1e0],\"data_offsets\":[0,4]") "}", 4, 0, "whole number", "x", 0},
    {"{" TX("\"dtype\":\"I32\",\"shape\":[^-1],\"data_offsets\":[0,4]") "}", 4, 0, "whole number", "x", 0},
    {"{" TX("\"dtype\":\"I32\",\"shape\":[^-0],\"data_offsets\":[0,0]") "}", 0, 0, "whole number", "x", 0},
    {"{" TX("\"dtype\":\"I32\",\"shape\":[^01],\"data_offsets\":[0,4]") "}", 4, 0, "begin with 0", "x", 0},
    {"{" TX("\"dtype\":\"I32\",\"shape\":[\"^1\"],\"data_offsets\":[0,4]") "}", 4, 0, "a dimension is not a number",
     "x", 0},
    {"{" TX("\"dtype\":\"I32\",\"shape\":[^null],\"data_offsets\":[0,4]") "}", 4, 0, "a dimension is not a number", "x",
     0},
    {"{" TX("\"dtype\":\"I32\",\"shape\":[^NaN],\"data_offsets\":[0,4]") "}", 4, 0, "", "x", 0},
    {"{" TX("\"dtype\":\"I32\",\"shape\":[^18446744073709551616],\"data_offsets\":[0,4]") "}", 4, 0,
     "more than 64 bits", "x", 0},
    {"{" TX("\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,"
            "1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,^1],\"data_offsets\":[0,1]") "}",
     1, 0, "more than 64 dimensions", "x", 0},
    {"{" TX("\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[0^]") "}", 4, 0,
     "expected a number, not the array's end", "x", 0},
    {"{" TX("\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[0,4,^4]") "}", 4, 0,
     "expected the array's end, not a number", "x", 0},
    {"{" TX("\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[0,^4.0]") "}", 4, 0, "whole number", "x", 0},
    {"{" TX("\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[\"^0\",4]") "}", 4, 0, "expected a number, not a string",
     "x", 0},

    /* sizes */
    {"{" TX("\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":^[4,0]") "}", 4, 0, "end before they begin", "x", 0},
    {"{" TX("\"dtype\":\"I32\",\"shape\":[2],\"data_offsets\":^[0,4]") "}", 4, 0, "make 8 bytes, data_offsets span 4",
     "x", 0},
    {"{" TX("\"data_offsets\":^[0,4],\"dtype\":\"I64\",\"shape\":[]") "}", 4, 0, "make 8 bytes, data_offsets span 4",
     "x", 0},
    {"{" TX("\"dtype\":\"I32\",\"shape\":^[9223372036854775808,4,0],\"data_offsets\":[0,0]") "}", 0, 0,
     "more than 64 bits hold", "x", 0},
    {"{" TX("\"dtype\":\"I32\",\"shape\":^[576460752303423488],\"data_offsets\":[0,0]") "}", 0, 0,
     "more than 64 bits hold", "x", 0},
    {"{" TX("\"dtype\":\"F4\",\"shape\":^[3],\"data_offsets\":[0,2]") "}", 2, 0, "3 elements of 4 bits fill no whole",
     "x", 0},
    {"{" TX("\"dtype\":\"F6_E3M2\",\"shape\":^[2],\"data_offsets\":[0,2]") "}", 2, 0,
     "2 elements of 6 bits fill no whole", "x", 0},

    /* cover: each byte of the data belongs to one tensor */
    {"{\"^x\":{\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[4,8]}}", 8, 0,
     "begins at 4 of the data; the 4 bytes before it", "x", 0},
    {"{" X4 ",\"^y\":{\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[5,9]}}", 9, 0,
     "begins at 5 of the data; the 1 bytes before it", "y", 0},
    {"{" X4 ",\"^y\":{\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[3,7]}}", 7, 0,
     "begins at 3 of the data, within \"x\", which ends at 4", "y", 0},
    {"{" X4 ",\"^y\":{\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, 0,
     "begins at 0 of the data, within \"x\"", "y", 0},
    {"{" X4 ",\"^y\":{\"dtype\":\"I32\",\"shape\":[0],\"data_offsets\":[2,2]}}", 4, 0,
     "begins at 2 of the data, within \"x\"", "y", 0},
    {"{" X4 ",\"^y\":{\"dtype\":\"I32\",\"shape\":[0],\"data_offsets\":[5,5]}}", 4, 0,
     "begins at 5 of the data; the 1 bytes", "y", 0},
    {"{" TX("\"dtype\":\"U8\",\"shape\":[18446744073709551615],\"data_offsets\":[0,18446744073709551615]") "}", 4, 0,
     "", "x", 0},

    /* names in messages are plain text */
    {"{\"a\\u001b[1m\\\"\xc3\xa4\":{\"dtype\":\"^?\"}}", 0, 0, "is no dtype", "a\\x1b[1m\\\"\\xc3\\xa4", 0},
};

static const struct {
    unsigned mode;
    uint32_t flags;
    const char *name;
} modes[] = {{DEFAULT, 0, "default"},
             {LENIENT, SIDE_CHECKPOINT_LENIENT, "lenient"},
             {LETTER, SIDE_CHECKPOINT_STRICT_SPEC, "strict-spec"}};

/* Without the mark; its place in *at, SIZE_MAX where there is none. */
static size_t unmark(const struct row *row, char *text, size_t *at)
{
    const size_t n = row->bytes != 0 ? row->bytes : strlen(row->header);
    const char *mark = memchr(row->header, '^', n);

    *at = mark != NULL ? (size_t)(mark - row->header) : SIZE_MAX;
    if (mark == NULL) {
        memcpy(text, row->header, n);
        return n;
    }
    memcpy(text, row->header, *at);
    memcpy(text + *at, mark + 1, n - *at - 1);
    return n - 1;
}

static void check_refusal(const struct row *row, const char *mode, size_t at)
{
    const side_error *e = side_last_error();
    char place[96], tensor[128];

    snprintf(place, sizeof(place), "m.safetensors, offset %zu: ", at + 8);
    snprintf(tensor, sizeof(tensor), "tensor \"%s\"", row->tensor != NULL ? row->tensor : "");
    if (e->status != SIDE_INVALID || strstr(e->message, row->word) == NULL ||
        (at != SIZE_MAX && strstr(e->message, place) == NULL) ||
        (row->tensor != NULL && strstr(e->message, tensor) == NULL))
        T_FAIL("%s of %s: expected '%s' at '%s' and '%s', got: %s", mode, row->header, row->word, place,
               row->tensor != NULL ? tensor : "", e->message);
}

T_TEST(rules)
{
    const char *path = in_folder("m.safetensors");
    char text[1024];

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        size_t at = 0;
        const size_t n = unmark(&rows[i], text, &at);
        write_safetensors(path, text, n, rows[i].data);
        for (size_t j = 0; j < 2 * sizeof(modes) / sizeof(modes[0]); j++) {
            const size_t m = j / 2;
            side_checkpoint *ck = NULL;
            st_test_by_tokens = j % 2 != 0;
            const side_status s = open_with(path, modes[m].flags, &ck);
            st_test_by_tokens = false;
            if ((s == SIDE_OK) != ((rows[i].takes & modes[m].mode) != 0))
                T_FAIL("%s of %s: %s", modes[m].name, rows[i].header,
                       s == SIDE_OK ? "is taken" : side_last_error()->message);
            /* By the letter, the blank before a broken header is told first. */
            if (s != SIDE_OK && (modes[m].mode != LETTER || n == 0 || text[0] == '{'))
                check_refusal(&rows[i], modes[m].name, at);
            side_checkpoint_close(ck);
        }
    }
}

static void same_row(const char *header, const side_checkpoint *a, const side_checkpoint *b, size_t i)
{
    side_tensor x, y;

    T_OK(side_checkpoint_tensor(a, i, &x));
    T_OK(side_checkpoint_tensor(b, i, &y));
    if (x.type != y.type || x.rank != y.rank || x.offset != y.offset || x.bytes != y.bytes ||
        strcmp(x.name, y.name) != 0 || (x.rank != 0 && memcmp(x.dims, y.dims, x.rank * sizeof(*x.dims)) != 0))
        T_FAIL("tensor %zu is another one token by token: %s", i, header);
}

/* Tensors in the usual form are read by a shorter way: with any byte changed, left out or doubled, both ways give the same, to the word of an error. */
T_TEST(usual_form)
{
    static const char header[] = "{\"a\":{\"dtype\":\"BF16\",\"shape\":[2,10],\"data_offsets\":[0,40]},"
                                 "\"b\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[40,44]}}";
    static const char others[] = "\"\\ ,:[]{}0129-.eU\n\200";
    const char *path = in_folder("m.safetensors");
    const size_t n = sizeof(header) - 1, kinds = sizeof(others) - 1 + 2;
    char text[sizeof(header) + 1];
    unsigned taken = 0;

    for (size_t i = 0; i < n * kinds; i++) {
        const size_t at = i / kinds, kind = i % kinds, gone = kind == 0, more = kind == 1;
        side_checkpoint *ck[2] = {NULL, NULL};
        char message[2][sizeof(((side_error *)0)->message)];
        memcpy(text, header, at + more);
        memcpy(text + at + more, header + at + gone, n - at - gone);
        if (kind > 1)
            text[at] = others[kind - 2];
        write_safetensors(path, text, n - gone + more, 44);
        text[n - gone + more] = '\0';
        for (int tokens = 0; tokens < 2; tokens++) {
            st_test_by_tokens = tokens != 0;
            message[tokens][0] = '\0';
            if (open_with(path, SIDE_CHECKPOINT_LENIENT * (uint32_t)(i & 1), &ck[tokens]) != SIDE_OK)
                memcpy(message[tokens], side_last_error()->message, sizeof(message[0]));
            st_test_by_tokens = false;
        }
        if (strcmp(message[0], message[1]) != 0 || (ck[0] == NULL) != (ck[1] == NULL))
            T_FAIL("%s: '%s', token by token '%s'", text, message[0], message[1]);
        for (size_t k = 0; ck[0] != NULL && k < side_checkpoint_count(ck[0]); k++)
            same_row(text, ck[0], ck[1], k);
        taken += ck[0] != NULL;
        side_checkpoint_close(ck[0]);
        side_checkpoint_close(ck[1]);
    }
    assert_true(taken > 20);
}

/* Of names that stand twice, the last counts leniently, for the metadata too. */
T_TEST(last_counts)
{
    static const char header[] = "{\"__metadata__\":{\"a\":\"1\",\"b\":\"2\",\"a\":\"3\"}," X4
                                 ",\"x\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}," Y4
                                 ",\"x\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}";
    const char *path = in_folder("m.safetensors"), *key, *value;
    side_checkpoint *ck;
    side_tensor t;
    size_t index;

    write_safetensors(path, header, strlen(header), 8);
    T_OK(open_with(path, SIDE_CHECKPOINT_LENIENT, &ck));
    assert_int_equal(side_checkpoint_count(ck), 2);
    T_OK(side_checkpoint_find(ck, "x", 1, &index));
    T_OK(side_checkpoint_tensor(ck, index, &t));
    assert_true(index == 0 && t.type == SIDE_DTYPE_F32);
    T_OK(side_checkpoint_find(ck, "y", 1, &index));
    assert_int_equal(index, 1);
    assert_int_equal(side_checkpoint_metadata_count(ck, 0), 2);
    T_OK(side_checkpoint_metadata(ck, 0, 1, &key, &value));
    assert_true(strcmp(key, "a") == 0 && strcmp(value, "3") == 0);
    side_checkpoint_close(ck);
}

/* A word of the reason, for files that are wrong outside the header. */
static void refuses(const char *path, side_status status, const char *word)
{
    side_checkpoint *ck;

    T_STATUS(side_checkpoint_open(path, NULL, &ck), status);
    if (strstr(side_last_error()->message, word) == NULL)
        T_FAIL("%s: expected '%s', got: %s", path, word, side_last_error()->message);
}

T_TEST(files)
{
    static const char header[] = "{" X4 "}";
    const char *path = in_folder("m.safetensors"), *other = in_folder("other");
    unsigned char all[16] = {0};

    for (size_t n = 0; n < 8; n++) {
        write_bytes(path, all, n);
        refuses(path, SIDE_INVALID, "m.safetensors, offset 0: the file has");
    }
    write_bytes(path, all, 8); /* a header of no bytes */
    refuses(path, SIDE_INVALID, "m.safetensors, offset 8: ");
    memcpy(all, "\x01\xe1\xf5\x05\0\0\0\0", 8); /* 100,000,001 */
    write_bytes(path, all, 16);
    refuses(path, SIDE_INVALID, "offset 0: a header of 100000001 bytes, and 100000000 are possible");
    assert_int_equal(truncate(path, 100000009), 0); /* sparse */
    refuses(path, SIDE_INVALID, "100000000 are possible");
    memset(all, 0xff, 8);
    write_bytes(path, all, 16);
    refuses(path, SIDE_INVALID, "a header of 18446744073709551615 bytes, and 100000000 are possible");
    write_bytes(path, "\x93NUMPY\1\0more", 12);
    refuses(path, SIDE_INVALID, "m.safetensors is no safetensors file; it looks like a .npy file: name it so");
    write_bytes(path, "PK\3\4\x14\0\0\0\x08\0", 10);
    refuses(path, SIDE_INVALID, "is no safetensors file; it looks like a zip file, as torch.save writes");
    write_bytes(path, "\x80\2\x8a\x0al\xfc\x9c\x46\xf9", 9);
    refuses(path, SIDE_INVALID, "is no safetensors file; it looks like a pickle");
    memcpy(all, "\x09\0\0\0\0\0\0\0", 8);
    write_bytes(path, all, 16);
    refuses(path, SIDE_INVALID, "a header of 9 bytes, but the file ends 8 bytes behind");
    write_safetensors(path, header, strlen(header), 3);
    refuses(path, SIDE_INVALID, "the file ends within tensor \"x\": 1 bytes of data are missing");
    write_safetensors(path, header, strlen(header), 5);
    refuses(path, SIDE_INVALID, "1 bytes behind the last tensor belong to none");
    write_safetensors(path, "{}", 2, 1);
    refuses(path, SIDE_INVALID, "m.safetensors, offset 10: 1 bytes behind");
    refuses(in_folder("absent"), SIDE_NOT_FOUND, "absent");
    refuses("/dev/null", SIDE_INVALID, "/dev/null is no regular file");
    assert_int_equal(mkfifo(other, 0600), 0);
    refuses(other, SIDE_INVALID, "other is no regular file");
    assert_int_equal(symlink("m.safetensors", in_folder("link")), 0);
    refuses(in_folder("link"), SIDE_INVALID, "offset 10: 1 bytes behind");
    refuses("", SIDE_INVALID, "path is NULL or empty");
}

/* A header of n tensors as those of a large mixture of experts. */
static char *large_header(size_t n, size_t *bytes)
{
    char *text = malloc(n * 192 + 64), *p = text;
    uint64_t at = 0;

    assert_non_null(text);
    p += sprintf(p, "{\"__metadata__\":{\"format\":\"pt\"}");
    for (size_t i = 0; i < n; i++, at += 3072)
        p += sprintf(
            p, ",\"model.layers.%zu.mlp.experts.%zu.gate_proj.weight\":{\"dtype\":\"BF16\",\"shape\":[768,2],\"data_offsets\":[%llu,%llu]}",
            i / 384, i % 384, (unsigned long long)at, (unsigned long long)at + 3072);
    p += sprintf(p, "}");
    *bytes = (size_t)(p - text);
    return text;
}

/* Many tensors, all found again; how long it takes is told, not judged. */
T_TEST(many)
{
    const size_t n = 18867;
    const char *path = in_folder("m.safetensors");
    size_t bytes = 0, index;
    char *text = large_header(n, &bytes);
    struct timespec a, b;
    side_checkpoint *ck = NULL;
    double least = 1e9;

    write_safetensors(path, text, bytes, 0);
    assert_int_equal(truncate(path, (off_t)(8 + bytes + n * 3072)), 0);
    for (int i = 0; i < 5; i++) {
        side_checkpoint_close(ck);
        clock_gettime(CLOCK_MONOTONIC, &a);
        T_OK(side_checkpoint_open(path, NULL, &ck));
        clock_gettime(CLOCK_MONOTONIC, &b);
        const double ms = (double)(b.tv_sec - a.tv_sec) * 1e3 + (double)(b.tv_nsec - a.tv_nsec) / 1e6;
        least = ms < least ? ms : least;
    }
    printf("%zu tensors, a header of %zu bytes: %.2f ms\n", n, bytes, least);
    assert_int_equal(side_checkpoint_count(ck), n);
    for (size_t i = 0; i < n; i++) {
        side_tensor t;
        T_OK(side_checkpoint_tensor(ck, i, &t));
        T_OK(side_checkpoint_find(ck, t.name, t.name_bytes, &index));
        assert_true(index == i && t.offset == 8 + bytes + i * 3072);
    }
    side_checkpoint_close(ck);
    free(text);
}

/* Any order of entries gives the tables in the order of the data. */
T_TEST(any_order)
{
    const char *path = in_folder("m.safetensors");

    T_FOR_SEEDS (seed, 20) {
        t_rng rng = t_rng_make(seed);
        enum { N = 50 };
        size_t order[N], used = 1;
        char text[N * 100] = "{";
        side_checkpoint *ck;
        for (size_t i = 0; i < N; i++)
            order[i] = i;
        for (size_t i = N - 1; i > 0; i--) {
            const size_t j = (size_t)t_rng_below(&rng, i + 1), kept = order[i];
            order[i] = order[j];
            order[j] = kept;
        }
        for (size_t i = 0; i < N; i++)
            used += (size_t)sprintf(
                text + used, "%s\"t%zu\":{\"dtype\":\"U8\",\"shape\":[%d],\"data_offsets\":[%zu,%zu]}",
                i > 0 ? "," : "", order[i], order[i] % 2 ? 2 : 0, order[i] / 2 * 2, (order[i] + 1) / 2 * 2);
        text[used++] = '}';
        write_safetensors(path, text, used, N / 2 * 2);
        T_OK(side_checkpoint_open(path, NULL, &ck));
        for (size_t i = 0; i < N; i++) {
            side_tensor t;
            char name[8];
            snprintf(name, sizeof(name), "t%zu", i);
            T_OK(side_checkpoint_tensor(ck, i, &t));
            assert_string_equal(t.name, name);
        }
        side_checkpoint_close(ck);
    }
}

T_MAIN(T(rules), T(usual_form), T(last_counts), T(files), T(many), T(any_order))
