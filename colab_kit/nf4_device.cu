// Types, sizes and instructions of nf4*.cu, which are compiled as one source (nf4.SOURCES).
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;
typedef unsigned long long u64;
struct Shard { i64 first_row; const float *absmax; };
struct Fixed { Shard shards[8]; float code[16]; };  // nf4.Fixed: an argument, for it need not be waited for

#define PREPARED (WGMMA == 2)  // x by prepare_x
constexpr int THREADS = WARPS * 32, ROWS = WARPS * R * 16, BATCH = MT * 8, GROUP = 4;
// Rows of W a lane; rows of x that a warp copies, bytes' entries of the table that a thread makes.
constexpr int OWN = R * 2, COPIES = (BATCH + WARPS - 1) / WARPS, ENTRIES = (255 + THREADS) / THREADS;
// Shared memory: the table, an entry of 256 bytes for each byte of W, of which 128 hold its two values, once a bank. x, a
// row's 64 values of a block next to each other, in the other 128, or for wgmma, whose rows follow one another, elsewhere;
// two stages of it. The scales, OWN a lane, in two stages as x; the rows' addresses of them; two barriers for x.
constexpr int UNIT = 256, TABLE = 256 * UNIT, ROW_X = WGMMA ? 128 : UNIT, STAGE = GROUP * BATCH * ROW_X;
constexpr int SMALL = 2 * OWN * THREADS * 4 + ROWS * 8 + 16;
#if ALIGNED  // the table's address is a multiple of its size (1,024 bytes before `shared` are the driver's)
constexpr int TABLE_AT = TABLE - 1024, BEHIND = 2 * TABLE;
constexpr bool BELOW = 2 * STAGE + SMALL <= TABLE_AT;  // there is room before it
constexpr int X = WGMMA ? 0 : TABLE_AT + UNIT / 2, SECOND = !WGMMA || BELOW ? STAGE : BEHIND;  // x, and its second stage
constexpr int SCALES = !WGMMA ? 0 : BELOW ? 2 * STAGE : STAGE;
#else
constexpr int TABLE_AT = 0, X = WGMMA ? TABLE : UNIT / 2, SECOND = STAGE;
constexpr int SCALES = WGMMA ? TABLE + 2 * STAGE : 2 * STAGE > TABLE ? 2 * STAGE : TABLE;
#endif
constexpr int PLACES = SCALES + 2 * OWN * THREADS * 4, ARRIVED = PLACES + ROWS * 8;
struct alignas(R * 4) Column { u32 two[R]; };  // a lane's rows in a row of Y

// Which 8 bytes of a row's 64-block of W lane t of a quad has, and which lane has those of a number.
__device__ int swap(int t) { return (t & 1) * 2 + (t >> 1); }
// Where wgmma looks for 16 bytes of a row of x (its 128-byte swizzle).
__device__ int swizzled(int row, int at) { return (at ^ (row & 7)) * 16; }

// 8 values of x, the `chunk`-th of a row's block of 64, to where the product finds them.
__device__ void put_x(u8 *to, int row, int chunk, uint4 v) {
#if WGMMA  // in the order of prepare_x: at swap(chunk >> 1)'s four bytes
    const u32 words[4] = {v.x, v.y, v.z, v.w}, at = (chunk & 2) * 4 + (chunk & 4);
#pragma unroll
    for (int k = 0; k < 4; k++) *(u32 *)(to + swizzled(row, (chunk & 1) * 4 + k) + at) = words[k];
#else  // in such an order that the reads of the main loop meet no bank twice
    *(uint4 *)(to + (((chunk & 1) * 4 + (chunk >> 1)) ^ (row & 1) * 4) * 16) = v;
#endif
}

#ifndef EMULATED  // tests/nf4_emulated.cpp has these in C++
#define SHARED extern __shared__ __align__(1024) u8 shared[]
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

