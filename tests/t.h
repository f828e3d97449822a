/* SPDX-License-Identifier: MIT
 *
 * Test harness: cmocka's assertions, but each test is a process of its own with a time limit.
 *
 *     #include "t.h"
 *
 *     T_TEST(ring_wraps)
 *     {
 *         T_FOR_SEEDS (seed, 100) {
 *             t_rng rng = t_rng_make(seed);
 *             ...
 *             assert_int_equal(t_rng_below(&rng, 1), 0);
 *         }
 *         T_OK(side_device_open("sim", &device));
 *     }
 *
 *     T_MAIN(T(ring_wraps), T_LONG(ring_soak, 120), T_ARG(conformance, "sim:one-copy-engine"))
 *
 * A test fails when an assertion does (on any thread), when it exits or dies, when a sanitizer reports (leaks included), or when its
 * time is up. Its output is shown only then. Prints "ok NAME", "FAIL NAME: why", "skip NAME # why" and last "N passed, N failed,
 * N skipped"; exits 1 on failures.
 *
 *     prog            every test          prog --list         their names
 *     prog NAME...    these               prog --here NAME    in this process, for a debugger
 *
 * Environment: T_TIMEOUT_MULT and T_SEEDS_MULT scale limits and seeds (both are scaled under sanitizers already), T_SEED=N runs
 * T_FOR_SEEDS with that seed alone, T_VERBOSE=1 shows output of tests that pass.
 */
#ifndef T_H
#define T_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "sidestream.h"

#if defined(__SANITIZE_THREAD__)
#define T_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define T_TSAN 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define T_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define T_ASAN 1
#endif
#endif
#ifndef T_TSAN
#define T_TSAN 0
#endif
#ifndef T_ASAN
#define T_ASAN 0
#endif
#define T_SANITIZED (T_TSAN || T_ASAN)

typedef struct t_case {
    const char *name;
    void (*run)(void);
    double seconds;  /* time limit without sanitizers; 0: 30 s */
    const char *arg; /* what t_arg() returns; NULL where none */
} t_case;

#define T_TEST(name) static void t_test_##name(void)
/* clang-format off */
#define T(name)                {#name, t_test_##name, 0, NULL}
#define T_LONG(name, seconds)  {#name, t_test_##name, seconds, NULL}
/* The same test once more with a parameter; listed as "name[arg]". */
#define T_ARG(name, arg)                {#name "[" arg "]", t_test_##name, 0, arg}
#define T_LONG_ARG(name, seconds, arg)  {#name "[" arg "]", t_test_##name, seconds, arg}
#define T_MAIN(...) const t_case t_cases[] = {__VA_ARGS__, {NULL, NULL, 0, NULL}};
/* clang-format on */

extern const t_case t_cases[]; /* defined by T_MAIN, ended by a NULL name */

/* The status is SIDE_OK, else the test fails with side_last_error()'s message. */
#define T_OK(expr) t_check_status((expr), SIDE_OK, #expr, __FILE__, __LINE__)
/* The status is the one expected. */
#define T_STATUS(expr, expected) t_check_status((expr), (expected), #expr, __FILE__, __LINE__)
/* Ends the test as skipped; from the test's own thread. */
#define T_SKIP(...) t_skip(__VA_ARGS__)
/* The test starts no thread, nor does what it calls: skipped under ThreadSanitizer, which would see nothing and takes long over it. In
 * programs without a sanitizer a thread that starts after this fails the test. */
#define T_ONE_THREAD() t_one_thread()
/* Fails the test, saying why; from any thread. */
#define T_FAIL(...) t_fail(__FILE__, __LINE__, __VA_ARGS__)

/* Seeds first, first+1, ...: t_seeds(count) of them. A failure prints the seed. */
#define T_FOR_SEEDS(seed, count) \
    for (uint64_t seed = t_seed_first(), t_left = t_seeds(count); t_left > 0 && t_seed_note(seed); seed++, t_left--)

void t_check_status(side_status got, side_status expected, const char *expr, const char *file, int line);
_Noreturn void t_skip(const char *format, ...) __attribute__((format(printf, 1, 2)));
_Noreturn void t_fail(const char *file, int line, const char *format, ...) __attribute__((format(printf, 3, 4)));

void t_one_thread(void);

/* cmocka compares byte by byte, under a sanitizer with a check of each: it is asked only where something differs. */
#undef assert_memory_equal
#define assert_memory_equal(a, b, bytes) t_check_memory((a), (b), (bytes), __FILE__, __LINE__)
void t_check_memory(const void *a, const void *b, size_t bytes, const char *file, int line);

const char *t_arg(void);
/* An empty folder for this test, removed after it. */
const char *t_tmpdir(void);

/* `count` scaled for the variant and by T_SEEDS_MULT, at least 1. */
uint64_t t_seeds(uint64_t count);
uint64_t t_seed_first(void);
bool t_seed_note(uint64_t seed);

/* xoshiro256**, seeded by splitmix64: the same numbers on every machine. */
typedef struct t_rng {
    uint64_t state[4];
} t_rng;

t_rng t_rng_make(uint64_t seed);
uint64_t t_rng_next(t_rng *rng);
/* Uniform in [0, bound); bound > 0. */
uint64_t t_rng_below(t_rng *rng, uint64_t bound);
/* True once in `one_in`, on average. */
bool t_rng_chance(t_rng *rng, uint64_t one_in);
void t_rng_fill(t_rng *rng, void *data, size_t bytes);

#endif
