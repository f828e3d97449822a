/* SPDX-License-Identifier: MIT
 *
 * Kernels of the named ops. Compiled by nvcc where there is one, else by NVRTC on the user's machine: includes nothing. Integer code where bits
 * matter, because the results are those of the host twins (src/base/ops.c) bit for bit. Pointers are 16-byte aligned. Grids are of any size:
 * each kernel strides over its work.
 */
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

/* ---- casts: nearest even; NaN keeps sign and top of payload, and gets quiet; in the two f8 it is 0x7f and the sign. Every way to f32 but that from f64 is
 * exact, so there is one rounding. src/base/ops_cast.h has the same */

/* A format that keeps `kept` bits after the point and whose least exponent is that of float's biased `least`. Rounds what is below the largest value.
 * a: without its sign. */
__device__ __forceinline__ static u32 cast_round(u32 a, u32 kept, u32 least)
{
    const u32 drop = 23u - kept;
    /* from the least exponent up: rounding carries into the exponent, also into that of infinity */
    const u32 normal = (a - ((least - 1u) << 23) + (1u << (drop - 1u)) - 1u + (a >> drop & 1u)) >> drop;
    /* below more bits go; with 25 nothing is left */
    const u32 less = drop + least - (a >> 23), shift = less > 25u ? 25u : less < drop + 1u ? drop + 1u : less;
    const u32 m = (a & 0x7fffffu) | 0x800000u, low = (m + (1u << (shift - 1)) - 1u + (m >> shift & 1u)) >> shift;

    return a < least << 23 ? low : normal;
}

__device__ static u16 f32_to_f16(u32 u)
{
    const u32 sign = u >> 16 & 0x8000u, a = u & 0x7fffffffu, nan = 0x7e00u | (a >> 13 & 0x3ffu);

    return (u16)(sign | (a > 0x7f800000u ? nan : a >= 0x47800000u ? 0x7c00u : cast_round(a, 10, 113)));
}

__device__ static u16 f32_to_bf16(u32 u)
{
    const u32 rounded = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
    return (u16)((u & 0x7fffffffu) > 0x7f800000u ? u >> 16 | 0x40u : rounded);
}

__device__ static u8 f32_to_f8e4m3(u32 u)
{
    const u32 sign = u >> 24 & 0x80u, a = u & 0x7fffffffu;

    return (u8)(sign | (a > 0x7f800000u ? 0x7fu : a >= 0x43e00000u ? 0x7eu : cast_round(a, 3, 121)));
}

__device__ static u8 f32_to_f8e5m2(u32 u)
{
    const u32 sign = u >> 24 & 0x80u, a = u & 0x7fffffffu;

    return (u8)(sign | (a > 0x7f800000u ? 0x7fu : a >= 0x47800000u ? 0x7cu : cast_round(a, 2, 113)));
}

__device__ static u32 f32_to_f32(u32 u)
{
    return u;
}

__device__ static u32 f16_to_f32(u16 h)
{
    const u32 sign = (u32)(h & 0x8000u) << 16, a = h & 0x7fffu;

    if (a >= 0x7c00u)
        return sign | 0x7f800000u | (a & 0x3ffu) << 13 | (a > 0x7c00u ? 0x400000u : 0u);
    if (a >= 0x400u)
        return sign | ((a << 13) + 0x38000000u);
    if (a == 0)
        return sign;
    const u32 up = (u32)__clz((int)a) - 21u;
    return sign | (113u - up) << 23 | (a << (up + 13) & 0x7fffffu);
}

__device__ static u32 bf16_to_f32(u16 h)
{
    const u32 u = (u32)h << 16;
    return (h & 0x7fffu) > 0x7f80u ? u | 0x400000u : u;
}

__device__ static u32 f8e4m3_to_f32(u8 h)
{
    const u32 sign = (u32)(h & 0x80u) << 24, a = h & 0x7fu;

    if (a == 0x7fu)
        return sign | 0x7ff00000u;
    if (a >= 8u)
        return sign | ((a << 20) + 0x3c000000u);
    if (a == 0)
        return sign;
    const u32 up = (u32)__clz((int)a) - 28u;
    return sign | (121u - up) << 23 | (a << (up + 20) & 0x7fffffu);
}

__device__ static u32 f8e5m2_to_f32(u8 h)
{
    return f16_to_f32((u16)((u32)h << 8));
}

