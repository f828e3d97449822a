/* SPDX-License-Identifier: MIT */
#include "ops.h"

#include "alloc.h"
#include "error.h"
#include "ops_cast.h"

#include <stdint.h>
#include <string.h>

/* ---------------------------------------------------------------- names and sizes */

static const struct {
    const char *name;
    size_t bytes;
} types[] = {
    [SIDE_F32] = {"f32", 4}, [SIDE_F16] = {"f16", 2},       [SIDE_BF16] = {"bf16", 2},    [SIDE_U8] = {"u8", 1},
    [SIDE_F64] = {"f64", 8}, [SIDE_F8E4M3] = {"f8e4m3", 1}, [SIDE_F8E5M2] = {"f8e5m2", 1}};

static const char *const op_names[SIDE_OP_COUNT] = {[SIDE_OP_MATMUL] = "matmul",
                                                    [SIDE_OP_CAST] = "cast",
                                                    [SIDE_OP_XXH3_BLOCKS] = "xxh3_blocks",
                                                    [SIDE_OP_AFFINE] = "affine",
                                                    [SIDE_OP_SPIN] = "spin"};
static const char *const math_names[] = {[SIDE_MATH_FP32] = "fp32", [SIDE_MATH_TF32] = "tf32", [SIDE_MATH_BF16] = "bf16"};

static bool type_known(side_type type)
{
    return (unsigned)type < sizeof(types) / sizeof(types[0]);
}

size_t side_type_bytes(side_type type)
{
    return type_known(type) ? types[type].bytes : 0;
}

const char *side_type_name(side_type type)
{
    return type_known(type) ? types[type].name : "unknown type";
}

const char *side_op_name(side_op_id id)
{
    return (unsigned)id < SIDE_OP_COUNT ? op_names[id] : "unknown op";
}

/* *product = count * bytes */
static side_status bytes_of(const side_op *op, uint64_t rows, uint64_t columns, size_t bytes, size_t *product)
{
    if (__builtin_mul_overflow(rows, columns, &rows) || __builtin_mul_overflow(rows, bytes, product) ||
        *product > PTRDIFF_MAX)
        return error_set(SIDE_TOO_LARGE, "side_op_bytes", "%s: %llu x %llu elements do not fit the address space",
                         side_op_name(op->id), (unsigned long long)rows, (unsigned long long)columns);
    return SIDE_OK;
}

static side_status matmul_bytes(const side_op *op, size_t in[2], size_t *out)
{
    const uint64_t m = op->dim[0], n = op->dim[1], k = op->dim[2];
    const bool bf16 = op->math == SIDE_MATH_BF16;
    side_status status;

    if ((unsigned)op->math >= sizeof(math_names) / sizeof(math_names[0]))
        return error_set(SIDE_INVALID, "side_op_bytes", "matmul: unknown math %d", (int)op->math);
    if (op->type[0] != (bf16 ? SIDE_BF16 : SIDE_F32) || (op->type[1] != SIDE_F32 && !(bf16 && op->type[1] == SIDE_BF16)))
        return error_set(SIDE_INVALID, "side_op_bytes", "matmul: math %s goes with %s, not with %s -> %s",
                         math_names[op->math], bf16 ? "bf16 -> bf16 or f32" : "f32 -> f32", side_type_name(op->type[0]),
                         side_type_name(op->type[1]));
    for (int i = 0; i < 3; i++) {
        if (op->dim[i] == 0)
            return error_set(SIDE_INVALID, "side_op_bytes", "matmul: dim[%d] is 0", i);
        if (op->dim[i] > OPS_DIM_MAX)
            return error_set(SIDE_TOO_LARGE, "side_op_bytes", "matmul: dim[%d] is %llu, at most %llu", i,
                             (unsigned long long)op->dim[i], OPS_DIM_MAX);
    }
    status = bytes_of(op, m, k, side_type_bytes(op->type[0]), &in[0]);
    if (status == SIDE_OK)
        status = bytes_of(op, k, n, side_type_bytes(op->type[0]), &in[1]);
    if (status == SIDE_OK)
        status = bytes_of(op, m, n, side_type_bytes(op->type[1]), out);
    return status;
}

