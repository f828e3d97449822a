/* SPDX-License-Identifier: MIT */
#include "parse.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

enum { SHOWN = 40 }; /* characters of what was given */

/* Digits at *text into *value; false where there are none or they pass 64 bits. Moves *text behind them. */
static bool digits(const char **text, uint64_t *value)
{
    const char *s = *text;
    uint64_t v = 0;
    bool fits = true;

    while (*s >= '0' && *s <= '9') {
        uint64_t digit = (uint64_t)(*s++ - '0');

        if (v > (UINT64_MAX - digit) / 10)
            fits = false;
        else
            v = v * 10 + digit;
    }
    fits = fits && s != *text;
    *text = s;
    *value = v;
    return fits;
}

/* The shift of a unit: 0 B, 10 K, ...; -1: none; -2: KB and the like, which mean two things. */
static int unit_shift(const char *unit)
{
    static const char letters[] = "KMGT";
    const char *letter;

    if (strcasecmp(unit, "B") == 0)
        return 0;
    letter = *unit != '\0' ? strchr(letters, *unit & ~0x20) : NULL;
    if (letter == NULL)
        return -1;
    if (strcasecmp(unit + 1, "B") == 0)
        return -2;
    if (unit[1] != '\0' && strcasecmp(unit + 1, "iB") != 0)
        return -1;
    return 10 * (int)(letter - letters + 1);
}

static bool bytes_range(const char *text, uint64_t least, uint64_t most, uint64_t value, char why[PARSE_WHY])
{
    static const char units[] = "BKMGT";
    int low = 0, high = 0;

    if (value >= least && value <= most)
        return true;
    while (low < 4 && least >> 10 * low >= 1024 && least % (UINT64_C(1) << 10 * (low + 1)) == 0)
        low++;
    while (high < 4 && most >> 10 * high >= 1024)
        high++;
    snprintf(why, PARSE_WHY, "'%.*s' is out of range; %llu%c to %llu%c are possible", SHOWN, text,
             (unsigned long long)(least >> 10 * low), units[low], (unsigned long long)(most >> 10 * high), units[high]);
    return false;
}

bool parse_bytes(const char *text, uint64_t least, uint64_t most, uint64_t *bytes, char why[PARSE_WHY])
{
    const char *s = text;
    uint64_t whole = 0, value;
    double fraction = 0, place = 1;
    int shift;

    if (*s == '-') {
        snprintf(why, PARSE_WHY, "'%.*s' is negative; want bytes such as 64M, 8MiB, 1.5G or 4096B", SHOWN, text);
        return false;
    }
    if (!digits(&s, &whole) || (*s == '.' && !(s[1] >= '0' && s[1] <= '9'))) {
        snprintf(why, PARSE_WHY, "'%.*s' is not an amount; want bytes such as 64M, 8MiB, 1.5G or 4096B", SHOWN, text);
        return false;
    }
    if (*s == '.')
        for (s++; *s >= '0' && *s <= '9'; s++)
            fraction += (double)(*s - '0') * (place /= 10);
    shift = unit_shift(s);
    if (*s == '\0')
        snprintf(why, PARSE_WHY, "'%.*s' has no unit; write %.*sB, %.*sK or %.*sM", SHOWN, text, SHOWN / 2, text,
                 SHOWN / 2, text, SHOWN / 2, text);
    else if (shift == -2)
        snprintf(why, PARSE_WHY, "'%.*s': %.8s may mean two things; K, M, G or KiB, MiB, GiB are powers of 1024", SHOWN,
                 text, s);
    else if (shift == -1)
        snprintf(why, PARSE_WHY, "'%.*s' has no unit that is known; want B, K, M, G (or KiB, MiB, GiB)", SHOWN, text);
    if (shift < 0)
        return false;
    if (shift > 0 && whole >> (64 - shift) != 0) {
        snprintf(why, PARSE_WHY, "'%.*s' is more than any machine has", SHOWN, text);
        return false;
    }
    value = (whole << shift) + (uint64_t)(fraction * (double)(UINT64_C(1) << shift));
    if (value == 0) {
        snprintf(why, PARSE_WHY, "'%.*s' is zero; want bytes such as 64M, 8MiB, 1.5G or 4096B", SHOWN, text);
        return false;
    }
    if (!bytes_range(text, least, most, value, why))
        return false;
    *bytes = value;
    return true;
}

bool parse_count(const char *text, uint64_t least, uint64_t most, uint64_t *count, char why[PARSE_WHY])
{
    const char *s = text;
    uint64_t value;

    if (!digits(&s, &value) || *s != '\0' || value < least || value > most) {
        snprintf(why, PARSE_WHY, "'%.*s' is not a whole number from %llu to %llu", SHOWN, text,
                 (unsigned long long)least, (unsigned long long)most);
        return false;
    }
    *count = value;
    return true;
}

/* "4" or "1..8" at *text. */
static bool range(const char **text, uint64_t *first, uint64_t *last)
{
    if (!digits(text, first))
        return false;
    *last = *first;
    if (strncmp(*text, "..", 2) != 0)
        return true;
    *text += 2;
    return digits(text, last) && *last >= *first;
}

