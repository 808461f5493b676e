// colab_kit/nf4.cu on a CPU: each GPU thread is a fiber, warps and blocks meet at barriers, the matrix instruction is
// written out by its documented fragment layout, and an asynchronous copy lands no earlier than its wait.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <ucontext.h>
#include <vector>

#define EMULATED
#define __device__ static
#define __global__
#define __shared__ static
#define __launch_bounds__(...)
#define SHARED uint8_t *shared = shared_memory
struct uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct dim3 { unsigned x, y, z; };
static uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct Barrier { int count = 0, generation = 0; };
struct Warp { Barrier barrier; float value[32]; uint32_t a[32][4], b[32][2]; };
struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(1 << 18);
    bool done = false;
    std::vector<std::vector<std::function<void()>>> copies;
    std::vector<std::function<void()>> open;
};
alignas(128) static uint8_t shared_memory[232448];
static dim3 threadIdx, blockIdx, gridDim;
static std::vector<Fiber> fibers;
static std::vector<Warp> warps;
static Barrier all;
static ucontext_t scheduler;
static int current;

static void meet(Barrier &barrier, int members) {
    const int before = barrier.generation;
    if (++barrier.count == members) barrier.count = 0, barrier.generation++;
    while (barrier.generation == before) {
        const int me = current;
        swapcontext(&fibers[me].context, &scheduler);
    }
}
static Warp &warp_of() { return warps[current / 32]; }
static void __syncthreads() { meet(all, fibers.size()); }
static void __threadfence() {}
static int atomicAdd(int *p, int v) { return (*p += v) - v; }
static void __stcg(float4 *p, float4 v) { *p = v; }
static float4 __ldcg(const float4 *p) { return *p; }
static float __ldcg(const float *p) { return *p; }
static float __ldg(const float *p) { return *p; }
static float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
static int min(int a, int b) { return std::min(a, b); }
static float __shfl_sync(unsigned, float v, int from) {
    Warp &warp = warp_of();
    warp.value[current % 32] = v;
    meet(warp.barrier, 32);
    v = warp.value[from];
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
static uint32_t entry(uint32_t v, int byte, uint32_t lane4) { return (v >> byte * 8 & 255) * 256 + lane4; }
static uint2 stream(const uint8_t *p) {
    uint2 v;
    memcpy(&v, p, 8);
    return v;
}
static void copy16(uint8_t *to, const uint16_t *from, bool there) {
    fibers[current].open.push_back([=] { there ? (void)memcpy(to, from, 16) : (void)memset(to, 0, 16); });
}
static void commit() {
    Fiber &fiber = fibers[current];
    fiber.copies.push_back(std::move(fiber.open));
    fiber.open.clear();
}
static void wait() {
    auto &copies = fibers[current].copies;
    while ((int)copies.size() > STAGES - 2) {
        for (auto &copy : copies.front()) copy();
        copies.erase(copies.begin());
    }
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

#include "../colab_kit/nf4.cu"

static std::function<void()> body;
static void enter() {
    body();
    fibers[current].done = true;
    swapcontext(&fibers[current].context, &scheduler);
}

static void launch_blocks(int gx, int gy, int gz) {
    gridDim = {(unsigned)gx, (unsigned)gy, (unsigned)gz};
    for (int block = 0; block < gx * gy * gz; block++) {
        blockIdx = {(unsigned)(block % gx), (unsigned)(block / gx % gy), (unsigned)(block / gx / gy)};
        memset(shared_memory, 0xff, sizeof shared_memory);  // NaN, if it is read before it is written
        fibers = std::vector<Fiber>(THREADS);
        warps = std::vector<Warp>(WARPS);
        all = {};
        for (auto &fiber : fibers) {
            getcontext(&fiber.context);
            fiber.context.uc_stack = {fiber.stack.data(), 0, fiber.stack.size()};
            fiber.context.uc_link = &scheduler;
            makecontext(&fiber.context, enter, 0);
        }
        for (bool left = true; left;) {
            left = false;
            for (current = 0; current < THREADS; current++) {
                if (fibers[current].done) continue;
                threadIdx = {(unsigned)current, 0, 0};
                swapcontext(&scheduler, &fibers[current].context);
                left |= !fibers[current].done;
            }
        }
    }
}

extern "C" void launch(const u16 *x, const u8 *w, const Shard *shards, const float *code, u16 *y, float4 *partial,
                       int *counters, int n_shards, int M, int N, int K, int stride, float factor, const u16 *h,
                       const u16 *const *lora_b, int rank, int gx, int gy, int gz) {
    body = [=] {
        nf4_matmul(x, w, shards, code, y, partial, counters, n_shards, M, N, K, stride, factor, h, lora_b, rank);
    };
    launch_blocks(gx, gy, gz);
}

extern "C" void launch_shrink(const u16 *x, const u16 *const *lora_a, u16 *h, float *partial, int *counters,
                              const int *adapters, int slices, int rank, int M, int K, int stride, int gx, int gy,
                              int gz) {
    body = [=] { lora_shrink(x, lora_a, h, partial, counters, adapters, slices, rank, M, K, stride); };
    launch_blocks(gx, gy, gz);
}
