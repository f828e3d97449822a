/* SPDX-License-Identifier: MIT
 * The one allocation seam. Tests (SIDE_TESTING) can fail the nth call. */
#ifndef BASE_ALLOC_H
#define BASE_ALLOC_H

#include <stddef.h>

/* Zeroed; NULL with the error detail SIDE_NO_MEMORY set on failure or overflow. count or bytes 0 gives a valid pointer. */
void *mem_zalloc(size_t count, size_t bytes);
void mem_free(void *p);

#ifdef SIDE_TESTING
/* The nth call from now fails (1: the next); 0: none. Returns how many calls there were since the last one. */
unsigned long mem_fail_at(unsigned long nth);
/* Blocks allocated and not freed. */
long mem_live(void);
#endif

#endif
