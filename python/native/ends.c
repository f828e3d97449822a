/* SPDX-License-Identifier: MIT
 *
 * The ends of a pipeline, and its callbacks: these take the GIL, on the library's threads (source, sink) or on the one that runs (compute, progress). */
#include "pipeline.h"

/* ---------------------------------------------------------------- arrays */

static int hold(struct pipeline_ref *ref, PyObject *object)
{
    return PyList_Append(ref->holds, object);
}

static int add_block(struct pipeline_ref *ref, PyObject *array, bool writes, const char *what, side_block *block)
{
    struct operand operand;
    int r;

    if (operand_get_host(&operand, array, ref->device, writes, what) != 0)
        return -1;
    block->data = operand.data;
    block->bytes = operand.bytes;
    r = hold(ref, operand.keep);
    operand_drop(&operand);
    return r;
}

/* An item may be several arrays, which are packed in order. */
static bool is_group(PyObject *item)
{
    return PyList_Check(item) || PyTuple_Check(item);
}

static Py_ssize_t count_blocks(PyObject *list)
{
    Py_ssize_t total = 0, n = PySequence_Size(list);

    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = PySequence_GetItem(list, i);
        if (item == NULL)
            return -1;
        total += is_group(item) ? PySequence_Size(item) : 1;
        Py_DECREF(item);
    }
    return n < 0 ? -1 : total;
}

/* One item: its blocks from *at on. Adds its bytes to *bytes. */
static int add_item(struct pipeline_ref *ref, PyObject *item, side_block *blocks, size_t *at, size_t room, size_t *bytes)
{
    Py_ssize_t n = is_group(item) ? PySequence_Size(item) : 1;

    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *array = is_group(item) ? PySequence_GetItem(item, i) : Py_NewRef(item);
        int r = array == NULL || *at == room ? -1 : add_block(ref, array, false, "source", &blocks[*at]);
        Py_XDECREF(array);
        if (r != 0) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_RuntimeError, "source: the list changed while it was read");
            return -1;
        }
        *bytes += blocks[(*at)++].bytes;
    }
    return 0;
}

static int source_list(struct pipeline_ref *ref, PyObject *list, side_source *to, size_t *largest)
{
    Py_ssize_t items = PySequence_Size(list), total = count_blocks(list);
    size_t at = 0;

    if (items < 0 || total < 0)
        return -1;
    ref->blocks_in = calloc((size_t)total + 1, sizeof(side_block));
    ref->pieces = calloc((size_t)items + 1, sizeof(uint32_t));
    if (ref->blocks_in == NULL || ref->pieces == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < items; i++) {
        PyObject *item = PySequence_GetItem(list, i);
        size_t begin = at, bytes = 0;
        int r = item == NULL ? -1 : add_item(ref, item, ref->blocks_in, &at, (size_t)total, &bytes);
        Py_XDECREF(item);
        if (r != 0)
            return -1;
        ref->pieces[i] = (uint32_t)(at - begin);
        *largest = bytes > *largest ? bytes : *largest;
    }
    *to = side_source_items(ref->blocks_in, ref->pieces, (uint64_t)items);
    return 0;
}

static int sink_list(struct pipeline_ref *ref, PyObject *list, side_sink *to, size_t *largest)
{
    Py_ssize_t items = PySequence_Size(list);

    if (items < 0)
        return -1;
    ref->blocks_out = calloc((size_t)items + 1, sizeof(side_block));
    if (ref->blocks_out == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < items; i++) {
        PyObject *item = PySequence_GetItem(list, i);
        int r = item == NULL ? -1 : add_block(ref, item, true, "sink", &ref->blocks_out[i]);
        Py_XDECREF(item);
        if (r != 0)
            return -1;
        *largest = ref->blocks_out[i].bytes > *largest ? ref->blocks_out[i].bytes : *largest;
    }
    *to = side_sink_blocks(ref->blocks_out, (uint64_t)items);
    return 0;
}

/* ---------------------------------------------------------------- callbacks */

void pipeline_keep_error(struct pipeline_ref *ref)
{
    PyObject *error[3];

    PyErr_Fetch(&error[0], &error[1], &error[2]);
    if (ref->error[0] == NULL) {
        memcpy(ref->error, error, sizeof(error));
        return;
    }
    for (int i = 0; i < 3; i++)
        Py_XDECREF(error[i]);
}

/* Memory of the library's for the time of a call. It does not hold the handle: nobody may have it any more. */
static PyObject *lend(struct pipeline_ref *ref, void *data, size_t bytes)
{
    struct memory *memory = memory_make(ref->device, SIDE_MEMORY_PINNED, data, bytes);

    if (memory == NULL)
        return NULL;
    memory->lent = true;
    return native_buffer_new(memory, ref->owner, 0, bytes, native_dtype(NULL), 1, NULL);
}

