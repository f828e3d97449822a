/* SPDX-License-Identifier: MIT
 *
 * Machine profiles within core.
 *
 *     machine.c            whose profile it is, where it lies, and the device's own copy of it
 *     machine_estimate.c   what is said without a file; which path the table gives. Pure
 *     machine_file.c       load and save: files
 *     machine_read.c       text to profile
 *     machine_write.c      profile to text, and the ranges of its numbers. Both pure
 */
#ifndef CORE_MACHINE_H
#define CORE_MACHINE_H

#include "device.h"

#define MACHINE_VERSION    1
#define MACHINE_TEXT_BYTES ((size_t)128 << 10) /* the longest text is less */

/* The device's profile, as side_machine_get gives it; lives as long as the device. NULL, with the error set: no memory. The device was checked. */
const side_machine *machine_of(side_device *device);
void machine_device_finish(side_device *device);

/* Sets the numbers, not whose they are. */
void machine_estimate(const side_device_props *props, const side_link *link, side_machine *machine);

/* For messages: of a long path its end, which tells it from others. */
const char *machine_shown(const char *path);

/* ---- text (machine_read.c, machine_write.c)
 *
 *     { "sidestream_machine": 1, "from": "measured", ..., "paths": [...],
 *     "check": "XXH3 of all bytes before this line" }
 *
 * "check" may be left out, for profiles that people write. */

enum machine_form { MACHINE_FROM, MACHINE_TEXT, MACHINE_WHOLE, MACHINE_REAL, MACHINE_RATE };

struct machine_field {
    const char *key;
    enum machine_form form;
    size_t offset, bytes; /* bytes: of a text */
    double least, most;   /* RATE: of gbps */
};

#define MACHINE_FIELDS 18
extern const struct machine_field
    machine_fields[MACHINE_FIELDS]; /* all there is but the version, paths and check; in the order of the text */

#define MACHINE_GBPS_LEAST   1e-3
#define MACHINE_GBPS_MOST    1e5
#define MACHINE_LATENCY_MOST 1.0
#define MACHINE_BESIDE_MOST  1e3

const char *machine_from_name(side_machine_from from); /* NULL: none */
/* Printable ASCII, so that no name does anything to a terminal. */
bool machine_text_is_plain(const char *text, size_t bytes);
uint64_t machine_hash(const char *text, size_t bytes);

/* SIDE_INVALID names the field. */
side_status machine_check(const side_machine *machine, const char *where);
/* `text`: MACHINE_TEXT_BYTES. The profile has been checked. Returns the length. */
size_t machine_write(const side_machine *machine, char *text);
/* SIDE_INVALID with `name`, line and offset. */
side_status machine_read(const char *name, const char *text, size_t bytes, side_machine *machine);

#ifdef SIDE_TESTING
extern const char *machine_test_etc; /* instead of /etc */
#endif

#endif
