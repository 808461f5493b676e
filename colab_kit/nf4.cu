// Y[M, N] = X[M, K] W[N, K]^T for bitsandbytes' NF4 (blocks of 64, float32 scales), up to 64 rows of X a block.
// nf4.py compiles it (NVRTC, no headers) with HALF (1: float16, 0: bfloat16), MT (tiles of 8 batch rows), R (tiles of
// 16 weight rows a warp), WARPS, STAGES (buffers of x) and RESIDENT (blocks a multiprocessor).
//
// A warp multiplies 16 R rows of W with the whole batch, W's rows being the 16-side of mma.m16n8k16. K is permuted
// within each 64-block so that lane t of a quad owns 8 bytes of W (16 values), read straight from memory to registers;
// its step s takes values 4s..4s+3 of them, and x is read with the same permutation, from shared memory.
// Each 64-block has its own float32 sum, which is multiplied by the block's scale: only the table of 16 is rounded.
// A LoRA adapter's update is added to the sums: `h` is X A^T (lora_shrink, below), B is read here.
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;
struct Shard { i64 first_row; const float *absmax; };

constexpr int THREADS = WARPS * 32, ROWS = WARPS * R * 16, BATCH = MT * 8, GROUP = 4;
// Shared memory in units of 256 bytes: the 128 of a byte's entry in the table, once a bank, then 128 of x, a row's 64.
constexpr int UNIT = 256, STAGE = GROUP * BATCH * UNIT;

#ifndef EMULATED  // tests/nf4_emulated.cpp has these in C++
#define SHARED extern __shared__ __align__(128) u8 shared[]
__device__ u32 pack(float low, float high) {
    u32 both;
#if HALF
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#endif
    return both;
}

__device__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if HALF
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ u32 entry(u32 v, int byte, u32 lane4) {  // where v's byte is in the table, for this lane's bank
    return __byte_perm(v, lane4, 0x5504 | byte << 4);
}

__device__ uint2 stream(const u8 *address) {  // read once: not kept in L1
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(address));
    return v;
}

