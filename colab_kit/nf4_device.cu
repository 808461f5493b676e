// Types, sizes and instructions of nf4.cu and nf4_lora.cu, which are compiled as one source.
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;
struct Shard { i64 first_row; const float *absmax; };
struct Fixed { Shard shards[8]; float code[16]; };  // nf4.Fixed: an argument, for it need not be waited for

constexpr int THREADS = WARPS * 32, ROWS = WARPS * R * 16, BATCH = MT * 8, GROUP = 4;
// Rows of W a lane; rows of x that a warp copies, bytes' entries of the table that a thread makes.
constexpr int OWN = R * 2, COPIES = (BATCH + WARPS - 1) / WARPS, ENTRIES = (255 + THREADS) / THREADS;
// Shared memory in units of 256 bytes: the 128 of a byte's entry in the table, once a bank, then 128 of x, a row's 64.
constexpr int UNIT = 256, STAGE = GROUP * BATCH * UNIT;
// Then the scales, OWN a lane, in two stages as x, and the rows' addresses of them.
constexpr int SCALES = 2 * STAGE > 256 * UNIT ? 2 * STAGE : 256 * UNIT, PLACES = SCALES + 2 * OWN * THREADS * 4;
struct alignas(R * 4) Column { u32 two[R]; };  // a lane's rows in a row of Y

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
