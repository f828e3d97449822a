/* SPDX-License-Identifier: MIT
 * What core needs of the pinned pool beyond the public calls. */
#ifndef CORE_POOL_H
#define CORE_POOL_H

#include "sidestream.h"

side_device *pool_device(const side_pool *pool);

/* Called by side_device_close before the context goes: unpins what side_memory_pin pinned and was not undone, then destroys the device's pool. */
void pool_device_finish(side_device *device);

/* Drivers refuse a copy whose host side crosses the edge of a pinned range (into another, or into pageable memory), and pins that overlap are
 * made of several ranges. Of `bytes` at host memory `data`, how many from the start on may go as one copy, as far as side_memory_pin's pins
 * are concerned: at least 1, `bytes` where there is no edge. Cheap where nothing is pinned in place. */
#ifdef SIDE_TESTING /* devices that refuse such copies split them themselves: device/cuda/cuda_copy.c */
size_t pool_copy_span(side_device *device, const void *data, size_t bytes);
/* Where the options leave regions to the budget: their size, instead of 2 to 64 MiB. 0: as in the product. Set before pools are made. */
extern size_t pool_test_region_bytes;
#endif

#endif
