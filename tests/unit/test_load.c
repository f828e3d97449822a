/* SPDX-License-Identifier: MIT
 *
 * Loads on the software device: every kind of source, destination, order and option gives the right bytes at the right place, in time; proof that a wait that is
 * left out would be seen. */
#include "load_help.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

/* ---------------------------------------------------------------- everything random */

static void choose(struct load_rig *r, t_rng *rng)
{
    static const side_memory_kind kinds[] = {SIDE_MEMORY_DEVICE, SIDE_MEMORY_DEVICE, SIDE_MEMORY_PAGEABLE,
                                             SIDE_MEMORY_PINNED};

    r->o.where = kinds[t_rng_below(rng, 4)];
    r->o.align = t_rng_chance(rng, 2) ? 0 : (size_t)1 << t_rng_below(rng, 13);
    r->o.piece_bytes = 4096 * (1 + t_rng_below(rng, 6));
    r->o.pinned_bytes = r->o.piece_bytes * (2 + t_rng_below(rng, 6));
    r->o.threads = 1 + (uint32_t)t_rng_below(rng, 3);
    r->o.flags |= t_rng_chance(rng, 3) ? SIDE_LOAD_IN_ORDER : 0;
    r->o.flags |= t_rng_chance(rng, 3) ? SIDE_LOAD_GIVEN : 0;
    r->o.flags |= t_rng_chance(rng, 4) ? SIDE_LOAD_CHECKSUM : 0;
    r->o.backend = t_rng_chance(rng, 3) ? SIDE_LOAD_PREAD : SIDE_LOAD_AUTO;
    if (t_rng_chance(rng, 2))
        load_parts(r, t_rng_below(rng, 60), (r->o.flags & SIDE_LOAD_CHECKSUM) == 0, rng);
}

static void check_end(struct load_rig *r)
{
    side_load_stats s;
    uint64_t all = 0, hash;

    T_OK(side_load_join(r->load, &s));
    T_OK(side_load_join(r->load, NULL));
    for (size_t i = 0; i < side_load_count(r->load); i++) {
        size_t bytes;
        const unsigned char *want = load_want(r, i, &bytes);
        all += bytes;
        T_OK(side_load_query(r->load, i));
        if ((r->o.flags & SIDE_LOAD_CHECKSUM) != 0) {
            T_OK(side_load_get_checksum(r->load, i, &hash));
            assert_int_equal(hash, XXH3_64bits(want, bytes));
        }
    }
    assert_int_equal(s.bytes, all);
    assert_int_equal(s.copied_bytes, all);
    assert_true(s.read_bytes >= all);
    assert_int_equal(s.ready, s.parts);
    assert_true(s.pinned_bytes <= r->o.pinned_bytes);
    uint64_t routed = 0;
    for (uint32_t i = 0; i < s.route_count; i++)
        routed += s.routes[i].pieces;
    assert_int_equal(routed, s.pieces);
    assert_true((s.bottleneck[0] != '\0') == (all != 0));
}

T_TEST(random_loads_are_right)
{
    T_FOR_SEEDS (seed, 300) {
        t_rng rng = t_rng_make(seed);
        side_device *dev = load_device("", seed);
        struct load_rig r;

        load_rig_init(&r, dev, t_rng_chance(&rng, 2), 1 + t_rng_below(&rng, 40), &rng);
        choose(&r, &rng);
        T_OK(side_load_start(dev, r.ck, &r.o, &r.load));
        if ((r.o.flags & SIDE_LOAD_GIVEN) != 0)
            T_OK(load_give(&r));
        T_OK(load_look(&r, &rng));
        check_end(&r);
        load_rig_finish(&r);
        load_close(dev);
    }
}

/* ---------------------------------------------------------------- dropped waits */

static side_status run_dropped(uint64_t seed, int drop)
{
    t_rng rng = t_rng_make(seed);
    side_device *dev = load_device("", seed);
    struct load_rig r;

    load_rig_init(&r, dev, false, 24, &rng);
    r.o.threads = 1;
    r.o.pinned_bytes = 2 * 4096;
    fence_mutate(drop != SITE_NONE ? MUTATE_DROP : MUTATE_NONE, drop);
    T_OK(side_load_start(dev, NULL, &r.o, &r.load));
    side_status s = load_look(&r, &rng);
    fence_mutate(MUTATE_NONE, SITE_NONE);
    T_OK(side_load_join(r.load, NULL));
    load_rig_finish(&r);
    side_device_close(dev);
    return s;
}

static void seen(int drop)
{
    uint64_t seed = 1;

    while (run_dropped(seed, drop) == SIDE_OK)
        if (++seed > 300)
            T_FAIL("site %d dropped: not seen in 300 seeds", drop);
    printf("site %d dropped: seen at seed %llu\n", drop, (unsigned long long)seed);
}

T_TEST(part_s_wait_dropped)
{
    seen(SITE_LOAD_READY);
}

T_TEST(slot_s_wait_dropped)
{
    if (T_TSAN)
        T_SKIP("a host wait left out is a data race, which this build ends at");
    seen(SITE_LOAD_SLOT);
}

T_MAIN(T_LONG(random_loads_are_right, 60), T(part_s_wait_dropped), T(slot_s_wait_dropped))
