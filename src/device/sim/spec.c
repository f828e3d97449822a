/* SPDX-License-Identifier: MIT
 *
 * Profiles, and the text that chooses and changes one: "PROFILE,key=value,...".
 *
 * Profiles are models, good for "does overlap pay here", not for the third digit. Sources: "measured" means a program's own timing on such a
 * machine; "data sheet" the vendor's public one, of which a loop reaches some 75-85 % in matrix products and 80 % on PCIe, as written below.
 */
#include "model.h"

#include "error.h"
#include "os.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define GB  UINT64_C(1000000000)
#define GIB (UINT64_C(1) << 30)

/* Two profiles are this GPU; they differ in their copy engines. */
/* clang-format off */
#define H200_MODEL \
    .link = "PCIe", \
    .link_generation = 5, \
    .link_width = 16, \
    .link_gbps = 63.0, \
    .compute_major = 9, \
    .compute_minor = 0, \
    .multiprocessors = 132, \
    .memory_bytes = 141 * GB, \
    .h2d_rate = 55300, \
    .d2h_rate = 55300, \
    .pageable_rate = 10000, \
    .memory_rate = 4800000, \
    .flops = {50900, 402000, 790000}, \
    .copy_latency_ns = 7700, \
    .piece_ns = 450, \
    .launch_ns = 2500, \
    .query_ns = 1000
/* clang-format on */

static const struct sim_config profiles[] = {
    /* Copies, fp32, tf32 and bf16 measured (64 KiB 7.4 GB/s, 1 MiB 39 GB/s: 7.7 us a copy); memory: data sheet, 4.8 TB/s, 141 GB. */
    {.profile = "h200", .title = "simulated H200", .copy_engines = 2, H200_MODEL},
    /* Data sheet: fp32 19.5, tf32 156, bf16 312 TFLOP/s, 1935 GB/s, 80 GB; matrix products at 80 %, PCIe 4 x16 at 25 of 31.5 GB/s. */
    {.profile = "a100-pcie4",
     .title = "simulated A100 PCIe",
     .link = "PCIe",
     .link_generation = 4,
     .link_width = 16,
     .link_gbps = 31.5,
     .compute_major = 8,
     .compute_minor = 0,
     .multiprocessors = 108,
     .copy_engines = 2,
     .memory_bytes = 80 * GIB,
     .h2d_rate = 25000,
     .d2h_rate = 25000,
     .pageable_rate = 8000,
     .memory_rate = 1935000,
     .flops = {15600, 125000, 250000},
     .copy_latency_ns = 8000,
     .piece_ns = 500,
     .launch_ns = 3000,
     .query_ns = 1000},
    /* Data sheet: fp32 82.6, tf32 82.6, bf16 165 TFLOP/s with fp32 sums, 1008 GB/s, 24 GB; 75-85 % of it. Where a GeForce shows one copy
     * engine, say copy_engines=1. */
    {.profile = "rtx4090",
     .title = "simulated RTX 4090",
     .link = "PCIe",
     .link_generation = 4,
     .link_width = 16,
     .link_gbps = 31.5,
     .compute_major = 8,
     .compute_minor = 9,
     .multiprocessors = 128,
     .copy_engines = 2,
     .memory_bytes = 24 * GIB,
     .h2d_rate = 25000,
     .d2h_rate = 25000,
     .pageable_rate = 9000,
     .memory_rate = 1008000,
     .flops = {60000, 70000, 140000},
     .copy_latency_ns = 8000,
     .piece_ns = 500,
     .launch_ns = 3000,
     .query_ns = 1000},
    /* Data sheet: fp32 8.1 TFLOP/s, 320 GB/s, 16 GB; 70 W hold it to some 60 %. Turing has neither TF32 nor BF16: both run as fp32. */
    {.profile = "t4",
     .title = "simulated T4",
     .link = "PCIe",
     .link_generation = 3,
     .link_width = 16,
     .link_gbps = 15.8,
     .compute_major = 7,
     .compute_minor = 5,
     .multiprocessors = 40,
     .copy_engines = 2,
     .memory_bytes = 16 * GIB,
     .h2d_rate = 12300,
     .d2h_rate = 12800,
     .pageable_rate = 6000,
     .memory_rate = 320000,
     .flops = {4900, 4900, 4900},
     .copy_latency_ns = 9000,
     .piece_ns = 600,
     .launch_ns = 4000,
     .query_ns = 1000},
    /* NVLink-C2C: data sheet 450 GB/s a direction; 419 and 371 from published benchmarks. Data sheet: fp32 67, tf32 494, bf16 990 TFLOP/s,
     * 4 TB/s, 96 GB, at 75-80 %. Pageable memory is within the GPU's reach, but the plain copy path is not: an assumption. */
    {.profile = "gh200",
     .title = "simulated GH200",
     .link = "NVLink-C2C",
     .link_generation = 0,
     .link_width = 0,
     .link_gbps = 450.0,
     .compute_major = 9,
     .compute_minor = 0,
     .multiprocessors = 132,
     .copy_engines = 2,
     .memory_bytes = 96 * GB,
     .h2d_rate = 419000,
     .d2h_rate = 371000,
     .pageable_rate = 30000,
     .memory_rate = 4000000,
     .flops = {51000, 380000, 750000},
     .copy_latency_ns = 7000,
     .piece_ns = 450,
     .launch_ns = 2500,
     .query_ns = 1000},
    /* The h200, with both directions on one engine. */
    {.profile = "one-copy-engine", .title = "simulated H200, one copy engine", .copy_engines = 1, H200_MODEL},
};
enum { PROFILES = sizeof(profiles) / sizeof(profiles[0]) };

