/* SPDX-License-Identifier: MIT
 * Exit codes: documented, never renumbered. doctor has its own: 0, 1 and 2 say how bad the worst finding is (doctor.h). */
#ifndef CLI_EXIT_H
#define CLI_EXIT_H

/* X(name, code, text) */
#define EXIT_MAP(X)                                                                  \
    X(EXIT_DONE, 0, "ok")                                                            \
    X(EXIT_FAILED, 1, "failed while running: device, input, output or verification") \
    X(EXIT_USAGE, 2, "bad argument")                                                 \
    X(EXIT_NO_DEVICE, 3, "no usable device, driver or library")                      \
    X(EXIT_MEMORY, 4, "out of memory or over budget")                                \
    X(EXIT_STUCK, 5, "the device did not finish in time")                            \
    X(EXIT_MEASURING, 6, "measuring error: faster than is possible")                 \
    X(EXIT_INTERRUPTED, 130, "interrupted")

enum {
#define EXIT_X(name, code, text) name = code,
    EXIT_MAP(EXIT_X)
#undef EXIT_X
};

#define EXIT_TEXT2(code)         #code
#define EXIT_X(name, code, text) "  " EXIT_TEXT2(code) "  " text "\n"
/* Lines for --help. */
#define EXIT_HELP "Exit codes:\n" EXIT_MAP(EXIT_X)

#endif
