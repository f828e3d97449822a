/* SPDX-License-Identifier: MIT
 *
 * When nothing may be done any more, and what is left to be done later. No Python here: all of this runs in threads that do not have the GIL, too.
 *
 *     deleter (any thread)  --life_bury-->  graveyard  --life_exhume-->  life_sweep (with the GIL: at entry points, and at exit)
 *
 * Over: in a forked child, for what was made before the fork; and everywhere once the interpreter ends. Then nothing is released, freed or called: the process
 * gives all back by itself, and the threads, locks and devices behind may be gone. */
#ifndef NATIVE_LIFE_H
#define NATIVE_LIFE_H

#include <stdbool.h>

/* Something to be done later, by a thread that holds the GIL. Embedded in what it is about. */
struct grave {
    struct grave *next;
    void (*bury)(
        struct grave *grave); /* called with the GIL; may release it, may run Python code; frees what holds the grave */
};

/* Lock-free, from any thread; the grave is the sweeper's from here on. */
void life_bury(struct grave *grave);
/* Takes all graves, newest first; NULL: none. Lock-free. */
struct grave *life_exhume(void);

/* Forks between the process that called life_watch_forks and this one: what notes it at birth knows where it is. */
unsigned life_forks(void);
/* The same and those that this process itself made since: "fork first" can be checked. */
unsigned long life_forks_made(void);
/* The interpreter finalises: deleters and drops do nothing from now on. */
bool life_is_over(void);
/* Neither forked since life_forks() was `forks`, nor over. */
bool life_goes_on(unsigned forks);

/* Once; again is fine. 0, or an errno. */
int life_watch_forks(void);
/* From the exit hook, after all threads of ours have stopped. For ever. */
void life_end(void);

#endif
