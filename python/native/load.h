/* SPDX-License-Identifier: MIT
 *
 * Checkpoints and loads: the counted handle that loads share with the Python object. */
#ifndef NATIVE_LOAD_H
#define NATIVE_LOAD_H

#include "native.h"

#include "sidestream/checkpoint.h"
#include "sidestream/load.h"

/* Reading it needs no device and no lock, so a forked child may; only closing is the parent's. */
struct checkpoint_ref {
    atomic_size_t refs;
    side_checkpoint *checkpoint;
    unsigned forks;
};

struct checkpoint_ref *checkpoint_hold(struct checkpoint_ref *ref);
/* Any thread; NULL is fine. The last one closes the files. */
void checkpoint_drop(struct checkpoint_ref *ref);
/* The handle in a Checkpoint, borrowed; NULL with an exception. */
struct checkpoint_ref *native_checkpoint(PyObject *object, const char *what);

enum { SHAPES_KEPT = 64, SHAPES_TRIED = 4 };

/* Shapes as tuples: tensors of a model share a few, and so do the tuples. Zeroed at first. A shape is kept at its hash or one of the next places. */
struct shapes {
    struct {
        side_dtype type, as;
        uint32_t rank;
        uint64_t dims[SIDE_RANK_MOST];
        PyObject *shape, *strides;
    } kept[SHAPES_KEPT];
};

/* The shape that PyTorch gives such a tensor, and its strides in elements; 0, or -1 with an exception. Elements of less than a byte are counted in bytes
 * along the last dimension; where a row is no whole number of them it becomes all bytes in one dimension, as U8. New references. */
int shape_make(const side_tensor *tensor, side_dtype *as, PyObject **shape, PyObject **strides);
/* The same, borrowed until the next call. */
int shapes_get(struct shapes *shapes, const side_tensor *tensor, side_dtype *as, PyObject **shape, PyObject **strides);
void shapes_end(struct shapes *shapes);

/* What the parts of a load are. */
struct load_parts {
    struct checkpoint_ref *checkpoint;
    bool *whole;       /* by part: it is its whole tensor, in an arena */
    uint64_t *tensors; /* by part */
    size_t count;
    struct shapes shapes;
};

/* A part as (name, dtype, shape, strides, offset in elements, arena); a new reference, None where it is in no arena. */
PyObject *load_spec(side_load *load, struct load_parts *parts, size_t part);
/* All of them, in columns: see load_methods. A new reference. */
PyObject *load_columns(side_load *load, struct load_parts *parts);

int checkpoint_add(PyObject *module);
int load_add(PyObject *module);

#endif
