/* SPDX-License-Identifier: MIT
 *
 * The driver as a program beside the library uses it: its own handle, its own calls. Nothing here comes from the library. */
#ifndef TEST_CU_H
#define TEST_CU_H

#include "t.h"

#include <dlfcn.h>

typedef void *cu_context, *cu_stream, *cu_graph, *cu_graph_exec;
typedef unsigned long long cu_ptr;

/* X(member, symbol, parameters) */
#define CU_CALLS(X)                                                                                      \
    X(init, "cuInit", (unsigned))                                                                        \
    X(retain, "cuDevicePrimaryCtxRetain", (cu_context *, int))                                           \
    X(release, "cuDevicePrimaryCtxRelease_v2", (int))                                                    \
    X(primary_state, "cuDevicePrimaryCtxGetState", (int, unsigned *, int *))                             \
    X(context_create, "cuCtxCreate_v2", (cu_context *, unsigned, int))                                   \
    X(context_destroy, "cuCtxDestroy_v2", (cu_context))                                                  \
    X(context_set, "cuCtxSetCurrent", (cu_context))                                                      \
    X(context_get, "cuCtxGetCurrent", (cu_context *))                                                    \
    X(stream_create, "cuStreamCreate", (cu_stream *, unsigned))                                          \
    X(stream_destroy, "cuStreamDestroy_v2", (cu_stream))                                                 \
    X(stream_sync, "cuStreamSynchronize", (cu_stream))                                                   \
    X(capture_begin, "cuStreamBeginCapture_v2", (cu_stream, int))                                        \
    X(capture_end, "cuStreamEndCapture", (cu_stream, cu_graph *))                                        \
    X(capture_state, "cuStreamIsCapturing", (cu_stream, int *))                                          \
    X(graph_instantiate, "cuGraphInstantiateWithFlags", (cu_graph_exec *, cu_graph, unsigned long long)) \
    X(graph_launch, "cuGraphLaunch", (cu_graph_exec, cu_stream))                                         \
    X(graph_exec_destroy, "cuGraphExecDestroy", (cu_graph_exec))                                         \
    X(graph_destroy, "cuGraphDestroy", (cu_graph))                                                       \
    X(alloc, "cuMemAlloc_v2", (cu_ptr *, size_t))                                                        \
    X(free, "cuMemFree_v2", (cu_ptr))                                                                    \
    X(set, "cuMemsetD8Async", (cu_ptr, unsigned char, size_t, cu_stream))                                \
    X(to_host, "cuMemcpyDtoH_v2", (void *, cu_ptr, size_t))

struct cu {
#define X(member, symbol, parameters) int(*member) parameters;
    CU_CALLS(X)
#undef X
};

/* The call succeeds. */
#define CU_OK(expr) cu_check((expr), #expr, __FILE__, __LINE__)

static inline void cu_check(int result, const char *expr, const char *file, int line)
{
    if (result != 0)
        t_fail(file, line, "%s gives CUresult %d", expr, result);
}

/* Skips where there is no GPU. */
static inline struct cu cu_open(void)
{
    struct cu cu;
    char specs[4][64], why[256] = "";
    size_t count = 4;

    T_OK(side_device_list(specs, &count, why, sizeof(why)));
    if (count == 0 || strncmp(specs[0], "cuda", 4) != 0)
        T_SKIP("no GPU: %s", why);
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == NULL)
        T_FAIL("%s", dlerror());
#define X(member, symbol, parameters)              \
    *(void **)&cu.member = dlsym(library, symbol); \
    if (*(void **)&cu.member == NULL)              \
        T_FAIL("the driver has no %s", symbol);
    CU_CALLS(X)
#undef X
    CU_OK(cu.init(0));
    return cu;
}

#endif
