/* SPDX-License-Identifier: MIT
 *
 * SIGINT and SIGTERM. The first cancels: the pipeline or cast being watched drains, files are taken away, the exit code is 130. The second unlinks
 * the unfinished files and leaves at once.
 */
#ifndef CLI_SIGNALS_H
#define CLI_SIGNALS_H

#include <sidestream.h>

void signals_install(void);
/* A first signal came. */
bool signals_interrupted(void);
/* The pipeline that a signal cancels; at once, if one came before. NULL: none; on return no handler uses the old one any more. */
void signals_watch(side_pipeline *pipeline);
/* The same for a cast. */
void signals_watch_cast(side_cast *cast);
/* A file that a second signal unlinks. Returns a place to give back; -1 where the path is too long or there is no place. */
int signals_unlink_add(const char *path);
void signals_unlink_drop(int place);

#endif