bool parse_list(const char *text, uint64_t least, uint64_t most, uint32_t list[PARSE_LIST], size_t *count,
                char why[PARSE_WHY])
{
    const char *s = text;
    size_t n = 0;

    for (;;) {
        uint64_t first, last;

        if (!range(&s, &first, &last) || first < least || last > most || (*s != ',' && *s != '\0')) {
            snprintf(why, PARSE_WHY, "'%.*s' is not a list such as 2,3,4 or 1..4 of numbers from %llu to %llu", SHOWN,
                     text, (unsigned long long)least, (unsigned long long)most);
            return false;
        }
        for (uint64_t value = first; value <= last; value++) {
            bool known = false;

            for (size_t i = 0; i < n; i++)
                known = known || list[i] == value;
            if (known)
                continue;
            if (n == PARSE_LIST) {
                snprintf(why, PARSE_WHY, "'%.*s' holds more than %d numbers", SHOWN, text, PARSE_LIST);
                return false;
            }
            list[n++] = (uint32_t)value;
        }
        if (*s++ == '\0')
            break;
    }
    *count = n;
    return true;
}

/* A time in the unit that suits it. */
static const char *seconds_text(double value, char text[32])
{
    static const char *const units[] = {"s", "ms", "us", "ns"};
    size_t unit = 0;

    while (unit < 3 && value < 0.9995) {
        value *= 1000;
        unit++;
    }
    snprintf(text, 32, "%.4g%s", value, units[unit]);
    return text;
}

/* Seconds of a unit; 0: none. */
static double unit_seconds(const char *unit)
{
    static const struct {
        const char *name;
        double seconds;
    } units[] = {{"s", 1}, {"ms", 1e-3}, {"us", 1e-6}, {"\xc2\xb5s", 1e-6}, {"ns", 1e-9}};

    for (size_t i = 0; i < sizeof(units) / sizeof(units[0]); i++)
        if (strcmp(unit, units[i].name) == 0)
            return units[i].seconds;
    return 0;
}

bool parse_seconds(const char *text, double least, double most, double *seconds, char why[PARSE_WHY])
{
    const char *s = text;
    uint64_t whole = 0;
    double value, unit, place = 1;
    char low[32], high[32];

    if (*s == '-') {
        snprintf(why, PARSE_WHY, "'%.*s' is negative; want a time such as 1.2ms, 800us or 3s", SHOWN, text);
        return false;
    }
    if (!digits(&s, &whole) || (*s == '.' && !(s[1] >= '0' && s[1] <= '9'))) {
        snprintf(why, PARSE_WHY, "'%.*s' is not a time; want one such as 1.2ms, 800us or 3s", SHOWN, text);
        return false;
    }
    value = (double)whole;
    if (*s == '.')
        for (s++; *s >= '0' && *s <= '9'; s++)
            value += (double)(*s - '0') * (place /= 10);
    unit = unit_seconds(s);
    if (unit <= 0) {
        if (*s == '\0')
            snprintf(why, PARSE_WHY, "'%.*s' has no unit; write %.*ss, %.*sms or %.*sus", SHOWN, text, SHOWN / 2, text,
                     SHOWN / 2, text, SHOWN / 2, text);
        else
            snprintf(why, PARSE_WHY, "'%.*s' has no unit that is known; want s, ms, us or ns", SHOWN, text);
        return false;
    }
    value *= unit;
    if (value <= 0) {
        snprintf(why, PARSE_WHY, "'%.*s' is zero; want a time such as 1.2ms, 800us or 3s", SHOWN, text);
        return false;
    }
    if (value < least || value > most) {
        snprintf(why, PARSE_WHY, "'%.*s' is out of range; %s to %s are possible", SHOWN, text, seconds_text(least, low),
                 seconds_text(most, high));
        return false;
    }
    *seconds = value;
    return true;
}

bool parse_ratio(const char *text, double most, double *ratio, char why[PARSE_WHY])
{
    const char *s = text;
    uint64_t whole = 0;
    double value, place = 1;

    if (!digits(&s, &whole) || (*s == '.' && !(s[1] >= '0' && s[1] <= '9'))) {
        snprintf(why, PARSE_WHY, "'%.*s' is not a share; want one such as 0.3 or 30%%", SHOWN, text);
        return false;
    }
    value = (double)whole;
    if (*s == '.')
        for (s++; *s >= '0' && *s <= '9'; s++)
            value += (double)(*s - '0') * (place /= 10);
    if (strcmp(s, "%") == 0) {
        value /= 100;
        s++;
    }
    if (*s != '\0')
        snprintf(why, PARSE_WHY, "'%.*s' is not a share; want one such as 0.3 or 30%%", SHOWN, text);
    else if (value > most)
        snprintf(why, PARSE_WHY, "'%.*s' is out of range; 0 to %g (%g%%) are possible", SHOWN, text, most, most * 100);
    if (*s != '\0' || value > most)
        return false;
    *ratio = value;
    return true;
}
