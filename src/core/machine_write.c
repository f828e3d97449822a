/* SPDX-License-Identifier: MIT
 *
 * The fields of a profile, their ranges, and the profile as text. Numbers have as many digits as it takes to read the same number back, and a point
 * whatever the locale says. Pure. */
#include "machine.h"

#include "error.h"
#include "ops.h"

#include <assert.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define AT(field) offsetof(side_machine, field)
#define TEXT(field)                                                               \
    {                                                                             \
#field, MACHINE_TEXT, AT(field), sizeof(((side_machine *)0)->field), 0, 0 \
    }
#define WHOLE(field, a, b)                        \
    {                                             \
#field, MACHINE_WHOLE, AT(field), 0, a, b \
    }
#define REAL(field, a, b)                        \
    {                                            \
#field, MACHINE_REAL, AT(field), 0, a, b \
    }
#define RATE(field, a)                                           \
    {                                                            \
#field, MACHINE_RATE, AT(field), 0, a, MACHINE_GBPS_MOST \
    }

const struct machine_field machine_fields[MACHINE_FIELDS] = {
    {"from", MACHINE_FROM, AT(from), 0, 0, 0},
    TEXT(machine),
    TEXT(gpu),
    TEXT(uuid),
    WHOLE(driver_version, 0, 1000000),
    TEXT(taken),
    WHOLE(copy_engines, 1, 2),
    RATE(h2d, MACHINE_GBPS_LEAST),
    RATE(d2h, MACHINE_GBPS_LEAST),
    REAL(both_gbps, 0, 2 * MACHINE_GBPS_MOST),
    REAL(both_h2d_gbps, 0, MACHINE_GBPS_MOST),
    RATE(pageable_h2d, 0),
    RATE(pageable_d2h, 0),
    REAL(stage_gbps, 0, MACHINE_GBPS_MOST),
    REAL(pin_s_per_gib, 0, 1e4),
    REAL(queue_s, 0, 1),
    REAL(handover_s, 0, 1),
    REAL(start_s, 0, 10),
};

const char *machine_from_name(side_machine_from from)
{
    static const char *const names[] = {"estimated", "measured", "simulated"};

    return (unsigned)from < 3 ? names[from] : NULL;
}

bool machine_text_is_plain(const char *text, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        if (text[i] < 0x20 || text[i] > 0x7e)
            return false;
    return true;
}

uint64_t machine_hash(const char *text, size_t bytes)
{
    uint64_t sums[8], hash = 0, blocks = bytes > 240 ? (bytes - 1) / 1024 : 0;
    size_t tail = bytes < 1024 + 64 ? bytes : 1024 + 64;
    side_xxh3 state;

    side_xxh3_begin(&state);
    for (uint64_t i = 0; i < blocks; i++) {
        xxh3_block_sums(sums, text + i * 1024, 1);
        side_xxh3_fold(&state, sums, 1);
    }
    side_status s = side_xxh3_end(&state, text + bytes - tail, tail, bytes, &hash);
    assert(s == SIDE_OK);
    (void)s;
    return hash;
}

/* ---------------------------------------------------------------- ranges */

/* False for a NaN too. */
static bool within(double value, double least, double most)
{
    return value >= least && value <= most;
}

static side_status bad_number(const char *where, const char *key, const char *member, double value, double least,
                              double most)
{
    return error_set(SIDE_INVALID, where, "machine.%s%s is %g; %g to %g are possible", key, member, value, least, most);
}

static side_status check_field(const side_machine *m, const struct machine_field *f, const char *where)
{
    const void *at = (const char *)m + f->offset;
    double value = 0;
    side_rate rate;
    int whole;

    switch (f->form) {
    case MACHINE_FROM:
        if (machine_from_name(m->from) == NULL)
            return error_set(SIDE_INVALID, where, "machine.from is %d, which is no source", (int)m->from);
        return SIDE_OK;
    case MACHINE_TEXT:
        if (memchr(at, '\0', f->bytes) == NULL || !machine_text_is_plain(at, strlen(at)))
            return error_set(SIDE_INVALID, where, "machine.%s is not at most %zu printable ASCII characters", f->key,
                             f->bytes - 1);
        return SIDE_OK;
    case MACHINE_RATE:
        memcpy(&rate, at, sizeof(rate));
        if (!within(rate.latency_s, 0, MACHINE_LATENCY_MOST))
            return bad_number(where, f->key, ".latency_s", rate.latency_s, 0, MACHINE_LATENCY_MOST);
        if (!within(rate.gbps, f->least, f->most))
            return bad_number(where, f->key, ".gbps", rate.gbps, f->least, f->most);
        return SIDE_OK;
    case MACHINE_WHOLE: memcpy(&whole, at, sizeof(whole)), value = whole; break;
    case MACHINE_REAL: memcpy(&value, at, sizeof(value)); break;
    }
    return within(value, f->least, f->most) ? SIDE_OK : bad_number(where, f->key, "", value, f->least, f->most);
}

