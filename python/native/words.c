/* SPDX-License-Identifier: MIT
 *
 * The library speaks C; what reaches Python speaks Python. Texts are translated in this one place: names of calls, of statuses and of options, and NULL.
 *
 *     "call side_pipeline_done for it first"  ->  "call Pipeline.done for it first"
 *     "options.compute is NULL"               ->  "compute is None" */
#include "native.h"

#include <stdio.h>

/* Whole phrases and words that no rule makes; the first that fits counts, so longer ones come first. */
static const char *const phrases[][2] = {
    {"pass NULL for a new one", "pass 0 for a new one"},
    {"side_copy_async", "Stream.copy"},
    {"side_memset_async", "Stream.fill"},
    {"side_op_async", "Stream"},
    {"side_op_bytes", "Stream"},
    {"side_op", "Stream"},
    {"side_stream_sync", "Stream.synchronize"},
    {"side_slots_poison", "Slots.cancel"},
    {"side_slots_publish", "Slot.publish"},
    {"side_slots_abandon", "Slot.abandon"},
    {"side_slots_release", "Slot.release"},
    {"side_slots_give_back", "Slot.give_back"},
    {"side_device_list", "list_devices"},
    {"side_memory_get_kind", "Buffer.kind"},
    {"side_memory_pin", "pin"},
    {"side_memory_unpin", "unpin"},
    {"timeout_s", "timeout"},
    {"NULL", "None"},
};

static const char *const nouns[][2] = {
    {"pipeline", "Pipeline"}, {"slots", "Slots"}, {"feeder", "Feeder"},   {"device", "Device"},
    {"stream", "Stream"},     {"event", "Event"}, {"pool", "PinnedPool"}, {"log", "Log"},
};

enum { PHRASES = sizeof(phrases) / sizeof(phrases[0]), NOUNS = sizeof(nouns) / sizeof(nouns[0]) };

static bool is_word(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}

static size_t word_length(const char *text)
{
    size_t n = 0;

    while (is_word(text[n]))
        n++;
    return n;
}

/* A method's name from what follows the noun: a time limit and a "try" are arguments here, what is got is an attribute, what is made is the class. */
static int method(const char *noun, const char *verb, size_t length, char *to, size_t room)
{
    if (length > 4 && memcmp(verb + length - 4, "_for", 4) == 0)
        length -= 4;
    if (length > 4 && (memcmp(verb, "try_", 4) == 0 || memcmp(verb, "get_", 4) == 0)) {
        verb += 4;
        length -= 4;
    }
    if (length == 0 || (length == 6 && memcmp(verb, "create", 6) == 0) || (length == 4 && memcmp(verb, "open", 4) == 0))
        return snprintf(to, room, "%s", noun);
    if (length == 7 && memcmp(verb, "destroy", 7) == 0)
        return snprintf(to, room, "%s.close", noun);
    return snprintf(to, room, "%s.%.*s", noun, (int)length, verb);
}

/* side_<noun>_<verb>, and SIDE_<STATUS>. Returns what snprintf does; -1: neither. */
static int translate(const char *word, size_t length, char *to, size_t room)
{
    for (size_t i = 0; i < NOUNS && length > 5 && memcmp(word, "side_", 5) == 0; i++) {
        size_t n = strlen(nouns[i][0]), from = 5 + n;
        if (length < from || memcmp(word + 5, nouns[i][0], n) != 0 || (length > from && word[from] != '_'))
            continue;
        from += length > from;
        return method(nouns[i][1], word + from, length - from, to, room);
    }
    if (length > 5 && memcmp(word, "SIDE_", 5) == 0) {
        const char *name = native_exception_name(word, length);
        return name == NULL ? -1 : snprintf(to, room, "%s", name);
    }
    return -1;
}

/* At the start of a word: how many characters of it were translated; 0: none. */
static size_t take(const char *text, char *to, size_t room, size_t *written)
{
    size_t length = word_length(text);
    int n = -1;

    for (size_t i = 0; i < PHRASES; i++) {
        size_t size = strlen(phrases[i][0]);
        if (strncmp(text, phrases[i][0], size) != 0 || is_word(text[size]))
            continue;
        *written = (size_t)snprintf(to, room, "%s", phrases[i][1]);
        return size;
    }
    if (strncmp(text, "options.", 8) == 0 && is_word(text[8])) {
        *written = 0;
        return 8;
    }
    n = translate(text, length, to, room);
    *written = n < 0 ? 0 : (size_t)n;
    return n < 0 ? 0 : length;
}

void native_words(char *to, size_t room, const char *text)
{
    size_t at = 0;
    bool quoted = false; /* the caller's own words */

    while (*text != 0 && at + 1 < room) {
        size_t written = 0, taken;
        quoted ^= *text == '"';
        taken = quoted ? 0 : take(text, to + at, room - at, &written);
        if (taken > 0) {
            text += taken;
            at += written < room - at ? written : room - at - 1;
            continue;
        }
        do /* a word, or a character between words */
            to[at++] = *text++;
        while (at + 1 < room && is_word(text[-1]) && is_word(*text));
    }
    to[at] = 0;
}

/* ---------------------------------------------------------------- tests */

static PyObject *test_words(PyObject *module, PyObject *text)
{
    char words[400];
    PyObject *bytes = PyUnicode_AsUTF8String(text);
    (void)module;

    if (bytes == NULL)
        return NULL;
    native_words(words, sizeof(words), PyBytes_AsString(bytes));
    Py_DECREF(bytes);
    return PyUnicode_DecodeUTF8(words, (Py_ssize_t)strlen(words), "replace");
}

static PyMethodDef functions[] = {
    {"_test_words", test_words, METH_O,
     "_test_words($module, text, /)\n--\n\nFor tests: a text of the library's as Python gets it."},
    {NULL, NULL, 0, NULL},
};

int words_add(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