enum form { WHOLE, RATE, SIZE, STATUS };

static const struct key {
    const char *name;
    enum form form;
    size_t offset;
    uint64_t least, most;
} keys[] = {
#define KEY(name, form, field, least, most)                         \
    {                                                               \
        name, form, offsetof(struct sim_config, field), least, most \
    }
    KEY("copy_engines", WHOLE, copy_engines, 1, 2),
    KEY("seed", WHOLE, seed, 0, UINT64_MAX),
    KEY("memory", SIZE, memory_bytes, 1, UINT64_C(1) << 46),
    KEY("h2d_gbps", RATE, h2d_rate, 1, 1000000000),
    KEY("d2h_gbps", RATE, d2h_rate, 1, 1000000000),
    KEY("pageable_gbps", RATE, pageable_rate, 1, 1000000000),
    KEY("copy_latency_ns", WHOLE, copy_latency_ns, 0, 1000000000),
    KEY("piece_ns", WHOLE, piece_ns, 0, 1000000000),
    KEY("launch_ns", WHOLE, launch_ns, 0, 1000000000),
    KEY("query_ns", WHOLE, query_ns, 1, 1000000000),
    KEY("fp32_tflops", RATE, flops[SIDE_MATH_FP32], 1, 1000000000),
    KEY("tf32_tflops", RATE, flops[SIDE_MATH_TF32], 1, 1000000000),
    KEY("bf16_tflops", RATE, flops[SIDE_MATH_BF16], 1, 1000000000),
    KEY("kernels", WHOLE, kernels, 0, 1),
    KEY("check", WHOLE, check, 0, 1),
    KEY("fail", WHOLE, fail, 0, UINT64_MAX),
    KEY("fail_status", STATUS, fail_status, 0, 0),
    KEY("lose", WHOLE, lose, 0, UINT64_MAX),
    KEY("hang", WHOLE, hang, 0, UINT64_MAX),
    KEY("refuse_register", WHOLE, refuse_register, 0, 1),
    KEY("refuse_pinning", WHOLE, refuse_pinning, 0, 1),
#undef KEY
};
enum { KEYS = sizeof(keys) / sizeof(keys[0]) };

static const char *const statuses[] = {/* as written in fail_status: without SIDE_, any case */
#define X(name, value, text) #name,
                                       SIDE_STATUS_MAP(X)
#undef X
};
static const int status_values[] = {
#define X(name, value, text) value,
    SIDE_STATUS_MAP(X)
#undef X
};

/* A piece of the spec. */
struct word {
    const char *text;
    size_t length;
};

static bool is(struct word w, const char *name)
{
    return strlen(name) == w.length && strncmp(w.text, name, w.length) == 0;
}

static side_status bad(const char *args, struct word w, const char *what, const char *accepted)
{
    int shown = w.length < 32 ? (int)w.length : 32;

    /* the position is that in "sim:...", from 1 */
    return error_set(SIDE_INVALID, "sim.open", "%s '%.*s' at character %zu of the spec; accepted: %s", what, shown,
                     w.text, (size_t)(w.text - args) + sizeof("sim:"), accepted);
}

static side_status bad_name(const char *args, struct word w, bool profile)
{
    char list[280];
    int n = 0;

    for (size_t i = 0; profile && i < PROFILES; i++)
        n += snprintf(list + n, sizeof(list) - (size_t)n, "%s%s", i > 0 ? " " : "", profiles[i].profile);
    for (size_t i = 0; !profile && i < KEYS; i++)
        n += snprintf(list + n, sizeof(list) - (size_t)n, "%s%s", i > 0 ? " " : "", keys[i].name);
    return bad(args, w, profile ? "no profile" : "no key", list);
}

