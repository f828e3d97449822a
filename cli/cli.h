/* SPDX-License-Identifier: MIT
 *
 * What the commands share. A command is a function in a file of its own, listed in main.c; it gets its own argv ("sidestream demo", then its
 * arguments) and returns an exit code. stdout is data, stderr is talk.
 */
#ifndef CLI_CLI_H
#define CLI_CLI_H

#include "exit.h"

#include <argp.h>
#include <jansson.h>
#include <sidestream.h>

int command_bench(int argc, char **argv);
int command_cast(int argc, char **argv);
int command_demo(int argc, char **argv);
int command_devices(int argc, char **argv);
int command_doctor(int argc, char **argv);
int command_load(int argc, char **argv);
int command_ls(int argc, char **argv);
int command_plan(int argc, char **argv);
int command_run(int argc, char **argv);

/* ---- options of every command: a child of the command's argp; fill child_inputs[0] with a struct common */

struct common {
    const char *device; /* NULL: "auto" */
    bool json;
};

extern const struct argp common_argp;

/* ---- talk (say.c) */

/* "sidestream: ..." on stderr; clears a progress bar first. */
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Says "<what>: <cause from side_last_error()>" and returns the exit code for the status. */
int say_status(side_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The same of a file: "<what> 'PATH': <cause>", or the cause alone where it names the path itself. */
int say_file(side_status status, const char *what, const char *path);
int exit_for(side_status status);
/* As say_status, for an error that a callback kept: what it returns to the library loses the cause. */
int say_kept(const side_error *kept, side_status status, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* Library warnings go to stderr. */
void say_warnings(void);

/* ---- small things (common.c) */

/* Opens the device that the options name; says why not. Returns an exit code. */
int open_device(const struct common *common, side_device **device);
/* Prints and frees it. Returns an exit code. */
int print_json(json_t *root);
/* Flushes stdout: EXIT_FAILED where that fails. */
int finish_stdout(void);
/* A JSON number, or null where the value is not finite. */
json_t *json_number(double value);
/* "64 MiB", "1.5 GiB", "1000 B" */
const char *bytes_text(uint64_t bytes, char text[32]);
/* "PCIe 5.0 x16"-like, with what it runs at where that is less than it could. */
const char *link_text(const side_link *link, char text[96]);
/* Columns to draw on stdout, and whether to keep to ASCII. */
uint32_t stdout_columns(void);
bool stdout_ascii(void);
double clock_s(void); /* CLOCK_MONOTONIC */

#endif