/* Rounds; what follows rounds again, as PyTorch does. */
__device__ static u32 f64_to_f32(u64 u)
{
    const u32 sign = (u32)(u >> 32) & 0x80000000u;
    const u64 a = u & 0x7fffffffffffffffull;
    const u64 normal = (a - 0x3800000000000000ull + 0xfffffffull + (a >> 29 & 1u)) >> 29;
    const u64 less = 926u - (a >> 52), shift = less > 54u ? 54u : less < 30u ? 30u : less;
    const u64 m = (a & 0xfffffffffffffull) | 0x10000000000000ull;
    const u64 low = (m + (1ull << (shift - 1)) - 1u + (m >> shift & 1u)) >> shift;
    const u32 finite = (u32)(a < 0x3810000000000000ull ? low : normal), nan = 0x7fc00000u | (u32)(a >> 29 & 0x3fffffu);

    return sign | (a > 0x7ff0000000000000ull ? nan : a >= 0x47f0000000000000ull ? 0x7f800000u : finite);
}

/* Four elements: 16 or 8 bytes, one access a side. */
template <class T> struct alignas(4 * sizeof(T)) four {
    T x[4];
};

template <class To, class From, u32 (*widen)(From), To (*narrow)(u32)>
__device__ static void cast_all(To *out, const From *in, u64 n)
{
    typedef four<From> from4;
    typedef four<To> to4;
    const u64 quads = n / 4, step = (u64)gridDim.x * blockDim.x, first = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    u64 i = first;

    for (; i + 3 * step < quads; i += 4 * step) { /* four loads in flight */
        from4 a[4];
#pragma unroll
        for (int k = 0; k < 4; k++)
            a[k] = ((const from4 *)in)[i + k * step];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            to4 b;
#pragma unroll
            for (int j = 0; j < 4; j++)
                b.x[j] = narrow(widen(a[k].x[j]));
            ((to4 *)out)[i + k * step] = b;
        }
    }
    for (; i < quads; i += step) {
        const from4 a = ((const from4 *)in)[i];
        to4 b;
#pragma unroll
        for (int j = 0; j < 4; j++)
            b.x[j] = narrow(widen(a.x[j]));
        ((to4 *)out)[i] = b;
    }
    if (first < n % 4)
        out[4 * quads + first] = narrow(widen(in[4 * quads + first]));
}

#define CAST_KERNEL(from, From, to, To)                                                                       \
    extern "C" __global__ void __launch_bounds__(256) side_cast_##from##_##to(To *out, const From *in, u64 n) \
    {                                                                                                         \
        cast_all<To, From, from##_to_f32, f32_to_##to>(out, in, n);                                           \
    }
CAST_KERNEL(f32, u32, f16, u16)
CAST_KERNEL(f32, u32, bf16, u16)
CAST_KERNEL(f16, u16, f32, u32)
CAST_KERNEL(f16, u16, bf16, u16)
CAST_KERNEL(bf16, u16, f32, u32)
CAST_KERNEL(bf16, u16, f16, u16)

/* All the others, in one kernel, an element a thread: many times as fast as what comes over the link. The types are those of side_type. */

__device__ static u32 widen(const void *in, u64 i, u32 from)
{
    switch (from) {
    case 0: return ((const u32 *)in)[i];
    case 1: return f16_to_f32(((const u16 *)in)[i]);
    case 2: return bf16_to_f32(((const u16 *)in)[i]);
    case 4: return f64_to_f32(((const u64 *)in)[i]);
    case 5: return f8e4m3_to_f32(((const u8 *)in)[i]);
    default: return f8e5m2_to_f32(((const u8 *)in)[i]);
    }
}

__device__ static void narrow(void *out, u64 i, u32 to, u32 u)
{
    switch (to) {
    case 0: ((u32 *)out)[i] = u; break;
    case 1: ((u16 *)out)[i] = f32_to_f16(u); break;
    case 2: ((u16 *)out)[i] = f32_to_bf16(u); break;
    case 5: ((u8 *)out)[i] = f32_to_f8e4m3(u); break;
    default: ((u8 *)out)[i] = f32_to_f8e5m2(u); break;
    }
}

extern "C" __global__ void __launch_bounds__(256) side_cast_any(void *out, const void *in, u64 n, u32 from, u32 to)
{
    const u64 step = (u64)gridDim.x * blockDim.x;

    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step)
        narrow(out, i, to, widen(in, i, from));
}

