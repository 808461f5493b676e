// colab_kit/nf4*.cu on a CPU: each GPU thread is a fiber, warps and blocks meet at barriers, the matrix instruction is
// written out by its documented fragment layout.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <ucontext.h>
#include <vector>

#define EMULATED
#define __device__ static
#define __global__
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__
#define SHARED uint8_t *shared = block->shared
struct uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct dim3 { unsigned x, y, z; };
static uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct Barrier { int count = 0, generation = 0; };
struct Warp { Barrier barrier; uint32_t value[32]; uint32_t a[32][4], b[32][2]; };
struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(1 << 17);
    bool done = false;
    const uint8_t *tile;  // of a product that has begun
    const uint32_t *lent;
    uint32_t a[4][4];
};
struct Copy { uint8_t *to; const uint8_t *from; int bytes = 0, done = 0; };
struct Block {
    Copy copies[2];
    alignas(1024) uint8_t shared[232448];
    dim3 at;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    Barrier all, together;
    Block **cluster;  // its blocks, by z
};
static dim3 threadIdx, blockIdx, gridDim;
static Block *block;
static ucontext_t scheduler;
static int current;

static void yield() {
    Fiber &fiber = block->fibers[current];
    swapcontext(&fiber.context, &scheduler);
}
static void meet(Barrier &barrier, int members) {
    const int before = barrier.generation;
    if (++barrier.count == members) barrier.count = 0, barrier.generation++;
    while (barrier.generation == before) yield();
}
static Warp &warp_of() { return block->warps[current / 32]; }
static void __syncthreads() { meet(block->all, block->fibers.size()); }
static void meet_cluster() { meet(block->cluster[0]->together, block->fibers.size() * gridDim.z); }
static float4 of_block(const float4 *mine, int z) {
    return *(const float4 *)((const uint8_t *)mine - block->shared + block->cluster[z]->shared);
}
static void __syncwarp() { meet(warp_of().barrier, 32); }
static void let_next_start() {}
static void await_last() {}
static void __threadfence() {}
static int atomicAdd(int *p, int v) { return (*p += v) - v; }
static int atomicOr(int *p, int v) {
    const int before = *p;
    *p |= v;
    return before;
}
static int poll(const int *p) {
    yield();
    return *p;
}
static int __popc(unsigned v) { return __builtin_popcount(v); }
template <class T> static void __stcg(T *p, T v) { *p = v; }
template <class T> static T __ldcg(const T *p) { return *p; }
template <class T> static T __ldg(const T *p) { return *p; }
static float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
static int min(int a, int b) { return std::min(a, b); }
static uint32_t __shfl_xor_sync(unsigned, uint32_t v, int with) {
    Warp &warp = warp_of();
    warp.value[current % 32] = v;
    meet(warp.barrier, 32);
    v = warp.value[current % 32 ^ with];
    meet(warp.barrier, 32);
    return v;
}
static float wide(uint16_t bits) {
#if HALF
    _Float16 v;
    memcpy(&v, &bits, 2);
    return (float)v;
#else
    const uint32_t u = (uint32_t)bits << 16;
    float v;
    memcpy(&v, &u, 4);
    return v;
#endif
}
static uint32_t narrow(float f) {
#if HALF
    const _Float16 v = (_Float16)f;
    uint16_t bits;
    memcpy(&bits, &v, 2);
    return bits;
#else
    uint32_t u;
    memcpy(&u, &f, 4);
    return (u + 0x7fff + (u >> 16 & 1)) >> 16;
#endif
}
static uint32_t pack(float low, float high) { return narrow(low) | narrow(high) << 16; }
static uint4 stream(const uint8_t *p) {
    uint4 v;
    memcpy(&v, p, 16);
    return v;
}
static void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    Warp &warp = warp_of();
    const int lane = current % 32, g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++) warp.a[lane][i] = a[i];
    warp.b[lane][0] = b0, warp.b[lane][1] = b1;
    meet(warp.barrier, 32);
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 16; k++) {
            const int row = g + i / 2 * 8, column = t * 2 + i % 2, shift = k % 2 * 16;
            c[i] += wide(warp.a[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2] >> shift)
                * wide(warp.b[column * 4 + k % 8 / 2][k / 8] >> shift);
        }
    meet(warp.barrier, 32);
}

