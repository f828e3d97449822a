/* SPDX-License-Identifier: MIT
 *
 * The structs of DLPack, as its specification fixes them: 0.x (DLManagedTensor) and 1.x (DLManagedTensorVersioned). Declared here, so that nothing has
 * to be installed.
 */
#ifndef NATIVE_DLPACK_H
#define NATIVE_DLPACK_H

#include <stdint.h>

enum { DL_CPU = 1, DL_CUDA = 2, DL_CUDA_HOST = 3, DL_CUDA_MANAGED = 13 };

enum { DL_INT = 0, DL_UINT = 1, DL_FLOAT = 2, DL_BFLOAT = 4, DL_COMPLEX = 5, DL_BOOL = 6 };

typedef struct dl_device {
    int32_t type;
    int32_t id;
} dl_device;

typedef struct dl_type {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
} dl_type;

typedef struct dl_tensor {
    void *data;
    dl_device device;
    int32_t ndim;
    dl_type dtype;
    int64_t *shape;
    int64_t *strides; /* elements; NULL: C order */
    uint64_t byte_offset;
} dl_tensor;

typedef struct dl_managed {
    dl_tensor tensor;
    void *context;
    void (*deleter)(struct dl_managed *);
} dl_managed;

#define DL_READ_ONLY 1u

typedef struct dl_managed_versioned {
    uint32_t major, minor;
    void *context;
    void (*deleter)(struct dl_managed_versioned *);
    uint64_t flags;
    dl_tensor tensor;
} dl_managed_versioned;

/* Names of capsules before and after a consumer took them. */
#define DL_CAPSULE                "dltensor"
#define DL_CAPSULE_USED           "used_dltensor"
#define DL_CAPSULE_VERSIONED      "dltensor_versioned"
#define DL_CAPSULE_VERSIONED_USED "used_dltensor_versioned"

#endif