/* ---- XXH3 block sums: see src/base/xxh3.c, also for whose algorithm and secret this is (xxHash, BSD 2-Clause)
 *
 * 16 lanes a KiB block. Lane l takes the 16 bytes at 16 * (l % 4) of stripes l / 4, l / 4 + 4, + 8, + 12: each of the four loads of the 16 lanes
 * covers 256 bytes in a row. Two neighbouring accumulators need no other bytes than those. Four lanes with the same l % 4 are then added up. */

__constant__ u64 xxh3_secret[24] = {
    0xbe4ba423396cfeb8ull, 0x1cad21f72c81017cull, 0xdb979083e96dd4deull, 0x1f67b3b7a4a44072ull, 0x78e5c0cc4ee679cbull,
    0x2172ffcc7dd05a82ull, 0x8e2443f7744608b8ull, 0x4c263a81e69035e0ull, 0xcb00c391bb52283cull, 0xa32e531b8b65d088ull,
    0x4ef90da297486471ull, 0xd8acdea946ef1938ull, 0x3f349ce33f76faa8ull, 0x1d4f0bc7c7bbdcf9ull, 0x3159b4cd4be0518aull,
    0x647378d9c97e9fc8ull, 0xc3ebd33483acc5eaull, 0xeb6313faffa081c5ull, 0x49daf0b751dd0d17ull, 0x9e68d429265516d3ull,
    0xfca1477d58be162bull, 0xce31d07ad1b8f88full, 0x280416958f3acb45ull, 0x7e404bbbcafbd7afull,
};

extern "C" __global__ void __launch_bounds__(256) side_xxh3_blocks(ulonglong2 *out, const ulonglong2 *in, u64 blocks)
{
    const u32 lane = threadIdx.x % 16, pair = lane % 4, row = lane / 4, group = 0xffffu << (threadIdx.x & 16u);
    const u64 step = (u64)gridDim.x * blockDim.x / 16;
    u64 key[4][2];

#pragma unroll
    for (int k = 0; k < 4; k++)
        for (int j = 0; j < 2; j++)
            key[k][j] = xxh3_secret[row + 4 * k + 2 * pair + j];
    for (u64 block = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / 16; block < blocks; block += step) {
        ulonglong2 v[4], sum = {0, 0};
#pragma unroll
        for (int k = 0; k < 4; k++)
            v[k] = in[block * 64 + 16 * k + lane];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const u64 x = v[k].x ^ key[k][0], y = v[k].y ^ key[k][1];
            sum.x += v[k].y + (x & 0xffffffffu) * (x >> 32);
            sum.y += v[k].x + (y & 0xffffffffu) * (y >> 32);
        }
#pragma unroll
        for (int other = 4; other <= 8; other *= 2) {
            sum.x += __shfl_xor_sync(group, sum.x, other);
            sum.y += __shfl_xor_sync(group, sum.y, other);
        }
        if (row == 0)
            out[block * 4 + pair] = sum;
    }
}

/* ---- affine: two roundings, as on the host; may run in place */

extern "C" __global__ void __launch_bounds__(256)
    side_affine(float *out, const float *in, u64 n, float scale, float bias)
{
    const u64 quads = n / 4, step = (u64)gridDim.x * blockDim.x, first = (u64)blockIdx.x * blockDim.x + threadIdx.x;

    for (u64 i = first; i < quads; i += step) {
        float4 v = ((const float4 *)in)[i];
        v.x = __fadd_rn(__fmul_rn(scale, v.x), bias);
        v.y = __fadd_rn(__fmul_rn(scale, v.y), bias);
        v.z = __fadd_rn(__fmul_rn(scale, v.z), bias);
        v.w = __fadd_rn(__fmul_rn(scale, v.w), bias);
        ((float4 *)out)[i] = v;
    }
    if (first < n % 4)
        out[4 * quads + first] = __fadd_rn(__fmul_rn(scale, in[4 * quads + first]), bias);
}

/* ---- spin: by the clock, and by a count of turns that no clock can stop; a turn takes some 10 ns at the least */

extern "C" __global__ void side_spin(u64 ns)
{
    u64 begin, now;

    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    for (u64 turns = ns / 2 + 1000; turns > 0; turns--) {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        if (now - begin >= ns)
            break;
    }
}

