// Hopper's matrix units, bulk copies and barriers: what the .cu files beside this one are written in.
//
// Tiles in shared memory are columns of 64 two-byte values, rows of 128 bytes, in the 128-byte
// swizzle: the 16-byte unit u of row r lies at r * 128 + ((u ^ r % 8) * 16). Bulk copies write them
// so and matrix instructions read them so, along rows ("K major") or across them ("MN major").
// Source: NVIDIA, "PTX ISA", sections on wgmma, cp.async.bulk.tensor and mbarrier.

#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#define DEVICE __device__ __forceinline__

DEVICE uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// The byte of a tile at which the 16-byte unit `unit` of row `row` begins.
DEVICE uint32_t swizzled(int row, int unit) { return row * 128 + ((unit ^ (row & 7)) << 4); }

// --- barriers ---

DEVICE void barrier_init(uint32_t at, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}

DEVICE void barrier_arrive(uint32_t at) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}

DEVICE void barrier_expect(uint32_t at, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes)
               : "memory");
}

DEVICE bool barrier_tried(uint32_t at, int parity) {
  uint32_t done;
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
      " selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(at), "r"(parity)
      : "memory");
  return done;
}

#ifdef GIVE_UP  // in tests, to see a deadlock as a wrong result: {barrier, parity, block, thread}
__device__ volatile unsigned stuck[4];
extern "C" void stuck_at(unsigned* at) {  // and clears it
  const unsigned none[4] = {};
  cudaMemcpyFromSymbol(at, stuck, sizeof(none));
  cudaMemcpyToSymbol(stuck, none, sizeof(none));
}
#endif

DEVICE void barrier_wait(uint32_t at, int parity) {
#ifdef GIVE_UP
  for (int tries = 0; tries < GIVE_UP && stuck[0] == 0; ++tries)
    if (barrier_tried(at, parity)) return;
  if (stuck[0] == 0) stuck[0] = at, stuck[1] = parity, stuck[2] = blockIdx.x, stuck[3] = threadIdx.x;
#else
  while (!barrier_tried(at, parity)) {
  }
#endif
}

template <int THREADS>
DEVICE void group_sync(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

template <int THREADS>
DEVICE void group_arrive(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

// Makes this thread's stores to shared memory visible to matrix units and bulk copies.
DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

DEVICE void wait_for_launch_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void allow_launch_after() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Waits until the thread block has so many: for ever, if it was launched with fewer.
template <int COUNT>
DEVICE void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
DEVICE void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// --- bulk copies ---

DEVICE void copy_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, int a, int b) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%3, %4}], [%2];" ::"r"(to), "l"(map), "r"(barrier), "r"(a), "r"(b)
      : "memory");
}

DEVICE void copy_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, int a, int b, int c) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%3, %4, %5}], [%2];" ::"r"(to), "l"(map), "r"(barrier), "r"(a), "r"(b), "r"(c)
      : "memory");
}

DEVICE void copy_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, int a, int b, int c,
                     int d) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%3, %4, %5, %6}], [%2];" ::"r"(to), "l"(map), "r"(barrier), "r"(a), "r"(b), "r"(c),
      "r"(d)
      : "memory");
}

// The same box to the L2 cache.
DEVICE void prefetch_box(const CUtensorMap* map, int a, int b, int c) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(map), "r"(a),
               "r"(b), "r"(c)
               : "memory");
}

// 16 bytes by a single thread, or zeros; done for this thread after copies_wait().
DEVICE void copy_unit(uint32_t to, int64_t from, bool zeros) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(zeros ? 0 : 16)
               : "memory");
}

DEVICE void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Where the boxes of some tokens of a paged pool lie: each lane of a warp knows that of its number.
// Found early, since the table is a long way off.
struct Boxes {
  int block = 0, slot = 0;
  DEVICE Boxes() {}
  DEVICE Boxes(const int64_t* table, int first, int box, int page, int context) {
    const int final = (context - 1) / box * box;  // later boxes are read again from here
    const int at = min(first + int(threadIdx.x % 32) * box, final);
    block = int(table[at / page]), slot = at % page;
  }
};

