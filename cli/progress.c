/* SPDX-License-Identifier: MIT */
#include "progress.h"
#include "cli.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { BAR = 30 };

static struct {
    const char *label; /* NULL: no bar */
    uint64_t total;
    int unit_bytes;
    int shown;
    double begin, last;
} bar;

void progress_begin(const char *label, uint64_t total, int unit_bytes)
{
    bar.label = isatty(STDERR_FILENO) ? label : NULL;
    bar.total = total > 0 ? total : 1;
    bar.unit_bytes = unit_bytes;
    bar.shown = 0;
    bar.begin = clock_s();
    bar.last = bar.begin + 0.9; /* first drawn after a second */
}

void progress_update(uint64_t done)
{
    char cells[BAR + 1];
    double now, share;

    if (bar.label == NULL)
        return;
    now = clock_s();
    if (now - bar.last < 0.1)
        return;
    bar.last = now;
    share = done < bar.total ? (double)done / (double)bar.total : 1.0;
    memset(cells, '.', BAR);
    memset(cells, '#', (size_t)(share * BAR));
    cells[BAR] = '\0';
    fprintf(stderr, "\r%s [%s] %3.0f %%", bar.label, cells, share * 100);
    if (bar.unit_bytes)
        fprintf(stderr, "  %.2f GB/s", (double)done / 1e9 / (now - bar.begin));
    fputs("\033[K", stderr);
    fflush(stderr);
    bar.shown = 1;
}

void progress_clear(void)
{
    if (bar.shown)
        fputs("\r\033[K", stderr);
    bar.shown = 0;
}

void progress_end(void)
{
    progress_clear();
    bar.label = NULL;
}