/* ---- scattered blocks: a warp copies a tile at a time, of any size and alignment; see cuda_table.c, which writes what is read here
 *
 * A unit is a few tiles in a row, of one or more pieces: so a warp waits for the table, which lies behind the link, once in many tiles. */

const u32 TILE = 4096;

struct alignas(16) block_piece {
    u64 to, from, bytes;
    u64 out; /* pack: where the host wants it; `to` is in a chunk */
};

struct alignas(16) block_unit {
    u32 piece, pieces; /* which it touches; at most as many as a warp has lanes */
    u32 tile, tiles;   /* begins with this tile of the first piece */
    u32 chunk, units;  /* pack: number within the call, and how many units that has */
    u32 unused[2];
};

/* `to` and `from` lie alike in words of V. The bytes at both ends go one by one; all loads of a round are on their way before the first store. */
template <class V> __device__ __forceinline__ static void copy_as(char *to, const char *from, u32 bytes, u32 lane)
{
    const u32 size = sizeof(V), before = (0u - (u32)(u64)to) & (size - 1), head = before < bytes ? before : bytes;
    const u32 n = (bytes - head) / size, tail = head + n * size;
    V *t = (V *)(to + head) + lane;
    const V *f = (const V *)(from + head) + lane;
    char first = 0, last = 0;

    if (lane < head)
        first = from[lane];
    if (lane < bytes - tail)
        last = from[tail + lane];
#pragma unroll 1
    for (int left = (int)n - (int)lane; left + (int)lane > 0; left -= 8 * 32) { /* the same for all lanes */
        V v[8];
#pragma unroll
        for (int k = 0; k < 8; k++)
            v[k] = 32 * k < left
                       ? f[32 * k]
                       : V(); /* of a value at all events, or registers are held for those of the round before */
#pragma unroll
        for (int k = 0; k < 8; k++)
            if (32 * k < left)
                t[32 * k] = v[k];
        f += 8 * 32;
        t += 8 * 32;
    }
    if (lane < head)
        to[lane] = first;
    if (lane < bytes - tail)
        to[tail + lane] = last;
}

__device__ static void copy_tile(char *to, const char *from, u32 bytes, u32 lane)
{
    const u32 apart = ((u32)(u64)to ^ (u32)(u64)from) & 15u;

    if (apart == 0)
        copy_as<uint4>(to, from, bytes, lane);
    else if (apart % 8 == 0)
        copy_as<u64>(to, from, bytes, lane);
    else if (apart % 4 == 0)
        copy_as<u32>(to, from, bytes, lane);
    else if (apart % 2 == 0)
        copy_as<u16>(to, from, bytes, lane);
    else
        copy_as<unsigned char>(to, from, bytes, lane);
}

/* By a whole warp: lane i holds the unit's piece i. */
__device__ static void copy_unit(const block_unit &unit, const block_piece *pieces, bool out, u32 lane)
{
    block_piece mine = {0, 0, 0, 0};
    u64 done = (u64)unit.tile * TILE;

    if (lane < unit.pieces)
        mine = pieces[unit.piece + lane];
    if (out)
        mine.to = mine.out;
#pragma unroll 1
    for (u32 k = 0, at = 0; k < unit.tiles; k++) {
        const u64 to = __shfl_sync(~0u, mine.to, at), from = __shfl_sync(~0u, mine.from, at),
                  bytes = __shfl_sync(~0u, mine.bytes, at), left = bytes - done;
        const u32 n = left < TILE ? (u32)left : TILE;
        copy_tile((char *)(to + done), (const char *)(from + done), n, lane);
        done += n;
        if (done == bytes) {
            at++;
            done = 0;
        }
    }
}

/* Units lie one before another: the first is *units. */
__device__ static void copy_units(const block_unit *units, u32 count, const block_piece *pieces, bool out)
{
    const u32 lane = threadIdx.x % 32, warps = gridDim.x * blockDim.x / 32;

    for (u32 u = (blockIdx.x * blockDim.x + threadIdx.x) / 32; u < count; u += warps)
        copy_unit(*(units - u), pieces, out, lane);
}

extern "C" __global__ void __launch_bounds__(1024, 1)
    side_gather(const block_unit *units, u32 count, const block_piece *pieces)
{
    copy_units(units, count, pieces, false);
}

