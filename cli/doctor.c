/* SPDX-License-Identifier: MIT
 * sidestream doctor: is this machine set up right, why does it matter, and what is the fix. */
#include "doctor.h"
#include "signals.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { KEY_ROOT = 256, KEY_LOADED };
enum { CHECKS = 64 };

static const char *const status_names[] = {
    [DOCTOR_OK] = "ok", [DOCTOR_SKIP] = "skip", [DOCTOR_WARN] = "warn", [DOCTOR_FAIL] = "fail"};

/* ---------------------------------------------------------------- findings */

/* Names from files may hold anything, escape sequences of terminals too. */
static void __attribute__((format(printf, 3, 0))) printable(char *text, size_t bytes, const char *format, va_list args)
{
    vsnprintf(text, bytes, format, args);
    for (char *c = text; *c != '\0'; c++)
        if (*c < ' ' || *c > '~')
            *c = '?';
}

void found(struct finding *f, enum doctor_status status, const char *format, ...)
{
    va_list args;

    f->status = status;
    va_start(args, format);
    printable(f->found, sizeof(f->found), format, args);
    va_end(args);
}

void fix(struct finding *f, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    printable(f->fix, sizeof(f->fix), format, args);
    va_end(args);
}

bool doctor_live_gpu(const struct doctor *d)
{
    return d->device != NULL && !d->props.simulated;
}

bool doctor_without_gpu(const struct doctor *d, struct finding *f)
{
    if (d->sim_asked)
        found(f, DOCTOR_SKIP, "--device=%s", d->spec);
    else if (d->gpu == NULL && !d->nodes && !d->dxg && !doctor_live_gpu(d))
        found(f, DOCTOR_SKIP, "no GPU");
    else
        return false;
    return true;
}

/* ---------------------------------------------------------------- the machine */

static struct doctor *doctor_new(void)
{
    struct doctor *d = calloc(1, sizeof(*d));

    if (d == NULL)
        return NULL;
    d->text = malloc(DOCTOR_TEXT);
    d->environment = malloc(DOCTOR_TEXT + 1);
    d->ordinal = -1;
    if (d->text != NULL && d->environment != NULL)
        return d;
    free(d->text);
    free(d->environment);
    free(d);
    return NULL;
}

static void doctor_free(struct doctor *d)
{
    side_device_close(d->device);
    free(d->text);
    free(d->environment);
    free(d);
}

/* "cuda:2" -> 2. False where the spec is none that a root can have. */
static bool spec_of_root(struct doctor *d)
{
    char *end;

    d->sim_asked = strncmp(d->spec, "sim", 3) == 0 && (d->spec[3] == '\0' || d->spec[3] == ':');
    if (strncmp(d->spec, "cuda:", 5) == 0 && d->spec[5] >= '0' && d->spec[5] <= '9') {
        d->ordinal = strtol(d->spec + 5, &end, 10);
        return *end == '\0' && d->ordinal < 1 << 16;
    }
    return d->sim_asked || strcmp(d->spec, "auto") == 0 || strcmp(d->spec, "cuda") == 0;
}

/* Returns false where the spec is wrong, having said so. */
static bool open_live(struct doctor *d)
{
    char specs[1][64];
    size_t count = 1;
    side_status status = side_device_open(d->spec, &d->device);

    if (status == SIDE_INVALID) {
        say("--device: %s", side_last_error()->message);
        return false;
    }
    if (status == SIDE_OK)
        status = side_device_get_props(d->device, &d->props);
    if (status != SIDE_OK) {
        snprintf(d->open_why, sizeof(d->open_why), "%s", side_last_error()->message);
        side_device_close(d->device);
        d->device = NULL;
    } else if (d->props.simulated) {
        side_device_list(specs, &count, d->open_why, sizeof(d->open_why));
    }
    if (doctor_live_gpu(d)) {
        d->cuda = d->props.driver_version;
        d->cuda_new = false;
    }
    return true;
}

