/* SPDX-License-Identifier: MIT
 *
 * Sources that are callbacks: threads that call them, in the place of a reader. Slots wait in a list, in order. */
#include "load_private.h"

#include "alloc.h"
#include "error.h"
#include "os.h"
#include "pipeline.h"

struct load_source_pool {
    side_load *load;
    uint32_t count;
    pthread_mutex_t mutex; /* guards what follows; inner to the load's */
    pthread_cond_t work, idle;
    struct load_slot *first, **last;
    uint32_t live; /* slots that wait or are in a call */
    bool cancelled, ending;
    uint64_t busy_ns;
    pthread_t threads[READER_MOST_THREADS];
};

static side_status call(side_load *l, const struct reader_piece *p)
{
    side_error own;
    int got;

    error_clear();
    got = l->options.read(l->options.read_user, p->file, p->offset, p->buffer, p->bytes);
    if (got == 0)
        return SIDE_OK;
    error_copy(&own);
    return error_set(SIDE_CALLBACK, "side_load_read_fn",
                     "source %u ('%.60s'), %zu bytes at %llu: the callback returned %d%s%s", p->file,
                     l->plan.files[p->file].name != NULL ? l->plan.files[p->file].name : "", p->bytes,
                     (unsigned long long)p->offset, got, own.message[0] != '\0' ? ": " : "", own.message);
}

static void *source_thread(void *pool)
{
    struct load_source_pool *q = pool;

    pthread_mutex_lock(&q->mutex);
    for (;;) {
        while (q->first == NULL && !q->ending)
            pthread_cond_wait(&q->work, &q->mutex);
        if (q->first == NULL)
            break;
        struct load_slot *s = q->first;
        const bool cancelled = q->cancelled;
        q->first = s->next;
        if (q->first == NULL)
            q->last = &q->first;
        pthread_mutex_unlock(&q->mutex);

        const uint64_t begin = os_now_ns();
        s->read.data = s->read.buffer;
        s->read.status = cancelled ? error_set(SIDE_CANCELLED, "side_load", "cancelled") : call(q->load, &s->read);
        const uint64_t spent = os_now_ns() - begin;
        load_filled(s);
        pthread_mutex_lock(&q->mutex);
        q->busy_ns += spent;
        if (--q->live == 0)
            pthread_cond_broadcast(&q->idle);
    }
    pthread_mutex_unlock(&q->mutex);
    return NULL;
}

side_status load_sources_create(side_load *l)
{
    struct load_source_pool *q = mem_zalloc(1, sizeof(*q));
    uint32_t threads = l->ordered ? 1 : l->options.threads != 0 ? l->options.threads : side_default_threads();
    side_error kept;

    if (q == NULL)
        return SIDE_NO_MEMORY;
    q->load = l;
    q->last = &q->first;
    pthread_mutex_init(&q->mutex, NULL);
    os_cond_init(&q->work);
    os_cond_init(&q->idle);
    for (uint32_t i = 0; i < l->plan.file_count; i++)
        l->plan.files[i].number = i;
    error_copy(&kept);
    l->sources = q;
    for (; q->count < threads; q->count++) {
        side_status r = os_thread_create(&q->threads[q->count], "side-source", source_thread, q);
        if (r != SIDE_OK && q->count == 0)
            return r; /* destroy frees the pool */
        if (r != SIDE_OK) {
            error_restore(&kept); /* fewer will do */
            break;
        }
    }
    return SIDE_OK;
}

void load_sources_submit(side_load *l, struct load_slot *s)
{
    struct load_source_pool *q = l->sources;

    pthread_mutex_lock(&q->mutex);
    s->next = NULL;
    *q->last = s;
    q->last = &s->next;
    q->live++;
    pthread_cond_signal(&q->work);
    pthread_mutex_unlock(&q->mutex);
}

void load_sources_cancel(side_load *l)
{
    struct load_source_pool *q = l->sources;

    pthread_mutex_lock(&q->mutex);
    q->cancelled = true;
    pthread_mutex_unlock(&q->mutex);
}

side_status load_sources_drain(side_load *l, uint64_t deadline_ns)
{
    struct load_source_pool *q = l->sources;
    side_status r = SIDE_OK;

    pthread_mutex_lock(&q->mutex);
    while (q->live > 0 && r == SIDE_OK) {
        if (os_now_ns() >= deadline_ns)
            r = error_set(SIDE_STUCK, "side_load", "%u calls of options.read have not returned within %g s", q->live,
                          l->options.timeout_s);
        else
            os_cond_wait_until(&q->idle, &q->mutex, deadline_ns);
    }
    pthread_mutex_unlock(&q->mutex);
    return r;
}

void load_sources_finish(side_load *l)
{
    struct load_source_pool *q = l->sources;

    if (q == NULL)
        return;
    pthread_mutex_lock(&q->mutex);
    q->ending = true;
    pthread_cond_broadcast(&q->work);
    pthread_mutex_unlock(&q->mutex);
    for (uint32_t i = 0; i < q->count; i++)
        pthread_join(q->threads[i], NULL);
    pthread_cond_destroy(&q->work);
    pthread_cond_destroy(&q->idle);
    pthread_mutex_destroy(&q->mutex);
    l->reader_end.threads = q->count;
    l->reader_end.backend[READER_AUTO].busy_ns = q->busy_ns;
    mem_free(q);
    l->sources = NULL;
}

void load_sources_stats(const side_load *l, uint32_t *threads, uint64_t *busy_ns)
{
    struct load_source_pool *q = l->sources;

    pthread_mutex_lock(&q->mutex);
    *threads = q->count;
    *busy_ns = q->busy_ns;
    pthread_mutex_unlock(&q->mutex);
}