__device__ void copy16(u8 *target, const u16 *source, bool there) {  // or 16 zeros
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((u32)__cvta_generic_to_shared(target)),
                 "l"(source), "r"(there ? 16 : 0) : "memory");
}
__device__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory"); }
#endif

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) nf4_matmul(
    const u16 *x, const u8 *w, const Shard *shards, const float *code, u16 *y, float4 *partial, int *counters,
    int n_shards, int M, int N, int K, int stride, float factor, const u16 *h, const u16 *const *lora_b, int rank) {
    SHARED;
    u8 *xs = shared + UNIT / 2;
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
    const int blocks = K / 64, first_m = blockIdx.z * BATCH;
    const int per = ((blocks + (int)gridDim.y - 1) / (int)gridDim.y + GROUP - 1) / GROUP * GROUP;
    const int from = blockIdx.y * per, count = min(per, blocks - from), groups = (count + GROUP - 1) / GROUP;

    // Rows of this lane: g and g + 8 of each tile. Rows past N repeat the last one and are not written.
    const int row0 = blockIdx.x * ROWS + warp * R * 16 + g;
    const float *scales[R][2];
    const u8 *weights[R][2];
    uint2 packed[GROUP][R][2] = {};
    float next[R][2];
#pragma unroll
    for (int i = 0; i < R * 2; i++) {
        const int row = min(row0 + i / 2 * 16 + i % 2 * 8, N - 1);
        int s = n_shards - 1;
        while (s > 0 && shards[s].first_row > row) s--;
        scales[i / 2][i % 2] = shards[s].absmax + (i64)(row - (int)shards[s].first_row) * blocks + from + t;
        weights[i / 2][i % 2] = w + (i64)row * (K / 2) + from * 32 + t * 8;
    }
    // `left`: blocks of 64 from the one that is meant to the end. What is not there is multiplied by zeros of x.
    auto load_packed = [&](int b, int offset, int left) {
        if (left > 0)
#pragma unroll
            for (int i = 0; i < R * 2; i++) packed[b][i / 2][i % 2] = stream(weights[i / 2][i % 2] + offset);
    };
    auto load_scales = [&](int offset, int left) {  // lane t of a quad: the group's block t
#pragma unroll
        for (int i = 0; i < R * 2; i++) next[i / 2][i % 2] = t < left ? __ldg(scales[i / 2][i % 2] + offset) : 0.f;
    };
    // 16 bytes of x: the 8 of a row's 128 bytes in such an order that the reads below meet no bank twice.
    const u16 *source = x + (i64)(first_m + warp) * stride + from * 64 + lane * 8;
    const int c = lane & 7, chunk = (c & 1) * 4 + (c >> 1);
    u8 *target = xs + ((lane >> 3) * BATCH + warp) * UNIT;
    int left_x = count * 8 - lane, filled = 0;  // in 16 bytes; the stage to fill, in bytes
    auto load_x = [&]() {
        if (left_x > -lane)
#pragma unroll
            for (int j = 0; j < BATCH / WARPS; j++) {
                const bool there = left_x > 0 && first_m + warp + j * WARPS < M;
                const int at = (chunk ^ ((warp + j * WARPS) & 1) * 4) * 16;
                copy16(target + filled + j * WARPS * UNIT + at, there ? source + (i64)j * WARPS * stride : x, there);
            }
        commit();
        source += GROUP * 64, left_x -= GROUP * 8, filled = filled == (STAGES - 1) * STAGE ? 0 : filled + STAGE;
    };
#pragma unroll
    for (int b = 0; b < GROUP; b++) load_packed(b, b * 32, count - b);
    load_scales(0, count);
    for (int i = 0; i < STAGES - 1; i++) load_x();
    // A byte of W -> its two values, once a bank.
    for (int i = tid; i < 256 * 8; i += THREADS) {
        const u32 v = pack(code[i >> 7] * factor, code[(i >> 3) & 15] * factor);
        *(uint4 *)(shared + (i >> 3) * UNIT + (i & 7) * 16) = make_uint4(v, v, v, v);
    }

    const float inverse = 1.f / factor;
    float sum[R][MT][4] = {};
    const u32 lane4 = lane * 4;
    const u8 *read = xs + g * UNIT + (t ^ ((g & 1) * 4)) * 16;
    int used = 0;
    for (int left = count; left > 0; left -= GROUP) {
        wait();
        __syncthreads();
        load_x();
        const u8 *p_side = read + used, *q_side = xs + g * UNIT + ((t ^ ((g & 1) * 4)) * 16 ^ 64) + used;
        used = used == (STAGES - 1) * STAGE ? 0 : used + STAGE;
        float mine[R][2];
#pragma unroll
        for (int i = 0; i < R * 2; i++) mine[i / 2][i % 2] = next[i / 2][i % 2] * inverse;
        load_scales(GROUP, left - GROUP);
#pragma unroll
        for (int b = 0; b < GROUP; b++) {
            u32 a[R][4][4];
            float scale[R][2];
#pragma unroll
            for (int i = 0; i < R * 2; i++) {
                const int r = i / 2, h = i % 2;
                scale[r][h] = __shfl_sync(0xffffffffu, mine[r][h], (lane & 28) | b);
#pragma unroll
                for (int s = 0; s < 4; s++) {
                    const u32 v = s < 2 ? packed[b][r][h].x : packed[b][r][h].y;
                    a[r][s][h] = *(const u32 *)(shared + entry(v, s % 2 * 2, lane4));
                    a[r][s][h + 2] = *(const u32 *)(shared + entry(v, s % 2 * 2 + 1, lane4));
                }
            }
            load_packed(b, (GROUP + b) * 32, left - GROUP - b);
#pragma unroll
            for (int n = 0; n < MT; n++) {
                const int at = (b * BATCH + n * 8) * UNIT;
                const uint4 p = *(const uint4 *)(p_side + at), q = *(const uint4 *)(q_side + at);
#pragma unroll
                for (int r = 0; r < R; r++) {
                    float c[4] = {};
                    mma(c, a[r][0], p.x, p.y);
                    mma(c, a[r][1], p.z, p.w);
                    mma(c, a[r][2], q.x, q.y);
                    mma(c, a[r][3], q.z, q.w);
#pragma unroll
                    for (int i = 0; i < 4; i++) sum[r][n][i] = __fmaf_rn(c[i], scale[r][i / 2], sum[r][n][i]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < R * 2; i++) weights[i / 2][i % 2] += GROUP * 32, scales[i / 2][i % 2] += GROUP;
    }

    // Split K: every block leaves its sums; the last one to come adds all of them, always in the same order.
    if (gridDim.y > 1) {
        __shared__ int arrived;
        const int tile = blockIdx.z * gridDim.x + blockIdx.x, tiles = gridDim.x * gridDim.z;
        float4 *place = partial + ((i64)tile * R * MT) * THREADS + tid;
        const i64 step = (i64)tiles * R * MT * THREADS;
#pragma unroll
        for (int i = 0; i < R * MT; i++) {
            const float *v = sum[i / MT][i % MT];
            __stcg(place + blockIdx.y * step + i * THREADS, make_float4(v[0], v[1], v[2], v[3]));
        }
        __threadfence();
        __syncthreads();
        if (tid == 0) arrived = atomicAdd(counters + tile, 1);
        __syncthreads();
        if (arrived != gridDim.y - 1) return;
        __threadfence();
#pragma unroll
        for (int i = 0; i < R * MT; i++) {
            float *v = sum[i / MT][i % MT];
            v[0] = v[1] = v[2] = v[3] = 0.f;
#pragma unroll 4
            for (int s = 0; s < gridDim.y; s++) {
                const float4 p = __ldcg(place + s * step + i * THREADS);
                v[0] += p.x, v[1] += p.y, v[2] += p.z, v[3] += p.w;
            }
        }
        if (tid == 0) counters[tile] = 0;
    }
    // Y += H B^T, B [N, rank] a shard; a tile of 16 rows lies in one shard. Lane t has 8 of 32 values, as above.
    if (rank)
#pragma unroll
        for (int r = 0; r < R; r++) {
            const int row = min(row0 - g + r * 16, N - 16);
            int s = n_shards - 1;
            while (s > 0 && shards[s].first_row > row) s--;
            const u16 *b = lora_b[s] + (i64)(row - (int)shards[s].first_row + g) * rank + t * 8;
            for (int k = 0; k < rank; k += 32) {
                const uint4 v = *(const uint4 *)(b + k), w = *(const uint4 *)(b + 8 * rank + k);
                const u32 first[4] = {v.x, w.x, v.y, w.y}, second[4] = {v.z, w.z, v.w, w.w};
#pragma unroll
                for (int n = 0; n < MT; n++) {
                    const i64 m = min(first_m + n * 8 + g, M - 1);
                    const uint4 p = *(const uint4 *)(h + (m * n_shards + s) * rank + k + t * 8);
                    mma(sum[r][n], first, p.x, p.y);
                    mma(sum[r][n], second, p.z, p.w);
                }
            }
        }
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int n = 0; n < MT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = row0 + r * 16 + i / 2 * 8, m = first_m + n * 8 + t * 2 + i % 2;
                if (row < N && m < M) y[(i64)m * N + row] = (u16)pack(sum[r][n][i], 0.f);
            }
}

// H[M, slices x rank] = X[M, K] A^T, A [rank, K] a slice; zeros for rows of X whose adapter (`adapters`) is below 0.
// A block takes 16 rows of A and a part of K, its warps every WARPS-th 32 values of it; the last block to come adds.
extern "C" __global__ void __launch_bounds__(THREADS) lora_shrink(
    const u16 *x, const u16 *const *lora_a, u16 *h, float *partial, int *counters, const int *adapters, int slices,
    int rank, int M, int K, int stride) {
    __shared__ float sums[WARPS][16 * BATCH];
    __shared__ int last;
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
    const int first_m = blockIdx.z * BATCH, tile = blockIdx.x * 16, s = tile / rank, chunks = K / 32;
    const int per = (chunks + (int)gridDim.y - 1) / (int)gridDim.y;
    const int to = min((int)(blockIdx.y + 1) * per, chunks);
    const u16 *a = lora_a[s] + (i64)(tile - s * rank + g) * K + t * 8, *rows[MT];
#pragma unroll
    for (int n = 0; n < MT; n++) rows[n] = x + (i64)min(first_m + n * 8 + g, M - 1) * stride + t * 8;
    float c[MT][4] = {};
#pragma unroll 2
    for (int k = blockIdx.y * per + warp; k < to; k += WARPS) {
        const uint4 v = *(const uint4 *)(a + k * 32), w = *(const uint4 *)(a + (i64)8 * K + k * 32);
        const u32 first[4] = {v.x, w.x, v.y, w.y}, second[4] = {v.z, w.z, v.w, w.w};
#pragma unroll
        for (int n = 0; n < MT; n++) {
            const uint4 p = *(const uint4 *)(rows[n] + k * 32);
            mma(c[n], first, p.x, p.y);
            mma(c[n], second, p.z, p.w);
        }
    }
#pragma unroll
    for (int n = 0; n < MT; n++)  // [row of X][row of A]
#pragma unroll
        for (int i = 0; i < 4; i++) sums[warp][(n * 8 + t * 2 + i % 2) * 16 + g + i / 2 * 8] = c[n][i];
    __syncthreads();
    const int at = blockIdx.z * gridDim.x + blockIdx.x, parts = gridDim.y;
    float *place = partial + (i64)at * parts * 16 * BATCH;
    for (int i = tid; i < 16 * BATCH; i += THREADS) {
        float sum = 0.f;
        for (int j = 0; j < WARPS; j++) sum += sums[j][i];
        place[blockIdx.y * 16 * BATCH + i] = sum;
    }
    __threadfence();
    __syncthreads();
    if (tid == 0) last = atomicAdd(counters + at, 1) == parts - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (int i = tid; i < 16 * BATCH; i += THREADS) {
        const int m = first_m + i / 16;
        if (m >= M) continue;
        float sum = 0.f;
        for (int j = 0; j < parts; j++) sum += __ldcg(place + j * 16 * BATCH + i);
        h[(i64)m * slices * rank + tile + i % 16] = (u16)pack(adapters[m] < 0 ? 0.f : sum, 0.f);
    }
    if (tid == 0) counters[at] = 0;
}