static int set_root(struct doctor *d, const char *root)
{
    struct stat is;
    size_t n;

    if (realpath(root, d->root) == NULL || stat(d->root, &is) != 0) {
        say("--root '%.200s': %s", root, strerror(errno));
        return DOCTOR_EXIT_USAGE;
    }
    if (!S_ISDIR(is.st_mode)) {
        say("--root '%.200s' is not a folder; want one that holds copies of /proc, /sys and so on", root);
        return DOCTOR_EXIT_USAGE;
    }
    n = strlen(d->root);
    if (n > 0 && d->root[n - 1] == '/')
        d->root[n - 1] = '\0';
    d->rooted = true;
    return 0;
}

/* ---------------------------------------------------------------- telling */

struct report {
    const struct check *checks[CHECKS];
    struct finding findings[CHECKS];
    size_t count, of[4];
    enum doctor_status worst; /* skip counts as ok */
};

static void look(struct doctor *d, struct report *r)
{
    const struct check *const lists[] = {doctor_gpu_checks,  doctor_libs_checks, doctor_link_checks,
                                         doctor_host_checks, doctor_use_checks,  doctor_profile_checks};

    for (size_t l = 0; l < sizeof(lists) / sizeof(lists[0]); l++) {
        for (const struct check *c = lists[l]; c->id != NULL && r->count < CHECKS && !signals_interrupted(); c++) {
            struct finding *f = &r->findings[r->count];

            r->checks[r->count++] = c;
            f->why = c->why;
            c->look(d, f);
            r->of[f->status]++;
            if (f->status >= DOCTOR_WARN && f->status > r->worst)
                r->worst = f->status;
        }
    }
}

/* Breaks at blanks where the terminal ends; what is not for a terminal stays in one line. */
static void print_wrapped(const char *text, uint32_t indent, uint32_t columns)
{
    while (columns > indent + 20 && strlen(text) > columns - indent) {
        size_t n = columns - indent;

        while (n > 0 && text[n] != ' ')
            n--;
        if (n == 0)
            break;
        printf("%.*s\n%*s", (int)n, text, (int)indent, "");
        text += n + 1;
    }
    puts(text);
}

static void print_finding(const struct check *c, const struct finding *f, uint32_t columns)
{
    printf("%-4s  %-16s  ", status_names[f->status], c->id);
    print_wrapped(f->found, 24, columns);
    if (f->status < DOCTOR_WARN)
        return;
    printf("%22s  ", "why");
    print_wrapped(f->why, 24, columns);
    printf("%22s  %s\n", "fix", f->fix); /* never broken: it is for copying */
}

/* Worst first; within a status in the order of the checks. */
static int print_text(const struct report *r)
{
    static const enum doctor_status order[] = {DOCTOR_FAIL, DOCTOR_WARN, DOCTOR_OK, DOCTOR_SKIP};
    uint32_t columns = isatty(STDOUT_FILENO) ? stdout_columns() : 0;

    for (size_t s = 0; s < 4; s++)
        for (size_t i = 0; i < r->count; i++)
            if (r->findings[i].status == order[s])
                print_finding(r->checks[i], &r->findings[i], columns);
    printf("\n%zu fail, %zu warn, %zu ok, %zu skip\n", r->of[DOCTOR_FAIL], r->of[DOCTOR_WARN], r->of[DOCTOR_OK],
           r->of[DOCTOR_SKIP]);
    return finish_stdout();
}

static int print_report_json(const struct doctor *d, const struct report *r, const char *root)
{
    json_t *list = json_array();

    for (size_t i = 0; i < r->count; i++) {
        const struct finding *f = &r->findings[i];

        json_array_append_new(list, json_pack("{s:s, s:s, s:s, s:s, s:s?}", "id", r->checks[i]->id, "status",
                                              status_names[f->status], "found", f->found, "why", f->why, "fix",
                                              f->status >= DOCTOR_WARN ? f->fix : NULL));
    }
    return print_json(json_pack("{s:o, s:s, s:s?, s:b, s:s?}", "checks", list, "worst", status_names[r->worst],
                                "device", d->device != NULL ? d->props.spec : NULL, "simulated",
                                d->device != NULL && d->props.simulated, "root", root));
}

