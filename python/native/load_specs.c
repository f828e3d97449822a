/* SPDX-License-Identifier: MIT
 *
 * What the parts of a load are as tensors: one by one, or all in columns, from which PyTorch makes many with a few calls. */
#include "load.h"

/* A part as a tensor; shape and strides are borrowed until the next call. */
struct spec {
    side_tensor tensor;
    side_dtype as;
    uint64_t offset, elements; /* of the arena, in elements */
    Py_ssize_t arena;          /* -1: none, it is empty */
    bool moved;                /* behind those that lie as in the file */
    PyObject *shape, *strides, *own_shape, *own_strides;
};

/* 1; 0: it has an address of its own; -1 with an exception. After 1 spec_end(). */
static int spec_get(side_load *load, struct load_parts *parts, size_t part, struct spec *spec)
{
    side_load_place place;
    size_t bytes;

    if (side_load_get_place(load, part, &place) != SIDE_OK) {
        native_raise(SIDE_STATE);
        return -1;
    }
    if (place.arena == SIZE_MAX && !parts->whole[part])
        return 0;
    spec->own_shape = spec->own_strides = NULL;
    side_checkpoint_tensor(parts->checkpoint->checkpoint, parts->tensors[part], &spec->tensor);
    if (parts->whole[part]) {
        if (shapes_get(&parts->shapes, &spec->tensor, &spec->as, &spec->shape, &spec->strides) != 0)
            return -1;
    } else { /* bytes: who asked for a part of a tensor knows its shape */
        spec->as = SIDE_DTYPE_U8;
        spec->shape = spec->own_shape = Py_BuildValue("(K)", (unsigned long long)place.bytes);
        spec->strides = spec->own_strides = Py_BuildValue("(i)", 1);
    }
    bytes = side_dtype_bits(spec->as) > 8 ? side_dtype_bits(spec->as) / 8 : 1;
    spec->offset = place.offset / bytes;
    spec->elements = place.bytes / bytes;
    spec->arena = place.arena == SIZE_MAX ? -1 : (Py_ssize_t)place.arena;
    spec->moved = place.moved;
    return spec->shape != NULL && spec->strides != NULL ? 1 : -1;
}

static void spec_end(struct spec *spec)
{
    Py_XDECREF(spec->own_shape);
    Py_XDECREF(spec->own_strides);
}

PyObject *load_spec(side_load *load, struct load_parts *parts, size_t part)
{
    struct spec spec = {.own_shape = NULL};
    int had = spec_get(load, parts, part, &spec);
    PyObject *result = NULL;

    if (had == 0)
        Py_RETURN_NONE;
    if (had > 0)
        result = Py_BuildValue("(s#iOOnn)", spec.tensor.name, (Py_ssize_t)spec.tensor.name_bytes, (int)spec.as,
                               spec.shape, spec.strides, (Py_ssize_t)spec.offset, spec.arena);
    spec_end(&spec);
    return result;
}

/* ---------------------------------------------------------------- columns */

/* The group that takes the next tensor of an arena and a dtype: one for those that lie as in the file, one for the others, so that in both places
 * ascend. Its lists are borrowed from `groups`. */
struct group {
    PyObject *names, *elements, *shapes, *strides; /* names NULL: there is none yet */
    uint64_t end;
};

struct columns {
    PyObject *names, *groups, *nothing;
    struct group *open; /* by arena, from -1 on, dtype, and whether moved */
};

static int group_begin(struct columns *c, struct group *group, const struct spec *spec)
{
    PyObject *one;

    group->names = PyList_New(0);
    group->elements = PyList_New(0);
    group->shapes = PyList_New(0);
    group->strides = PyList_New(0);
    group->end = spec->offset;
    one = Py_BuildValue("(ninNNNN)", spec->arena, (int)spec->as, (Py_ssize_t)spec->offset, group->names,
                        group->elements, group->shapes, group->strides);
    if (one == NULL || PyList_Append(c->groups, one) != 0)
        group->names = NULL;
    Py_XDECREF(one);
    return group->names == NULL ? -1 : 0;
}

static int group_add(struct group *group, PyObject *name, uint64_t elements, PyObject *shape, PyObject *strides)
{
    PyObject *number = PyLong_FromUnsignedLongLong(elements);
    int failed = number == NULL || PyList_Append(group->names, name) != 0 ||
                 PyList_Append(group->elements, number) != 0 || PyList_Append(group->shapes, shape) != 0 ||
                 PyList_Append(group->strides, strides) != 0;

    Py_XDECREF(number);
    group->end += elements;
    return failed ? -1 : 0;
}

static int column_add(struct columns *c, const struct spec *spec)
{
    struct group *group = &c->open[((size_t)(spec->arena + 1) * SIDE_DTYPE_COUNT + (size_t)spec->as) * 2 + spec->moved];
    PyObject *name = PyUnicode_DecodeUTF8(spec->tensor.name, (Py_ssize_t)spec->tensor.name_bytes, NULL);
    int failed = name == NULL || PyList_Append(c->names, name) != 0;

    if (!failed && (group->names == NULL || (spec->arena >= 0 && spec->offset < group->end)))
        failed = group_begin(c, group, spec) != 0;
    if (!failed && spec->arena >= 0 && spec->offset > group->end)
        failed = group_add(group, Py_None, spec->offset - group->end, c->nothing, c->nothing) != 0;
    if (!failed)
        failed = group_add(group, name, spec->elements, spec->shape, spec->strides) != 0;
    Py_XDECREF(name);
    return failed ? -1 : 0;
}

PyObject *load_columns(side_load *load, struct load_parts *parts)
{
    struct columns c = {.names = PyList_New(0), .groups = PyList_New(0), .nothing = PyTuple_New(0)};
    struct spec spec = {.own_shape = NULL};
    PyObject *result = NULL;
    int had = 0;

    c.open = calloc((side_load_arenas(load) + 1) * SIDE_DTYPE_COUNT * 2, sizeof(*c.open));
    if (c.open == NULL)
        PyErr_NoMemory();
    if (c.open != NULL && c.names != NULL && c.groups != NULL && c.nothing != NULL) {
        for (size_t i = 0; had >= 0 && i < parts->count; i++) {
            had = spec_get(load, parts, i, &spec);
            if (had > 0 && column_add(&c, &spec) != 0)
                had = -1;
            spec_end(&spec);
            spec.own_shape = spec.own_strides = NULL;
        }
        if (had >= 0)
            result = PyTuple_Pack(2, c.names, c.groups);
    }
    free(c.open);
    Py_XDECREF(c.names);
    Py_XDECREF(c.groups);
    Py_XDECREF(c.nothing);
    return result;
}
