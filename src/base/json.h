/* SPDX-License-Identifier: MIT
 *
 * A strict reader of JSON (RFC 8259): pulls one token after the other out of text that the caller keeps. For what the library itself reads: profiles
 * of machines, headers of safetensors files. No allocation, no locale, no recursion.
 *
 *     jread r;
 *     jread_key keys[64];
 *     jread_begin(&r, path, text, bytes, keys, 64);
 *     if (jread_expect(&r, JREAD_OBJECT) != SIDE_OK) ...
 *     while (jread_next(&r) == JREAD_KEY)
 *         if (jread_is(&r, "rate"))
 *             status = jread_double(&r, 0, 1e5, &rate);   // reads the value
 *         else
 *             status = jread_skip(&r);                    // or jread_fail(&r, "is not known")
 *     // now r.token is JREAD_OBJECT_END, or JREAD_ERROR
 *
 * Refused besides what the RFC refuses: bytes that are not UTF-8 (surrogates, overlong forms), lone surrogates as \u, a key twice in one object
 * (after unescaping), more than JREAD_DEPTH levels, numbers of over JREAD_NUMBER characters, a byte order mark, text of 4 GiB and more.
 *
 * The first error stays: later calls return JREAD_ERROR or SIDE_INVALID and change nothing. It is in the thread's error detail, as
 * "NAME, line L, byte B (offset O): what is wrong", line and byte from 1, the offset from 0; after jread_within "NAME, offset O: what is wrong".
 */
#ifndef BASE_JSON_H
#define BASE_JSON_H

#include "sidestream.h"

#define JREAD_DEPTH  64
#define JREAD_NUMBER 255

typedef enum jread_token {
    JREAD_ERROR = -1,
    JREAD_END = 0, /* of the text, behind one value and nothing else */
    JREAD_OBJECT,
    JREAD_OBJECT_END,
    JREAD_ARRAY,
    JREAD_ARRAY_END,
    JREAD_KEY, /* its colon is read too */
    JREAD_STRING,
    JREAD_NUMBER_VALUE,
    JREAD_TRUE,
    JREAD_FALSE,
    JREAD_NULL
} jread_token;

/* A key of an object that is not closed yet, and by the way a bucket of the hash table over them. */
typedef struct jread_key {
    uint64_t hash;
    uint32_t at, end;    /* of its text, quotes excluded */
    uint32_t head, next; /* head: the bucket's latest key, next: the one before this in its bucket; both + 1, 0 none */
} jread_key;

typedef struct jread {
    /* The token. */
    jread_token token;
    size_t at, end; /* its text; of strings and keys what is between the quotes */
    bool escaped;   /* a string or key with a backslash in it */
    uint32_t depth; /* open objects and arrays, behind the token */

    /* The reader's own. */
    const char *name, *text;
    size_t bytes, pos;
    jread_key *keys;
    uint32_t key_most, key_count;
    uint64_t objects; /* bit per level: an object */
    uint32_t first_key[JREAD_DEPTH + 1];
    bool started; /* the innermost object or array, or the text, has a value */
    bool failed;
    bool within;     /* jread_within: no lines */
    uint64_t before; /* its bytes */
} jread;

/* name: of the file, for messages. `keys`: the caller's, as many as objects within each other have together; more is an error. All must outlive the reader.
 * keys NULL: the caller looks for keys that stand twice itself; text that was read may then be overwritten. */
void jread_begin(jread *r, const char *name, const char *text, size_t bytes, jread_key *keys, uint32_t key_most);
/* The text lies in a file of other things, behind `before` bytes: errors tell offsets in the file. Right after jread_begin. */
void jread_within(jread *r, uint64_t before);
/* The next token. Amortised O(1) a byte. */
jread_token jread_next(jread *r);

/* The next token must be this one. */
side_status jread_expect(jread *r, jread_token token);
/* Skips the next value, whatever it is. Checked as everything. */
side_status jread_skip(jread *r);

/* For who knows a short way through objects of one usual form: what stands behind the key that was read last; and that its first `bytes` were an object of
 * valid JSON, which is passed over. Not where keys are noted. */
const char *jread_rest(const jread *r, size_t *bytes);
void jread_passed(jread *r, size_t bytes);

/* The string or key that was read last equals `text`, after unescaping. */
bool jread_is(const jread *r, const char *text);
/* Its bytes, unescaped and NUL-terminated. SIDE_INVALID: they do not fit into buffer_bytes - 1, or a NUL is among them and length is NULL. */
side_status jread_text(jread *r, char *buffer, size_t buffer_bytes, size_t *length);

/* Read the next token, which must be a value of the kind. Numbers out of [least, most] are errors that name the range. */
side_status jread_string(jread *r, char *buffer, size_t buffer_bytes);
side_status jread_double(jread *r, double least, double most, double *value);
side_status jread_u64(jread *r, uint64_t least, uint64_t most, uint64_t *value); /* exact; no sign, point or exponent */
/* The same of the number that was read last. */
side_status jread_number(jread *r, double least, double most, double *value);
side_status jread_whole(jread *r, uint64_t least, uint64_t most, uint64_t *value);

/* An error of the caller's about the token that was read last: "NAME, line ...: what". Returns SIDE_INVALID. */
side_status jread_fail(jread *r, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
