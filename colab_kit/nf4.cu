// Y[M, N] = X[M, K] W[N, K]^T for bitsandbytes' NF4 (blocks of 64, float32 scales), up to 32 rows of X a block.
// nf4.py compiles it (NVRTC, no headers) with HALF (1: float16, 0: bfloat16), MT (tiles of 8 batch rows), R (tiles of
// 16 weight rows a warp), WARPS and RESIDENT (blocks a multiprocessor).
//
// What binds is L1, which also is shared memory, so each value takes as few of its cycles (128 bytes) as possible. (So x
// goes to shared memory through registers: cp.async would take 25 cycles for 512 bytes.)
// A warp multiplies 16 R rows of W with the whole batch, W's rows being the 16-side of mma.m16n8k16: quad g of lanes
// has rows 2 R g .. 2 R g + 2 R - 1, which are next to each other in Y. K is permuted within each 64-block so that a
// lane of a quad owns 8 bytes of W (16 values); step s takes values 4s..4s+3 of them, and x is read with the same
// permutation, from shared memory. W comes straight from memory to registers, 64 bytes of a row (two 64-blocks) a quad,
// of which lanes t and t ^ 2 exchange halves: lane t has the 8 bytes number (t % 2) * 2 + t / 2 of both blocks.
// Each 64-block has its own float32 sum, which is multiplied by the block's scale: only the table of 16 is rounded.
// A LoRA adapter's update is added to the sums: `h` is X A^T (lora_shrink, below), B is read here.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) nf4_matmul(
    const u16 *x, const u8 *w, const __grid_constant__ Fixed fixed, u16 *y, float4 *partial, int *counters,
    int n_shards, int M, int N, int K, int stride, float factor, const u16 *h, const u16 *const *lora_b, int rank,
    int patience) {
    SHARED;
    u8 *xs = shared + UNIT / 2;
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
    // Blocks that take the same weights start one after the other: the second finds them in L2.
    const int blocks = K / 64, first_m = blockIdx.x * BATCH, parts = gridDim.z, part = blockIdx.z;
    const int per = ((blocks + parts - 1) / parts + GROUP - 1) / GROUP * GROUP;
    const int from = part * per, count = min(per, blocks - from);
    u32 values[ENTRIES];  // of the table
#pragma unroll
    for (int i = 0; i < ENTRIES; i++) {
        const int byte = min(tid + i * THREADS, 255);
        values[i] = pack(fixed.code[byte >> 4] * factor, fixed.code[byte & 15] * factor);
    }

    // Rows past N repeat the last one and are not written.
    const int row0 = blockIdx.y * ROWS + warp * R * 16 + g * OWN;
    const u8 *weights = w + from * 32 + t * 16;
    uint4 packed[GROUP / 2][OWN] = {};
    // `left`: blocks of 64 from the one that is meant to the end. What is not there is multiplied by zeros of x.
    auto load_packed = [&](uint4 &to, int i, int offset, int left) {
        if (left > t / 2) to = stream(weights + (u32)min(row0 + i, N - 1) * (u32)(K / 2) + offset);
    };
#pragma unroll
    for (int i = 0; i < GROUP / 2 * OWN; i++)
        load_packed(packed[i / OWN][i % OWN], i % OWN, i / OWN * 64, count - i / OWN * 2);

    // 16 bytes of x: the 8 of a row's 128 bytes in such an order that the reads below meet no bank twice.
    // `block`: the first of the four that come to `stage`.
    const u16 *source = x + (i64)(first_m + warp) * stride + from * 64 + lane * 8;
    const int c = lane & 7, chunk = (c & 1) * 4 + (c >> 1);
    u8 *target = xs + ((lane >> 3) * BATCH + warp) * UNIT;
    auto row_of = [&](int j) { return warp + j * WARPS; };
    auto there = [&](int j, int block) {
        return block + lane / 8 < count && row_of(j) < BATCH && first_m + row_of(j) < M;
    };
    auto from_x = [&](int j, int block) { return source + (i64)j * WARPS * stride + block * 64; };
    auto to_x = [&](int j, int stage) {
        return target + stage * STAGE + j * WARPS * UNIT + (chunk ^ (row_of(j) & 1) * 4) * 16;
    };
    uint4 some[COPIES];
    auto fetch_x = [&](int block) {
#pragma unroll
        for (int j = 0; j < COPIES; j++)
            some[j] = there(j, block) ? __ldg((const uint4 *)from_x(j, block)) : make_uint4(0, 0, 0, 0);
    };
    auto put_x = [&](int block, int stage) {  // what was fetched, and fetch what comes next
#pragma unroll
        for (int j = 0; j < COPIES; j++)
            if (BATCH % WARPS == 0 || row_of(j) < BATCH) *(uint4 *)to_x(j, stage) = some[j];
        fetch_x(block + GROUP);
    };
    fetch_x(0);
    // The scales of a lane's rows and where they are in memory, in shared memory: registers are scarce.
    float *scales = (float *)(shared + SCALES) + tid;
    const float **places = (const float **)(shared + PLACES) + (tid >> 2);
    const int own = t % OWN, row = min(row0 + own, N - 1);
    const float *scales_of_row = fixed.shards[0].absmax + (i64)row * blocks;
    for (int s = 1; s < n_shards; s++) {
        const int first = fixed.shards[s].first_row;
        if (row >= first) scales_of_row = fixed.shards[s].absmax + (i64)(row - first) * blocks;
    }
    places[own * (THREADS / 4)] = scales_of_row + from;
    __syncwarp();
    // Lane t of a quad copies each group's block t.
    float held[OWN];
    auto fetch_scales = [&](int block) {
#pragma unroll
        for (int i = 0; i < OWN; i++) held[i] = block + t < count ? __ldg(places[i * (THREADS / 4)] + block + t) : 0.f;
    };
    auto put_scales = [&](int block, int stage) {
#pragma unroll
        for (int i = 0; i < OWN; i++) scales[(stage * OWN + i) * THREADS] = held[i];
        fetch_scales(block + GROUP);
    };
    fetch_scales(0);
    put_scales(0, 0);
    // A byte of W -> its two values, once a bank.
#pragma unroll
    for (int i = 0; i < ENTRIES * 8; i++) {
        const u32 v = values[i / 8], byte = min(tid + i / 8 * THREADS, 255);
        *(uint4 *)(shared + byte * UNIT + ((i + tid) & 7) * 16) = make_uint4(v, v, v, v);
    }
    put_x(0, 0);

    float sum[R][MT][4] = {};
    const u32 lane4 = lane * 4;
    const int at = g * UNIT + (((t & 1) * 2 + (t >> 1)) ^ ((g & 1) * 4)) * 16;
    int now = 0;  // the stage that is read; the other one is filled
    for (int left = count; left > 0; left -= GROUP) {
        __syncthreads();
        put_x(count - left + GROUP, now ^ 1);
        put_scales(count - left + GROUP, now ^ 1);
        const u8 *p_side = xs + at + now * STAGE, *q_side = xs + (at ^ 64) + now * STAGE;
        const float *scale_of = scales - t + now * OWN * THREADS;
        now ^= 1;
#pragma unroll  // and no more: the loop is to fit into the cache of instructions
        for (int pair = 0; pair < GROUP / 2; pair++) {
            uint2 second[OWN];  // of the pair's blocks
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint4 p[MT], q[MT];
#pragma unroll
                for (int n = 0; n < MT; n++) {
                    const int unit = ((pair * 2 + half) * BATCH + n * 8) * UNIT;
                    p[n] = *(const uint4 *)(p_side + unit), q[n] = *(const uint4 *)(q_side + unit);
                }
                u32 a[R][4][4];
                float scale[R][2];
#pragma unroll
                for (int i = 0; i < OWN; i++) {
                    scale[i / 2][i % 2] = scale_of[i * THREADS + pair * 2 + half];
                    uint4 &both = packed[pair][i];
                    if (half == 0) {
                        const bool upper = t & 2;
                        const u32 x = __shfl_xor_sync(0xffffffffu, upper ? both.x : both.z, 2);
                        const u32 y = __shfl_xor_sync(0xffffffffu, upper ? both.y : both.w, 2);
                        (upper ? both.x : both.z) = x, (upper ? both.y : both.w) = y;
                        second[i] = {both.z, both.w};
                    }
                    const uint2 v = half ? second[i] : uint2{both.x, both.y};
                    if (half) load_packed(both, i, GROUP * 32 + pair * 64, left - GROUP - pair * 2);
#pragma unroll
                    for (int s = 0; s < 8; s++)
                        a[i / 2][s / 2][i % 2 + s % 2 * 2] =
                            *(const u32 *)(shared + entry(s < 4 ? v.x : v.y, s % 4, lane4));
                }
#pragma unroll
                for (int r = 0; r < R; r++) {
                    float c[MT][4] = {};
#pragma unroll
                    for (int j = 0; j < 4 * MT; j++) {  // neighbours don't wait for each other
                        const int s = j / MT, n = j % MT;
                        const uint4 v = s < 2 ? p[n] : q[n];
                        mma(c[n], a[r][s], s % 2 ? v.z : v.x, s % 2 ? v.w : v.y);
                    }
#pragma unroll
                    for (int j = 0; j < 4 * MT; j++)
                        sum[r][j / 4][j % 4] = __fmaf_rn(c[j / 4][j % 4], scale[r][j % 4 / 2], sum[r][j / 4][j % 4]);
                }
            }
        }
        weights += GROUP * 32;
    }
