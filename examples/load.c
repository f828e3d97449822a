/* SPDX-License-Identifier: MIT
 *
 * Load: the tensors of a checkpoint to the device, each used while later ones are still on disk; then one tensor by its name, to host memory.
 *
 *     load [--device SPEC] [PATH [TENSOR]]
 *
 * PATH is a safetensors file, an index of shards, a folder with either, or a .npy file. Without it the example writes a small checkpoint to load.
 */
#include "example.h"

#include <unistd.h>

enum { HEAD = 8, SHOWN = 10 };

/* What uses the tensors: here it only looks at the first bytes of each. */
struct model {
    side_stream *stream;
    unsigned char *heads; /* pinned, HEAD bytes a tensor */
};

/* Stands for a layer: queues work that reads the tensor, and returns. Your kernel goes to side_stream_native(m->stream). */
static side_status layer(const struct model *m, size_t tensor, const side_load_place *at)
{
    if (at->bytes == 0)
        return SIDE_OK;
    return side_copy_async(m->stream, SIDE_COPY_D2H, m->heads + tensor * HEAD, at->data,
                           at->bytes < HEAD ? at->bytes : HEAD);
}

static side_status load_all(side_device *device, side_checkpoint *ck, const struct model *m, side_load_stats *stats)
{
    side_load *load = NULL;
    side_load_place at;
    side_status d, s = side_load_start(device, ck, NULL, &load); /* all tensors; returns at once */

    if (s != SIDE_OK)
        return s;
    for (size_t i = 0; s == SIDE_OK && i < side_load_count(load); i++) {
        s = side_load_wait(load, i, m->stream); /* what is queued on the stream from here on may read tensor i */
        if (s == SIDE_OK)
            s = side_load_get_place(load, i, &at);
        if (s == SIDE_OK)
            s = layer(m, i, &at);
    }
    if (s == SIDE_OK)
        s = side_load_join(load, stats); /* all of it is there and right, and staging is given back */

    /* The tensors' memory is the load's. A program keeps the load for as long as it uses them; before it goes, nothing may read them any more. */
    d = side_stream_sync(m->stream, 30.0);
    if (d != SIDE_STUCK)
        d = side_load_destroy(load);
    return s != SIDE_OK ? s : d;
}

/* A tensor to host memory of our own: read straight there. *data is the caller's to free. */
static side_status load_one(side_device *device, side_checkpoint *ck, const side_tensor *t, size_t index, void **data)
{
    side_load_options o = SIDE_LOAD_OPTIONS_INIT;
    side_load_part part = {.tensor = index};
    side_load *load = NULL;
    side_status s, d;

    part.data = malloc(t->bytes > 0 ? (size_t)t->bytes : 1);
    if (part.data == NULL)
        return SIDE_NO_MEMORY;
    o.parts = &part;
    o.count = 1;
    o.where = SIDE_MEMORY_PAGEABLE; /* the kind of part.data */
    s = side_load_start(device, ck, &o, &load);
    if (s == SIDE_OK)
        s = side_load_join(load, NULL);
    d = side_load_destroy(load); /* NULL is fine */
    s = s != SIDE_OK ? s : d;
    if (s == SIDE_OK)
        *data = part.data; /* ours: it outlives the load */
    else if (s != SIDE_STUCK && d != SIDE_STUCK)
        free(part.data);
    return s;
}

/* ---------------------------------------------------------------- what is printed */

static void print_tensors(const side_checkpoint *ck, const side_load_stats *stats)
{
    const size_t count = side_checkpoint_count(ck);
    side_tensor t;

    for (size_t i = 0; i < count && i < SHOWN; i++)
        if (side_checkpoint_tensor(ck, i, &t) == SIDE_OK)
            printf("load: %-24s %-8s %10llu bytes\n", t.name, side_dtype_name(t.type), (unsigned long long)t.bytes);
    if (count > SHOWN)
        printf("load: and %zu others\n", count - SHOWN);
    printf("load: %zu tensors, %.1f MB in %.3f ms: %.2f GB/s, limited by: %s\n", count, (double)stats->bytes / 1e6,
           stats->time_s * 1e3, stats->gbps, stats->bottleneck);
}

static void print_first(const side_tensor *t, const void *data)
{
    const unsigned char *byte = data;
    double wide;
    float number;

    printf("load: the first number of %s is ", t->name);
    if (t->type == SIDE_DTYPE_F64 && t->bytes > 0) {
        memcpy(&wide, data, sizeof(wide));
        printf("%g\n", wide);
    } else if ((t->type == SIDE_DTYPE_F32 || t->type == SIDE_DTYPE_BF16) && t->bytes > 0) {
        const size_t bytes = side_dtype_bits(t->type) / 8; /* bfloat16 is the upper half of a float */
        number = 0;
        memcpy((char *)&number + sizeof(number) - bytes, data, bytes);
        printf("%g\n", number);
    } else {
        for (size_t i = 0; i < t->bytes && i < side_dtype_bits(t->type) / 8; i++)
            printf("%02x", byte[i]);
        printf(" (%s)\n", side_dtype_name(t->type));
    }
}

