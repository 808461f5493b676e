// What a thread adds at a time: a lane's four values of mma's result, or one where that would leave most threads without.
#if MT == 1
typedef float Some;
__device__ void add(float &to, float v) { to += v; }
#else
typedef float4 Some;
__device__ void add(float4 &to, float4 v) { to.x += v.x, to.y += v.y, to.z += v.z, to.w += v.w; }
#endif

// H[M, slices x rank] = X[M, K] A^T, A [rank, K] a slice; zeros for rows of X whose adapter (`adapters`) is below 0.
// A block takes 16 rows of A and a part of K, its warps every WARPS-th 32 values of it; the last block to come adds.
extern "C" __global__ void __launch_bounds__(THREADS) lora_shrink(
    const u16 *x, const u16 *const *lora_a, u16 *h, float *partial, int *counters, const int *adapters, int slices,
    int rank, int M, int K, int stride, int *ready) {
    SHARED;
    constexpr int WIDE = sizeof(Some) / 4, TILE = MT * 128 / WIDE;
    Some(*sums)[TILE] = (Some(*)[TILE])shared;
    int &last = *(int *)(sums + WARPS);
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
    int *done = ready + blockIdx.z * gridDim.x + blockIdx.x;  // for nf4_matmul, which may begin as soon as it is 0
    if (tid == 0) {
        *(volatile int *)done = 0;
        __threadfence();
        let_next_start();
    }
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
    for (int n = 0; n < MT; n++) ((float4 *)sums[warp])[n * 32 + lane] = make_float4(c[n][0], c[n][1], c[n][2], c[n][3]);
    __syncthreads();
    const int at = blockIdx.z * gridDim.x + blockIdx.x, parts = gridDim.y;
    Some *place = (Some *)partial + (i64)at * parts * TILE;
    for (int i = tid; i < TILE; i += THREADS) {
        Some sum = {};
#pragma unroll
        for (int j = 0; j < WARPS; j++) add(sum, sums[j][i]);
        __stcg(place + blockIdx.y * TILE + i, sum);
    }
    __threadfence();
    __syncthreads();
    if (tid == 0) last = atomicAdd(counters + at, 1) == parts - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (int i = tid; i < TILE; i += THREADS) {
        Some sum = {};
#pragma unroll(8)
        for (int j = 0; j < parts; j++) add(sum, __ldcg(place + j * TILE + i));
#pragma unroll
        for (int e = 0; e < WIDE; e++) {
            const int v = i * WIDE + e, m = first_m + v / 128 * 8 + v / 4 % 4 * 2 + v % 2;  // lane v / 4's value v % 4
            u16 *to = h + (i64)m * slices * rank + tile + v / 16 % 8 + v / 2 % 2 * 8;
            if (m < M) *to = (u16)pack(adapters[m] < 0 ? 0.f : ((float *)&sum)[e], 0.f);
        }
    }
    __threadfence();
    __syncthreads();
    if (tid == 0) counters[at] = 0, *(volatile int *)done = 1;
}
