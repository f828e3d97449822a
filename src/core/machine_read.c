/* SPDX-License-Identifier: MIT
 *
 * The text of a profile, read strictly: every field once and no others, each number in its range, the version first, the checksum (which may be left
 * out) last. What is damaged must not be taken for a measurement. Pure. */
#include "machine.h"

#include "error.h"
#include "json.h"

#include <stdio.h>
#include <string.h>

enum { KEYS = 64 };

static side_status read_from(jread *r, side_machine_from *from)
{
    side_status s = jread_expect(r, JREAD_STRING);

    for (int i = 0; s == SIDE_OK && machine_from_name((side_machine_from)i) != NULL; i++)
        if (jread_is(r, machine_from_name((side_machine_from)i))) {
            *from = (side_machine_from)i;
            return SIDE_OK;
        }
    return s == SIDE_OK ? jread_fail(r, "not measured, estimated or simulated") : s;
}

static side_status read_text(jread *r, char *text, size_t bytes)
{
    side_status s = jread_string(r, text, bytes);

    if (s == SIDE_OK && !machine_text_is_plain(text, strlen(text)))
        return jread_fail(r, "a character that is not printable ASCII");
    return s;
}

static side_status read_rate(jread *r, const struct machine_field *f, side_rate *rate)
{
    side_status s = jread_expect(r, JREAD_OBJECT);
    bool latency = false, gbps = false;

    while (s == SIDE_OK && jread_next(r) == JREAD_KEY) {
        if (jread_is(r, "latency_s")) {
            s = jread_double(r, 0, MACHINE_LATENCY_MOST, &rate->latency_s);
            latency = true;
        } else if (jread_is(r, "gbps")) {
            s = jread_double(r, f->least, f->most, &rate->gbps);
            gbps = true;
        } else {
            s = jread_fail(r, "a key that version %d does not have", MACHINE_VERSION);
        }
    }
    if (s == SIDE_OK && r->token == JREAD_OBJECT_END && !(latency && gbps))
        s = jread_fail(r, "%s lacks %s", f->key, latency ? "gbps" : "latency_s");
    return r->token == JREAD_ERROR ? SIDE_INVALID : s;
}

static side_status read_field(jread *r, const struct machine_field *f, side_machine *m)
{
    void *at = (char *)m + f->offset;
    side_status s = SIDE_OK;
    uint64_t whole = 0;
    int number;

    switch (f->form) {
    case MACHINE_FROM: return read_from(r, at);
    case MACHINE_TEXT: return read_text(r, at, f->bytes);
    case MACHINE_REAL: return jread_double(r, f->least, f->most, at);
    case MACHINE_RATE: return read_rate(r, f, at);
    case MACHINE_WHOLE:
        s = jread_u64(r, (uint64_t)f->least, (uint64_t)f->most, &whole);
        number = (int)whole;
        memcpy(at, &number, sizeof(number));
        break;
    }
    return s;
}

/* ---------------------------------------------------------------- paths */

static side_status read_kind(jread *r, side_copy_kind *kind)
{
    static const char *const names[] = {"h2d", "d2h", "d2d"};
    side_status s = jread_expect(r, JREAD_STRING);

    for (int i = 0; s == SIDE_OK && i < 3; i++)
        if (jread_is(r, names[i])) {
            *kind = (side_copy_kind)i;
            return SIDE_OK;
        }
    return s == SIDE_OK ? jread_fail(r, "not h2d, d2h or d2d") : s;
}

static side_status read_way(jread *r, side_path *path)
{
    side_status s = jread_expect(r, JREAD_STRING);

    for (int i = SIDE_PATH_AUTO + 1; s == SIDE_OK && i < SIDE_PATH_COUNT; i++)
        if (jread_is(r, side_path_name((side_path)i))) {
            *path = (side_path)i;
            return SIDE_OK;
        }
    return s == SIDE_OK ? jread_fail(r, "no path for scattered blocks") : s;
}

static side_status read_u32(jread *r, uint32_t *value)
{
    uint64_t whole = 0;
    side_status s = jread_u64(r, 1, UINT32_MAX, &whole);

    *value = (uint32_t)whole;
    return s;
}

