/* SPDX-License-Identifier: MIT
 *
 * The harness itself. That it sees failures is shown by tools/check-selftest with test_harness_bad.
 */
#include "t.h"

#include <sys/stat.h>

T_TEST(rng_is_the_published_one)
{
    /* splitmix64(0) begins e220a8397b1dcdaf 6e789e6aa1b965f4. */
    t_rng rng = t_rng_make(0);
    assert_true(rng.state[0] == 0xe220a8397b1dcdafu);
    assert_true(rng.state[1] == 0x6e789e6aa1b965f4u);
    /* xoshiro256** of {1, 2, 3, 4} begins 11520, 0, 1509978240. */
    rng = (t_rng){{1, 2, 3, 4}};
    assert_true(t_rng_next(&rng) == 11520);
    assert_true(t_rng_next(&rng) == 0);
    assert_true(t_rng_next(&rng) == 1509978240);
}

T_TEST(seeds_are_scaled)
{
    uint64_t n = 0, last = 0;
    T_FOR_SEEDS (seed, 1) {
        n++;
        last = seed;
    }
    assert_int_equal(n, 1);
    assert_int_equal(last, t_seed_first());
    assert_true(t_seeds(1000) >= 1);
}

T_TEST(tmpdir_is_empty_and_ours)
{
    struct stat st;
    assert_int_equal(stat(t_tmpdir(), &st), 0);
    assert_true(S_ISDIR(st.st_mode));
    assert_int_equal(st.st_nlink, 2);
    assert_ptr_equal(t_tmpdir(), t_tmpdir());
}

T_TEST(arg_is_given)
{
    assert_string_equal(t_arg(), "here");
}

T_TEST(below_is_in_range)
{
    t_rng rng = t_rng_make(7);
    for (uint64_t bound = 1; bound < 100; bound++) {
        assert_true(t_rng_below(&rng, bound) < bound);
    }
}

T_MAIN(T(rng_is_the_published_one), T(seeds_are_scaled), T(tmpdir_is_empty_and_ours), T_ARG(arg_is_given, "here"),
       T(below_is_in_range))
