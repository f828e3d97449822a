/* SPDX-License-Identifier: MIT
 *
 * Where the GPU sits: its link, its NUMA node, and how many ways it copies at once.
 *
 * A link has two ends, the card below and the slot above, each with what it can and what it runs at; a switch between GPU and CPU makes two
 * links of one. Idle links run slower, but not narrower, so a generation is judged while copies run, or not at all. */
#include "doctor.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LINKS = 3, LOAD_BYTES = 32 << 20, LOAD_COPIES = 8 };
static const double LOAD_S = 0.3, STUCK_S = 5;

struct end {
    int generation, width, max_generation, max_width; /* 0: not known */
};

struct link {
    struct end card, slot; /* slot all 0: not known, or emulated */
    char card_pci[20];
};

/* ---------------------------------------------------------------- reading */

static int generation_of(const char *speed)
{
    static const double gts[] = {2.5, 5, 8, 16, 32, 64, 128};
    double value = strtod(speed, NULL);

    for (int i = 0; i < (int)(sizeof(gts) / sizeof(gts[0])); i++)
        if (value > gts[i] * 0.99 && value < gts[i] * 1.01)
            return i + 1;
    return 0;
}

static int read_generation(const struct doctor *d, const char *folder, const char *name)
{
    char path[PATH_MAX], line[64];

    return doctor_join(path, folder, name, NULL) && doctor_line(d, path, line, sizeof(line)) ? generation_of(line) : 0;
}

/* 255 and 63 are what a device says that does not answer. */
static int read_width(const struct doctor *d, const char *folder, const char *name)
{
    char path[PATH_MAX];
    long long width;

    return doctor_join(path, folder, name, NULL) && doctor_number(d, path, &width) && width > 0 && width <= 32
               ? (int)width
               : 0;
}

static bool read_end(const struct doctor *d, const char *folder, struct end *end)
{
    end->generation = read_generation(d, folder, "current_link_speed");
    end->max_generation = read_generation(d, folder, "max_link_speed");
    end->width = read_width(d, folder, "current_link_width");
    end->max_width = read_width(d, folder, "max_link_width");
    return end->generation > 0 && end->max_generation > 0 && end->width > 0 && end->max_width > 0;
}

static bool up(char folder[PATH_MAX])
{
    char *slash = strrchr(folder, '/');

    if (slash == NULL || slash == folder)
        return false;
    *slash = '\0';
    return true;
}

/* From the GPU upwards. Above a slot that is a switch's comes the switch's own upper end, which is the card of the next link. */
static size_t read_links(const struct doctor *d, const char *gpu, struct link links[LINKS])
{
    char folder[PATH_MAX];
    size_t count = 0;

    strcpy(folder, gpu);
    while (count < LINKS) {
        struct link *l = &links[count];

        memset(l, 0, sizeof(*l));
        if (!read_end(d, folder, &l->card))
            break;
        snprintf(l->card_pci, sizeof(l->card_pci), "%.19s", strrchr(folder, '/') + 1);
        count++;
        if (!up(folder))
            break;
        /* Both ends of a real link run the same; an emulated slot tells of nothing. */
        if (!read_end(d, folder, &l->slot) || l->slot.generation != l->card.generation || l->slot.width != l->card.width)
            memset(&l->slot, 0, sizeof(l->slot));
        if (!up(folder))
            break;
    }
    return count;
}

/* ---------------------------------------------------------------- load */

/* Takes what is seen now where it is better. Ends that disagree were read while the link changed: an answer of both is worth more. */
static void keep_best(struct link *links, size_t count, const struct link *now)
{
    for (size_t i = 0; i < count; i++)
        if (now[i].card.generation > links[i].card.generation ||
            (now[i].card.generation == links[i].card.generation && now[i].slot.generation != 0))
            links[i] = now[i];
}

