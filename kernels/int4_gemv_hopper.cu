// An INT4 linear layer for up to eight tokens, bound by reading the weight once: y^T = W x^T.
//
// The rows of a weight lie one behind another, so sixteen of them are one bulk copy, and their
// scales another; a thread block keeps some of these under way, and its warps share the input
// features of those that have come. A nibble q is multiplied as 128 + q (fp16: 1024 + q), exact in
// two bytes, and what is too much comes off the sum of a group, from the sum of the group's x.

#include "hopper.cuh"

struct Arguments {
  int64_t x, qweight, scales, zeros, bias, y;  // addresses; 0: none
  int64_t rows, x_row, out_features, packed;   // packed: bytes of a row of the weight
  int64_t groups, per_group, stages;           // per_group: units of a group
};

namespace {

constexpr int UNIT = 128, ROWS = 16;

template <class T>
DEVICE void product(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Nibbles p and p + 4 of a word, as values.
template <class T>
DEVICE uint32_t raised(uint32_t word, int p) {
  constexpr uint32_t MAGIC = std::is_same_v<T, __half> ? 0x64006400 : 0x43004300;
  uint32_t q;
  asm("lop3.b32 %0, %1, 0x000f000f, %2, 0xea;" : "=r"(q) : "r"(word >> 4 * p), "r"(MAGIC));
  return q;
}

DEVICE void copy_bytes(uint32_t to, int64_t from, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to), "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

DEVICE uint32_t low_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x5410); }
DEVICE uint32_t high_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x7632); }

struct Sizes {
  int weights, scales, zeros, units, stage, x, sums, total;
  __host__ __device__ Sizes(const Arguments& a, int columns, int warps) {
    weights = ROWS * int(a.packed), scales = ROWS * int(a.groups) * 2;
    zeros = a.zeros ? ROWS * int(a.groups) : 0;
    units = int(a.packed) / (UNIT / 2);
    stage = (weights + scales + zeros + 127) / 128 * 128;
    x = units * (columns == 1 ? 256 : 2048);
    sums = units * columns * 4 + 2 * warps * ROWS * columns * 4;
    total = 128 + int(a.stages) * stage + x + sums;
  }
};

