/* SPDX-License-Identifier: MIT
 *
 * Sizes of the public structs, as programs were compiled against them: a change here is a change of the binary interface, and is to be meant. */
#include "t.h"

#include "sidestream_device.h"

#define PIN(type, bytes)           \
    {                              \
#type, sizeof(type), bytes \
    }

static const struct {
    const char *name;
    size_t is, was;
} structs[] = {
    PIN(side_error, 344),
    PIN(side_device_props, 376),
    PIN(side_link, 40),
    PIN(side_pool_options, 32),
    PIN(side_pool_stats, 88),
    PIN(side_piece, 24),
    PIN(side_op, 96),
    PIN(side_xxh3, 72),
    PIN(side_slots_options, 56),
    PIN(side_slot, 40),
    PIN(side_ticket, 24),
    PIN(side_span, 104),
    PIN(side_account, 104),
    PIN(side_draw, 48),
    PIN(side_block, 16),
    PIN(side_source, 72),
    PIN(side_sink, 56),
    PIN(side_item, 128),
    PIN(side_pipeline_options, 256),
    PIN(side_pipeline_stats, 128),
    PIN(side_plan_work, 80),
    PIN(side_plan, 208),
    PIN(side_feed_piece, 24),
    PIN(side_feed_item, 56),
    PIN(side_feeder_options, 88),
    PIN(side_feeder_stats, 160),
    PIN(side_rate, 16),
    PIN(side_path_rate, 32),
    PIN(side_machine, 8584),
    PIN(struct side_device_ops, 288),
};

T_TEST(public_structs_have_their_sizes)
{
    for (size_t i = 0; i < sizeof(structs) / sizeof(structs[0]); i++)
        if (structs[i].is != structs[i].was)
            T_FAIL("%s has %zu bytes, not %zu: old programs would be misread", structs[i].name, structs[i].is,
                   structs[i].was);
}

/* options_copy looks for what a newer program set behind our end: a hole inside would hold what the compiler left there. */
T_TEST(options_have_no_holes)
{
    assert_int_equal(sizeof(side_pool_options), 3 * sizeof(size_t) + 2 * sizeof(uint32_t));
    assert_int_equal(sizeof(side_slots_options) % sizeof(size_t), 0);
    assert_int_equal(sizeof(side_pipeline_options) % sizeof(size_t), 0);
    assert_int_equal(sizeof(side_feeder_options) % sizeof(size_t), 0);
    assert_int_equal(offsetof(side_feeder_options, size), 0);
    assert_int_equal(offsetof(side_pool_options, size), 0);
    assert_int_equal(offsetof(side_slots_options, size), 0);
    assert_int_equal(offsetof(side_pipeline_options, size), 0);
    assert_int_equal(offsetof(side_op, size), 0);
    assert_int_equal(offsetof(side_draw, size), 0);
}

T_MAIN(T(public_structs_have_their_sizes), T(options_have_no_holes))