/* ---------------------------------------------------------------- arguments */

struct arguments {
    struct common common;
    const char *root;
    bool loaded;
};

static const struct argp_option options[] = {
    {"root", KEY_ROOT, "DIR", 0, "Look at the files below DIR, copies of /proc, /sys and so on, and open nothing", 1},
    {"loaded", KEY_LOADED, NULL, 0,
     "With --root: the copy was taken while data was copied to the GPU, so judge its link's speed", 1},
    {0},
};

static error_t parse(int key, char *arg, struct argp_state *state)
{
    struct arguments *a = state->input;

    switch (key) {
    case ARGP_KEY_INIT: state->child_inputs[0] = &a->common; return 0;
    case KEY_ROOT:
        if (*arg == '\0')
            argp_error(state, "--root: the name is empty; want a folder");
        a->root = arg;
        return 0;
    case KEY_LOADED: a->loaded = true; return 0;
    case ARGP_KEY_ARG: argp_error(state, "'%.60s' is too much; doctor takes options only", arg); return 0;
    case ARGP_KEY_END:
        if (a->loaded && a->root == NULL)
            argp_error(state, "--loaded tells of a copy: it needs --root");
        return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_child children[] = {{&common_argp, 0, NULL, 0}, {0}};
static const struct argp argp = {
    options,
    parse,
    NULL,
    "Says whether this machine is set up right: for each check what was found, why it matters, and the fix.\v"
    "Exit codes, doctor's own:\n"
    "  0  all is well, or does not apply\n"
    "  1  the worst is a warning\n"
    "  2  something fails\n"
    "  64  bad argument\n"
    "  74  the report could not be written\n"
    "  130  interrupted\n",
    children,
    NULL,
    NULL,
};

static int examine(struct doctor *d, const struct arguments *a)
{
    struct report *r;
    int code;

    doctor_facts(d);
    if (!d->rooted && !open_live(d))
        return DOCTOR_EXIT_USAGE;
    doctor_choose(d);
    r = calloc(1, sizeof(*r));
    if (r == NULL) {
        say("out of host memory");
        return DOCTOR_EXIT_OUTPUT;
    }
    look(d, r);
    code = signals_interrupted()                                                              ? EXIT_INTERRUPTED
           : (a->common.json ? print_report_json(d, r, a->root) : print_text(r)) != EXIT_DONE ? DOCTOR_EXIT_OUTPUT
           : r->worst == DOCTOR_FAIL                                                          ? DOCTOR_EXIT_FAIL
           : r->worst == DOCTOR_WARN                                                          ? DOCTOR_EXIT_WARN
                                                                                              : EXIT_DONE;
    free(r);
    return code;
}

int command_doctor(int argc, char **argv)
{
    struct arguments a = {{NULL, false}, NULL, false};
    struct doctor *d;
    int code = 0;

    argp_err_exit_status = DOCTOR_EXIT_USAGE;
    argp_parse(&argp, argc, argv, 0, NULL, &a);
    d = doctor_new();
    if (d == NULL) {
        say("out of host memory");
        return DOCTOR_EXIT_OUTPUT;
    }
    d->spec = a.common.device != NULL ? a.common.device : "auto";
    d->loaded = a.loaded;
    if (a.root != NULL)
        code = set_root(d, a.root);
    if (!spec_of_root(d) && code == 0 && a.root != NULL) {
        say("--device '%.60s': with --root it is auto, cuda, cuda:N or sim", d->spec);
        code = DOCTOR_EXIT_USAGE;
    }
    if (code == 0)
        code = examine(d, &a);
    doctor_free(d);
    return code;
}
