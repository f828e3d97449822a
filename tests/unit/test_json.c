/* SPDX-License-Identifier: MIT
 *
 * The strict JSON reader: what it takes, what it refuses and where, and that whole numbers, doubles and strings come out as they went in. What random
 * text does is tests/fuzz/fuzz_json.c's. */
#include "t.h"

#include "json.h"

#include <float.h>
#include <locale.h>
#include <math.h>

enum { KEYS = 64 };

static jread_key keys[KEYS];

/* The text lies at the end of a block of its own, so that AddressSanitizer sees a byte too much. */
static jread *begin(const char *text, size_t bytes)
{
    static jread r;
    static char *block;

    free(block);
    block = malloc(bytes != 0 ? bytes : 1);
    assert_non_null(block);
    memcpy(block, text, bytes);
    jread_begin(&r, "file.json", block, bytes, keys, KEYS);
    return &r;
}

/* The last token: JREAD_END or JREAD_ERROR. */
static jread_token read_all(const char *text, size_t bytes)
{
    jread *r = begin(text, bytes);
    jread_token token;

    do
        token = jread_next(r);
    while (token != JREAD_END && token != JREAD_ERROR);
    return token;
}

static void takes(const char *text)
{
    if (read_all(text, strlen(text)) != JREAD_END)
        T_FAIL("refuses %s: %s", text, side_last_error()->message);
    /* All of it is needed: each beginning is refused at its end, but for numbers at the top. */
    for (size_t n = 0; n < strlen(text); n++) {
        if (text[0] != '{' && text[0] != '[' && text[0] != '"')
            break;
        if (read_all(text, n) != JREAD_ERROR)
            T_FAIL("takes the first %zu bytes of %s", n, text);
    }
}

/* Refused, with the offset and a word of the reason. */
static void refuses(const char *text, size_t bytes, size_t offset, const char *word)
{
    char place[64];

    snprintf(place, sizeof(place), "(offset %zu)", offset);
    if (read_all(text, bytes) != JREAD_ERROR)
        T_FAIL("takes %.*s", (int)bytes, text);
    const char *said = side_last_error()->message;
    if (side_last_error()->status != SIDE_INVALID || strstr(said, place) == NULL || strstr(said, word) == NULL ||
        strncmp(said, "file.json, line ", 16) != 0)
        T_FAIL("%.*s: expected '%s' at offset %zu, got: %s", (int)bytes, text, word, offset, said);
}
#define REFUSES(text, offset, word) refuses(text, sizeof(text) - 1, offset, word)

T_TEST(what_is_json)
{
    static const char *const texts[] = {
        "{}",
        "[]",
        " \t\r\n[ ] ",
        "0",
        "-0",
        "10",
        "1.5",
        "1e5",
        "1E+5",
        "1e-5",
        "-0.0e0",
        "\"\"",
        "true",
        "false",
        "null",
        "[1,2,3]",
        "[[],[[]],{}]",
        "{\"a\":1,\"b\":[true,false,null],\"c\":{\"a\":{\"a\":{}}}}",
        "{ \"a\" : 1 , \"\" : \"\" }",
        "\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u0041\\uD83D\\uDE00\"",
        "\"\xc2\x80\xdf\xbf\xe0\xa0\x80\xed\x9f\xbf\xee\x80\x80\xef\xbf\xbf\xf0\x90\x80\x80\xf4\x8f\xbf\xbf\"",
        "\"\x7f\"",
        "{\"a\":{\"b\":1},\"b\":{\"a\":1}}"};

    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++)
        takes(texts[i]);
}

T_TEST(what_is_not)
{
    REFUSES("", 0, "expected a value");
    REFUSES(" ", 1, "the text ends");
    REFUSES("{} {}", 3, "the end of the text");
    REFUSES("1 2", 2, "the end of the text");
    REFUSES("nul", 0, "expected a value");
    REFUSES("True", 0, "expected a value");
    REFUSES("NaN", 0, "expected a value");
    REFUSES("-Infinity", 1, "a digit");
    REFUSES("+1", 0, "expected a value");
    REFUSES("01", 0, "begin with 0");
    REFUSES("-01", 1, "begin with 0");
    REFUSES("1.", 2, "behind the point");
    REFUSES(".5", 0, "expected a value");
    REFUSES("1e", 2, "exponent");
    REFUSES("1e+", 3, "exponent");
    REFUSES("0x10", 1, "the end of the text");
    REFUSES("[1,]", 3, "expected a value");
    REFUSES("[,1]", 1, "expected a value");
    REFUSES("[1 2]", 3, "',' or ']'");
    REFUSES("[1}", 2, "',' or ']'");
    REFUSES("{\"a\":1]", 6, "',' or '}'");
    REFUSES("{\"a\":1,}", 7, "a key");
    REFUSES("{,}", 1, "a key");
    REFUSES("{a:1}", 1, "a key");
    REFUSES("{'a':1}", 1, "a key");
    REFUSES("{\"a\" 1}", 5, "':'");
    REFUSES("{\"a\":}", 5, "expected a value");
    REFUSES("{\"a\"}", 4, "':'");
    REFUSES("]", 0, "expected a value");
    REFUSES("// x\n1", 0, "expected a value");
    REFUSES("\xef\xbb\xbf{}", 0, "0xef");
    REFUSES("[1]\0", 3, "0x00");
    REFUSES("[\v1]", 1, "0x0b");
}

