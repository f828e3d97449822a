/* SPDX-License-Identifier: MIT
 * Device specs: whatever is typed after "sim:" opens a device or is refused with a message, and nothing else happens. */
#include "error.h"
#include "sim.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char text[256];
    dev_context *context = NULL;
    side_device_props props;
    size_t n = size < sizeof(text) - 1 ? size : sizeof(text) - 1;

    memcpy(text, data, n);
    text[n] = '\0';
    error_clear();
    side_status s = sim_device_ops.open(text, &context);
    if (s != SIDE_OK) {
        if (s > 0 || side_last_error()->status != s || side_last_error()->message[0] == '\0' || context != NULL)
            abort();
        return 0;
    }
    if (sim_device_ops.props(context, &props) == SIDE_OK && (props.copy_engines < 1 || props.copy_engines > 2))
        abort();
    sim_device_ops.close(context);
    return 0;
}