/* ---- pack: see cuda_pack.c for the protocol
 *
 * Warps take units by ticket, so that a thread block that comes late, or never, holds nothing up. Whoever finishes a chunk's last unit says so to the
 * stream that waits for it. A chunk's memory is used again when that stream has said that it is through with the chunk SLOTS before. */

const u32 SLOTS = 4;

struct alignas(128)
    pack_state {      /* device memory; zero before the first call, and as it should be for the next one after each */
    u32 ticket, left; /* the next unit; thread blocks that are through */
    u32 stopped;      /* this call gives up */
    u32 failed;       /* number behind the last chunk of the last call that gave up */
    alignas(128) u32 done[SLOTS];
    alignas(128) u32 ready[SLOTS];    /* number behind the last chunk that is packed; streams wait for it */
    alignas(128) u32 released[SLOTS]; /* the same of those that are copied; streams write it */
};

__device__ static u32 load_acquire(const u32 *p)
{
    u32 value;
    asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
}

__device__ static void store_release(u32 *p, u32 value)
{
    asm volatile("st.release.sys.u32 [%0], %1;" : : "l"(p), "r"(value) : "memory");
}

/* Waits until the stream is through with chunk number - 1 (cyclic). False: the call gives up, because the host says so or nothing moved for too long. */
__device__ static bool wait_released(pack_state *s, u32 slot, u32 number, const u32 *stop, u64 patience)
{
    u64 begin = 0, now = 0;

    for (u32 turn = 0; (int)(load_acquire(&s->released[slot]) - number) < 0; turn++) {
        if (load_acquire(&s->stopped) != 0)
            return false;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        if (turn == 0)
            begin = now;
        if (now - begin > patience || (turn % 64 == 63 && load_acquire(stop) != 0)) { /* `stop` lies behind the link */
            atomicExch(&s->stopped, 1u);
            return false;
        }
        __nanosleep(200);
    }
    return true;
}

/* The last thread block leaves all as the next call wants it. Who still waits for a chunk of a call that gave up waits no longer. */
__device__ static void pack_leave(pack_state *s, u32 end)
{
    __syncthreads();
    if (threadIdx.x != 0)
        return;
    __threadfence();
    if (atomicAdd(&s->left, 1u) + 1 != gridDim.x)
        return;
    __threadfence();
    if (load_acquire(&s->stopped) != 0)
        s->failed = end;
    s->ticket = s->left = s->stopped = 0;
    for (u32 i = 0; i < SLOTS; i++) {
        s->done[i] = 0;
        s->released[i] = end;
    }
    __threadfence_system();
    for (u32 i = 0; i < SLOTS; i++)
        store_release(&s->ready[i], end);
}

/* `base`: the number of the call's first chunk; `end`: of the next call's. */
extern "C" __global__ void __launch_bounds__(1024, 1)
    side_pack(pack_state *s, const block_unit *units, u32 count, const block_piece *pieces, u32 base, u32 end,
              const u32 *stop, u64 patience)
{
    const u32 lane = threadIdx.x % 32;

    for (;;) {
        u32 u = 0, go = 1;
        if (lane == 0)
            u = atomicAdd(&s->ticket, 1u);
        u = __shfl_sync(~0u, u, 0);
        if (u >= count)
            break;
        const block_unit unit = *(units - u);
        const u32 slot = unit.chunk % SLOTS;
        if (lane == 0 && unit.chunk >= SLOTS)
            go = wait_released(s, slot, base + unit.chunk - SLOTS + 1, stop, patience);
        if (__shfl_sync(~0u, go, 0) == 0)
            break;
        copy_unit(unit, pieces, false, lane);
        __threadfence();
        __syncwarp();
        if (lane == 0 && atomicAdd(&s->done[slot], 1u) + 1 == unit.units) {
            s->done[slot] = 0; /* before anyone can count for the slot's next chunk */
            __threadfence_system();
            store_release(&s->ready[slot], base + unit.chunk + 1);
        }
    }
    pack_leave(s, end);
}

/* Behind all copies of a call: where it gave up, everything goes again, by stores to the host. */
extern "C" __global__ void __launch_bounds__(1024, 1)
    side_pack_rest(const pack_state *s, u32 end, const block_unit *units, u32 count, const block_piece *pieces)
{
    if (s->failed == end)
        copy_units(units, count, pieces, true);
}