static side_status cast_bytes(const side_op *op, size_t in[2], size_t *out)
{
    side_status status;

    for (int i = 0; i < 2; i++)
        if (!type_known(op->type[i]) || op->type[i] == SIDE_U8)
            return error_set(SIDE_INVALID, "side_op_bytes",
                             "cast: type[%d] is %s; f64, f32, f16, bf16, f8e4m3 and f8e5m2 can be cast", i,
                             side_type_name(op->type[i]));
    if (op->type[1] == SIDE_F64 && op->type[0] != SIDE_F64)
        return error_set(SIDE_INVALID, "side_op_bytes", "cast: %s -> f64; nothing is cast to f64",
                         side_type_name(op->type[0]));
    status = bytes_of(op, op->dim[0], 1, side_type_bytes(op->type[0]), &in[0]);
    if (status == SIDE_OK)
        status = bytes_of(op, op->dim[0], 1, side_type_bytes(op->type[1]), out);
    return status;
}

static side_status affine_bytes(const side_op *op, size_t in[2], size_t *out)
{
    side_status status;

    if (op->type[0] != SIDE_F32 || op->type[1] != SIDE_F32)
        return error_set(SIDE_INVALID, "side_op_bytes", "affine: f32 -> f32 only, not %s -> %s",
                         side_type_name(op->type[0]), side_type_name(op->type[1]));
    status = bytes_of(op, op->dim[0], 1, sizeof(float), &in[0]);
    *out = in[0];
    return status;
}

side_status ops_bytes(const side_op *op, size_t in_bytes[2], size_t *out_bytes)
{
    size_t in[2] = {0, 0}, out = 0;
    side_status status = SIDE_OK;

    switch (op->id) {
    case SIDE_OP_MATMUL: status = matmul_bytes(op, in, &out); break;
    case SIDE_OP_CAST: status = cast_bytes(op, in, &out); break;
    case SIDE_OP_AFFINE: status = affine_bytes(op, in, &out); break;
    case SIDE_OP_XXH3_BLOCKS:
        status = bytes_of(op, op->dim[0], 1024, 1, &in[0]);
        out = in[0] / 1024 * 64;
        break;
    case SIDE_OP_SPIN:
        if (op->dim[0] > OPS_SPIN_MAX_NS)
            status = error_set(SIDE_TOO_LARGE, "side_op_bytes", "spin: %llu ns, at most %llu",
                               (unsigned long long)op->dim[0], OPS_SPIN_MAX_NS);
        break;
    case SIDE_OP_COUNT:
    default: status = error_set(SIDE_INVALID, "side_op_bytes", "unknown op id %d", (int)op->id); break;
    }
    if (status != SIDE_OK)
        return status;
    in_bytes[0] = in[0];
    in_bytes[1] = in[1];
    *out_bytes = out;
    return SIDE_OK;
}

static bool overlap(const void *a, size_t a_bytes, const void *b, size_t b_bytes)
{
    return (uintptr_t)a < (uintptr_t)b + b_bytes && (uintptr_t)b < (uintptr_t)a + a_bytes;
}

