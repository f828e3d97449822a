/* SPDX-License-Identifier: MIT */
#include "cuda_impl.h"

#include "error.h"

side_status cuda_copy_blocks(dev_stream *stream, side_copy_kind kind, const side_piece *pieces, size_t count,
                             side_path path)
{
    side_status status;

    if (path != SIDE_PATH_LOOP && path != SIDE_PATH_BATCH)
        return error_set(SIDE_UNSUPPORTED, "side_copy_blocks", "path %s: not on a GPU", side_path_name(path));
    status = cuda_enter(stream->context);
    if (status != SIDE_OK)
        return status;
    status = cuda_copy_queue(stream, kind, pieces, count, path);
    cuda_leave(stream->context);
    return status;
}
