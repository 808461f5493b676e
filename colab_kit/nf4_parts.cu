// What a block of threads does of the product, and how the parts of a split K come together.
struct Part {
    int tile, first_m, first_row;   // ROWS rows of W with BATCH of X
    int from, count;                // of K, blocks of 64
    int part, parts, first_block;   // of the tile; a stream's block that does the first of them
};

// A stream's blocks of threads take as many units as each other: groups of four 64-blocks of a tile, one after the other.
__device__ int groups_of(int K) { return (K / 64 + GROUP - 1) / GROUP; }
__device__ int units_of(int M, int N, int K) {
    return (M + BATCH - 1) / BATCH * ((N + ROWS - 1) / ROWS) * groups_of(K);
}
__device__ int first_unit(int units, int block) { return (int)((i64)units * block / gridDim.x); }

__device__ Part part_at(int unit, int units, int M, int K, int streams) {
    const int blocks = K / 64, groups = groups_of(K);
    if (!streams) {  // blocks that take the same weights start one after the other: the second finds them in L2
        const int parts = gridDim.z, part = blockIdx.z, tile = blockIdx.y * gridDim.x + blockIdx.x;
        const int per = ((blocks + parts - 1) / parts + GROUP - 1) / GROUP * GROUP;
        const int count = min(per, blocks - part * per);
        return {tile, (int)blockIdx.x * BATCH, (int)blockIdx.y * ROWS, part * per, count, part, parts, 0};
    }
    const int batches = (M + BATCH - 1) / BATCH, tile = unit / groups, from = unit % groups * GROUP;
    const int count = min((first_unit(units, blockIdx.x + 1) - unit) * GROUP, blocks - from);
    auto block_of = [&](int unit) { return (int)(((unit + 1ll) * gridDim.x - 1) / units); };
    const int first = block_of(tile * groups), parts = block_of(tile * groups + groups - 1) - first + 1;
    return {tile, tile % batches * BATCH, tile / batches * ROWS, from, count, (int)blockIdx.x - first, parts, first};
}

