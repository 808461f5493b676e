// H[M, slices x rank] = X[M, K] A^T, A [rank, K] a slice; zeros for rows of X whose adapter (`adapters`) is below 0.
// A block takes 16 rows of A and a part of K, its warps every WARPS-th 32 values of it; the last block to come adds.
extern "C" __global__ void __launch_bounds__(THREADS) lora_shrink(
    const u16 *x, const u16 *const *lora_a, u16 *h, float *partial, int *counters, const int *adapters, int slices,
    int rank, int M, int K, int stride, int *ready) {
    SHARED;
    float(*sums)[16 * BATCH] = (float(*)[16 * BATCH])shared;
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
    __threadfence();
    __syncthreads();
    if (tid == 0) counters[at] = 0, *(volatile int *)done = 1;
}