T_TEST(strings_that_are_none)
{
    REFUSES("\"abc", 4, "within a string");
    REFUSES("\"abc\\\"", 6, "within a string");
    REFUSES("\"a\nb\"", 2, "control");
    REFUSES("\"a\0b\"", 2, "control");
    REFUSES("\"12345678\x1f\"", 9, "control"); /* behind eight plain ones */
    REFUSES("\"\\x41\"", 1, "no escape");
    REFUSES("\"\\u12G4\"", 1, "hexadecimal");
    REFUSES("\"\\u123", 1, "hexadecimal");
    REFUSES("\"\\ud800\"", 1, "surrogate");
    REFUSES("\"\\ud800\\u0041\"", 1, "surrogate");
    REFUSES("\"\\udc00\"", 1, "surrogate");
    REFUSES("\"\x80\"", 1, "UTF-8");
    REFUSES("\"\xc0\x80\"", 1, "UTF-8"); /* overlong */
    REFUSES("\"\xc1\xbf\"", 1, "UTF-8");
    REFUSES("\"\xe0\x9f\xbf\"", 1, "UTF-8");
    REFUSES("\"\xf0\x8f\xbf\xbf\"", 1, "UTF-8");
    REFUSES("\"\xed\xa0\x80\"", 1, "UTF-8");     /* surrogate */
    REFUSES("\"\xf4\x90\x80\x80\"", 1, "UTF-8"); /* past U+10FFFF */
    REFUSES("\"\xf5\x80\x80\x80\"", 1, "UTF-8");
    REFUSES("\"\xe2\x82\"", 1, "UTF-8");
    REFUSES("\"\xe2\x82", 1, "UTF-8");
    REFUSES("\"12345678\xff\"", 9, "UTF-8");
}

T_TEST(keys_that_stand_twice)
{
    REFUSES("{\"a\":1,\"a\":2}", 8, "twice");
    REFUSES("{\"a\":1,\"\\u0061\":2}", 8, "twice");
    REFUSES("{\"\\ud83d\\ude00\":1,\"\xf0\x9f\x98\x80\":2}", 19, "twice");
    REFUSES("{\"\":1,\"\":2}", 7, "twice");
    REFUSES("{\"b\":{\"a\":1,\"c\":{\"a\":0}},\"b\":2}", 26, "twice");
    REFUSES("[{\"a\":1},{\"a\":1,\"a\":1}]", 17, "twice");
    takes("[{\"a\":1},{\"a\":1},{\"a\":{\"a\":1}}]");
    takes("{\"ab\":1,\"a\":2,\"abc\":3,\"\":4,\"a\\u0000\":5}");
}

/* As many keys as there is room for, in all orders of nesting; then one more. */
T_TEST(room_for_keys)
{
    char text[4096];
    size_t n = 0;

    n += (size_t)sprintf(text + n, "{");
    for (int i = 0; i < KEYS; i++)
        n += (size_t)sprintf(text + n, "%s\"key %d\":%d", i > 0 ? "," : "", i, i);
    sprintf(text + n, "}");
    takes(text);
    sprintf(text + n, ",\"more\":1}");
    assert_int_equal(read_all(text, strlen(text)), JREAD_ERROR);
    assert_non_null(strstr(side_last_error()->message, "more than 64 keys"));
    n = (size_t)sprintf(text, "["); /* closed objects give their room back */
    for (int i = 0; i < 100; i++)
        n += (size_t)sprintf(text + n, "%s{\"a\":{\"b\":{}},\"c\":0}", i > 0 ? "," : "");
    sprintf(text + n, "]");
    assert_int_equal(read_all(text, strlen(text)), JREAD_END);
}