/* What the links run at best while one batch of copies runs. */
static side_status watch_batch(const struct doctor *d, const char *gpu, struct link *links, size_t count,
                               side_stream *stream, side_event *event, void *device, const void *host)
{
    double until = clock_s() + STUCK_S;
    struct link now[LINKS];
    side_status status = SIDE_OK;

    for (int i = 0; i < LOAD_COPIES && status == SIDE_OK; i++)
        status = side_copy_async(stream, SIDE_COPY_H2D, device, host, LOAD_BYTES);
    if (status == SIDE_OK)
        status = side_event_record(event, stream);
    if (status != SIDE_OK)
        return status;
    do {
        if (read_links(d, gpu, now) == count)
            keep_best(links, count, now);
        status = side_event_query(event);
    } while (status == SIDE_AGAIN && clock_s() < until);
    return status;
}

/* True where copies ran; links then hold the best that was seen. */
static bool watch_load(const struct doctor *d, const char *gpu, struct link *links, size_t count)
{
    double until = clock_s() + LOAD_S;
    void *device = NULL, *host = NULL;
    side_stream *stream = NULL;
    side_event *event = NULL;
    side_pool *pool = NULL;
    bool ran = side_stream_create(d->device, &stream) == SIDE_OK &&
               side_event_create(d->device, false, &event) == SIDE_OK &&
               side_device_alloc(d->device, LOAD_BYTES, &device) == SIDE_OK &&
               side_device_pool(d->device, &pool) == SIDE_OK && side_pool_alloc(pool, LOAD_BYTES, &host) == SIDE_OK;

    if (ran)
        memset(host, 0, LOAD_BYTES);
    do
        ran = ran && watch_batch(d, gpu, links, count, stream, event, device, host) == SIDE_OK;
    while (ran && clock_s() < until);
    /* After a failure copies may still run: then the memory is kept, for the process to end with it. */
    if (stream == NULL || side_stream_sync(stream, STUCK_S) == SIDE_OK) {
        if (host != NULL)
            side_pool_free(pool, host, NULL, 0);
        side_device_free(d->device, device);
    }
    side_event_destroy(event);
    side_stream_destroy(stream);
    return ran;
}

/* ---------------------------------------------------------------- judging */

static int least(int a, int b)
{
    return b != 0 && b < a ? b : a;
}

static double gbps(int generation, int width)
{
    static const double lane[] = {0, 0.25, 0.5, 0.985, 1.969, 3.938, 7.563, 15.126};

    return lane[generation] * width;
}

static void narrow(const struct link *l, struct finding *f, int width)
{
    found(f, DOCTOR_WARN, "%s runs x%d of x%d lanes: %.1f GB/s at most instead of %.1f", l->card_pci, l->card.width,
          width, gbps(least(l->card.max_generation, l->slot.max_generation), l->card.width),
          gbps(least(l->card.max_generation, l->slot.max_generation), width));
    fix(f,
        "seat card and riser anew, use a slot wired for x%d, switch bifurcation off; then look: sudo lspci -vvs %s | "
        "grep "
        "Lnk",
        width, l->card_pci);
}

static void slow(const struct link *l, struct finding *f, int generation)
{
    found(f, DOCTOR_WARN, "%s runs at generation %d of %d while copies run: %.1f GB/s at most instead of %.1f",
          l->card_pci, l->card.generation, generation, gbps(l->card.generation, l->card.width),
          gbps(generation, l->card.width));
    fix(f,
        "set the slot's link speed to Auto in the firmware's setup; try another riser or slot: links that make errors "
        "fall "
        "back; then look: sudo lspci -vvs %s | grep Lnk",
        l->card_pci);
}

