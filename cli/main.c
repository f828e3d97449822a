/* SPDX-License-Identifier: MIT
 * sidestream COMMAND [ARGUMENT...]: finds the command and hands over. */
#include "cli.h"
#include "signals.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

struct command {
    const char *name, *summary;
    int (*run)(int argc, char **argv);
};

static const struct command commands[] = {
    {"bench", "measure what this machine can do", command_bench},
    {"cast", "cast a checkpoint to another type, from disk to disk", command_cast},
    {"demo", "show what overlapping copy and compute gives, with proof", command_demo},
    {"devices", "list the devices, their links and their memory", command_devices},
    {"doctor", "say whether this machine is set up right, and how to mend it", command_doctor},
    {"load", "load the tensors of a checkpoint to the device, and say how fast and why", command_load},
    {"ls", "list the tensors that files hold", command_ls},
    {"plan", "say what overlap will give, before any code is written", command_plan},
    {"run", "stream a file through an operation on the device", command_run},
};

enum { COMMANDS = sizeof(commands) / sizeof(commands[0]) };

static void help(FILE *to)
{
    fputs("Usage: sidestream COMMAND [ARGUMENT...]\n"
          "Moves data between host and GPU on a side stream while the GPU computes.\n\nCommands:\n",
          to);
    for (size_t i = 0; i < COMMANDS; i++)
        fprintf(to, "  %-10s %s\n", commands[i].name, commands[i].summary);
    fputs("\nEvery command takes, after its name:\n"
          "  -d, --device=SPEC   auto (the first GPU, else sim), cuda, cuda:N, sim, sim:PROFILE,key=value,...\n"
          "  -j, --json          one JSON object on stdout instead of text\n"
          "  --help              what else it takes\n"
          "\n" EXIT_HELP "\nEnvironment:\n"
          "  SIDESTREAM_DEVICE      what auto means\n"
          "  SIDESTREAM_DISABLE=1   no overlap: ordered copies, for bisecting\n"
          "  SIDESTREAM_VALIDATE=1  poison reused memory and check fences\n",
          to);
}

/* Letters to change, add or remove to get from a to b; words here are short. */
static size_t distance(const char *a, const char *b)
{
    size_t row[33], n = strlen(b);

    if (n > 32 || strlen(a) > 32)
        return 99;
    for (size_t j = 0; j <= n; j++)
        row[j] = j;
    for (size_t i = 1; a[i - 1] != '\0'; i++) {
        size_t diagonal = row[0];

        row[0] = i;
        for (size_t j = 1; j <= n; j++) {
            size_t change = diagonal + (a[i - 1] != b[j - 1]);

            diagonal = row[j];
            row[j] = row[j] + 1 < row[j - 1] + 1 ? row[j] + 1 : row[j - 1] + 1;
            row[j] = change < row[j] ? change : row[j];
        }
    }
    return row[n];
}

static int unknown(const char *name)
{
    const struct command *best = NULL;
    size_t least = 3; /* further than two letters is a guess */

    if (name[0] == '-') {
        say("option '%.60s' comes before the command; write: sidestream COMMAND %.60s", name, name);
        return EXIT_USAGE;
    }
    for (size_t i = 0; i < COMMANDS; i++) {
        size_t d = distance(name, commands[i].name);

        if (strlen(name) >= 2 && strncmp(name, commands[i].name, strlen(name)) == 0)
            d = 0;
        if (d < least && d < strlen(name)) {
            least = d;
            best = &commands[i];
        }
    }
    if (best != NULL)
        say("no command '%.60s'; did you mean '%s'?", name, best->name);
    else
        say("no command '%.60s'; 'sidestream --help' lists them", name);
    return EXIT_USAGE;
}

/* A device that does not answer could hold up what the driver does at exit. */
static int leave(int code)
{
    if (code == EXIT_STUCK) {
        fflush(NULL);
        _exit(code);
    }
    return code;
}

int main(int argc, char **argv)
{
    char name[64];

    argp_err_exit_status = EXIT_USAGE;
    if (argc < 2) {
        help(stderr);
        return EXIT_USAGE;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "help") == 0) {
        help(stdout);
        return finish_stdout();
    }
    if (strcmp(argv[1], "--version") == 0 || strcmp(argv[1], "-V") == 0) {
        printf("sidestream %s\n", side_version());
        return finish_stdout();
    }
    for (size_t i = 0; i < COMMANDS; i++) {
        if (strcmp(argv[1], commands[i].name) != 0)
            continue;
        snprintf(name, sizeof(name), "sidestream %s", commands[i].name);
        argv[1] = name;
        signals_install();
        say_warnings();
        return leave(commands[i].run(argc - 1, argv + 1));
    }
    return unknown(argv[1]);
}