// A map of a tensor of two-byte values, or of bytes, 64 in a row of a box, in the 64-byte swizzle:
// the 16-byte unit u of row r lies at r * 64 + ((u ^ r / 2 % 4) * 16). Sizes and box innermost first,
// strides in bytes from the second dimension on. Returns whether the driver took it.
inline bool make_map(CUtensorMap* map, bool bf16, void* base, int rank, const uint64_t* sizes,
                     const uint64_t* strides, const uint32_t* box, bool bytes = false) {
  static decltype(&cuTensorMapEncodeTiled) encode = nullptr;
  if (encode == nullptr) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault,
                                         &result) != cudaSuccess ||
        result != cudaDriverEntryPointSuccess)
      return false;
    encode = reinterpret_cast<decltype(encode)>(found);
  }
  const uint32_t ones[5] = {1, 1, 1, 1, 1};
  const auto type = bytes  ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                    : bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                           : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return encode(map, type, rank, base, sizes, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                bytes ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// --- matrix products of a warpgroup: accumulators [64, N] += a [64, 16] b [16, N] ---
// Thread t holds, of rows t / 32 * 16 + t % 32 / 4 (+ 8) and columns 8 j + t % 4 * 2 (+ 1), the
// values 4 j, 4 j + 1 (and 4 j + 2, 4 j + 3 of the row + 8).

// Where a tile begins; `across`: bytes between its columns of 64 values, for MN major.
struct Tile {
  uint32_t low;
  DEVICE explicit Tile(uint32_t at, int across = 16) : low(at >> 4 | across >> 4 << 16) {
    asm volatile("" : "+r"(low));  // or each loop's descriptors would be kept in registers
  }
  DEVICE uint64_t operator[](int bytes) const {
    return uint64_t(1 << 30 | 1024 >> 4) << 32 | low + (bytes >> 4);
  }
};

DEVICE void matrix_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void matrix_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
DEVICE void matrix_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving uses of accumulators across a wait.
template <int COUNT>
DEVICE void pin(float (&x)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

template <int COUNT>
DEVICE void pin(uint32_t (&x)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(x[i])::"memory");
}

#define ACC4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ACC16(d, i) ACC4(d, i), ACC4(d, i + 4), ACC4(d, i + 8), ACC4(d, i + 12)
#define ACC32(d, i) ACC16(d, i), ACC16(d, i + 16)
#define ACC64(d, i) ACC32(d, i), ACC32(d, i + 32)
#define ACC128(d, i) ACC64(d, i), ACC64(d, i + 64)
#define TEN(a) "%" a "0,%" a "1,%" a "2,%" a "3,%" a "4,%" a "5,%" a "6,%" a "7,%" a "8,%" a "9"
#define LIST32 TEN("") "," TEN("1") "," TEN("2") ",%30,%31"
#define LIST64 LIST32 ",%32,%33,%34,%35,%36,%37,%38,%39," TEN("4") "," TEN("5") ",%60,%61,%62,%63"
#define LIST128                                                                              \
  LIST64 ",%64,%65,%66,%67,%68,%69," TEN("7") "," TEN("8") "," TEN("9") "," TEN("10") "," TEN( \
      "11") ",%120,%121,%122,%123,%124,%125,%126,%127"

// a and b in shared memory; ACROSS: b is MN major
#define PRODUCT_SHARED(N, TYPE, COUNT, A, B, USE, MAJOR)                                \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %" USE                                   \
               ", 0; wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" \
               LIST##COUNT "}, %" A ", %" B ", p, 1, 1, 0, %" MAJOR "; }"               \
               : ACC##COUNT(d, 0)                                                       \
               : "l"(a), "l"(b), "r"(int(use)), "n"(ACROSS ? 1 : 0))

// a in registers, as accumulators lie there, in pairs
#define PRODUCT_REGISTERS(N, TYPE, COUNT, A0, A1, A2, A3, B, USE, MAJOR)                \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %" USE                                   \
               ", 0; wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" \
               LIST##COUNT "}, {%" A0 ",%" A1 ",%" A2 ",%" A3 "}, %" B ", p, 1, 1, %" MAJOR "; }" \
               : ACC##COUNT(d, 0)                                                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(use)),     \
                 "n"(ACROSS ? 1 : 0))

#define PRODUCTS(COUNT, N, I0, I1, I2, I3, I4, I5, I6)                                        \
  template <class T, bool ACROSS>                                                         \
  DEVICE void multiply(float (&d)[COUNT], uint64_t a, uint64_t b, bool use = true) {      \
    if constexpr (std::is_same_v<T, __half>)                                              \
      PRODUCT_SHARED(N, "f16", COUNT, I0, I1, I2, I3);                                    \
    else                                                                                  \
      PRODUCT_SHARED(N, "bf16", COUNT, I0, I1, I2, I3);                                   \
  }                                                                                       \
  template <class T, bool ACROSS>                                                         \
  DEVICE void multiply(float (&d)[COUNT], const uint32_t* a, uint64_t b, bool use = true) { \
    if constexpr (std::is_same_v<T, __half>)                                              \
      PRODUCT_REGISTERS(N, "f16", COUNT, I0, I1, I2, I3, I4, I5, I6);                      \
    else                                                                                  \
      PRODUCT_REGISTERS(N, "bf16", COUNT, I0, I1, I2, I3, I4, I5, I6);                     \
  }

PRODUCTS(32, "64", "32", "33", "34", "35", "36", "37", "38")
PRODUCTS(64, "128", "64", "65", "66", "67", "68", "69", "70")
PRODUCTS(128, "256", "128", "129", "130", "131", "132", "133", "134")

// --- values ---

template <class T>
DEVICE uint32_t packed(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    __half2 both = __floats2half2_rn(low, high);
    return reinterpret_cast<uint32_t&>(both);
  } else {
    __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<uint32_t&>(both);
  }
}

DEVICE float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Of the four threads that share a row of accumulators.
DEVICE float largest_of_row(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

DEVICE float sum_of_row(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// The sequence that owns row `token` of query_start [sequences + 1], a guess first: one token each.
DEVICE int64_t sequence_of(const int64_t* query_start, int64_t token, int64_t sequences) {
  int64_t low = token < sequences ? token : sequences - 1;
  if (query_start[low] == token && query_start[low + 1] == token + 1) return low;
  int64_t high = sequences;
  low = 0;
  while (high - low > 1) {
    int64_t middle = (low + high) / 2;
    (query_start[middle] <= token ? low : high) = middle;
  }
  return low;
}

template <class Kernel, class... Given>
int launch(Kernel kernel, dim3 grid, int threads, int shared, void* stream,
           Given... given) {
  cudaError_t failed =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (failed != cudaSuccess) return failed;
  cudaLaunchAttribute asked;
  asked.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  asked.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = dim3(threads), config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(stream), config.attrs = &asked, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, given...);
}
