/* SPDX-License-Identifier: MIT
 *
 * Tests that must fail, each in its way, and one that must be skipped. Not run by itself: tools/check-selftest runs it and compares.
 */
#include "t.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

T_TEST(assertion)
{
    T_FOR_SEEDS (seed, 1) {
        assert_int_equal(seed, UINT64_MAX);
    }
}

static void *assert_on_thread(void *user)
{
    assert_non_null(user);
    return NULL;
}

T_TEST(assertion_on_thread)
{
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, assert_on_thread, NULL), 0);
    pthread_join(thread, NULL);
}

T_TEST(crash)
{
    raise(SIGSEGV);
}

T_TEST(early_exit)
{
    exit(3);
}

T_TEST(hang)
{
    for (;;) {
        pause();
    }
}

T_TEST(status)
{
    T_OK(SIDE_INVALID);
}

T_TEST(memory)
{
    assert_memory_equal("abcd", "abcd", 5);
    assert_memory_equal("abcd", "abed", 4);
}

/* Fails under AddressSanitizer only. */
T_TEST(leak)
{
    char *volatile lost = malloc(100);
    lost = NULL;
    assert_null(lost);
}

/* Fails under UndefinedBehaviorSanitizer only. */
T_TEST(undefined)
{
    volatile int most = INT32_MAX;
    most = most + 1;
}

static int racy;

static void *write_racy(void *user)
{
    racy++;
    return user;
}

/* Fails without a sanitizer only; under ThreadSanitizer it is skipped. */
T_TEST(second_thread)
{
    pthread_t thread;
    T_ONE_THREAD();
    assert_int_equal(pthread_create(&thread, NULL, write_racy, NULL), 0);
    pthread_join(thread, NULL);
}

/* Fails under ThreadSanitizer only. */
T_TEST(race)
{
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, write_racy, NULL), 0);
    racy++;
    pthread_join(thread, NULL);
}

T_TEST(skipped)
{
    T_SKIP("on purpose, %d", 1);
}

T_MAIN(T(assertion), T(assertion_on_thread), T(crash), T(early_exit), T_LONG(hang, 0.2), T(status), T(second_thread),
       T(memory), T(leak), T(undefined), T(race), T(skipped))