/* Calls `fn(item, view)`. The memory is the library's again afterwards, so a view that is kept is an error. Returns the result, a new reference. */
static PyObject *call_with_view(struct pipeline_ref *ref, PyObject *fn, uint64_t item, void *data, size_t bytes,
                                bool writes)
{
    PyObject *buffer = lend(ref, data, bytes), *view = NULL, *r = NULL;

    if (buffer != NULL)
        view = PyMemoryView_FromObject(buffer);
    if (view != NULL && !writes) {
        PyObject *read_only = PyObject_CallMethod(view, "toreadonly", NULL);
        Py_DECREF(view);
        view = read_only;
    }
    if (view != NULL)
        r = PyObject_CallFunction(fn, "KO", (unsigned long long)item, view);
    Py_XDECREF(view);
    if (buffer != NULL && Py_REFCNT(buffer) > 1) { /* every export of it holds the buffer */
        struct memory *memory = ((buffer_object *)buffer)->memory;

        /* It stays memory for whoever has it, which may be the traceback of an exception. */
        if (pipeline_hold_living(ref)) {
            memory->parent = ref;
            memory->parent_drop = pipeline_drop;
        }
        if (r != NULL)
            PyErr_SetString(PyExc_BufferError,
                            "the callable kept its view, or an array over it; copy what is needed later");
        Py_CLEAR(r);
    }
    if (buffer != NULL)
        ((buffer_object *)buffer)->memory->ended = true;
    Py_XDECREF(buffer);
    return r;
}

static int source_result(PyObject *r, size_t capacity, size_t *bytes)
{
    Py_ssize_t n;

    if (r == Py_None) {
        *bytes = SIDE_NO_MORE;
        return 0;
    }
    n = PyNumber_AsSsize_t(r, PyExc_OverflowError);
    if (n == -1 && PyErr_Occurred())
        return -1;
    if (n < 0 || (size_t)n > capacity) {
        PyErr_Format(PyExc_ValueError, "source returned %zd bytes; an item takes 0..%zu (item_bytes); None ends", n,
                     capacity);
        return -1;
    }
    *bytes = (size_t)n;
    return 0;
}

static int source_call(void *user, uint64_t item, void *data, size_t capacity, size_t *bytes)
{
    struct pipeline_ref *ref = user;
    PyGILState_STATE gil;
    PyObject *r;
    int status;

    if (life_is_over())
        return -1;
    gil = PyGILState_Ensure();
    native_callback_begin();
    r = call_with_view(ref, ref->source, item, data, capacity, true);
    status = r == NULL ? -1 : source_result(r, capacity, bytes);
    Py_XDECREF(r);
    if (status != 0)
        pipeline_keep_error(ref);
    native_callback_end();
    PyGILState_Release(gil);
    return status;
}

static int sink_call(void *user, uint64_t item, const void *data, size_t bytes)
{
    struct pipeline_ref *ref = user;
    PyGILState_STATE gil;
    PyObject *r;

    if (life_is_over())
        return -1;
    gil = PyGILState_Ensure();
    native_callback_begin();
    r = call_with_view(ref, ref->sink, item, (void *)(uintptr_t)data, bytes, false);
    if (r == NULL)
        pipeline_keep_error(ref);
    native_callback_end();
    Py_XDECREF(r);
    PyGILState_Release(gil);
    return r == NULL ? -1 : 0;
}

int compute_call(void *user, side_stream *stream, side_item *item)
{
    struct pipeline_ref *ref = user;
    PyGILState_STATE gil;
    PyObject *object, *r = NULL;
    (void)stream; /* the one in streams[lane] */

    if (life_is_over())
        return -1;
    gil = PyGILState_Ensure();
    native_callback_begin();
    object = PyErr_CheckSignals() == 0 ? item_new(ref, item) : NULL;
    if (object != NULL) {
        r = PyObject_CallFunctionObjArgs(ref->compute, ref->streams[item->lane % ref->stream_count], object, NULL);
        item->result_bytes = item_end(object);
        Py_DECREF(object);
    }
    if (r == NULL)
        pipeline_keep_error(ref);
    native_callback_end();
    Py_XDECREF(r);
    PyGILState_Release(gil);
    return r == NULL ? -1 : 0;
}

