/* SPDX-License-Identifier: MIT
 * The op log as core writes it: logging never fails what is logged. */
#ifndef CORE_LOG_H
#define CORE_LOG_H

#include "sidestream.h"

#define LOG_NONE UINT32_MAX

/* What a span touches; 0,0 unknown. */
struct log_ranges {
    const void *read, *write;
    size_t read_bytes, write_bytes;
};

side_device *log_device(const side_log *log);

/* log NULL: off, gives LOG_NONE. A span that cannot be recorded is counted as dropped. */
uint32_t log_begin(side_log *log, side_stream *stream, side_lane lane, const char *name, uint64_t item, uint64_t bytes,
                   const struct log_ranges *ranges);
void log_end(side_log *log, side_stream *stream, uint32_t span);

#endif
