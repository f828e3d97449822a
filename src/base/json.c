/* SPDX-License-Identifier: MIT */
#include "json.h"

#include "error.h"

#include <assert.h>
#include <errno.h>
#include <locale.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ONES     UINT64_C(0x0101010101010101)
#define HIGHS    UINT64_C(0x8080808080808080)
#define NAME_END 120 /* bytes of a long name that a message shows: its end */

/* ---------------------------------------------------------------- errors */

/* Lines are counted here, not while reading. */
__attribute__((format(printf, 3, 0))) static side_status fail_list(jread *r, size_t offset, const char *format,
                                                                   va_list args)
{
    char what[160];
    unsigned long long line = 1, byte = 1;
    size_t named = strlen(r->name);

    if (r->failed)
        return SIDE_INVALID;
    for (size_t i = 0; i < offset && !r->within; i++) {
        byte++;
        if (r->text[i] == '\n') {
            line++;
            byte = 1;
        }
    }
    vsnprintf(what, sizeof(what), format, args);
    r->failed = true;
    r->token = JREAD_ERROR;
    if (r->within)
        return error_set(SIDE_INVALID, "json", "%s%s, offset %llu: %s", named > NAME_END ? "..." : "",
                         r->name + (named > NAME_END ? named - NAME_END : 0), (unsigned long long)(r->before + offset),
                         what);
    return error_set(SIDE_INVALID, "json", "%s%s, line %llu, byte %llu (offset %zu): %s", named > NAME_END ? "..." : "",
                     r->name + (named > NAME_END ? named - NAME_END : 0), line, byte, offset, what);
}

__attribute__((format(printf, 3, 4))) static jread_token bad(jread *r, size_t offset, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    fail_list(r, offset, format, args);
    va_end(args);
    return JREAD_ERROR;
}

side_status jread_fail(jread *r, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    fail_list(r, r->at, format, args);
    va_end(args);
    return SIDE_INVALID;
}

/* "what" where a token should stand. */
static jread_token unexpected(jread *r, const char *what)
{
    unsigned char c;

    if (r->pos >= r->bytes)
        return bad(r, r->bytes, "the text ends; expected %s", what);
    c = (unsigned char)r->text[r->pos];
    if (c > 0x20 && c < 0x7f)
        return bad(r, r->pos, "'%c', expected %s", c, what);
    return bad(r, r->pos, "byte 0x%02x, expected %s", c, what);
}

/* ---------------------------------------------------------------- characters */

/* Length of the UTF-8 sequence at s, at most `left` bytes; 0: it is none. */
static size_t utf8_length(const unsigned char *s, size_t left)
{
    size_t n = s[0] < 0x80 ? 1 : s[0] >= 0xc2 && s[0] < 0xe0 ? 2 : s[0] >= 0xe0 && s[0] < 0xf0 ? 3 : 4;

    if (n == 4 && (s[0] < 0xf0 || s[0] > 0xf4))
        return 0;
    if (n > left)
        return 0;
    for (size_t i = 1; i < n; i++)
        if ((s[i] & 0xc0) != 0x80)
            return 0;
    if ((s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xed && s[1] > 0x9f) || (s[0] == 0xf0 && s[1] < 0x90) ||
        (s[0] == 0xf4 && s[1] > 0x8f))
        return 0;
    return n;
}

static size_t utf8_put(uint32_t code, char to[4])
{
    if (code < 0x80) {
        to[0] = (char)code;
        return 1;
    }
    size_t n = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    static const unsigned char first[] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (size_t i = n; i-- > 1; code >>= 6)
        to[i] = (char)(0x80 | (code & 0x3f));
    to[0] = (char)(first[n] | code);
    return n;
}

/* Four hexadecimal digits; -1: they are none. */
static int32_t hex4(const char *s, size_t left)
{
    int32_t value = 0;

    for (size_t i = 0; i < 4; i++) {
        char c = i < left ? s[i] : '\0', low = (char)(c | 0x20);
        if (c >= '0' && c <= '9')
            value = value * 16 + (c - '0');
        else if (low >= 'a' && low <= 'f')
            value = value * 16 + (low - 'a' + 10);
        else
            return -1;
    }
    return value;
}

