/* SPDX-License-Identifier: MIT
 * What core needs of the pinned pool beyond the public calls. */
#ifndef CORE_POOL_H
#define CORE_POOL_H

#include "sidestream.h"

/* Called by side_device_close before the context goes: unpins what side_memory_pin pinned and was not undone. */
void pool_device_finish(side_device *device);

#endif
