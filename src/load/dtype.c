/* SPDX-License-Identifier: MIT */
#include "checkpoint.h"

#include "error.h"

#include <string.h>

static const struct {
    const char *name;
    uint32_t bits;
    uint32_t bytes; /* of the name */
} types[SIDE_DTYPE_COUNT] = {
#define SIDE_X(name, value, bits, text) [value] = {text, bits, sizeof(text) - 1},
    SIDE_DTYPE_MAP(SIDE_X)
#undef SIDE_X
};

const char *side_dtype_name(side_dtype type)
{
    return (unsigned)type < SIDE_DTYPE_COUNT ? types[type].name : "?";
}

uint32_t side_dtype_bits(side_dtype type)
{
    return (unsigned)type < SIDE_DTYPE_COUNT ? types[type].bits : 0;
}

bool dtype_of(const char *text, size_t bytes, side_dtype *type)
{
    for (unsigned i = 0; i < SIDE_DTYPE_COUNT; i++)
        if (types[i].bytes == bytes && memcmp(types[i].name, text, bytes) == 0) {
            *type = (side_dtype)i;
            return true;
        }
    return false;
}

side_status side_dtype_find(const char *name, side_dtype *type)
{
    if (name == NULL || type == NULL)
        return error_set(SIDE_INVALID, "side_dtype_find", "%s is NULL", name == NULL ? "name" : "type");
    if (!dtype_of(name, strlen(name), type))
        return error_set(SIDE_NOT_FOUND, "side_dtype_find", "no type is named %.32s; they are named as BF16", name);
    return SIDE_OK;
}