T_TEST(depth)
{
    char text[2 * JREAD_DEPTH + 3];

    memset(text, '[', JREAD_DEPTH);
    memset(text + JREAD_DEPTH, ']', JREAD_DEPTH);
    assert_int_equal(read_all(text, 2 * JREAD_DEPTH), JREAD_END);
    memset(text, '[', JREAD_DEPTH + 1);
    refuses(text, JREAD_DEPTH + 1, JREAD_DEPTH, "levels");
}

T_TEST(places)
{
    static const char text[] = "{\n  \"a\": 1,\n  \"b\": x\n}\n";

    assert_int_equal(read_all(text, strlen(text)), JREAD_ERROR);
    assert_string_equal(side_last_error()->message, "file.json, line 3, byte 8 (offset 19): 'x', expected a value");
    jread *r = begin("[1]", 3);
    char name[500];
    memset(name, 'n', sizeof(name));
    strcpy(name + 400, "/the-end.json");
    r->name = name;
    assert_int_equal(jread_next(r), JREAD_ARRAY);
    assert_int_equal(jread_fail(r, "%s", "no good"), SIDE_INVALID);
    assert_non_null(strstr(side_last_error()->message, "/the-end.json, line 1, byte 1 (offset 0): no good"));
    assert_int_equal(jread_next(r), JREAD_ERROR); /* the first error stays */
    assert_int_equal(jread_fail(r, "another"), SIDE_INVALID);
    assert_non_null(strstr(side_last_error()->message, "no good"));
}

/* ---------------------------------------------------------------- values */

static side_status whole(const char *text, uint64_t least, uint64_t most, uint64_t *value)
{
    return jread_u64(begin(text, strlen(text)), least, most, value);
}