/* The escape behind the backslash at s (which has `left` bytes) as UTF-8; its length in *used. 0: it is none, for *why. */
static size_t unescape(const char *s, size_t left, char to[4], size_t *used, const char **why)
{
    static const char from[] = "\"\\/bfnrt", into[] = "\"\\/\b\f\n\r\t";
    const char *known = left > 1 && s[1] != '\0' ? strchr(from, s[1]) : NULL;
    int32_t code, low;

    *used = 2;
    if (known != NULL) {
        to[0] = into[known - from];
        return 1;
    }
    *why = "no escape that JSON knows; those are \\\" \\\\ \\/ \\b \\f \\n \\r \\t \\uXXXX";
    if (left < 2 || s[1] != 'u')
        return 0;
    *used = 6;
    *why = "\\u needs four hexadecimal digits";
    code = hex4(s + 2, left - 2);
    if (code < 0)
        return 0;
    *why = "half a surrogate pair";
    if (code >= 0xdc00 && code < 0xe000)
        return 0;
    if (code >= 0xd800 && code < 0xdc00) {
        low = left >= 12 && s[6] == '\\' && s[7] == 'u' ? hex4(s + 8, left - 8) : -1;
        if (low < 0xdc00 || low >= 0xe000)
            return 0;
        *used = 12;
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    }
    return utf8_put((uint32_t)code, to);
}

/* Eight bytes of which none ends a run of plain characters. */
static bool plain8(const char *s)
{
    uint64_t v, quote, slash;

    memcpy(&v, s, 8);
    quote = v ^ (ONES * '"');
    slash = v ^ (ONES * '\\');
    return (((v - ONES * 0x20) | (quote - ONES) | (slash - ONES) | v) & HIGHS) == 0;
}

/* The string whose opening quote is at pos: sets at, end and escaped, and goes behind the closing one. */
static jread_token string(jread *r, jread_token token)
{
    const char *s = r->text;
    size_t i = r->pos + 1, n = r->bytes;

    r->at = i;
    r->escaped = false;
    for (;;) {
        while (n - i >= 8 && plain8(s + i))
            i += 8;
        if (i >= n)
            return bad(r, n, "the text ends within a string");
        unsigned char c = (unsigned char)s[i];
        size_t used = 1;
        if (c == '"')
            break;
        if (c < 0x20)
            return bad(r, i, "byte 0x%02x in a string; control characters are written as \\u%04x", c, c);
        if (c == '\\') {
            char to[4];
            const char *why = "";
            if (unescape(s + i, n - i, to, &used, &why) == 0)
                return bad(r, i, "%s", why);
            r->escaped = true;
        } else if (c >= 0x80) {
            used = utf8_length((const unsigned char *)s + i, n - i);
            if (used == 0)
                return bad(r, i, "byte 0x%02x is not UTF-8", c);
        }
        i += used;
    }
    r->end = i;
    r->pos = i + 1;
    return r->token = token;
}

/* Unescapes piece by piece, for comparing and hashing without a buffer. */
struct pieces {
    const char *s;
    size_t left;
    char made[4];
};

/* The next piece of at least one byte; 0 at the end. */
static size_t piece_next(struct pieces *p, const char **piece)
{
    const char *slash = p->left > 0 ? memchr(p->s, '\\', p->left) : NULL, *why;
    size_t n = slash != NULL ? (size_t)(slash - p->s) : p->left, used = n;

    *piece = p->s;
    if (n == 0 && slash != NULL) {
        n = unescape(p->s, p->left, p->made, &used, &why);
        *piece = p->made;
    }
    p->s += used;
    p->left -= used;
    return n;
}

static bool same_text(const char *a, size_t a_bytes, const char *b, size_t b_bytes)
{
    struct pieces x = {.s = a, .left = a_bytes}, y = {.s = b, .left = b_bytes};
    const char *p = NULL, *q = NULL;
    size_t n = 0, m = 0;

    for (;;) {
        if (n == 0)
            n = piece_next(&x, &p);
        if (m == 0)
            m = piece_next(&y, &q);
        if (n == 0 || m == 0)
            return n == m;
        size_t both = n < m ? n : m;
        if (memcmp(p, q, both) != 0)
            return false;
        p += both, n -= both;
        q += both, m -= both;
    }
}

/* ---------------------------------------------------------------- keys */

