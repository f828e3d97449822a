/* SPDX-License-Identifier: MIT
 * Quantities on the command line: what is accepted lies in the range, what is not has a reason. */
#include "parse.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void expect(bool held)
{
    if (!held)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char text[256], why[PARSE_WHY] = "";
    uint32_t list[PARSE_LIST];
    uint64_t value = 0;
    double seconds = 0;
    size_t n = size < sizeof(text) - 1 ? size : sizeof(text) - 1, count = 0;

    memcpy(text, data, n);
    text[n] = '\0';
    if (parse_bytes(text, 4096, (uint64_t)1 << 40, &value, why))
        expect(value >= 4096 && value <= (uint64_t)1 << 40);
    else
        expect(why[0] != '\0' && memchr(why, '\0', sizeof(why)) != NULL);
    why[0] = '\0';
    if (parse_count(text, 1, 100000, &value, why))
        expect(value >= 1 && value <= 100000);
    else
        expect(why[0] != '\0' && memchr(why, '\0', sizeof(why)) != NULL);
    why[0] = '\0';
    if (parse_list(text, 1, 64, list, &count, why)) {
        expect(count >= 1 && count <= PARSE_LIST);
        for (size_t i = 0; i < count; i++)
            expect(list[i] >= 1 && list[i] <= 64);
    } else {
        expect(why[0] != '\0' && memchr(why, '\0', sizeof(why)) != NULL);
    }
    why[0] = '\0';
    if (parse_seconds(text, 1e-7, 3600, &seconds, why))
        expect(seconds >= 1e-7 && seconds <= 3600);
    else
        expect(why[0] != '\0' && memchr(why, '\0', sizeof(why)) != NULL);
    why[0] = '\0';
    if (parse_ratio(text, 2, &seconds, why))
        expect(seconds >= 0 && seconds <= 2);
    else
        expect(why[0] != '\0' && memchr(why, '\0', sizeof(why)) != NULL);
    return 0;
}