side_status machine_check(const side_machine *m, const char *where)
{
    for (size_t i = 0; i < MACHINE_FIELDS; i++) {
        side_status s = check_field(m, &machine_fields[i], where);
        if (s != SIDE_OK)
            return s;
    }
    if (m->path_count > SIDE_MACHINE_PATHS)
        return error_set(SIDE_INVALID, where, "machine.path_count is %u; 0 to %d are possible", m->path_count,
                         SIDE_MACHINE_PATHS);
    for (uint32_t i = 0; i < m->path_count; i++) {
        const side_path_rate *p = &m->paths[i];
        if ((unsigned)p->kind > SIDE_COPY_D2D || p->path <= SIDE_PATH_AUTO || p->path >= SIDE_PATH_COUNT ||
            p->block_bytes == 0 || p->count == 0 || !within(p->gbps, MACHINE_GBPS_LEAST, MACHINE_GBPS_MOST) ||
            !within(p->beside, 0, MACHINE_BESIDE_MOST))
            return error_set(SIDE_INVALID, where,
                             "machine.paths[%u]: kind, path, block_bytes, count, gbps or beside is out of its range", i);
    }
    return SIDE_OK;
}

/* ---------------------------------------------------------------- text */

struct writer {
    char *text;
    size_t used;
};

__attribute__((format(printf, 2, 3))) static void put(struct writer *w, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    int n = vsnprintf(w->text + w->used, MACHINE_TEXT_BYTES - w->used, format, args);
    va_end(args);
    assert(n >= 0 && (size_t)n < MACHINE_TEXT_BYTES - w->used); /* 256 paths of 200 bytes are the most */
    w->used += (size_t)n;
}

/* Printable ASCII: all that JSON wants escaped is this. */
static void put_text(struct writer *w, const char *text)
{
    put(w, "\"");
    for (; *text != '\0'; text++)
        put(w, *text == '"' || *text == '\\' ? "\\%c" : "%c", *text);
    put(w, "\"");
}

/* The fewest digits from 15 up that read back as the same number; the locale's point, whatever its bytes, becomes '.'. */
static void put_number(struct writer *w, double value)
{
    char text[64];
    bool point = false;

    for (int digits = 15; digits <= 17; digits++) {
        snprintf(text, sizeof(text), "%.*g", digits, value);
        if (strtod(text, NULL) == value)
            break;
    }
    for (const char *c = text; *c != '\0'; c++) {
        bool plain = strchr("0123456789+-e", *c) != NULL;
        if (plain)
            put(w, "%c", *c);
        else if (!point)
            put(w, ".");
        point = point || !plain;
    }
}

static void put_rate(struct writer *w, side_rate rate)
{
    put(w, "{\"latency_s\": ");
    put_number(w, rate.latency_s);
    put(w, ", \"gbps\": ");
    put_number(w, rate.gbps);
    put(w, "}");
}

static void put_field(struct writer *w, const side_machine *m, const struct machine_field *f)
{
    const void *at = (const char *)m + f->offset;
    side_rate rate;
    double value;
    int whole;

    put(w, "  \"%s\": ", f->key);
    switch (f->form) {
    case MACHINE_FROM: put_text(w, machine_from_name(m->from)); break;
    case MACHINE_TEXT: put_text(w, at); break;
    case MACHINE_WHOLE:
        memcpy(&whole, at, sizeof(whole));
        put(w, "%d", whole);
        break;
    case MACHINE_REAL:
        memcpy(&value, at, sizeof(value));
        put_number(w, value);
        break;
    case MACHINE_RATE:
        memcpy(&rate, at, sizeof(rate));
        put_rate(w, rate);
        break;
    }
    put(w, ",\n");
}

static void put_path(struct writer *w, const side_path_rate *p)
{
    static const char *const kinds[] = {"h2d", "d2h", "d2d"};

    put(w, "    {\"kind\": \"%s\", \"path\": \"%s\", \"block_bytes\": %u, \"count\": %u, \"gbps\": ", kinds[p->kind],
        side_path_name(p->path), p->block_bytes, p->count);
    put_number(w, p->gbps);
    put(w, ", \"beside\": ");
    put_number(w, p->beside);
    put(w, "}");
}

size_t machine_write(const side_machine *m, char *text)
{
    struct writer w = {.text = text};

    put(&w, "{\n  \"sidestream_machine\": %d,\n", MACHINE_VERSION);
    for (size_t i = 0; i < MACHINE_FIELDS; i++)
        put_field(&w, m, &machine_fields[i]);
    put(&w, "  \"paths\": [");
    for (uint32_t i = 0; i < m->path_count; i++) {
        put(&w, i > 0 ? ",\n" : "\n");
        put_path(&w, &m->paths[i]);
    }
    put(&w, m->path_count > 0 ? "\n  ],\n" : "],\n");
    const uint64_t hash = machine_hash(text, w.used);
    put(&w, "  \"check\": \"%016llx\"\n}\n", (unsigned long long)hash);
    return w.used;
}