static uint64_t mix(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;

    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* Seeded with an address, so that a file cannot be made whose keys all fall into one bucket. Equal text gives equal hashes, however it is escaped. */
static uint64_t key_hash(const jread *r)
{
    struct pieces p = {.s = r->text + r->at, .left = r->end - r->at};
    uint64_t h = mix((uintptr_t)r->keys ^ UINT64_C(0x9e3779b97f4a7c15), UINT64_C(0xbf58476d1ce4e5b9)), word = 0;
    const char *piece;
    size_t held = 0, n;

    while ((n = piece_next(&p, &piece)) > 0)
        for (size_t i = 0; i < n; i++) {
            word |= (uint64_t)(unsigned char)piece[i] << (8 * held);
            if (++held == 8) {
                h = mix(h ^ word, UINT64_C(0x94d049bb133111eb));
                word = held = 0;
            }
        }
    return mix(h ^ word, UINT64_C(0xe7037ed1a0b428db) + held);
}

/* Notes the key that was just read; JREAD_ERROR where its object has it already. */
static jread_token key_add(jread *r)
{
    uint64_t hash;
    uint32_t bucket, i;

    if (r->key_count == r->key_most)
        return bad(r, r->at, "more than %u keys; this is not such a file", r->key_most);
    hash = key_hash(r);
    bucket = (uint32_t)(((unsigned __int128)hash * r->key_most) >> 64);
    /* Within a bucket the latest comes first, so keys of outer objects end the search. */
    for (i = r->keys[bucket].head; i > r->first_key[r->depth]; i = r->keys[i - 1].next) {
        const jread_key *k = &r->keys[i - 1];
        if (k->hash == hash && same_text(r->text + k->at, k->end - k->at, r->text + r->at, r->end - r->at))
            return bad(r, r->at, "the key stands twice in this object");
    }
    i = r->key_count++;
    r->keys[i].hash = hash;
    r->keys[i].at = (uint32_t)r->at;
    r->keys[i].end = (uint32_t)r->end;
    r->keys[i].next = r->keys[bucket].head;
    r->keys[bucket].head = i + 1;
    return JREAD_KEY;
}

/* Those of the object that closes: each is the latest of its bucket. */
static void keys_drop(jread *r)
{
    while (r->key_count > r->first_key[r->depth]) {
        const jread_key *k = &r->keys[--r->key_count];
        r->keys[(uint32_t)(((unsigned __int128)k->hash * r->key_most) >> 64)].head = k->next;
    }
}

/* ---------------------------------------------------------------- tokens */

void jread_begin(jread *r, const char *name, const char *text, size_t bytes, jread_key *keys, uint32_t key_most)
{
    *r = (jread){.name = name, .text = text, .bytes = bytes, .keys = keys, .key_most = key_most};
    for (uint32_t i = 0; i < key_most; i++)
        keys[i].head = 0;
    if (bytes > UINT32_MAX)
        bad(r, 0, "%zu bytes; 4 GiB and more are not read", bytes);
}

void jread_within(jread *r, uint64_t before)
{
    r->within = true;
    r->before = before;
}

static void blanks(jread *r)
{
    while (r->pos < r->bytes &&
           (r->text[r->pos] == ' ' || r->text[r->pos] == '\n' || r->text[r->pos] == '\r' || r->text[r->pos] == '\t'))
        r->pos++;
}

static bool in_object(const jread *r)
{
    return r->depth > 0 && (r->objects >> (r->depth - 1) & 1) != 0;
}

static size_t digits(const jread *r, size_t i)
{
    while (i < r->bytes && r->text[i] >= '0' && r->text[i] <= '9')
        i++;
    return i;
}

static jread_token number(jread *r)
{
    const char *s = r->text;
    size_t i = r->pos, first;

    r->at = i;
    i += s[i] == '-';
    first = i;
    i = digits(r, i);
    r->pos = i;
    if (i == first)
        return unexpected(r, "a digit");
    if (s[first] == '0' && i > first + 1)
        return bad(r, first, "a number does not begin with 0, unless it is 0 or 0.something");
    if (i < r->bytes && s[i] == '.') {
        r->pos = digits(r, i + 1);
        if (r->pos == i + 1)
            return unexpected(r, "a digit behind the point");
        i = r->pos;
    }
    if (i < r->bytes && (s[i] | 0x20) == 'e') {
        i++;
        i += i < r->bytes && (s[i] == '+' || s[i] == '-');
        r->pos = digits(r, i);
        if (r->pos == i)
            return unexpected(r, "a digit of the exponent");
        i = r->pos;
    }
    if (i - r->at > JREAD_NUMBER)
        return bad(r, r->at, "a number of over %d characters", JREAD_NUMBER);
    r->end = i;
    return r->token = JREAD_NUMBER_VALUE;
}

static jread_token word(jread *r, const char *text, jread_token token)
{
    size_t n = strlen(text);

    if (r->bytes - r->pos < n || memcmp(r->text + r->pos, text, n) != 0)
        return unexpected(r, "a value");
    r->at = r->pos;
    r->end = r->pos += n;
    return r->token = token;
}

static jread_token open_level(jread *r, bool object)
{
    if (r->depth == JREAD_DEPTH)
        return bad(r, r->pos, "more than %d levels within each other", JREAD_DEPTH);
    r->at = r->pos++;
    r->end = r->pos;
    r->objects = (r->objects & ~(UINT64_C(1) << r->depth)) | (uint64_t)object << r->depth;
    r->depth++;
    r->first_key[r->depth] = r->key_count;
    r->started = false;
    return r->token = object ? JREAD_OBJECT : JREAD_ARRAY;
}

static jread_token close_level(jread *r)
{
    bool object = in_object(r);

    r->at = r->pos++;
    r->end = r->pos;
    if (object)
        keys_drop(r);
    r->depth--;
    r->started = true;
    return r->token = object ? JREAD_OBJECT_END : JREAD_ARRAY_END;
}

static jread_token value(jread *r)
{
    jread_token token;
    char c = r->pos < r->bytes ? r->text[r->pos] : '\0';

    if (c == '{' || c == '[')
        return open_level(r, c == '{');
    if (c == '"')
        token = string(r, JREAD_STRING);
    else if (c == '-' || (c >= '0' && c <= '9'))
        token = number(r);
    else if (c == 't')
        token = word(r, "true", JREAD_TRUE);
    else if (c == 'f')
        token = word(r, "false", JREAD_FALSE);
    else if (c == 'n')
        token = word(r, "null", JREAD_NULL);
    else
        token = unexpected(r, "a value");
    r->started = true;
    return token;
}

static jread_token key(jread *r)
{
    if (r->pos >= r->bytes || r->text[r->pos] != '"')
        return unexpected(r, "a key in quotes");
    if (string(r, JREAD_KEY) == JREAD_ERROR || (r->keys != NULL && key_add(r) == JREAD_ERROR))
        return JREAD_ERROR;
    blanks(r);
    if (r->pos >= r->bytes || r->text[r->pos] != ':')
        return unexpected(r, "':'");
    r->pos++;
    return JREAD_KEY;
}

jread_token jread_next(jread *r)
{
    bool object = in_object(r);

    if (r->failed)
        return JREAD_ERROR;
    blanks(r);
    if (r->token == JREAD_KEY)
        return value(r);
    if (r->depth == 0) {
        if (!r->started)
            return value(r);
        r->at = r->end = r->pos;
        return r->pos < r->bytes ? unexpected(r, "the end of the text") : (r->token = JREAD_END);
    }
    if (r->pos < r->bytes && r->text[r->pos] == (object ? '}' : ']'))
        return close_level(r);
    if (r->started) {
        if (r->pos >= r->bytes || r->text[r->pos] != ',')
            return unexpected(r, object ? "',' or '}'" : "',' or ']'");
        r->pos++;
        blanks(r);
    }
    return object ? key(r) : value(r);
}

/* ---------------------------------------------------------------- reading on purpose */

static const char *token_name(jread_token token)
{
    static const char *const names[] = {"the end of the text",
                                        "an object",
                                        "the object's end",
                                        "an array",
                                        "the array's end",
                                        "a key",
                                        "a string",
                                        "a number",
                                        "true",
                                        "false",
                                        "null"};

    return token >= 0 && (size_t)token < sizeof(names) / sizeof(names[0]) ? names[token] : "an error";
}

side_status jread_expect(jread *r, jread_token token)
{
    jread_token got = jread_next(r);

    if (got == JREAD_ERROR)
        return SIDE_INVALID;
    return got == token ? SIDE_OK : jread_fail(r, "expected %s, not %s", token_name(token), token_name(got));
}

side_status jread_skip(jread *r)
{
    uint32_t depth = r->depth;
    jread_token token = jread_next(r);

    if (token == JREAD_END || token == JREAD_OBJECT_END || token == JREAD_ARRAY_END)
        return jread_fail(r, "expected a value, not %s", token_name(token));
    while (token != JREAD_ERROR && r->depth > depth)
        token = jread_next(r);
    return token != JREAD_ERROR ? SIDE_OK : SIDE_INVALID;
}

const char *jread_rest(const jread *r, size_t *bytes)
{
    assert(r->token == JREAD_KEY);
    *bytes = r->failed ? 0 : r->bytes - r->pos;
    return r->text + r->pos;
}

void jread_passed(jread *r, size_t bytes)
{
    assert(r->token == JREAD_KEY && !r->failed && r->keys == NULL && bytes <= r->bytes - r->pos);
    r->at = r->pos;
    r->end = r->pos += bytes;
    r->started = true;
    r->token = JREAD_OBJECT_END;
}

bool jread_is(const jread *r, const char *text)
{
    size_t n = strlen(text);
    struct pieces p = {.s = r->text + r->at, .left = r->end - r->at};
    const char *piece;
    size_t m;

    if (r->failed)
        return false;
    if (!r->escaped)
        return n == p.left && memcmp(p.s, text, n) == 0;
    while ((m = piece_next(&p, &piece)) > 0) {
        if (m > n || memcmp(piece, text, m) != 0)
            return false;
        text += m;
        n -= m;
    }
    return n == 0;
}

side_status jread_text(jread *r, char *buffer, size_t buffer_bytes, size_t *length)
{
    struct pieces p = {.s = r->text + r->at, .left = r->end - r->at};
    const char *piece;
    size_t used = 0, n;

    if (r->failed)
        return SIDE_INVALID;
    assert(r->token == JREAD_KEY || r->token == JREAD_STRING);
    while ((n = piece_next(&p, &piece)) > 0) {
        if (n >= buffer_bytes - used)
            return jread_fail(r, "a text of over %zu bytes", buffer_bytes - 1);
        if (length == NULL && memchr(piece, '\0', n) != NULL)
            return jread_fail(r, "\\u0000 in a text");
        memmove(buffer + used, piece, n); /* the text itself, where it is unescaped in place */
        used += n;
    }
    buffer[used] = '\0';
    if (length != NULL)
        *length = used;
    return SIDE_OK;
}

side_status jread_string(jread *r, char *buffer, size_t buffer_bytes)
{
    side_status s = jread_expect(r, JREAD_STRING);

    return s != SIDE_OK ? s : jread_text(r, buffer, buffer_bytes, NULL);
}

side_status jread_whole(jread *r, uint64_t least, uint64_t most, uint64_t *value)
{
    uint64_t v = 0;

    if (r->failed)
        return SIDE_INVALID;
    assert(r->token == JREAD_NUMBER_VALUE);
    for (size_t i = r->at; i < r->end; i++) {
        char c = r->text[i];
        if (c < '0' || c > '9')
            return jread_fail(r, "not a whole number of digits alone");
        if (__builtin_mul_overflow(v, 10, &v) || __builtin_add_overflow(v, (uint64_t)(c - '0'), &v))
            return jread_fail(r, "more than 64 bits hold");
    }
    if (v < least || v > most)
        return jread_fail(r, "%llu is out of range; %llu to %llu are possible", (unsigned long long)v,
                          (unsigned long long)least, (unsigned long long)most);
    *value = v;
    return SIDE_OK;
}

side_status jread_number(jread *r, double least, double most, double *value)
{
    char text[JREAD_NUMBER + 1];
    size_t n = r->end - r->at;
    locale_t plain;
    double v;

    if (r->failed)
        return SIDE_INVALID;
    assert(r->token == JREAD_NUMBER_VALUE && n <= JREAD_NUMBER);
    memcpy(text, r->text + r->at, n);
    text[n] = '\0';
    plain = newlocale(LC_ALL_MASK, "C",
                      (locale_t)0); /* glibc's own constant: nothing is allocated, and this cannot fail */
    v = strtod_l(text, NULL, plain);
    freelocale(plain);
    if (!isfinite(v))
        return jread_fail(r, "more than a double holds");
    if (!(v >= least && v <= most))
        return jread_fail(r, "%.6g is out of range; %.6g to %.6g are possible", v, least, most);
    *value = v;
    return SIDE_OK;
}

side_status jread_double(jread *r, double least, double most, double *value)
{
    side_status s = jread_expect(r, JREAD_NUMBER_VALUE);

    return s != SIDE_OK ? s : jread_number(r, least, most, value);
}

side_status jread_u64(jread *r, uint64_t least, uint64_t most, uint64_t *value)
{
    side_status s = jread_expect(r, JREAD_NUMBER_VALUE);

    return s != SIDE_OK ? s : jread_whole(r, least, most, value);
}