/* The object has been begun. */
static side_status read_path(jread *r, side_path_rate *p)
{
    static const char *const names[] = {"kind", "path", "block_bytes", "count", "gbps", "beside"};
    enum { MEMBERS = 6 };
    unsigned seen = 0;
    side_status s = SIDE_OK;

    while (s == SIDE_OK && jread_next(r) == JREAD_KEY) {
        int i = 0;
        while (i < MEMBERS && !jread_is(r, names[i]))
            i++;
        switch (i) {
        case 0: s = read_kind(r, &p->kind); break;
        case 1: s = read_way(r, &p->path); break;
        case 2: s = read_u32(r, &p->block_bytes); break;
        case 3: s = read_u32(r, &p->count); break;
        case 4: s = jread_double(r, MACHINE_GBPS_LEAST, MACHINE_GBPS_MOST, &p->gbps); break;
        case 5: s = jread_double(r, 0, MACHINE_BESIDE_MOST, &p->beside); break;
        default: s = jread_fail(r, "a key that version %d does not have", MACHINE_VERSION);
        }
        seen |= 1u << i;
    }
    for (int i = 0; s == SIDE_OK && r->token == JREAD_OBJECT_END && i < MEMBERS; i++)
        if ((seen & 1u << i) == 0)
            s = jread_fail(r, "the path lacks %s", names[i]);
    return r->token == JREAD_ERROR ? SIDE_INVALID : s;
}

static side_status read_paths(jread *r, side_machine *m)
{
    side_status s = jread_expect(r, JREAD_ARRAY);

    while (s == SIDE_OK && jread_next(r) == JREAD_OBJECT)
        if (m->path_count < SIDE_MACHINE_PATHS)
            s = read_path(r, &m->paths[m->path_count++]);
        else
            s = jread_fail(r, "more than %d paths", SIDE_MACHINE_PATHS);
    if (s == SIDE_OK && r->token != JREAD_ARRAY_END)
        s = jread_fail(r, "expected a path, an object");
    return s;
}

/* ---------------------------------------------------------------- the whole */

/* The key has been read: everything before its line is hashed. */
static side_status read_check(jread *r, const char *text)
{
    size_t before = r->at - 1; /* the quote */
    char said[24], want[24];
    side_status s;

    while (before > 0 && text[before - 1] == ' ')
        before--;
    s = jread_string(r, said, sizeof(said));
    if (s != SIDE_OK)
        return s;
    snprintf(want, sizeof(want), "%016llx", (unsigned long long)machine_hash(text, before));
    if (strcmp(said, want) != 0)
        return jread_fail(r, "the text is not what was saved; if it was changed on purpose, take the line out");
    return jread_expect(r, JREAD_OBJECT_END);
}

static side_status read_version(jread *r)
{
    uint64_t version = 0;
    side_status s = jread_expect(r, JREAD_OBJECT);

    if (s == SIDE_OK && jread_next(r) == JREAD_ERROR)
        return SIDE_INVALID;
    if (s == SIDE_OK && (r->token != JREAD_KEY || !jread_is(r, "sidestream_machine")))
        return jread_fail(r, "no machine profile: its first key is \"sidestream_machine\"");
    if (s == SIDE_OK)
        s = jread_u64(r, 0, UINT64_MAX, &version);
    if (s == SIDE_OK && version != MACHINE_VERSION)
        return jread_fail(r, "a profile of version %llu; this program (%s) reads version %d",
                          (unsigned long long)version, side_version(), MACHINE_VERSION);
    return s;
}

/* The key has been read. */
static side_status read_member(jread *r, const char *text, uint32_t *seen, side_machine *m)
{
    if (jread_is(r, "check"))
        return read_check(r, text);
    if (jread_is(r, "paths")) {
        *seen |= 1u << MACHINE_FIELDS;
        return read_paths(r, m);
    }
    for (size_t i = 0; i < MACHINE_FIELDS; i++)
        if (jread_is(r, machine_fields[i].key)) {
            *seen |= 1u << i;
            return read_field(r, &machine_fields[i], m);
        }
    return jread_fail(r, "a key that version %d does not have", MACHINE_VERSION);
}

side_status machine_read(const char *name, const char *text, size_t bytes, side_machine *machine)
{
    jread_key keys[KEYS];
    jread r;
    uint32_t seen = 0;
    side_status s;

    jread_begin(&r, name, text, bytes, keys, KEYS);
    s = read_version(&r);
    while (s == SIDE_OK && r.depth > 0 && jread_next(&r) == JREAD_KEY)
        s = read_member(&r, text, &seen, machine);
    if (s == SIDE_OK && r.token == JREAD_ERROR)
        s = SIDE_INVALID;
    for (size_t i = 0; s == SIDE_OK && i <= MACHINE_FIELDS; i++)
        if ((seen & 1u << i) == 0)
            s = jread_fail(&r, "the profile lacks \"%s\"", i < MACHINE_FIELDS ? machine_fields[i].key : "paths");
    return s == SIDE_OK ? jread_expect(&r, JREAD_END) : s;
}
