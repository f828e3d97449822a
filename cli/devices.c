/* SPDX-License-Identifier: MIT
 * sidestream devices: what would open, and what it can do. */
#include "cli.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 64 };

struct seen {
    side_device_props props;
    side_link link;
    size_t free_bytes, total_bytes;
};

static int look(const char *spec, struct seen *seen)
{
    side_device *device;
    side_status status = side_device_open(spec, &device);

    if (status != SIDE_OK)
        return say_status(status, "cannot open device '%s'", spec);
    status = side_device_get_props(device, &seen->props);
    if (status == SIDE_OK)
        status = side_device_get_link(device, &seen->link);
    if (status == SIDE_OK)
        status = side_device_get_memory(device, &seen->free_bytes, &seen->total_bytes);
    side_device_close(device);
    return status == SIDE_OK ? EXIT_DONE : say_status(status, "device '%s'", spec);
}

static json_t *to_json(const struct seen *s)
{
    const side_device_props *p = &s->props;
    const side_link *l = &s->link;

    return json_pack("{s:s, s:s, s:b, s:i, s:i, s:[i,i], s:i, s:i, s:b, s:b, s:i, s:I, s:I, s:s, s:s, s:b, s:s,"
                     " s:{s:s, s:i, s:i, s:i, s:i, s:o}}",
                     "spec", p->spec, "name", p->name, "simulated", p->simulated, "ordinal", p->ordinal,
                     "driver_version", p->driver_version, "compute_capability", p->compute_major, p->compute_minor,
                     "copy_engines", p->copy_engines, "multiprocessors", p->multiprocessors, "can_register",
                     p->can_register, "integrated", p->integrated, "numa_node", p->numa_node, "memory_bytes",
                     (json_int_t)s->total_bytes, "memory_free_bytes", (json_int_t)s->free_bytes, "uuid", p->uuid, "pci",
                     p->pci, "kernels", p->kernels, "kernels_from", p->kernels_from, "link", "kind", l->kind,
                     "generation", l->generation, "width", l->width, "max_generation", l->max_generation, "max_width",
                     l->max_width, "peak_gbps", json_number(l->peak_gbps));
}

static void print_one(const struct seen *s)
{
    const side_device_props *p = &s->props;
    char link[96], memory[32], left[32];

    printf("%-8s %s\n", p->spec, p->name);
    printf("         memory    %s, %s free\n", bytes_text(s->total_bytes, memory), bytes_text(s->free_bytes, left));
    printf("         link      %s", link_text(&s->link, link));
    if (s->link.peak_gbps > 0)
        printf(", %.1f GB/s at most in theory", s->link.peak_gbps);
    if (s->link.generation < s->link.max_generation)
        printf(" (idle links may run slower until used)");
    printf("\n         copies    %s%s\n",
           p->copy_engines == 1 ? "one copy engine: H2D and D2H take turns" : "both directions at once",
           p->can_register ? "" : "; cannot pin the caller's memory in place");
    printf("         compute   %d multiprocessors, capability %d.%d, %s%s\n", p->multiprocessors, p->compute_major,
           p->compute_minor, p->kernels ? "kernels from " : "no kernels: ", p->kernels_from);
    if (p->simulated)
        printf("         simulated: times are of a model, not of hardware\n");
    else
        printf("         driver    CUDA %d.%d; %s; PCI %s; NUMA node %d\n", p->driver_version / 1000,
               p->driver_version % 1000 / 10, p->uuid, p->pci, p->numa_node);
}

static int show(char (*specs)[64], size_t count, const char *why, bool json)
{
    json_t *list = json ? json_array() : NULL;
    int code = EXIT_DONE;

    for (size_t i = 0; i < count; i++) {
        struct seen seen;
        int one;

        memset(&seen, 0, sizeof(seen));
        one = look(specs[i], &seen);
        if (one != EXIT_DONE)
            code = one;
        else if (json)
            json_array_append_new(list, to_json(&seen));
        else
            print_one(&seen);
    }
    if (json) {
        int printed = print_json(json_pack("{s:o, s:s?}", "devices", list, "no_gpu", *why != '\0' ? why : NULL));

        return code != EXIT_DONE ? code : printed;
    }
    if (*why != '\0')
        printf("no GPU: %s\n", why);
    return code != EXIT_DONE ? code : finish_stdout();
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    switch (key) {
    case ARGP_KEY_INIT: state->child_inputs[0] = state->input; return 0;
    case ARGP_KEY_ARG:
        argp_error(state, "'%.60s' is too much; devices takes no argument (--device SPEC shows one)", arg);
        return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

int command_devices(int argc, char **argv)
{
    static const struct argp_child children[] = {{&common_argp, 0, NULL, 0}, {0}};
    static const struct argp argp = {
        NULL,
        parse,
        NULL,
        "Lists the devices that would open, in order of preference, and why there is no GPU where there is "
        "none.\v" EXIT_HELP,
        children,
        NULL,
        NULL,
    };
    struct common common = {NULL, false};
    char specs[MOST][64], why[320] = "";
    size_t count = MOST;
    side_status status;

    argp_parse(&argp, argc, argv, 0, NULL, &common);
    if (common.device != NULL) {
        if (strlen(common.device) >= sizeof(specs[0])) {
            say("--device '%.40s...' is longer than %zu characters", common.device, sizeof(specs[0]) - 1);
            return EXIT_USAGE;
        }
        strcpy(specs[0], common.device);
        return show(specs, 1, why, common.json);
    }
    status = side_device_list(specs, &count, why, sizeof(why));
    if (status != SIDE_OK)
        return say_status(status, "cannot list the devices");
    return show(specs, count < MOST ? count : MOST, why, common.json);
}
