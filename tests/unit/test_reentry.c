/* SPDX-License-Identifier: MIT
 *
 * Callbacks that call back, and loops that ask once too often. */
#include "pipe_help.h"

#include "error.h"
#include "os.h"

#include <pthread.h>

static side_pipeline *entered;

static int reenter(void *user, side_stream *stream, side_item *item)
{
    side_item other;
    int *calls = user;

    (*calls)++;
    item->result_bytes = 0;
    T_STATUS(side_pipeline_run(entered, NULL), SIDE_STATE);
    T_STATUS(side_pipeline_next(entered, stream, &other), SIDE_STATE);
    T_STATUS(side_pipeline_rewind(entered), SIDE_STATE);
    T_STATUS(side_pipeline_destroy(entered), SIDE_STATE);
    return 0;
}

T_TEST(callbacks_do_not_reenter)
{
    side_device *dev = rig_device("", 1);
    side_block blocks[3];
    side_pipeline_options o = SIDE_PIPELINE_OPTIONS_INIT;
    int calls = 0;

    for (int i = 0; i < 3; i++)
        blocks[i] = (side_block){malloc(64), 64};
    o.item_bytes = 64;
    o.source = side_source_blocks(blocks, 3);
    o.compute = reenter;
    o.compute_user = &calls;
    T_OK(side_pipeline_create(dev, &o, &entered));
    T_OK(side_pipeline_run(entered, NULL));
    T_OK(side_pipeline_run(entered, NULL)); /* nothing of it stuck */
    assert_int_equal(calls, 6);
    T_OK(side_pipeline_destroy(entered));
    for (int i = 0; i < 3; i++)
        free(blocks[i].data);
    rig_close(dev);
}

/* All items of the end are held: there is nothing to wait for, so the answer is END, and the pass ends once they are done. */
T_TEST(the_end_while_all_is_held)
{
    side_device *dev = rig_device("", 1);
    side_block blocks[2];
    side_pipeline_options o = SIDE_PIPELINE_OPTIONS_INIT;
    side_pipeline_stats stats;
    side_pipeline *p;
    side_stream *stream;
    side_item a, b, none;

    for (int i = 0; i < 2; i++)
        blocks[i] = (side_block){malloc(64), 64};
    o.item_bytes = 64;
    o.depth = 2;
    o.source = side_source_blocks(blocks, 2);
    T_OK(side_pipeline_create(dev, &o, &p));
    T_OK(side_stream_create(dev, &stream));
    for (int pass = 0; pass < 2; pass++) {
        T_OK(side_pipeline_next(p, stream, &a));
        T_OK(side_pipeline_next(p, stream, &b));
        T_STATUS(side_pipeline_next(p, stream, &none), SIDE_END);
        T_OK(side_pipeline_done(p, &b, stream));
        T_OK(side_pipeline_done(p, &a, stream));
        T_STATUS(side_pipeline_next(p, stream, &none), SIDE_END);
    }
    T_OK(side_pipeline_next(p, stream, &a)); /* a pull that is cancelled has statistics, too */
    T_OK(side_pipeline_done(p, &a, stream));
    side_pipeline_cancel(p);
    T_STATUS(side_pipeline_next(p, stream, &a), SIDE_CANCELLED);
    T_OK(side_pipeline_get_stats(p, &stats));
    assert_int_equal(stats.items, 1);
    assert_true(stats.bytes_in >= 64);
    T_OK(side_pipeline_destroy(p));
    side_stream_destroy(stream);
    for (int i = 0; i < 2; i++)
        free(blocks[i].data);
    rig_close(dev);
}

/* A callback that waits for a lock of the caller's (an interpreter's, say) must not stop a thread that holds it from logging. */
static pthread_mutex_t interpreter = PTHREAD_MUTEX_INITIALIZER;
static atomic_int waiting;

static void log_under_lock(void *user, side_level level, const char *component, const char *message)
{
    (void)level;
    (void)component;
    (void)message;
    if (pthread_equal(*(pthread_t *)user, pthread_self()))
        return;
    atomic_store(&waiting, 1);
    pthread_mutex_lock(&interpreter);
    pthread_mutex_unlock(&interpreter);
}

static void *log_from_another(void *arg)
{
    (void)arg;
    log_message(SIDE_LEVEL_WARN, "test", "from the other thread");
    return NULL;
}

T_TEST(a_callback_that_waits_stops_nobody_else)
{
    pthread_t self = pthread_self(), other;

    side_log_callback(log_under_lock, &self, SIDE_LEVEL_WARN);
    pthread_mutex_lock(&interpreter);
    assert_int_equal(pthread_create(&other, NULL, log_from_another, NULL), 0);
    while (atomic_load(&waiting) == 0)
        os_sleep_ns(100000);
    log_message(SIDE_LEVEL_WARN, "test", "from the thread that holds the lock");
    pthread_mutex_unlock(&interpreter);
    pthread_join(other, NULL);
    side_log_callback(NULL, NULL, SIDE_LEVEL_WARN);
}

T_MAIN(T(callbacks_do_not_reenter), T(the_end_while_all_is_held), T(a_callback_that_waits_stops_nobody_else))
