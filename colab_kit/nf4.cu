// Y[M, N] = X[M, K] W[N, K]^T for bitsandbytes' NF4 (blocks of 64, float32 scales), up to 64 rows of X a block.
// nf4.py compiles it (NVRTC, no headers) with HALF (1: float16, 0: bfloat16), MT (tiles of 8 batch rows), R (tiles of
// 16 weight rows a warp), WARPS, RESIDENT (blocks a multiprocessor) and WGMMA (0: mma.sync; Hopper's wgmma, 1: with x
// through registers, 2: with x as prepare_x has left it).
//
// What binds is L1, which also is shared memory, and the instructions. So each value takes as few of L1's cycles (128
// bytes) as possible. (x goes to shared memory through registers, since cp.async would take 25 cycles for 512 bytes, or
// in the right order already by the copy engine.)
// A warp multiplies 16 R rows of W with the whole batch, W's rows being the 16-side of mma.m16n8k16: quad g of lanes
// has rows 2 R g .. 2 R g + 2 R - 1, which are next to each other in Y. K is permuted within each 64-block so that a
// lane of a quad owns 8 bytes of W (16 values); step s takes values 4s..4s+3 of them, and x is read with the same
// permutation, from shared memory. W comes straight from memory to registers, 64 bytes of a row (two 64-blocks) a quad,
// of which lanes t and t ^ 2 exchange halves: lane t has the 8 bytes number (t % 2) * 2 + t / 2 of both blocks.
// wgmma takes W from the same registers, for four warps at a time, and multiplies while they unpack what comes next.
// Each 64-block has its own float32 sum, which is multiplied by the block's scale: only the table of 16 is rounded.
// A LoRA adapter's update is added to the sums: `h` is X A^T (lora_shrink), B is read here.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) nf4_matmul(
    const u16 *x, const u8 *w, const __grid_constant__ Fixed fixed, u16 *y, float4 *partial, int *counters,
    int n_shards, int M, int N, int K, int stride, float factor, const u16 *h, const u16 *const *lora_b, int rank,
    const int *ready, int patience, int want_streams) {
    SHARED;
    u8 *xs = shared + X;
    const int streams = PREPARED ? want_streams : 0;
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
    const int blocks = K / 64, units = units_of(M, N, K);
    int unit = streams ? first_unit(units, blockIdx.x) : 0;
    const int end = streams ? first_unit(units, blockIdx.x + 1) : 1;
    int turn = 0;  // of the groups of four blocks; the stages of shared memory take turns
    u32 values[ENTRIES];  // of the table
#pragma unroll
    for (int i = 0; i < ENTRIES; i++) {
        const int byte = min(tid + i * THREADS, 255);
        values[i] = pack(fixed.code[byte >> 4] * factor, fixed.code[byte & 15] * factor);
    }
    u64 *arrived = (u64 *)(shared + ARRIVED);
    const u32 table = table_of_lane(shared, lane);
    for (bool first = true; unit < end; first = false) {
        const Part of = part_at(unit, units, M, K, streams);
        const int from = of.from, count = of.count;
        // Rows past N repeat the last one and are not written.
        const int row0 = of.first_row + warp * R * 16 + g * OWN;
        const u8 *weights = w + from * 32 + t * 16;
        uint4 packed[GROUP / 2][OWN] = {};
        // `left`: blocks of 64 from the one that is meant to the end. What is not there is multiplied by zeros of x.
        auto load_packed = [&](uint4 &to, int i, int offset, int left) {
            if (left > t / 2) to = stream(weights + (u32)min(row0 + i, N - 1) * (u32)(K / 2) + offset);
        };
#pragma unroll
        for (int i = 0; i < GROUP / 2 * OWN; i++)
            load_packed(packed[i / OWN][i % OWN], i % OWN, i / OWN * 64, count - i / OWN * 2);

#if PREPARED  // x is as prepare_x has left it, each group of blocks as shared memory is to have it
        const u8 *tiles = (const u8 *)x + ((i64)(of.first_m / BATCH) * groups_of(K) + from / GROUP) * STAGE;
        auto copy_x = [&](int block, int stage) {
            const u8 *from_x = tiles + (i64)(block / GROUP) * STAGE;
            if (tid == 0 && block < count) copy(xs + stage * SECOND, from_x, STAGE, arrived + stage);
        };
#else  // A warp copies 64 values of 4 rows of x at a time, a lane 8 of them. `block`: the first of the four for `stage`.
        const int chunk = lane & 7, rows_of_block = BATCH / 4;
        auto unit_of = [&](int j) { return warp + j * WARPS; };
        auto row_of = [&](int j) { return unit_of(j) % rows_of_block * 4 + lane / 8; };
        auto block_of = [&](int j) { return unit_of(j) / rows_of_block; };
        const u16 *source = x + (i64)of.first_m * stride + from * 64 + chunk * 8;
        uint4 some[COPIES];
        auto fetch_x = [&](int block) {
#pragma unroll
            for (int j = 0; j < COPIES; j++) {
                const int at = block + block_of(j), row = row_of(j);
                const bool there = at < count && unit_of(j) < BATCH && of.first_m + row < M;
                const u16 *from_x = source + (i64)row * stride + at * 64;
                some[j] = there ? __ldg((const uint4 *)from_x) : make_uint4(0, 0, 0, 0);
            }
        };
        auto copy_x = [&](int block, int stage) {  // what was fetched, and fetch what comes next
#pragma unroll
            for (int j = 0; j < COPIES; j++) {
                if (BATCH % WARPS && unit_of(j) >= BATCH) continue;
                u8 *to = xs + stage * SECOND + (block_of(j) * BATCH + row_of(j)) * ROW_X;
                put_x(to, row_of(j), chunk, some[j]);
            }
#if WGMMA
            show_to_wgmma();
#endif
            fetch_x(block + GROUP);
        };
        fetch_x(0);
#endif
        // The scales of a lane's rows and where they are in memory, in shared memory: registers are scarce.
        float *scales = (float *)(shared + SCALES) + tid;
        const float **places = (const float **)(shared + PLACES) + (tid >> 2);
        const int own = t % OWN, row = min(row0 + own, N - 1);
        const float *scales_of_row = fixed.shards[0].absmax + (i64)row * blocks;
        for (int s = 1; s < n_shards; s++) {
            const int first = fixed.shards[s].first_row;
            if (row >= first) scales_of_row = fixed.shards[s].absmax + (i64)(row - first) * blocks;
        }
        if (!first) __syncthreads();  // all are through with the last part
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
        // A byte of W -> its two values, once a bank.
#pragma unroll
        for (int i = 0; i < ENTRIES * 8; i++) {
            const u32 v = values[i / 8], byte = min(tid + i / 8 * THREADS, 255);
            if (first) *(uint4 *)(shared + TABLE_AT + byte * UNIT + ((i + tid) & 7) * 16) = make_uint4(v, v, v, v);
        }
        put_scales(0, turn & 1);
#if PREPARED
        if (first && tid == 0) start_barriers(arrived), await_last();  // prepare_x
#endif
        copy_x(0, turn & 1);

        float sum[R][MT][4] = {};
        uint2 second[OWN];  // of a pair's blocks
        // Row i's 16 values of a 64-block of the group, as pairs of 16-bit numbers in mma's order; `left` as in the loop below.
        auto unpack = [&](int block, int i, int left, u32 (&a)[4][4]) {
            uint4 &both = packed[block / 2][i];
            if (block % 2 == 0) {
                const bool upper = t & 2;
                const u32 x = __shfl_xor_sync(0xffffffffu, upper ? both.x : both.z, 2);
                const u32 y = __shfl_xor_sync(0xffffffffu, upper ? both.y : both.w, 2);
                (upper ? both.x : both.z) = x, (upper ? both.y : both.w) = y;
                second[i] = {both.z, both.w};
            }
            const uint2 v = block % 2 ? second[i] : uint2{both.x, both.y};
            if (block % 2) load_packed(both, i, GROUP * 32 + block / 2 * 64, left - GROUP - block / 2 * 2);
#pragma unroll
            for (int s = 0; s < 8; s++)
                a[s / 2][i % 2 + s % 2 * 2] = two_values(shared, table, s < 4 ? v.x : v.y, s % 4);
        };
#if WGMMA
        u32 a[2][4][4];
        float c[MT][4] = {};
        __syncthreads();  // the table
#pragma unroll
        for (int i = 0; i < 2; i++) unpack(0, i, count, a[0]);
#else
        const int at = g * UNIT + (swap(t) ^ ((g & 1) * 4)) * 16;
#endif
        for (int left = count; left > 0; left -= GROUP, turn++) {
            const int now = turn & 1;  // the stage that is read; the other one is filled
            __syncthreads();
            const float *scale_of = scales - t + now * OWN * THREADS;
            if (PREPARED || !WGMMA) copy_x(count - left + GROUP, now ^ 1);
            put_scales(count - left + GROUP, now ^ 1);
#if WGMMA
#if PREPARED
            await_copy(arrived + now, turn >> 1 & 1);
#endif
#pragma unroll  // a tile of 16 rows and 64 values at a time; the next one is unpacked while it is multiplied
            for (int i = 0; i < GROUP * R; i++) {
                const int r = i % R, next = (i + 1) % (GROUP * R);
                begin_product(c, a[i % 2], xs + now * SECOND + i / R * BATCH * ROW_X);
                if (!PREPARED && i == 0) copy_x(count - left + GROUP, now ^ 1);
#pragma unroll
                for (int j = 0; j < 2; j++) unpack(next / R, next % R * 2 + j, left, a[next % 2]);
                const float scale[2] = {scale_of[r * 2 * THREADS + i / R], scale_of[(r * 2 + 1) * THREADS + i / R]};
                end_product(c);
#pragma unroll
                for (int j = 0; j < 4 * MT; j++)
                    sum[r][j / 4][j % 4] = __fmaf_rn(c[j / 4][j % 4], scale[j % 4 / 2], sum[r][j / 4][j % 4]);
            }
#else
            const u8 *p_side = xs + at + now * SECOND, *q_side = xs + (at ^ 64) + now * SECOND;
#pragma unroll  // and no more: the loop is to fit into the cache of instructions
            for (int block = 0; block < GROUP; block++) {
                uint4 p[MT], q[MT];
#pragma unroll
                for (int n = 0; n < MT; n++) {
                    const int unit = (block * BATCH + n * 8) * UNIT;
                    p[n] = *(const uint4 *)(p_side + unit), q[n] = *(const uint4 *)(q_side + unit);
                }
                u32 a[R][4][4];
                float scale[R][2];
#pragma unroll
                for (int i = 0; i < OWN; i++) {
                    scale[i / 2][i % 2] = scale_of[i * THREADS + block];
                    unpack(block, i, left, a[i / 2]);
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
#endif
            weights += GROUP * 32;
        }
#pragma unroll
        for (int i = 0; i < R * MT * 4; i++) sum[i / 4 / MT][i / 4 % MT][i % 4] *= 1.f / factor;

        add_and_write(shared, of, sum, fixed, y, partial, counters, n_shards, M, N, h, lora_b, rank, ready, patience, streams);
        unit += streams ? (count + GROUP - 1) / GROUP : end;
    }
}

#if PREPARED
// X -> tiles: a block of 64 of K after the other, BATCH rows of 128 bytes each, as begin_product takes them: of lane t's 16
// values of W, a step's four are the values 2t, 2t + 1, 2t + 8 and 2t + 9 of 16. Zeros where X has none.
extern "C" __global__ void __launch_bounds__(THREADS) prepare_x(const u16 *x, u8 *tiles, int M, int K, int stride) {
    let_next_start();
    for (int i = threadIdx.x; i < BATCH * 8; i += THREADS) {
        const int row = i / 8, at = i % 8, m = blockIdx.y * BATCH + row;
        u32 v[4];
#pragma unroll
        for (int t = 0; t < 4; t++) {
            const int k = blockIdx.x * 64 + swap(t) * 16 + at * 2;
            v[t] = m < M && k < K ? *(const u32 *)(x + (i64)m * stride + k) : 0;
        }
        u8 *tile = tiles + (i64)(blockIdx.y * gridDim.x + blockIdx.x) * BATCH * ROW_X;
        *(uint4 *)(tile + row * ROW_X + swizzled(row, at)) = make_uint4(v[0], v[1], v[2], v[3]);
    }
}
#endif
