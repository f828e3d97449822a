/* SPDX-License-Identifier: MIT
 * The CUDA device, for core's registry. */
#ifndef DEVICE_CUDA_H
#define DEVICE_CUDA_H

#include "sidestream_device.h"

extern const struct side_device_ops cuda_device_ops;

#endif
