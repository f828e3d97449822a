/* SPDX-License-Identifier: MIT
 * A progress bar on stderr: where that is a terminal, from the second second on. One at a time, from one thread. */
#ifndef CLI_PROGRESS_H
#define CLI_PROGRESS_H

#include <stdint.h>

/* total in any unit; unit_bytes: it is bytes, and the bar shows GB/s. `label` must live on. */
void progress_begin(const char *label, uint64_t total, int unit_bytes);
void progress_update(uint64_t done);
/* Takes the bar off the screen; the next update draws it again. */
void progress_clear(void);
void progress_end(void);

#endif