/* Cannot stop the run by itself: cancels. */
void progress_call(void *user, uint64_t items, uint64_t bytes_in, uint64_t bytes_out)
{
    struct pipeline_ref *ref = user;
    PyGILState_STATE gil;
    PyObject *r;

    if (life_is_over())
        return;
    gil = PyGILState_Ensure();
    native_callback_begin();
    r = PyObject_CallFunction(ref->progress, "KKK", (unsigned long long)items, (unsigned long long)bytes_in,
                              (unsigned long long)bytes_out);
    if (r == NULL) {
        pipeline_keep_error(ref);
        side_pipeline_cancel(ref->pipeline);
    }
    native_callback_end();
    Py_XDECREF(r);
    PyGILState_Release(gil);
}

/* ---------------------------------------------------------------- parsing */

/* A file object, or one or a descriptor as (file, offset[, length]). */
static int file_parse(struct pipeline_ref *ref, PyObject *file, int *fd, uint64_t *offset, uint64_t *length, bool *whole)
{
    unsigned long long from = 0, bytes = 0;
    PyObject *object = file;

    *whole = true;
    if (PyTuple_Check(file)) {
        if (!PyArg_ParseTuple(file, "O|KK", &object, &from, &bytes))
            return -1;
        *whole = PyTuple_Size(file) < 3;
    }
    *fd = PyObject_AsFileDescriptor(object);
    *offset = from;
    *length = bytes;
    return *fd < 0 ? -1 : hold(ref, object);
}

/* A number alone is no file: more likely a size, or something else in the wrong place. */
static int refuse_number(PyObject *object, const char *what)
{
    if (!PyLong_Check(object))
        return 0;
    PyErr_Format(
        PyExc_TypeError, "%s is %R; a file descriptor is given as (%R, offset%s), an open file as itself, item sizes by name, as item_bytes=",
        what, object, object, strcmp(what, "source") == 0 ? ", length" : "");
    return -1;
}

/* (file, ...) is a file; every other tuple and list is of arrays. */
static bool is_file(PyObject *object)
{
    PyObject *first;
    bool r;

    if (!PyTuple_Check(object))
        return PyObject_HasAttrString(object, "fileno");
    first = PyTuple_Size(object) > 0 ? PyTuple_GetItem(object, 0) : NULL; /* borrowed */
    r = first != NULL && (PyLong_Check(first) || PyObject_HasAttrString(first, "fileno"));
    return r;
}

static int file_length(PyObject *file, int fd, uint64_t offset, uint64_t *length)
{
    PyObject *os = PyImport_ImportModule("os");
    PyObject *stat = os == NULL ? NULL : PyObject_CallMethod(os, "fstat", "i", fd);
    PyObject *size = stat == NULL ? NULL : PyObject_GetAttrString(stat, "st_size");
    unsigned long long bytes = size == NULL ? 0 : PyLong_AsUnsignedLongLong(size);
    (void)file;

    Py_XDECREF(size);
    Py_XDECREF(stat);
    Py_XDECREF(os);
    if (PyErr_Occurred())
        return -1;
    *length = bytes > offset ? bytes - offset : 0;
    return 0;
}

int source_parse(struct pipeline_ref *ref, PyObject *source, side_source *to, size_t *largest)
{
    uint64_t offset, length;
    bool whole;
    int fd;

    if (refuse_number(source, "source") != 0)
        return -1;
    if (is_file(source)) {
        if (file_parse(ref, source, &fd, &offset, &length, &whole) != 0 ||
            (whole && file_length(source, fd, offset, &length) != 0))
            return -1;
        *to = side_source_file(fd, offset, length);
        return 0;
    }
    if (PyList_Check(source) || PyTuple_Check(source))
        return source_list(ref, source, to, largest);
    if (PyCallable_Check(source)) {
        ref->source = Py_NewRef(source);
        *to = side_source_callback(source_call, ref);
        return 0;
    }
    PyErr_SetString(PyExc_TypeError, "source must be a list of arrays, a callable, an open file or (file, offset, "
                                     "length); list(array) gives the rows of one");
    return -1;
}

int sink_parse(struct pipeline_ref *ref, PyObject *sink, side_sink *to, size_t *largest)
{
    uint64_t offset, length;
    bool whole;
    int fd;

    if (sink == Py_None)
        return 0;
    if (refuse_number(sink, "sink") != 0)
        return -1;
    if (is_file(sink)) {
        if (file_parse(ref, sink, &fd, &offset, &length, &whole) != 0)
            return -1;
        *to = side_sink_file(fd, offset);
        return 0;
    }
    if (PyList_Check(sink) || PyTuple_Check(sink))
        return sink_list(ref, sink, to, largest);
    if (PyCallable_Check(sink)) {
        ref->sink = Py_NewRef(sink);
        *to = side_sink_callback(sink_call, ref);
        return 0;
    }
    PyErr_SetString(PyExc_TypeError,
                    "sink must be a list of writable arrays, a callable, an open file or (file, offset)");
    return -1;
}