// The end of a part: the parts are added, an adapter's update too, and Y is written.
__device__ void add_and_write(
    u8 *shared, const Part &of, float (&sum)[R][MT][4], const Fixed &fixed, u16 *y, float4 *partial, int *counters,
    int n_shards, int M, int N, const u16 *h, const u16 *const *lora_b, int rank,
    const int *ready, int patience, int streams) {
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
    const int first_m = of.first_m, parts = of.parts, part = of.part;
    // What is left for the rows of a warp and 8 rows of x: Y += H B^T, B [N, rank] a shard (rows of other shards are
    // multiplied as zeros; lane t has 8 of 32 values), and Y.
    auto finish = [&](int warp, int first_n, auto &c) {  // c [R][tiles of 8 rows][4]
        constexpr int TILES = sizeof c / R / 16;
        const int low = of.first_row + warp * R * 16, row = low + g * OWN;
        const int flags = n_shards * rank / 16;  // of lora_shrink, for H
        for (int i = lane; i < flags; i += 32)
            while (!poll(ready + first_m / BATCH * flags + i)) {}
        if (rank) __syncwarp(), __threadfence();
        for (int s = 0; rank && s < n_shards; s++) {
            const int first = fixed.shards[s].first_row, last = s == n_shards - 1;
            const int end = last ? N : (int)fixed.shards[s + 1].first_row;
            if (end <= low || first >= low + R * 16) continue;
            const u16 *b = lora_b[s] + t * 8;
            for (int k = 0; k < rank; k += 32) {
                uint4 p[TILES];
#pragma unroll
                for (int n = 0; n < TILES; n++) {
                    const i64 m = min(first_m + (first_n + n) * 8 + g, M - 1);
                    p[n] = *(const uint4 *)(h + (m * n_shards + s) * rank + t * 8 + k);
                }
#pragma unroll
                for (int r = 0; r < R; r++) {
                    uint4 v[2] = {};
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        const int at = row + r * 2 + j;
                        if (at >= first && at < end) v[j] = *(const uint4 *)(b + (i64)(at - first) * rank + k);
                    }
                    const u32 one[4] = {v[0].x, v[1].x, v[0].y, v[1].y}, two[4] = {v[0].z, v[1].z, v[0].w, v[1].w};
#pragma unroll
                    for (int n = 0; n < TILES; n++) mma(c[r][n], one, p[n].x, p[n].y), mma(c[r][n], two, p[n].z, p[n].w);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < TILES * 2; i++) {
            const int n = i / 2, e = i % 2, m = first_m + (first_n + n) * 8 + t * 2 + e;
            u16 *to = y + (i64)m * N + row;
            Column column;
#pragma unroll
            for (int r = 0; r < R; r++) column.two[r] = pack(c[r][n][e], c[r][n][e + 2]);
            if (m >= M) continue;
            if (N % OWN == 0 && row < N) *(Column *)to = column;
#pragma unroll
            for (int j = 0; j < OWN; j++)
                if (N % OWN && row + j < N) to[j] = (u16)(column.two[j / 2] >> j % 2 * 16);
        }
    };
    if (parts == 1) {
        finish(warp, 0, sum);
        return;
    }

    // A split K: `finish` the i-th of the warps' tiles with the sums of all parts, always in the same order;
    // part_of(at, s): what block s has at `at`.
    auto add_parts = [&](int i, auto part_of) {
        float c[R][1][4] = {};
#pragma unroll(8)
        for (int s = 0; s < parts; s++)
#pragma unroll
            for (int r = 0; r < R; r++) {
                const float4 p = part_of((r * MT + i % MT) * THREADS + i / MT * 32 + lane, s);
                c[r][0][0] += p.x, c[r][0][1] += p.y, c[r][0][2] += p.z, c[r][0][3] += p.w;
            }
        finish(i / MT, i % MT, c);
    };
    if (patience < 0) {  // the parts are a cluster: each block reads its share of the sums where the others have them
        float4 *mine = (float4 *)shared;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < R * MT; i++) {
            const float (&v)[4] = sum[i / MT][i % MT];
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
    // A block of a stream has two tiles at most that others have parts of: its first and its last.
    auto place = [&](int s) {
        const int grid = s * gridDim.x * gridDim.y + of.tile, stream = 2 * (of.first_block + s) + (s == 0);
        return partial + (i64)(streams ? stream : grid) * R * MT * THREADS;
    };
#pragma unroll
    for (int i = 0; i < R * MT; i++) {
        const float (&v)[4] = sum[i / MT][i % MT];
        __stcg(place(part) + i * THREADS + tid, make_float4(v[0], v[1], v[2], v[3]));
    }
    __threadfence();
    __syncthreads();
    int &mine = *(int *)(shared + PLACES), *counter = counters + of.tile * 2;
    if (streams) {  // the last one has its own part in its registers and adds the others'
        if (tid == 0) mine = atomicAdd(counter, 1) == parts - 1;
        __syncthreads();
        if (!mine) return;
        __threadfence();
        float c[R][MT][4] = {};
        for (int s = 0; s < parts; s++)
#pragma unroll
            for (int i = 0; i < R * MT; i++) {
                const float(&v)[4] = sum[i / MT][i % MT];
                const float4 p = s == part ? make_float4(v[0], v[1], v[2], v[3]) : __ldcg(place(s) + i * THREADS + tid);
                float(&to)[4] = c[i / MT][i % MT];
                to[0] += p.x, to[1] += p.y, to[2] += p.z, to[3] += p.w;
            }
        finish(warp, 0, c);
        if (tid == 0) *counter = 0;
        return;
    }
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
            add_parts(i, [&](int at, int s) { return __ldcg(place(s) + at); });
    __syncthreads();
    if (tid == 0 && atomicAdd(counter + 1, __popc(mine)) + __popc(mine) == shares) counter[0] = counter[1] = 0;
}