side_status ops_check(const side_op *op, size_t align)
{
    size_t in_bytes[2], out_bytes;
    side_status status = ops_bytes(op, in_bytes, &out_bytes);

    if (status != SIDE_OK)
        return status;
    const bool hash = op->id == SIDE_OP_XXH3_BLOCKS;
    const size_t in_align = align != 0 ? align : hash ? 1 : side_type_bytes(op->type[0]);
    const size_t out_align = align != 0 ? align : hash ? 8 : side_type_bytes(op->type[1]);
    for (int i = 0; i < 2; i++) {
        if (in_bytes[i] == 0)
            continue;
        if (op->in[i] == NULL || (uintptr_t)op->in[i] % in_align != 0)
            return error_set(SIDE_INVALID, "side_op", "%s: in[%d] is %s", side_op_name(op->id), i,
                             op->in[i] == NULL ? "NULL" : "not aligned");
        if (op->id == SIDE_OP_AFFINE && op->in[i] == op->out)
            continue;
        if (overlap(op->in[i], in_bytes[i], op->out, out_bytes))
            return error_set(SIDE_INVALID, "side_op", "%s: out overlaps in[%d]", side_op_name(op->id), i);
    }
    if (out_bytes != 0 && (op->out == NULL || (uintptr_t)op->out % out_align != 0))
        return error_set(SIDE_INVALID, "side_op", "%s: out is %s", side_op_name(op->id),
                         op->out == NULL ? "NULL" : "not aligned");
    return SIDE_OK;
}

static void affine(const side_op *op)
{
    const unsigned char *in = op->in[0];
    unsigned char *out = op->out;

    for (uint64_t i = 0; i < op->dim[0]; i++) {
        float x;
        memcpy(&x, in + i * sizeof(x), sizeof(x));
        x = op->scale * x + op->bias;
        memcpy(out + i * sizeof(x), &x, sizeof(x));
    }
}

/* ---------------------------------------------------------------- matmul
 * Blocks of both inputs are packed as float into panels that fit the cache, padded with zeros, and multiplied by a 4 x 8 kernel in registers.
 * Every sum runs over k upwards in float, as the plain triple loop does: the same bits on every machine. */

#define MR 4
#define NR 8
#define MC 64
#define NC 256
#define KC 256

typedef float v4 __attribute__((vector_size(16)));

struct matmul_room {
    float a[MC * KC]; /* panels of MR rows: [panel][k][MR] */
    float b[KC * NC]; /* panels of NR columns: [panel][k][NR] */
    float c[MC * NC];
};

/* One element as the float that is multiplied; tf32 has 10 bits after the point (nearest, ties away, as the hardware's cvt.rna does). */
static inline float element(const unsigned char *p, size_t i, const side_op *op)
{
    uint32_t u;
    float x;

    if (op->type[0] == SIDE_BF16) {
        uint16_t h;
        memcpy(&h, p + 2 * i, sizeof(h));
        u = cast_bf16_to_f32(h);
    } else {
        memcpy(&u, p + 4 * i, sizeof(u));
        if (op->math == SIDE_MATH_TF32 && (u & 0x7f800000u) != 0x7f800000u)
            u = (u + 0x1000u) & ~0x1fffu;
    }
    memcpy(&x, &u, sizeof(x));
    return x;
}

/* rows x columns at (row, column) of a matrix of `stride` columns into panels of `width` rows (by_rows) or columns. */
static void pack_a(float *to, const side_op *op, size_t row, size_t column, size_t rows, size_t columns)
{
    const size_t stride = (size_t)op->dim[2];

    for (size_t panel = 0; panel < rows; panel += MR, to += MR * columns)
        for (size_t r = 0; r < MR; r++)
            for (size_t k = 0; k < columns; k++)
                to[k * MR + r] = panel + r < rows ? element(op->in[0], (row + panel + r) * stride + column + k, op) : 0;
}

static void pack_b(float *to, const side_op *op, size_t row, size_t column, size_t rows, size_t columns)
{
    const size_t stride = (size_t)op->dim[1];

    for (size_t panel = 0; panel < columns; panel += NR, to += NR * rows)
        for (size_t k = 0; k < rows; k++)
            for (size_t c = 0; c < NR; c++)
                to[k * NR + c] = panel + c < columns ? element(op->in[1], (row + k) * stride + column + panel + c, op)
                                                     : 0;
}

