/* SPDX-License-Identifier: MIT
 * Finding the driver. */
#ifndef CU_LOAD_H
#define CU_LOAD_H

#include "cu_abi.h"
#include "sidestream.h"

/* The driver, loaded and initialised at the first success and kept for the life of the process (unloading it is not safe). A failure is tried
 * again by the next call. SIDE_NO_DEVICE: no driver, or it says that there is no usable device; SIDE_DRIVER_TOO_OLD: with both versions. */
side_status cu_load(const struct cu_api **api);

/* Fills *api from a loaded driver. `get` is its cuGetProcAddress_v2. SIDE_DRIVER_TOO_OLD names the function that is missing. */
side_status cu_resolve(cu_get_proc_address *get, struct cu_api *api);

/* Checks the version and calls cuInit. */
side_status cu_start(const struct cu_api *api);

#ifdef SIDE_TESTING
/* From now on cu_load gives this table, started; NULL: the real one again. */
void cu_test_api(const struct cu_api *api);
#endif

#endif