static void judge(const struct link *links, size_t count, bool loaded, struct finding *f)
{
    const struct end *card = &links[0].card, *slot = &links[0].slot;
    int generation = least(card->max_generation, slot->max_generation);

    for (size_t i = 0; i < count; i++) {
        int width = least(links[i].card.max_width, links[i].slot.max_width);

        if (links[i].card.width < width) {
            narrow(&links[i], f, width);
            return;
        }
    }
    for (size_t i = 0; i < count && loaded; i++) {
        int most = least(links[i].card.max_generation, links[i].slot.max_generation);

        if (links[i].card.generation < most) {
            slow(&links[i], f, most);
            return;
        }
    }
    if (generation < card->max_generation || least(card->max_width, slot->max_width) < card->max_width) {
        found(f, DOCTOR_WARN,
              "the card can do generation %d x%d, its slot no more than generation %d x%d: %.1f GB/s of %.1f",
              card->max_generation, card->max_width, slot->max_generation, slot->max_width,
              gbps(generation, least(card->max_width, slot->max_width)), gbps(card->max_generation, card->max_width));
        fix(f, "move the card to a slot of generation %d x%d that belongs to a CPU", card->max_generation,
            card->max_width);
    } else if (card->generation < generation)
        found(f, DOCTOR_OK, "can do generation %d x%d; generation %d now, as idle links do", generation, card->width,
              card->generation);
    else
        found(f, DOCTOR_OK, "generation %d x%d%s, all that card and slot can do", card->generation, card->width,
              loaded ? " while copies run" : "");
}

/* Where /sys tells nothing, the driver's own numbers: max is what card and slot can do together. */
static void judge_device(struct doctor *d, struct finding *f)
{
    struct link l = {.card_pci = "the link"};
    side_link link;

    if (side_device_get_link(d->device, &link) != SIDE_OK || link.generation <= 0 || link.width <= 0 ||
        link.max_generation <= 0 || link.max_generation > 7 || link.max_width <= 0)
        found(f, DOCTOR_SKIP, "neither /sys nor the driver tells");
    else {
        l.card = (struct end){link.generation, link.width, link.max_generation, link.max_width};
        judge(&l, 1, false, f);
    }
}

static void look_link(struct doctor *d, struct finding *f)
{
    struct link links[LINKS];
    char path[PATH_MAX], gpu[PATH_MAX];
    side_link link;
    bool loaded = d->loaded;
    size_t count = 0;

    if (doctor_without_gpu(d, f))
        return;
    if (doctor_live_gpu(d) && side_device_get_link(d->device, &link) == SIDE_OK && strcmp(link.kind, "PCIe") != 0) {
        found(f, DOCTOR_OK, "%s", link.kind);
        return;
    }
    if (d->gpu != NULL && doctor_join(path, "/sys/bus/pci/devices", d->gpu->pci, NULL) &&
        doctor_path_inside(d, path, gpu))
        count = read_links(d, gpu, links);
    if (count == 0 && doctor_live_gpu(d))
        judge_device(d, f);
    else if (count == 0)
        found(f, DOCTOR_SKIP, "/sys does not tell");
    else {
        if (doctor_live_gpu(d))
            loaded = watch_load(d, gpu, links, count);
        judge(links, count, loaded, f);
    }
}

/* ---------------------------------------------------------------- NUMA */

enum { CPUS = 8192 };

struct set {
    unsigned char bits[CPUS / 8];
};

/* "0-15,32-47" */
static void set_of(const char *list, struct set *set)
{
    memset(set, 0, sizeof(*set));
    while (*list >= '0' && *list <= '9') {
        char *end;
        unsigned long first = strtoul(list, &end, 10), last = first;

        if (*end == '-')
            last = strtoul(end + 1, &end, 10);
        for (unsigned long i = first; i <= last && i < CPUS; i++)
            set->bits[i / 8] |= (unsigned char)(1u << i % 8);
        list = *end == ',' ? end + 1 : "";
    }
}

static bool has(const struct set *set, long i)
{
    return i >= 0 && i < CPUS && (set->bits[i / 8] >> i % 8 & 1) != 0;
}

static size_t common(const struct set *a, const struct set *b)
{
    size_t count = 0;

    for (long i = 0; i < CPUS; i++)
        count += has(a, i) && has(b, i);
    return count;
}