#if WGMMA  // a warpgroup's 64 rows of W, a warp's 16 as in mma, by BATCH rows of x, which are in shared memory
#if HALF
#define TYPES ".f32.f16.f16 "
#else
#define TYPES ".f32.bf16.bf16 "
#endif
#define FOUR(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#if MT == 1
#define SHAPE "n8k16"
#define RESULT "{%0,%1,%2,%3}"
#define OPERANDS ", {%4,%5,%6,%7}, %8, "
#define ADD "%9"
#define FOURS FOUR(0)
#elif MT == 2
#define SHAPE "n16k16"
#define RESULT "{%0,%1,%2,%3,%4,%5,%6,%7}"
#define OPERANDS ", {%8,%9,%10,%11}, %12, "
#define ADD "%13"
#define FOURS FOUR(0), FOUR(1)
#elif MT == 4
#define SHAPE "n32k16"
#define RESULT "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}"
#define OPERANDS ", {%16,%17,%18,%19}, %20, "
#define ADD "%21"
#define FOURS FOUR(0), FOUR(1), FOUR(2), FOUR(3)
#elif MT == 8
#define SHAPE "n64k16"
#define RESULT "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27," \
               "%28,%29,%30,%31}"
#define OPERANDS ", {%32,%33,%34,%35}, %36, "
#define ADD "%37"
#define FOURS FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7)
#endif
__device__ u32 in_shared(const void *p) { return (u32)__cvta_generic_to_shared(p); }
// c = a x^T, begun. `tile`: a 64-block of x, rows of 128 bytes, `swizzled`.
__device__ void begin_product(float (&c)[MT][4], const u32 (&a)[4][4], const u8 *tile) {
    // 16 bytes a unit: where it begins, then 1024 from 8 rows to the next.
    const u64 x = (in_shared(tile) & 0x3ffff) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int s = 0; s < 4; s++)
        asm volatile("{.reg .pred add;\nsetp.ne.b32 add, " ADD ", 0;\n"
                     "wgmma.mma_async.sync.aligned.m64" SHAPE TYPES RESULT OPERANDS "add, 1, 1, 0;}"
                     : FOURS
                     : "r"(a[s][0]), "r"(a[s][1]), "r"(a[s][2]), "r"(a[s][3]), "l"(x + s * 2), "r"(s));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
__device__ void end_product(float (&c)[MT][4]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" : FOURS::"memory");
}
__device__ void show_to_wgmma() {  // what this thread has written to shared memory
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// x's two stages. A copy is by the engine for it; the barrier's phase ends when all has come.
__device__ void start_barriers(u64 *barriers) {
    for (int i = 0; i < 2; i++) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(in_shared(barriers + i)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ void copy(u8 *to, const u8 *from, int bytes, u64 *barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(in_shared(barrier)), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(in_shared(to)),
                 "l"(from), "r"(bytes), "r"(in_shared(barrier)) : "memory");
}
__device__ void await_copy(u64 *barrier, int phase) {
    for (u32 done = 0; !done;)
        asm volatile("{.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;}"
                     : "=r"(done) : "r"(in_shared(barrier)), "r"(phase) : "memory");
}
#endif

// The table for this lane's bank, and of a byte of v its two values (volatile: not before the barrier behind which they are
// there).
__device__ u32 table_of_lane(const u8 *shared, int lane) {
    const u32 at = (u32)__cvta_generic_to_shared(shared) + TABLE_AT;
#if ALIGNED  // its upper two bytes, but one further down
    return at >> 8 | lane * 4;
#else
    return at + lane * 4;
#endif
}
__device__ u32 two_values(const u8 *, u32 table, u32 v, int byte) {
#if ALIGNED
    const u32 at = __byte_perm(v, table, 0x6504 | byte << 4);
#else
    const u32 at = table + __byte_perm(v, 0, 0x4404 | byte << 4);
#endif
    u32 both;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(both) : "r"(at));
    return both;
}

__device__ uint4 stream(const u8 *address) {  // read once: not kept in L1
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
    return v;
}

__device__ int poll(const int *counter) {
    int v;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(counter) : "memory");
    return v;
}

// From sm_90 on. A kernel that is launched `early` (nvrtc.launch) starts when all blocks of the one before it have called
// the first of these, and waits in the second for that one's results. The blocks of a cluster meet in the third, and the
// fourth reads what is at `mine` in the shared memory of a block of the same cluster.
__device__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ void await_last() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ void meet_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
__device__ float4 of_block(const float4 *mine, int block) {
    float4 v = {};
#if __CUDA_ARCH__ >= 900
    u32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"((u32)__cvta_generic_to_shared(mine)), "r"(block));
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
#endif
    return v;
}
#endif
