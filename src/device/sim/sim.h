/* SPDX-License-Identifier: MIT
 *
 * The software GPU: runs on the CPU, keeps virtual time, and is the oracle of the tests. Two layers that do not know of each other:
 *
 *     submit --+--> TIME     when would a GPU have done it?       engines, latencies, bandwidths; integer ns     time.c
 *              +--> EFFECTS  what would be in memory afterwards?  the bytes move, in an order that only the      effects.c
 *                            declared dependencies restrict, drawn from a seed
 *
 * What is exact
 *   An engine takes the operation that was ready first (stream predecessor and awaited events done, submission time reached), ties by submission.
 *   Submitting costs no virtual time. Placements are final, and nothing is placed that starts after what a caller asked for, so whatever is
 *   submitted later (its submission time is the caller's clock) cannot have come before it. Therefore every time is exact, and equal on every machine,
 *   - where one thread submits and waits; or
 *   - with several threads, where each engine is fed through one stream by one thread (its order is then given) and hand-overs between threads go
 *     through events or clock_join.
 *   Otherwise each engine's timeline is still consistent (nothing overlaps, all dependencies hold), but an operation that is submitted "in the past" of
 *   what another thread has already asked for comes behind what was placed for it.
 *
 * Clocks
 *   Each thread has a virtual clock a context, 0 at its first call. Waits move it to the event's time, pageable copies to the copy's end, clock_join to
 *   what another thread handed over. A query that says "not yet" moves it by query_ns, so that polling ends. A wait of 0 ns counts as a query.
 *
 * Effects
 *   Nothing runs in the background. Each submission runs a few random ready operations (how eagerly, and how long one stream is favoured, is drawn
 *   from the seed); a host wait runs random ready ones until the awaited one is done; a query that says "done" does so too. Host functions run
 *   in host waits (a pageable copy is one) and in such queries alone, on the calling thread and without the lock: one that itself waits for
 *   the calling thread hangs. Work that is still queued at close never runs.
 *
 * Memory
 *   Device memory is host memory: allocations carry a non-zero pattern, freed ones are poisoned and kept until all operations queued before are
 *   done, so late ones harm nobody and show. Contexts share nothing: opening "sim" twice gives two devices with memory of their own.
 *   With check=1 (or SIDESTREAM_VALIDATE=1) freeing or unpinning what queued operations touch is logged and counted.
 *
 * Not modelled: the loss when both directions run at once (55.3 -> 50.5 GB/s each on an H200), clocks and power, concurrent kernels, queue lengths.
 */
#ifndef DEVICE_SIM_H
#define DEVICE_SIM_H

#include "sidestream_device.h"

extern const struct side_device_ops sim_device_ops;

/* For tests. Fallible calls are all that return side_status and take a context or a handle of one; they are counted at entry. */
uint64_t sim_calls(dev_context *context);
/* The nth fallible call from now (1: the next; 0: none) fails with `status` before it does anything. SIDE_DEVICE_LOST stays: all later calls fail with it
 * and what is queued never runs. */
void sim_fail_at(dev_context *context, uint64_t nth, side_status status);
/* Forgets a scripted failure that has not happened; does not bring a lost device back. */
void sim_fault_clear(dev_context *context);
/* Frees and unpins under queued work, where check is on. */
uint64_t sim_violations(dev_context *context);
/* Operations, waits and records kept because they have not both run and got their times. */
size_t sim_pending(dev_context *context);
/* From now on the stream says that it is (not) being captured; what is queued on it runs as ever. */
void sim_capture(dev_stream *stream, bool capturing);

#endif
