/* SPDX-License-Identifier: MIT */
#include "sidestream.h"

#define TEXT2(x) #x
#define TEXT(x)  TEXT2(x)

const char *side_version(void)
{
    return TEXT(SIDE_VERSION_MAJOR) "." TEXT(SIDE_VERSION_MINOR) "." TEXT(SIDE_VERSION_PATCH);
}
