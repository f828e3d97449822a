/* SPDX-License-Identifier: MIT
 * The strict JSON reader beside jansson: both take the same texts and read the same out of them, but for limits that are ours alone. */
#include "error.h"
#include "json.h"

#include <float.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { KEYS = 128 };

static void expect(bool held)
{
    if (!held)
        abort();
}

static void compare(jread *r, jread_token token, const json_t *want);

static void compare_object(jread *r, const json_t *want)
{
    char key[1024];
    size_t n = 0;
    jread_token token;

    expect(json_is_object(want));
    while ((token = jread_next(r)) == JREAD_KEY) {
        expect(jread_text(r, key, sizeof(key), NULL) == SIDE_OK);
        expect(jread_is(r, key));
        const json_t *value = json_object_get(want, key);
        expect(value != NULL);
        compare(r, jread_next(r), value);
        n++;
    }
    expect(token == JREAD_OBJECT_END && n == json_object_size(want));
}

static void compare_array(jread *r, const json_t *want)
{
    size_t n = 0;
    jread_token token;

    expect(json_is_array(want));
    while ((token = jread_next(r)) != JREAD_ARRAY_END) {
        expect(n < json_array_size(want));
        compare(r, token, json_array_get(want, n++));
    }
    expect(n == json_array_size(want));
}

static void compare(jread *r, jread_token token, const json_t *want)
{
    char text[1024];
    size_t length = 0;
    double number = 0;

    switch (token) {
    case JREAD_OBJECT: compare_object(r, want); break;
    case JREAD_ARRAY: compare_array(r, want); break;
    case JREAD_STRING:
        expect(jread_text(r, text, sizeof(text), &length) == SIDE_OK);
        expect(json_is_string(want) && length == json_string_length(want) &&
               memcmp(text, json_string_value(want), length) == 0);
        break;
    case JREAD_NUMBER_VALUE:
        expect(jread_number(r, -DBL_MAX, DBL_MAX, &number) == SIDE_OK);
        expect(json_is_real(want) && number == json_real_value(want));
        break;
    case JREAD_TRUE: expect(json_is_true(want)); break;
    case JREAD_FALSE: expect(json_is_false(want)); break;
    case JREAD_NULL: expect(json_is_null(want)); break;
    case JREAD_ERROR:
    case JREAD_END:
    case JREAD_OBJECT_END:
    case JREAD_ARRAY_END:
    case JREAD_KEY: abort();
    }
}

/* Reads all of it. False, and a message with the offset, where it is refused; *ours: for what jansson may take. */
static bool read_all(const char *text, size_t size, bool *ours)
{
    jread r;
    jread_key keys[KEYS];
    jread_token token;
    double number;

    jread_begin(&r, "input", text, size, keys, KEYS);
    do {
        token = jread_next(&r);
        if (token == JREAD_NUMBER_VALUE && jread_number(&r, -DBL_MAX, DBL_MAX, &number) != SIDE_OK)
            token = JREAD_ERROR;
        expect(token == JREAD_ERROR || (r.at <= r.end && r.end <= size && r.depth <= JREAD_DEPTH));
    } while (token != JREAD_END && token != JREAD_ERROR);
    if (token == JREAD_END)
        return true;
    const char *why = side_last_error()->message;
    expect(strstr(why, "input, line ") == why && strstr(why, "(offset ") != NULL);
    expect(jread_next(&r) == JREAD_ERROR && jread_skip(&r) == SIDE_INVALID && !jread_is(&r, ""));
    *ours = strstr(why, "levels within") != NULL || strstr(why, "keys; this") != NULL ||
            strstr(why, "a number of over") != NULL;
    return false;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    /* a block of its own, so that AddressSanitizer sees a read behind its end */
    char *text = malloc(size != 0 ? size : 1);
    json_error_t error;
    bool ours = false;

    expect(text != NULL);
    if (size != 0)
        memcpy(text, data, size);
    error_clear();
    bool took = read_all(text, size, &ours);
    json_t *want = json_loadb(
        text, size, JSON_DECODE_ANY | JSON_REJECT_DUPLICATES | JSON_DECODE_INT_AS_REAL | JSON_ALLOW_NUL, &error);
    if (took && want == NULL)
        expect(json_error_code(&error) == json_error_null_byte_in_key);
    if (!took) /* jansson passes over a NUL that ends a number */
        expect(want == NULL || ours || memchr(text, '\0', size) != NULL);
    if (took && want != NULL) {
        jread r;
        jread_key keys[KEYS];

        jread_begin(&r, "input", text, size, keys, KEYS);
        compare(&r, jread_next(&r), want);
        expect(jread_next(&r) == JREAD_END);
    }
    json_decref(want);
    free(text);
    return 0;
}