/* ---------------------------------------------------------------- a checkpoint to load, where none is given */

enum { LAYERS = 12, ROWS = 128, COLUMNS = 256, FLOATS = ROWS * COLUMNS };

/* Tensor i is full of i + 1. */
static side_status write_small(const char *path)
{
    static float weights[FLOATS];
    static const uint64_t dims[] = {ROWS, COLUMNS};
    char names[LAYERS][24];
    side_tensor tensors[LAYERS];
    side_writer *w = NULL;
    side_status s;

    for (int i = 0; i < LAYERS; i++) {
        snprintf(names[i], sizeof(names[i]), "layers.%02d.weight", i);
        tensors[i] = (side_tensor){.name = names[i], .name_bytes = strlen(names[i]), .type = SIDE_DTYPE_F32, .rank = 2};
        tensors[i].dims = dims;
    }
    s = side_writer_create(path, tensors, LAYERS, NULL, &w);
    for (size_t i = 0; s == SIDE_OK && i < LAYERS; i++) {
        for (int k = 0; k < FLOATS; k++)
            weights[k] = (float)(i + 1);
        s = side_writer_write(w, i, 0, weights, sizeof(weights));
    }
    if (s == SIDE_OK)
        s = side_writer_finish(w);
    side_writer_destroy(w);
    return s;
}

/* ---------------------------------------------------------------- the program */

/* Whole, then the one tensor. *wrong: whether that is another one in host memory than on the device. */
static side_status run(side_device *device, side_checkpoint *ck, const char *name, bool *wrong)
{
    const size_t count = side_checkpoint_count(ck);
    struct model m = {0};
    side_pool *pool = NULL;
    side_load_stats stats;
    side_tensor t;
    void *heads = NULL, *data = NULL;
    size_t index = 0;
    side_status s = side_stream_create(device, &m.stream);

    if (s == SIDE_OK)
        s = side_device_pool(device, &pool);
    if (s == SIDE_OK)
        s = side_pool_alloc(pool, count * HEAD + HEAD, &heads);
    m.heads = heads;
    if (s == SIDE_OK)
        s = load_all(device, ck, &m, &stats);
    if (s == SIDE_OK)
        print_tensors(ck, &stats);
    if (s == SIDE_OK && name != NULL)
        s = side_checkpoint_find(ck, name, strlen(name), &index);
    if (s == SIDE_OK && count > 0) {
        s = side_checkpoint_tensor(ck, index, &t);
        if (s == SIDE_OK)
            s = load_one(device, ck, &t, index, &data);
        if (s == SIDE_OK) {
            print_first(&t, data);
            *wrong = memcmp(data, m.heads + index * HEAD, t.bytes < HEAD ? (size_t)t.bytes : HEAD) != 0;
        }
    }
    free(data);
    if (s == SIDE_STUCK)
        return s; /* the device may still use what is ours */
    if (heads != NULL)
        side_pool_free(pool, heads, NULL, 0);
    side_stream_destroy(m.stream);
    return s;
}

/* An empty file of a new name; 0 or an exit code. */
static int make_path(char *path, size_t bytes)
{
    const char *folder = getenv("TMPDIR");
    int fd = -1;

    if (snprintf(path, bytes, "%s/sidestream-load.XXXXXX", folder != NULL ? folder : "/tmp") < (int)bytes)
        fd = mkstemp(path);
    if (fd < 0) {
        perror("load: a file to load cannot be made");
        return 1;
    }
    close(fd);
    return 0;
}

int main(int argc, char **argv)
{
    const int at = argc > 2 && strcmp(argv[1], "--device") == 0 ? 3 : 1;
    const char *path = argc > at ? argv[at] : NULL, *name = argc > at + 1 ? argv[at + 1] : NULL;
    char made[1024];
    side_device *device = NULL;
    side_checkpoint *ck = NULL;
    bool wrong = false;
    side_status s;

    if (argc > at + 2 || (path != NULL && path[0] == '-')) {
        fprintf(stderr, "usage: %s [--device SPEC] [PATH [TENSOR]]\n", argv[0]);
        return 2;
    }
    if (path == NULL && make_path(made, sizeof(made)) != 0)
        return 1;
    s = side_device_open(example_device(at, argv), &device);
    if (s == SIDE_OK && path == NULL)
        s = write_small(made);
    if (s == SIDE_OK)
        s = side_checkpoint_open(path != NULL ? path : made, NULL, &ck);
    if (s == SIDE_OK)
        s = run(device, ck, name, &wrong);
    int code = example_end("load", s);
    if (path == NULL)
        unlink(made);
    if (s == SIDE_STUCK)
        return code; /* the device may still use what is ours */
    side_checkpoint_close(ck);
    side_device_close(device);
    if (wrong)
        fprintf(stderr, "load: the tensor is another one in host memory than on the device\n");
    return code != 0 || wrong;
}