#pragma unroll
    for (int i = 0; i < R * MT * 4; i++) sum[i / 4 / MT][i / 4 % MT][i % 4] *= 1.f / factor;

    // What is left for the rows of a warp and 8 rows of x: Y += H B^T, B [N, rank] a shard (rows of other shards are
    // multiplied as zeros; lane t has 8 of 32 values), and Y.
    auto finish = [&](int of, int n, float (&c)[R][4]) {
        const int low = blockIdx.y * ROWS + of * R * 16, row = low + g * OWN;
        if (rank) await_last();  // lora_shrink, for H
        for (int s = 0; rank && s < n_shards; s++) {
            const int first = fixed.shards[s].first_row, last = s == n_shards - 1;
            const int end = last ? N : (int)fixed.shards[s + 1].first_row;
            if (end <= low || first >= low + R * 16) continue;
            const i64 m = min(first_m + n * 8 + g, M - 1);
            const u16 *b = lora_b[s] + t * 8, *a = h + (m * n_shards + s) * rank + t * 8;
            for (int k = 0; k < rank; k += 32) {
                const uint4 p = *(const uint4 *)(a + k);
#pragma unroll
                for (int r = 0; r < R; r++) {
                    uint4 v[2] = {};
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        const int at = row + r * 2 + j;
                        if (at >= first && at < end) v[j] = *(const uint4 *)(b + (i64)(at - first) * rank + k);
                    }
                    const u32 one[4] = {v[0].x, v[1].x, v[0].y, v[1].y}, two[4] = {v[0].z, v[1].z, v[0].w, v[1].w};
                    mma(c[r], one, p.x, p.y);
                    mma(c[r], two, p.z, p.w);
                }
            }
        }
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int m = first_m + n * 8 + t * 2 + e;
            u16 *to = y + (i64)m * N + row;
            Column column;