T_TEST(whole_numbers)
{
    uint64_t v = 7;

    T_OK(whole("18446744073709551615", 0, UINT64_MAX, &v));
    assert_true(v == UINT64_MAX);
    T_OK(whole("9007199254740993", 0, UINT64_MAX, &v)); /* no double holds it */
    assert_true(v == 9007199254740993u);
    T_OK(whole("0", 0, 0, &v));
    assert_true(v == 0);
    v = 7;
    static const char *const bad[] = {
        "18446744073709551616", "99999999999999999999999", "-1", "-0", "1.0", "1e3", "\"1\"", "null", "[1]"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        T_STATUS(whole(bad[i], 0, UINT64_MAX, &v), SIDE_INVALID);
    T_STATUS(whole("11", 1, 10, &v), SIDE_INVALID);
    assert_non_null(strstr(side_last_error()->message, "11 is out of range; 1 to 10 are possible"));
    T_STATUS(whole("0", 1, 10, &v), SIDE_INVALID);
    assert_true(v == 7);
}

static side_status real(const char *text, double least, double most, double *value)
{
    return jread_double(begin(text, strlen(text)), least, most, value);
}

T_TEST(real_numbers)
{
    char text[64], longest[JREAD_NUMBER + 3] = "0.";
    double v = 7;

    T_FOR_SEEDS (seed, 2000) {
        t_rng rng = t_rng_make(seed);
        union {
            uint64_t bits;
            double value;
        } any = {.bits = t_rng_next(&rng)};
        if (!isfinite(any.value))
            continue;
        snprintf(text, sizeof(text), "%.17g", any.value);
        T_OK(real(text, -DBL_MAX, DBL_MAX, &v));
        assert_true(v == any.value);
    }
    v = 7;
    T_STATUS(real("1e309", -DBL_MAX, DBL_MAX, &v), SIDE_INVALID);
    T_STATUS(real("-1e999999999999", -DBL_MAX, DBL_MAX, &v), SIDE_INVALID);
    T_STATUS(real("0.999", 1, 2, &v), SIDE_INVALID);
    assert_non_null(strstr(side_last_error()->message, "0.999 is out of range; 1 to 2 are possible"));
    T_STATUS(real("true", 0, 2, &v), SIDE_INVALID);
    assert_non_null(strstr(side_last_error()->message, "expected a number, not true"));
    memset(longest + 2, '1', JREAD_NUMBER - 1);
    T_STATUS(real(longest, 0, 2, &v), SIDE_INVALID);
    assert_true(v == 7);
    longest[JREAD_NUMBER] = '\0';
    T_OK(real(longest, 0, 2, &v));
}

/* A decimal comma is no business of a file's. */
T_TEST(locales)
{
    static const char *const comma[] = {"de_DE.UTF-8", "de_DE.utf8", "fr_FR.UTF-8", "nl_NL.UTF-8", "it_IT.UTF-8"};
    double v = 0;
    size_t i = 0;

    while (i < 5 && setlocale(LC_ALL, comma[i]) == NULL)
        i++;
    if (i == 5)
        T_SKIP("no locale with a decimal comma is installed");
    T_OK(real("1.5", 0, 2, &v));
    assert_true(v == 1.5);
}

T_TEST(texts)
{
    char buffer[16];
    size_t n = 0;
    static const char text[] = "[\"a\\u0000b\",\"\\ud83d\\ude00\",\"0123456789abcde\",\"0123456789abcdef\"]";
    jread *r = begin(text, strlen(text));

    assert_int_equal(jread_next(r), JREAD_ARRAY);
    assert_int_equal(jread_next(r), JREAD_STRING);
    assert_true(r->escaped);
    assert_false(jread_is(r, "a"));
    T_OK(jread_text(r, buffer, sizeof(buffer), &n));
    assert_int_equal(n, 3);
    assert_memory_equal(buffer, "a\0b", 4);
    T_OK(jread_string(r, buffer, sizeof(buffer)));
    assert_string_equal(buffer, "\xf0\x9f\x98\x80");
    assert_true(jread_is(r, "\xf0\x9f\x98\x80"));
    assert_false(jread_is(r, "\xf0\x9f\x98"));
    T_OK(jread_string(r, buffer, sizeof(buffer)));
    assert_string_equal(buffer, "0123456789abcde");
    T_STATUS(jread_string(r, buffer, sizeof(buffer)), SIDE_INVALID);
    assert_non_null(strstr(side_last_error()->message, "over 15 bytes"));
    r = begin("\"\\u0000\"", 8);
    T_STATUS(jread_string(r, buffer, sizeof(buffer)), SIDE_INVALID);
}

T_TEST(skipping)
{
    static const char text[] = "{\"skip\":{\"a\":[1,{\"b\":[]}]},\"take\":5,\"last\":\"x\"}";
    jread *r = begin(text, strlen(text));
    uint64_t v = 0;

    T_OK(jread_expect(r, JREAD_OBJECT));
    while (jread_next(r) == JREAD_KEY)
        if (jread_is(r, "take"))
            T_OK(jread_u64(r, 0, 9, &v));
        else
            T_OK(jread_skip(r));
    assert_int_equal(r->token, JREAD_OBJECT_END);
    assert_int_equal(r->depth, 0);
    T_OK(jread_expect(r, JREAD_END));
    assert_int_equal(v, 5);
    r = begin("[[}]", 4);
    T_STATUS(jread_skip(r), SIDE_INVALID);
    r = begin("[]", 2);
    T_OK(jread_expect(r, JREAD_ARRAY));
    T_STATUS(jread_skip(r), SIDE_INVALID);
    assert_non_null(strstr(side_last_error()->message, "expected a value, not the array's end"));
}

/* A safetensors header of many tensors: linear, not quadratic, or this would take minutes. */
T_TEST(many_keys)
{
    enum { TENSORS = 100000 };
    size_t room = (size_t)TENSORS * 120, n = 0;
    char *text = malloc(room);
    jread_key *many = malloc((TENSORS + 8) * sizeof(*many));
    jread r;
    uint64_t seen = 0;

    assert_true(text != NULL && many != NULL);
    text[n++] = '{';
    for (int i = 0; i < TENSORS; i++)
        n += (size_t)snprintf(
            text + n, room - n,
            "%s\"model.layers.%d.weight\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[%d,%d]}",
            i > 0 ? "," : "", i, i * 24, i * 24 + 24);
    text[n++] = '}';
    jread_begin(&r, "header", text, n, many, TENSORS + 8);
    T_OK(jread_expect(&r, JREAD_OBJECT));
    while (jread_next(&r) == JREAD_KEY) {
        T_OK(jread_skip(&r));
        seen++;
    }
    assert_int_equal(r.token, JREAD_OBJECT_END);
    assert_int_equal(seen, TENSORS);
    T_OK(jread_expect(&r, JREAD_END));
    free(text);
    free(many);
}

T_TEST(too_long)
{
    jread r;

    jread_begin(&r, "big", "{}", (size_t)UINT32_MAX + 1, keys, KEYS);
    assert_int_equal(jread_next(&r), JREAD_ERROR);
    assert_non_null(strstr(side_last_error()->message, "4 GiB"));
}

T_MAIN(T(what_is_json), T(what_is_not), T(strings_that_are_none), T(keys_that_stand_twice), T(room_for_keys), T(depth),
       T(places), T(whole_numbers), T(real_numbers), T(locales), T(texts), T(skipping), T(many_keys), T(too_long))
