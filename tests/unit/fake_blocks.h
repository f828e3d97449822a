/* SPDX-License-Identifier: MIT
 *
 * What the kernels that copy blocks do, from the tables that they read: done by the host, for a driver that is not there (fake_cuda.h). A gather is done when it
 * is launched. A pack kernel goes on beside the streams, as far as released chunks let it, so chunks that are released too early, or never, show. */
#ifndef FAKE_BLOCKS_H
#define FAKE_BLOCKS_H

#include "t.h"

#include "cuda_table.h"

static void block_unit_run(const struct block_unit *unit, const struct block_piece *pieces, bool out)
{
    uint64_t done = (uint64_t)unit->tile * TABLE_TILE;

    assert_true(unit->pieces > 0 && unit->pieces <= 32 && unit->tiles > 0 && unit->tiles <= TABLE_UNIT_MOST);
    for (uint32_t k = 0, at = 0; k < unit->tiles; k++) {
        assert_true(at < unit->pieces);
        const struct block_piece *p = &pieces[unit->piece + at];
        const uint64_t left = p->bytes - done, n = left < TABLE_TILE ? left : TABLE_TILE;
        assert_true(p->bytes > done);
        memcpy((void *)((out ? p->out : p->to) + done), (const void *)(p->from + done), n);
        done += n;
        if (done == p->bytes) {
            at++;
            done = 0;
        }
    }
}

static void blocks_run(const struct block_unit *units, uint32_t n, const struct block_piece *pieces, bool out)
{
    for (uint32_t u = 0; u < n; u++)
        block_unit_run(units - u, pieces, out);
}

enum { FAKE_SLOTS = 4 };
/* struct pack_state of kernels.cu */
struct fake_pack_state {
    uint32_t ticket, left, stopped, failed, unused[28];
    uint32_t done[32], ready[32], released[32];
};
/* The pack kernel that runs: it goes as far as it can whenever something happens that could let it. Guarded by the library's own mutex. */
static struct fake_pack {
    bool runs;
    bool gives_up; /* told by a test: chunks are not released in time */
    CUstream stream;
    struct fake_pack_state *state;
    const struct block_unit *units;
    const struct block_piece *pieces;
    const uint32_t *stop;
    uint32_t count, base, end, next;
} fake_pack;

static void pack_end(bool failed)
{
    struct fake_pack_state *s = fake_pack.state;

    if (failed)
        s->failed = fake_pack.end;
    for (int i = 0; i < FAKE_SLOTS; i++) {
        s->done[i] = 0;
        s->ready[i] = s->released[i] = fake_pack.end;
    }
    fake_pack.runs = false;
}

static void pack_advance(void)
{
    struct fake_pack *f = &fake_pack;

    while (f->runs && f->next < f->count) {
        const struct block_unit *unit = f->units - f->next;
        const uint32_t slot = unit->chunk % FAKE_SLOTS;
        if (unit->chunk >= FAKE_SLOTS && f->gives_up) {
            pack_end(true);
            return;
        }
        if (unit->chunk >= FAKE_SLOTS &&
            (int32_t)(f->state->released[slot] - (f->base + unit->chunk - FAKE_SLOTS + 1)) < 0) {
            if (*f->stop != 0)
                pack_end(true);
            return;
        }
        block_unit_run(unit, f->pieces, false);
        f->next++;
        if (++f->state->done[slot] == unit->units) {
            f->state->done[slot] = 0;
            f->state->ready[slot] = f->base + unit->chunk + 1;
        }
    }
    if (f->runs)
        pack_end(false);
}

static struct {
    _Atomic size_t gathers, packs, rests;
} fake_kernels;

/* Queued; other kernels have no effect. */
static void fake_launch(const char *name, CUstream stream, void **a)
{
    if (strcmp(name, "side_gather") == 0) {
        blocks_run(*(struct block_unit **)a[0], *(uint32_t *)a[1], *(struct block_piece **)a[2], false);
        fake_kernels.gathers++;
    } else if (strcmp(name, "side_pack") == 0) {
        pack_advance();
        if (fake_pack.runs)
            T_FAIL("a pack kernel is launched before the one before can end");
        fake_pack = (struct fake_pack){.runs = true,
                                       .gives_up = fake_pack.gives_up,
                                       .stream = stream,
                                       .state = *(void **)a[0],
                                       .units = *(void **)a[1],
                                       .count = *(uint32_t *)a[2],
                                       .pieces = *(void **)a[3],
                                       .base = *(uint32_t *)a[4],
                                       .end = *(uint32_t *)a[5],
                                       .stop = *(void **)a[6]};
        assert_true(*(uint64_t *)a[7] > 0);
        fake_kernels.packs++;
        pack_advance();
    } else if (strcmp(name, "side_pack_rest") == 0) {
        if ((*(struct fake_pack_state **)a[0])->failed == *(uint32_t *)a[1])
            blocks_run(*(struct block_unit **)a[2], *(uint32_t *)a[3], *(struct block_piece **)a[4], true);
        fake_kernels.rests++;
    }
}

#endif
