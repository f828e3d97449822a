/* SPDX-License-Identifier: MIT
 *
 * Quantities on the command line. Each returns false and leaves a sentence in `why` that names what was given and the accepted form. Pure.
 */
#ifndef CLI_PARSE_H
#define CLI_PARSE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PARSE_WHY  200
#define PARSE_LIST 32 /* values in a list */

/* "64M", "8MiB", "1.5G", "4096B": digits, at most one point, and a unit, powers of 1024. */
bool parse_bytes(const char *text, uint64_t least, uint64_t most, uint64_t *bytes, char why[PARSE_WHY]);
/* "8" */
bool parse_count(const char *text, uint64_t least, uint64_t most, uint64_t *count, char why[PARSE_WHY]);
/* "2,3,4", "1..8", "1,4..6" */
bool parse_list(const char *text, uint64_t least, uint64_t most, uint32_t list[PARSE_LIST], size_t *count,
                char why[PARSE_WHY]);
/* "1.2ms", "800us", "3s", "50ns": digits, at most one point, and a unit. Zero is refused, whatever `least` is. */
bool parse_seconds(const char *text, double least, double most, double *seconds, char why[PARSE_WHY]);
/* "0.3" or "30%": from 0 to `most`. */
bool parse_ratio(const char *text, double most, double *ratio, char why[PARSE_WHY]);

#endif