#include "../colab_kit/nf4_device.cu"
static u32 table_of_lane(const u8 *, int lane) { return lane * 4; }
static u32 two_values(const u8 *shared, u32 table, u32 v, int byte) {
    return *(const u32 *)(shared + TABLE_AT + (v >> byte * 8 & 255) * UNIT + table);
}
static void show_to_wgmma() {}
static void start_barriers(u64 *) {}
// What is copied comes when somebody awaits it; until then there are NaNs.
static void copy(u8 *to, const u8 *from, int bytes, u64 *barrier) {
    Copy &copy = block->copies[barrier - (u64 *)(block->shared + ARRIVED)];
    if (copy.bytes) abort();
    copy.to = to, copy.from = from, copy.bytes = bytes;
    memset(to, 0xff, bytes);
}
static void await_copy(u64 *barrier, int phase) {
    Copy &copy = block->copies[barrier - (u64 *)(block->shared + ARRIVED)];
    if (copy.bytes) memcpy(copy.to, copy.from, copy.bytes), copy.bytes = 0, copy.done++;
    if ((copy.done & 1) == phase) abort();  // it would wait for ever: here the copy was begun before a barrier
}
// The product is there when it ends, from the shared memory of then; W's registers must be as they were.
static void begin_product(float (&c)[MT][4], const uint32_t (&a)[4][4], const uint8_t *tile) {
    Fiber &fiber = block->fibers[current];
    if ((tile - block->shared) % 1024) abort();  // or the swizzle would begin elsewhere
    for (auto &four : c) std::fill(four, four + 4, NAN);
    fiber.tile = tile, fiber.lent = &a[0][0], memcpy(fiber.a, a, sizeof a);
}
static void end_product(float (&c)[MT][4]) {
    Fiber &fiber = block->fibers[current];
    if (memcmp(fiber.a, fiber.lent, sizeof fiber.a)) abort();
    const int lane = current % 32, g = lane / 4, t = lane % 4;
    memset(c, 0, sizeof c);
    for (int s = 0; s < 4; s++)
        for (int n = 0; n < MT; n++) {
            auto two = [&](int at) { return *(const u32 *)(fiber.tile + (n * 8 + g) * 128 + (at ^ g) * 16 + t * 4); };
            mma(c[n], fiber.a[s], two(s * 2), two(s * 2 + 1));
        }
}
#include "../colab_kit/nf4_parts.cu"
#include "../colab_kit/nf4.cu"
#include "../colab_kit/nf4_lora.cu"

static std::function<void()> body;
static void enter() {
    body();
    block->fibers[current].done = true;
    yield();
}

// The blocks of a z after one another, or as many as `together` at the same time: of whole clusters, where it is
// a multiple of gz.
static void launch_blocks(int gx, int gy, int gz, int together = 1) {
    gridDim = {(unsigned)gx, (unsigned)gy, (unsigned)gz};
    std::vector<std::unique_ptr<Block>> blocks(together);
    std::vector<Block *> clusters(together);
    for (int first = 0; first < gx * gy * gz; first += together) {
        const int count = std::min(together, gx * gy * gz - first);
        for (int i = 0; i < count; i++) {
            blocks[i] = std::make_unique<Block>();
            const int z = (first + i) % gz, xy = (first + i) / gz;
            clusters[i] = blocks[i].get();
            blocks[i]->cluster = &clusters[i / gz * gz];
            blocks[i]->at = {(unsigned)(xy % gx), (unsigned)(xy / gx), (unsigned)z};
            memset(blocks[i]->shared, 0xff, sizeof blocks[i]->shared);  // NaN, if it is read before it is written
            blocks[i]->fibers = std::vector<Fiber>(THREADS);
            blocks[i]->warps = std::vector<Warp>(WARPS);
            for (auto &fiber : blocks[i]->fibers) {
                getcontext(&fiber.context);
                fiber.context.uc_stack = {fiber.stack.data(), 0, fiber.stack.size()};
                fiber.context.uc_link = &scheduler;
                makecontext(&fiber.context, enter, 0);
            }
        }
        for (bool left = true; left;) {
            left = false;
            for (int i = 0; i < count; i++)
                for (current = 0; current < THREADS; current++) {
                    block = blocks[i].get();
                    if (block->fibers[current].done) continue;
                    threadIdx = {(unsigned)current, 0, 0}, blockIdx = block->at;
                    swapcontext(&scheduler, &block->fibers[current].context);
                    left |= !block->fibers[current].done;
                }
        }
    }
}

extern "C" void launch(const u16 *x, const u8 *w, const Fixed *fixed, u16 *y, float4 *partial, int *counters,
                       int n_shards, int M, int N, int K, int stride, float factor, const u16 *h,
                       const u16 *const *lora_b, int rank, const int *ready, int patience, int streams, int together, int gx, int gy, int gz) {
    body = [=] {
        nf4_matmul(x, w, *fixed, y, partial, counters, n_shards, M, N, K, stride, factor, h, lora_b, rank, ready,
                   patience, streams);
    };
    launch_blocks(gx, gy, gz, together);
}

extern "C" void launch_shrink(const u16 *x, const u16 *const *lora_a, u16 *h, float *partial, int *counters,
                              const int *adapters, int slices, int rank, int M, int K, int stride, int *ready, int gx,
                              int gy, int gz) {
    body = [=] { lora_shrink(x, lora_a, h, partial, counters, adapters, slices, rank, M, K, stride, ready); };
    launch_blocks(gx, gy, gz);
}

#if PREPARED
extern "C" void launch_prepare(const u16 *x, u8 *tiles, int M, int K, int stride, int gx, int gy, int gz) {
    body = [=] { prepare_x(x, tiles, M, K, stride); };
    launch_blocks(gx, gy, gz);
}
#endif