/* Digits, for SIZE with K, M, G or T behind, for RATE with up to three decimals. False: not of that form, or out of 64 bits. */
static bool parse_number(struct word w, enum form form, uint64_t *value)
{
    uint64_t v = 0;
    size_t i = 0, decimals = 0;
    bool point = false;

    if (w.length == 0 || w.text[0] < '0' || w.text[0] > '9')
        return false;
    for (; i < w.length; i++) {
        char ch = w.text[i];
        if (ch == '.' && form == RATE && !point) {
            point = true;
            continue;
        }
        if (ch < '0' || ch > '9')
            break;
        decimals += point;
        if (decimals > 3 || __builtin_mul_overflow(v, 10, &v) || __builtin_add_overflow(v, (uint64_t)(ch - '0'), &v))
            return false;
    }
    if (form == SIZE && i + 1 == w.length) {
        static const char units[] = "KMGT";
        const char *unit = strchr(units, w.text[i]);
        if (unit == NULL || __builtin_mul_overflow(v, UINT64_C(1) << (10 * (unit - units + 1)), &v))
            return false;
        i++;
    }
    for (; form == RATE && decimals < 3; decimals++)
        if (__builtin_mul_overflow(v, 10, &v))
            return false;
    *value = v;
    return i == w.length;
}

static bool is_any_case(struct word w, const char *name)
{
    return strlen(name) == w.length && strncasecmp(w.text, name, w.length) == 0;
}

static bool parse_status(struct word w, uint64_t *value)
{
    for (size_t i = 0; i < sizeof(statuses) / sizeof(statuses[0]); i++) {
        bool lost = status_values[i] == SIDE_DEVICE_LOST && is_any_case(w, "lost");
        if (status_values[i] < 0 && (lost || is_any_case(w, statuses[i] + strlen("SIDE_")))) {
            *value = (uint64_t)-status_values[i];
            return true;
        }
    }
    return false;
}

static side_status parse_key(const char *args, struct word w, struct sim_config *config)
{
    const char *equals = memchr(w.text, '=', w.length);
    struct word name = {w.text, equals != NULL ? (size_t)(equals - w.text) : w.length};
    const struct key *key = keys;
    uint64_t value;

    while (key < keys + KEYS && !is(name, key->name))
        key++;
    if (key == keys + KEYS)
        return bad_name(args, name, false);
    struct word text = {w.text + w.length, 0};
    if (equals != NULL)
        text = (struct word){equals + 1, w.length - name.length - 1};
    if (key->form == STATUS) {
        if (!parse_status(text, &value))
            return bad(args, text, "fail_status: no error",
                       "lost, or an error's name without SIDE_, such as device_error, no_device_memory");
    } else if (!parse_number(text, key->form, &value) || value < key->least || value > key->most) {
        static const char *const forms[] = {"", ", up to 3 decimals", ", K M G T behind it"};
        char what[48], accepted[96];
        snprintf(what, sizeof(what), "%s: bad number", key->name);
        if (key->form == RATE) /* in thousandths */
            snprintf(accepted, sizeof(accepted), "%.10g to %.10g%s", (double)key->least / 1000,
                     (double)key->most / 1000, forms[key->form]);
        else
            snprintf(accepted, sizeof(accepted), "%llu to %llu%s", (unsigned long long)key->least,
                     (unsigned long long)key->most, forms[key->form]);
        return bad(args, text, what, accepted);
    }
    memcpy((char *)config + key->offset, &value, sizeof(value));
    return SIDE_OK;
}

side_status sim_config_parse(const char *args, struct sim_config *config)
{
    struct sim_config made = profiles[0];
    const char *at = args, *env = getenv("SIDESTREAM_SIM_SEED");
    size_t first = strcspn(args, ",");
    uint64_t seed = 1;

    if (first > 0 && memchr(args, '=', first) == NULL) {
        size_t i = 0;
        while (i < PROFILES && !is((struct word){args, first}, profiles[i].profile))
            i++;
        if (i == PROFILES)
            return bad_name(args, (struct word){args, first}, true);
        made = profiles[i];
        at += first;
    }
    if (env != NULL && !parse_number((struct word){env, strlen(env)}, WHOLE, &seed))
        return error_set(SIDE_INVALID, "sim.open", "SIDESTREAM_SIM_SEED='%.40s' is not a number", env);
    made.seed = seed;
    made.kernels = 1;
    made.check = os_env_flag("SIDESTREAM_VALIDATE");
    made.fail_status = (uint64_t)-SIDE_DEVICE_ERROR;
    while (*at != '\0') {
        at += *at == ',';
        size_t length = strcspn(at, ",");
        side_status s = parse_key(args, (struct word){at, length}, &made);
        if (s != SIDE_OK)
            return s;
        at += length;
    }
    *config = made;
    return SIDE_OK;
}