template <class T, int COLUMNS>
__global__ void __launch_bounds__(512, 2) int4_few_kernel(const Arguments a) {
  extern __shared__ __align__(128) uint8_t memory[];
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = lane / 4, t = lane % 4, stages = int(a.stages), groups = int(a.groups);
  const Sizes size(a, COLUMNS, warps);
  uint8_t* const ring = memory + 128;
  auto* const tokens = reinterpret_cast<uint4*>(ring + stages * size.stage);
  auto* const sums = reinterpret_cast<float*>(ring + stages * size.stage + size.x);
  float* const parts = sums + size.units * COLUMNS;
  const int blocks = int(a.out_features) / ROWS, step = gridDim.x;
  const auto full = [&](int stage) { return shared_address(memory) + 8 * stage; };
  const auto fill = [&](int stage, int block) {
    const uint32_t to = shared_address(ring) + stage * size.stage;
    barrier_expect(full(stage), size.weights + size.scales + size.zeros);
    copy_bytes(to, a.qweight + int64_t(block) * size.weights, size.weights, full(stage));
    copy_bytes(to + size.weights, a.scales + int64_t(block) * size.scales, size.scales,
               full(stage));
    if (a.zeros)
      copy_bytes(to + size.weights + size.scales, a.zeros + int64_t(block) * size.zeros,
                 size.zeros, full(stage));
  };
  if (threadIdx.x == 0) {
    for (int i = 0; i < stages; ++i) barrier_init(full(i), 1);
    fence_async();
    for (int i = 0; i < stages && int(blockIdx.x) + i * step < blocks; ++i)
      fill(i, blockIdx.x + i * step);  // older than the launch before, as x is not
  }
  wait_for_launch_before();
  allow_launch_after();

  // x: of eight features f the pairs (f, f + 4), where the lane that multiplies by them reads 16
  // bytes: [unit][eight of its 32 features][token][lane of four].
  const int chunks = size.units * 16;
  for (int i = threadIdx.x; i < chunks * COLUMNS; i += blockDim.x) {
    const int chunk = i % chunks, token = i / chunks;
    uint4 f = {};
    if (token < a.rows)
      f = *reinterpret_cast<const uint4*>(a.x + 2 * (token * a.x_row + chunk * 8));
    const int unit = chunk / 16, owner = chunk / 4 % 4, c = chunk % 4;
    tokens[((unit * 4 + c) * COLUMNS + token) * 4 + owner] =
        make_uint4(low_halves(f.x, f.z), high_halves(f.x, f.z), low_halves(f.y, f.w),
                   high_halves(f.y, f.w));
  }
  __syncthreads();
  const int column = COLUMNS == 1 ? 0 : row;
  const uint4* const own = tokens + column * 4 + t;
  constexpr uint32_t ONE = std::is_same_v<T, __half> ? 0x3c003c00 : 0x3f803f80;
  for (int u = warp; u < size.units; u += warps) {
    float total[4] = {};
    const uint32_t ones[4] = {ONE, ONE, ONE, ONE};
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const uint4 b0 = own[(u * 4 + 2 * e) * COLUMNS * 4], b1 = own[(u * 4 + 2 * e + 1) * COLUMNS * 4];
      product<T>(total, ones, b0.x, b1.x);
      product<T>(total, ones, b0.y, b1.y);
      product<T>(total, ones, b0.z, b1.z);
      product<T>(total, ones, b0.w, b1.w);
    }
    if (COLUMNS == 1 && lane == 0) sums[u] = total[0];
    if (COLUMNS > 1 && row == 0)
      sums[u * COLUMNS + 2 * t] = total[0], sums[u * COLUMNS + 2 * t + 1] = total[1];
  }
  __syncwarp();

  constexpr float OFFSET = std::is_same_v<T, __half> ? 1024 : 128;
  int stage = 0, parity = 0, side = 0;
  for (int block = blockIdx.x; block < blocks; block += step) {
    barrier_wait(full(stage), parity);
    const uint8_t* const from = ring + stage * size.stage;
    const auto* const scales = reinterpret_cast<const T*>(from + size.weights) + row * groups;
    const uint8_t* const zeros = from + size.weights + size.scales + row * groups;
    float acc[4] = {};
    for (int u = warp; u < size.units; u += warps) {
      const uint8_t* const at = from + row * int(a.packed) + u * 64 + t * 16;
      const uint4 low = *reinterpret_cast<const uint4*>(at);
      const uint4 high = *reinterpret_cast<const uint4*>(at + 8 * int(a.packed));
      const uint32_t w[2][4] = {{low.x, low.y, low.z, low.w}, {high.x, high.y, high.z, high.w}};
      float part[2][4] = {};
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const uint4 b0 = own[(u * 4 + 2 * e) * COLUMNS * 4];
        const uint4 b1 = own[(u * 4 + 2 * e + 1) * COLUMNS * 4];
        const uint32_t b[2][4] = {{b0.x, b0.y, b0.z, b0.w}, {b1.x, b1.y, b1.z, b1.w}};
#pragma unroll
        for (int p = 0; p < 4; ++p) {
          const uint32_t q[4] = {raised<T>(w[0][2 * e], p), raised<T>(w[1][2 * e], p),
                                 raised<T>(w[0][2 * e + 1], p), raised<T>(w[1][2 * e + 1], p)};
          product<T>(part[e], q, b[0][p], b[1][p]);
        }
      }
      const int group = a.per_group == 1 ? u : u / int(a.per_group);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float scale = float(scales[8 * r * groups + group]);
        const float offset = OFFSET + (a.zeros ? float(zeros[8 * r * groups + group]) : 8.f);
#pragma unroll
        for (int j = 0; j < (COLUMNS == 1 ? 1 : 2); ++j) {
          const float sum = sums[u * COLUMNS + (COLUMNS == 1 ? 0 : 2 * t + j)];
          acc[2 * r + j] += scale * (part[0][2 * r + j] + part[1][2 * r + j] - offset * sum);
        }
      }
    }
    float* const mine = parts + (side * warps + warp) * ROWS * COLUMNS;
    if (COLUMNS == 1) {
      if (t == 0) mine[row] = acc[0], mine[row + 8] = acc[2];
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int j = 0; j < 2; ++j) mine[(2 * t + j) * ROWS + row + 8 * r] = acc[2 * r + j];
    }
    __syncthreads();
    if (threadIdx.x == 0 && block + stages * step < blocks) fill(stage, block + stages * step);
    const int i = int(threadIdx.x) - (warps > 4 && COLUMNS == 1 ? 32 : 0);
    if (i >= 0 && i < ROWS * COLUMNS) {
      const int m = i / ROWS, n = block * ROWS + i % ROWS;
      float total = 0;
      for (int w = 0; w < warps; ++w) total += parts[(side * warps + w) * ROWS * COLUMNS + i];
      if (a.bias) total += float(reinterpret_cast<const T*>(a.bias)[n]);
      if (m < a.rows) reinterpret_cast<T*>(a.y)[m * a.out_features + n] = T(total);
    }
    side ^= 1;
    if (++stage == stages) stage = 0, parity ^= 1;
  }
}

template <class T, int COLUMNS>
int start(const Arguments& a, int blocks, int warps, void* stream) {
  const int shared = Sizes(a, COLUMNS, warps).total;
  const auto kernel = int4_few_kernel<T, COLUMNS>;
  cudaError_t failed =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (failed != cudaSuccess) return failed;
  cudaLaunchAttribute asked[1];
  asked[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  asked[0].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks), config.blockDim = dim3(32 * warps);
  config.dynamicSmemBytes = shared, config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = asked, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, a);
}

}  // namespace

// Returns 0 or CUDA's error.
extern "C" int int4_few(const Arguments* a, int blocks, int warps, int fp16, void* stream) {
  using B = __nv_bfloat16;
  if (a->rows == 1)
    return fp16 ? start<__half, 1>(*a, blocks, warps, stream) : start<B, 1>(*a, blocks, warps, stream);
  return fp16 ? start<__half, 8>(*a, blocks, warps, stream) : start<B, 8>(*a, blocks, warps, stream);
}
