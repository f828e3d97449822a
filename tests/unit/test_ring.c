/* SPDX-License-Identifier: MIT
 * Our declarations of io_uring are the kernel's. */
#include "ring.h"
#include "t.h"

#if defined(__has_include)
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#define HAVE_HEADER 1
#endif
#endif

T_TEST(same_as_the_kernel)
{
#ifdef HAVE_HEADER
    assert_int_equal(sizeof(struct ring_sqe), sizeof(struct io_uring_sqe));
    assert_int_equal(offsetof(struct ring_sqe, fd), offsetof(struct io_uring_sqe, fd));
    assert_int_equal(offsetof(struct ring_sqe, offset), offsetof(struct io_uring_sqe, off));
    assert_int_equal(offsetof(struct ring_sqe, address), offsetof(struct io_uring_sqe, addr));
    assert_int_equal(offsetof(struct ring_sqe, bytes), offsetof(struct io_uring_sqe, len));
    assert_int_equal(offsetof(struct ring_sqe, user), offsetof(struct io_uring_sqe, user_data));
    assert_int_equal(offsetof(struct ring_sqe, buffer), offsetof(struct io_uring_sqe, buf_index));
    assert_int_equal(offsetof(struct ring_cqe, result), offsetof(struct io_uring_cqe, res));
    assert_int_equal(sizeof(struct ring_table_make), sizeof(struct io_uring_rsrc_register));
    assert_int_equal(offsetof(struct ring_table_make, flags), offsetof(struct io_uring_rsrc_register, flags));
    assert_int_equal(sizeof(struct ring_table_update), sizeof(struct io_uring_rsrc_update2));
    assert_int_equal(offsetof(struct ring_table_update, data), offsetof(struct io_uring_rsrc_update2, data));
    assert_int_equal(offsetof(struct ring_table_update, count), offsetof(struct io_uring_rsrc_update2, nr));
    assert_int_equal(RING_TABLE, IORING_REGISTER_BUFFERS2);
    assert_int_equal(RING_TABLE_UPDATE, IORING_REGISTER_BUFFERS_UPDATE);
    assert_int_equal(RING_TABLE_SPARSE, IORING_RSRC_REGISTER_SPARSE);
    assert_int_equal(RING_BUFFERS, IORING_REGISTER_BUFFERS);
    assert_int_equal(RING_PROBE, IORING_REGISTER_PROBE);
    assert_int_equal(RING_NOP, IORING_OP_NOP);
    assert_int_equal(RING_READ, IORING_OP_READ);
    assert_int_equal(RING_READ_FIXED, IORING_OP_READ_FIXED);
#else
    T_SKIP("no linux/io_uring.h here");
#endif
}

/* The queue as a queue: full, taken back, submitted, reaped, round and round. */
T_TEST(turns)
{
    struct ring ring;
    struct ring_cqe cqe;
    const char *what;
    int r = ring_open(&ring, 4, &what);

    if (r != 0)
        T_SKIP("%s: %s", what, strerror(-r));
    for (uint64_t turn = 0; turn < 20; turn++) {
        for (uint64_t i = 0; i < 4; i++) {
            struct ring_sqe *sqe = ring_next(&ring);
            assert_non_null(sqe);
            sqe->user = turn * 4 + i;
        }
        assert_null(ring_next(&ring));
        assert_int_equal(ring_unsubmitted(&ring), 4);
        assert_int_equal(ring_take_back(&ring), turn * 4 + 3);
        assert_int_equal(ring_enter(&ring, 3), 0);
        assert_int_equal(ring_unsubmitted(&ring), 0);
        for (uint64_t i = 0; i < 3; i++) {
            assert_true(ring_reap(&ring, &cqe));
            assert_int_equal(cqe.user, turn * 4 + i);
            assert_int_equal(cqe.result, 0);
        }
        assert_false(ring_reap(&ring, &cqe));
    }
    ring_close(&ring);
}

T_MAIN(T(same_as_the_kernel), T(turns))