#pragma unroll
            for (int r = 0; r < R; r++) column.two[r] = pack(c[r][e], c[r][e + 2]);
            if (m >= M) continue;
            if (N % OWN == 0 && row < N) *(Column *)to = column;
#pragma unroll
            for (int j = 0; j < OWN; j++)
                if (N % OWN && row + j < N) to[j] = (u16)(column.two[j / 2] >> j % 2 * 16);
        }
    };
    if (parts == 1) {
#pragma unroll
        for (int n = 0; n < MT; n++) {
            float c[R][4];
#pragma unroll
            for (int i = 0; i < R * 4; i++) c[i / 4][i % 4] = sum[i / 4][n][i % 4];
            finish(warp, n, c);
        }
        return;
    }

    // A split K: `finish` the i-th of the warps' tiles with the sums of all parts, always in the same order;
    // part_of(at, s): what block s has at `at`.
    auto add_parts = [&](int i, auto part_of) {
        float c[R][4] = {};
#pragma unroll(8)
        for (int s = 0; s < parts; s++)
#pragma unroll
            for (int r = 0; r < R; r++) {
                const float4 p = part_of((r * MT + i % MT) * THREADS + i / MT * 32 + lane, s);
                c[r][0] += p.x, c[r][1] += p.y, c[r][2] += p.z, c[r][3] += p.w;
            }
        finish(i / MT, i % MT, c);
    };
    if (patience < 0) {  // the parts are a cluster: each block reads its share of the sums where the others have them
        float4 *mine = (float4 *)shared;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < R * MT; i++) {
            const float(&v)[4] = sum[i / MT][i % MT];
            mine[i * THREADS + tid] = make_float4(v[0], v[1], v[2], v[3]);
        }
        meet_cluster();
        for (int i = part + warp * parts; i < WARPS * MT; i += WARPS * parts)
            add_parts(i, [&](int at, int s) { return of_block(mine + at, s); });
        meet_cluster();  // none ends while another one reads its memory
        return;
    }

    // Otherwise every block leaves its sums, waits a while for those of the others and adds its share of all of them.
    // Who waits no longer leaves its share to the block that comes last, so none depends on
    // another's running at the same time. counters[0]: how many came, then a bit for each that left; [1]: shares done.
    const int tile = blockIdx.y * gridDim.x + blockIdx.x, tiles = gridDim.x * gridDim.y;
    float4 *place = partial + (i64)tile * R * MT * THREADS;
    const i64 step = (i64)tiles * R * MT * THREADS;
#pragma unroll
    for (int i = 0; i < R * MT; i++) {
        const float(&v)[4] = sum[i / MT][i % MT];
        __stcg(place + part * step + i * THREADS + tid, make_float4(v[0], v[1], v[2], v[3]));
    }
    __threadfence();
    __syncthreads();
    int &mine = *(int *)(shared + PLACES), *counter = counters + tile * 2;
    const int shares = min(parts, 23);
    if (tid == 0) {
        const int bit = part < shares ? 1 << part : 0;
        int before = atomicAdd(counter, patience ? 1 : 1 + (bit << 8));
        mine = (before & 255) == parts - 1 ? before >> 8 | bit : 0;
        if (!mine && patience && bit) {
            for (int i = 0; i < patience && (before & 255) != parts; i++) before = poll(counter);
            if ((before & 255) != parts) before = atomicOr(counter, bit << 8);
            mine = (before & 255) == parts ? bit : 0;
        }
    }
    __syncthreads();
    if (!mine) return;
    __threadfence();
    for (int share = 0; share < shares; share++)
        for (int i = share + warp * shares; mine >> share & 1 && i < WARPS * MT; i += WARPS * shares)
            add_parts(i, [&](int at, int s) { return __ldcg(place + s * step + at); });
    __syncthreads();
    if (tid == 0 && atomicAdd(counter + 1, __popc(mine)) + __popc(mine) == shares) counter[0] = counter[1] = 0;
}