/* c[MR][NC..] += panel of a times panel of b */
static void kernel(float *c, const float *a, const float *b, size_t depth)
{
    v4 sum[MR][2];

    for (size_t r = 0; r < MR; r++)
        memcpy(sum[r], c + r * NC, sizeof(sum[r]));
    for (size_t k = 0; k < depth; k++, a += MR, b += NR) {
        v4 b0, b1;
        memcpy(&b0, b, sizeof(b0));
        memcpy(&b1, b + 4, sizeof(b1));
        for (size_t r = 0; r < MR; r++) {
            const v4 x = {a[r], a[r], a[r], a[r]};
            sum[r][0] += x * b0;
            sum[r][1] += x * b1;
        }
    }
    for (size_t r = 0; r < MR; r++)
        memcpy(c + r * NC, sum[r], sizeof(sum[r]));
}

static void store(const side_op *op, const float *c, size_t row, size_t column, size_t rows, size_t columns)
{
    const size_t width = side_type_bytes(op->type[1]);

    for (size_t r = 0; r < rows; r++) {
        unsigned char *to = (unsigned char *)op->out + ((row + r) * (size_t)op->dim[1] + column) * width;
        if (op->type[1] == SIDE_F32)
            memcpy(to, c + r * NC, columns * width);
        else
            ops_cast(to, c + r * NC, columns, SIDE_F32, SIDE_BF16);
    }
}

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

static side_status matmul(const side_op *op)
{
    const size_t m = (size_t)op->dim[0], n = (size_t)op->dim[1], k = (size_t)op->dim[2];
    struct matmul_room *room = mem_zalloc(1, sizeof(*room));

    if (room == NULL)
        return SIDE_NO_MEMORY;
    for (size_t j = 0; j < n; j += NC)
        for (size_t i = 0; i < m; i += MC) {
            const size_t rows = least(MC, m - i), columns = least(NC, n - j);
            memset(room->c, 0, sizeof(room->c));
            for (size_t p = 0; p < k; p += KC) {
                const size_t depth = least(KC, k - p);
                pack_a(room->a, op, i, p, rows, depth);
                pack_b(room->b, op, p, j, depth, columns);
                for (size_t c = 0; c < columns; c += NR)
                    for (size_t r = 0; r < rows; r += MR)
                        kernel(room->c + r * NC + c, room->a + r * depth, room->b + c * depth, depth);
            }
            store(op, room->c, i, j, rows, columns);
        }
    mem_free(room);
    return SIDE_OK;
}

/* ---------------------------------------------------------------- run */

side_status ops_run_host(const side_op *op)
{
    side_status status = ops_check(op, 0);

    if (status != SIDE_OK)
        return status;
    switch (op->id) {
    case SIDE_OP_MATMUL: return matmul(op);
    case SIDE_OP_CAST:
        if (op->dim[0] != 0)
            ops_cast(op->out, op->in[0], (size_t)op->dim[0], op->type[0], op->type[1]);
        break;
    case SIDE_OP_XXH3_BLOCKS: xxh3_block_sums(op->out, op->in[0], (size_t)op->dim[0]); break;
    case SIDE_OP_AFFINE: affine(op); break;
    case SIDE_OP_SPIN:
    case SIDE_OP_COUNT: break;
    }
    return SIDE_OK;
}

static side_status op_take(side_op *op, const side_op *from, const char *where)
{
    if (from == NULL)
        return error_set(SIDE_INVALID, where, "op is NULL");
    return options_copy(op, sizeof(*op), from, sizeof(*op), where);
}

side_status side_op_bytes(const side_op *op, size_t in_bytes[2], size_t *out_bytes)
{
    side_op o = SIDE_OP_INIT;
    side_status status = op_take(&o, op, "side_op_bytes");

    if (status == SIDE_OK && (in_bytes == NULL || out_bytes == NULL))
        return error_set(SIDE_INVALID, "side_op_bytes", "in_bytes or out_bytes is NULL");
    return status == SIDE_OK ? ops_bytes(&o, in_bytes, out_bytes) : status;
}

side_status side_op_host(const side_op *op)
{
    side_op o = SIDE_OP_INIT;
    side_status status = op_take(&o, op, "side_op_host");

    return status == SIDE_OK ? ops_run_host(&o) : status;
}