static long long gpu_node(const struct doctor *d)
{
    char path[PATH_MAX];
    long long node = -1;

    if (d->gpu != NULL && doctor_join(path, "/sys/bus/pci/devices", d->gpu->pci, "numa_node", NULL) &&
        doctor_number(d, path, &node))
        return node;
    return doctor_live_gpu(d) ? d->props.numa_node : -1;
}

static void judge_numa(struct doctor *d, struct finding *f, long long node, size_t nodes)
{
    char path[64], list[1024] = "", allowed[1024] = "", mems[1024] = "";
    struct set near, mine, memory;
    const char *status = doctor_text(d, "/proc/self/status");

    snprintf(path, sizeof(path), "/sys/devices/system/node/node%lld/cpulist", node);
    if (status == NULL || !doctor_value(status, "Cpus_allowed_list:", allowed, sizeof(allowed)) ||
        !doctor_value(status, "Mems_allowed_list:", mems, sizeof(mems)) || !doctor_line(d, path, list, sizeof(list))) {
        found(f, DOCTOR_SKIP, "/proc/self/status or %s does not tell", path);
        return;
    }
    set_of(list, &near);
    set_of(allowed, &mine);
    set_of(mems, &memory);
    if (*list != '\0' && common(&near, &mine) == 0) {
        found(f, DOCTOR_WARN, "the GPU is on node %lld (CPUs %.100s), this process may use CPUs %.100s alone", node,
              list, allowed);
        fix(f,
            "numactl --cpunodebind=%lld --membind=%lld COMMAND; in a container: docker run --cpuset-cpus=%.100s "
            "--cpuset-mems=%lld ...",
            node, node, list, node);
    } else if (!has(&memory, (long)node)) {
        found(f, DOCTOR_WARN, "the GPU is on node %lld, this process gets memory of nodes %.100s alone", node, mems);
        fix(f, "numactl --membind=%lld COMMAND; in a container: docker run --cpuset-mems=%lld ...", node, node);
    } else
        found(f, DOCTOR_OK, "GPU on node %lld of %zu; this process may use its memory and %zu of its CPUs", node, nodes,
              common(&near, &mine));
}

static void look_numa(struct doctor *d, struct finding *f)
{
    struct doctor_names nodes;
    size_t count = 0;
    long long node;

    if (doctor_without_gpu(d, f))
        return;
    nodes = doctor_list(d, "/sys/devices/system/node", "node");
    for (size_t i = 0; i < nodes.count; i++)
        count += nodes.name[i][4] >= '0' && nodes.name[i][4] <= '9';
    doctor_names_free(&nodes);
    node = gpu_node(d);
    if (count <= 1)
        found(f, DOCTOR_OK, "one node");
    else if (node < 0)
        found(f, DOCTOR_OK, "%zu nodes; the system does not tell on which the GPU is", count);
    else
        judge_numa(d, f, node, count);
}

static void look_engines(struct doctor *d, struct finding *f)
{
    if (d->device == NULL) {
        found(f, DOCTOR_SKIP, "%s", d->rooted ? "--root: nothing is opened" : "no device is open");
        return;
    }
    found(f, d->props.copy_engines == 1 ? DOCTOR_WARN : DOCTOR_OK, "%s has %d%s", d->props.spec, d->props.copy_engines,
          d->props.simulated ? " (simulated)" : "");
    if (d->props.copy_engines == 1)
        fix(f, "none: it is the GPU's, or the instance's of a GPU that is cut up; let results stay on the device, or "
               "be small");
}

const struct check doctor_link_checks[] = {
    {"link", "no copy is faster than the link", look_link},
    {"numa", "pinned memory on another node reaches the GPU through the link between CPUs: slower, and shared",
     look_numa},
    {"copy-engines", "with one engine, copies to and from the device take turns: results cost time that nothing hides",
     look_engines},
    {NULL, NULL, NULL},
};
