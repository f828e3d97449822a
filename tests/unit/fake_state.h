/* SPDX-License-Identifier: MIT
 *
 * What the driver and the libraries that are not there (fake_cuda.h, fake_libs.h) have in common: what fails, what lives, what was seen. */
#ifndef FAKE_STATE_H
#define FAKE_STATE_H

#include "t.h"

#include "cuda_impl.h"

enum fake_kind {
    FAKE_CONTEXT,
    FAKE_STREAM,
    FAKE_EVENT,
    FAKE_MODULE,
    FAKE_MEMORY,
    FAKE_HOST,
    FAKE_PROGRAM,
    FAKE_BLAS,
    FAKE_NVML,
    FAKE_KINDS
};

static struct fake {
    /* What fails: the fail_at-th call from now (0: none), or every call of fail_name. A test of threads sets neither. */
    unsigned long calls, fail_at;
    const char *fail_name, *failed; /* failed: the last call that was made to fail */
    int code;                       /* with what: a CUresult; libraries answer 1 */
    int live[FAKE_KINDS], registered;
    /* What the machine is like. */
    int version, devices, major, minor, engines, coherent, can_register;
    const char *name;
    unsigned pointer_type, pointer_managed;
    int capturing;       /* what cuStreamIsCapturing says */
    int pending;         /* so many queries answer "not ready"; -1: all */
    void *alien;         /* a stream of another context */
    int module_refusals; /* so many loads are refused for their image */
    int archs[3];        /* what NVRTC compiles for */
    unsigned c2c;
    /* What was seen. */
    size_t batches, batched, singles, launches, gemms, stream_waits;
    unsigned register_flags, grid, block;
    char target[64]; /* NVRTC's --gpu-architecture */
    void *workspace; /* of the last product */
    CUstream gemm_stream;
    int relaxed; /* how often a thread was made relaxed */
    _Atomic size_t pointer_queries;
    size_t longest; /* the most pieces of a batch */
    int priority;
} fake;

static _Thread_local int depth; /* of this thread's context stack */
static pthread_mutex_t fake_mutex = PTHREAD_MUTEX_INITIALIZER;

struct fake_handle {
    int kind;
    bool timing, recorded;
};
static struct fake_handle primary = {FAKE_CONTEXT, false, false};

/* Counts the call; true where it is to fail. */
static bool fails(const char *name)
{
    pthread_mutex_lock(&fake_mutex);
    fake.calls++;
    const bool yes = fake.calls == fake.fail_at || (fake.fail_name != NULL && strcmp(fake.fail_name, name) == 0);
    if (yes)
        fake.failed = name;
    pthread_mutex_unlock(&fake_mutex);
    return yes;
}

static void count(int *counter, int by)
{
    pthread_mutex_lock(&fake_mutex);
    *counter += by;
    assert_true(*counter >= 0);
    pthread_mutex_unlock(&fake_mutex);
}

static void *make(enum fake_kind kind)
{
    struct fake_handle *h = calloc(1, sizeof(*h));
    assert_non_null(h);
    h->kind = (int)kind;
    count(&fake.live[kind], 1);
    return h;
}

static struct fake_handle *live(void *handle, enum fake_kind kind)
{
    struct fake_handle *h = handle;
    assert_non_null(h);
    assert_int_equal(h->kind, kind);
    return h;
}

static void unmake(void *handle, enum fake_kind kind)
{
    live(handle, kind)->kind = -1;
    count(&fake.live[kind], -1);
    free(handle);
}

static void entered(void)
{
    if (depth <= 0)
        T_FAIL("a driver call without a current context");
}

static bool is_stream(CUstream stream)
{
    if ((uintptr_t)stream > CU_HANDLE_PER_THREAD && (void *)stream != fake.alien)
        live(stream, FAKE_STREAM);
    return true;
}

/* ---- memory that the driver knows: of a device, or pinned */

static struct fake_range {
    uintptr_t begin;
    size_t bytes;
    unsigned type;
} fake_ranges[256];
static size_t fake_range_count;
static int fake_device; /* whose context is retained */

static void range_add(const void *data, size_t bytes, unsigned type)
{
    pthread_mutex_lock(&fake_mutex);
    assert_true(fake_range_count < sizeof(fake_ranges) / sizeof(fake_ranges[0]));
    fake_ranges[fake_range_count++] = (struct fake_range){(uintptr_t)data, bytes, type};
    pthread_mutex_unlock(&fake_mutex);
}

static void range_remove(const void *data)
{
    pthread_mutex_lock(&fake_mutex);
    for (size_t i = 0; i < fake_range_count; i++)
        if (fake_ranges[i].begin == (uintptr_t)data) {
            fake_ranges[i] = fake_ranges[--fake_range_count];
            break;
        }
    pthread_mutex_unlock(&fake_mutex);
}

static struct fake_range range_find(uintptr_t at)
{
    struct fake_range found = {at, 0, fake.pointer_type};

    pthread_mutex_lock(&fake_mutex);
    for (size_t i = 0; i < fake_range_count; i++)
        if (at - fake_ranges[i].begin < fake_ranges[i].bytes)
            found = fake_ranges[i];
    pthread_mutex_unlock(&fake_mutex);
    return found;
}

#endif
