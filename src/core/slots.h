/* SPDX-License-Identifier: MIT
 * Slots as the pipeline uses them: the public calls plus an end of input and a cancel flag. */
#ifndef CORE_SLOTS_H
#define CORE_SLOTS_H

#include "fence.h"

#include <stdatomic.h>

/* Which ring this is (enum fence_site, the even value) and whose flag ends every blocking call with SIDE_CANCELLED (NULL: none). Before first use. */
void slots_configure(side_slots *slots, int site, const atomic_bool *cancel);
/* Blocked callers look at the cancel flag now, not at their next turn. */
void slots_wake(side_slots *slots);
/* With a cancel flag, but no owner who drains the streams of others: a record that fails waits for its stream, as without a flag. Before first use. */
void slots_drain_own(side_slots *slots);
/* RING: nothing more will be acquired: take of numbers not given out so far returns SIDE_END. */
void slots_close(side_slots *slots);
/* RING: closed, and before this number. */
bool slots_is_past(side_slots *slots, uint64_t number);
/* RING: every item was released: numbering starts at 0 again, open; fences are kept. SIDE_STATE while something is open. */
side_status slots_restart(side_slots *slots);
/* Nothing that was queued on the slots runs any more: it is done, or the device is lost. False: not known, the memory must be kept. */
bool slots_are_drained(side_slots *slots);
/* What a slot of `slot_bytes` takes in a slab, alignment included. */
size_t slots_stride(size_t slot_bytes);
/* Invariants, for tests and asserts. */
bool slots_is_valid(side_slots *slots);

#endif
