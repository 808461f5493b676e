// H[M, slices x rank] = X[M, K] A^T, A [rank, K] a slice; zeros for rows of X whose adapter (`adapters`) is below 0.
// A block takes 16 rows of A and a part of K, its warps every WARPS-th 32 values of it; the last block to come adds.
extern "C" __global__ void __launch_bounds__(THREADS) lora_shrink(
    const u16 *x, const u16 *const *lora_a, u16 *h, float *partial, int *counters, const int *adapters, int slices,
    int rank, int M, int K, int stride, int *ready) {
    SHARED;
    constexpr int LANES = MT * 32;  // of a tile, a lane of mma's result each
    float4(*sums)[LANES] = (float4(*)[LANES])shared;
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
    for (int n = 0; n < MT; n++) sums[warp][n * 32 + lane] = make_float4(c[n][0], c[n][1], c[n][2], c[n][3]);
    __syncthreads();
    auto add = [](float4 &to, float4 v) { to.x += v.x, to.y += v.y, to.z += v.z, to.w += v.w; };
    const int at = blockIdx.z * gridDim.x + blockIdx.x, parts = gridDim.y;
    float4 *place = (float4 *)partial + (i64)at * parts * LANES;
    for (int i = tid; i < LANES; i += THREADS) {
        float4 sum = {};
#pragma unroll
        for (int j = 0; j < WARPS; j++) add(sum, sums[j][i]);
        __stcg(place + blockIdx.y * LANES + i, sum);
    }
    __threadfence();
    __syncthreads();
    if (tid == 0) last = atomicAdd(counters + at, 1) == parts - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (int i = tid; i < LANES; i += THREADS) {
        float4 sum = {};
#pragma unroll(8)
        for (int j = 0; j < parts; j++) add(sum, __ldcg(place + j * LANES + i));
        const int m = first_m + i / 32 * 8 + t * 2;  // tid and i are the same lane's
        const float both[2][2] = {{sum.x, sum.z}, {sum.y, sum.w}};
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (m + e / 2 < M)
                h[(i64)(m + e / 2) * slices * rank + tile + g + e % 2 * 8] =
                    (u16)pack(adapters[m + e / 2] < 0 ? 0.f : both[e / 2][e % 2], 0.f);
    }
    __threadfence();
    __syncthreads();
    if (tid == 0) counters[at] = 0, *(volatile int *)done = 1;
}
