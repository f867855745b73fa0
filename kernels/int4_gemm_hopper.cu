// An INT4 linear layer for some dozens of tokens and more: y^T = W x^T on Hopper's matrix units.
//
// A warpgroup decodes the weights of 64 output features into the registers from which the matrix
// unit takes its first operand; the second, x, lies in shared memory. One warp keeps the bulk copies
// of both running, STAGES units ahead. Of each eight features, four bytes, a lane of four needs one
// byte: it reads all, so that x may lie as it is. Between two products of a unit a part of the next
// unit is decoded: a warp waits where the matrix unit is busy, and would decode while it is idle.
// Thread blocks of a cluster may share the input features (few tokens); they add up their parts
// through each other's shared memory.

#include "hopper.cuh"

#define LIST8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define LIST16 TEN("") ",%10,%11,%12,%13,%14,%15"
#define ACC8(d, i) ACC4(d, i), ACC4(d, i + 4)
PRODUCTS(8, "16", "8", "9", "10", "11", "12", "13", "14")
PRODUCTS(16, "32", "16", "17", "18", "19", "20", "21", "22")

struct Arguments {
  int64_t scales, zeros, bias, y;  // addresses; 0: none
  int64_t rows, x_row, out_features;
  int64_t packed;  // bytes of a row of the weight
  int64_t groups, units;
  int64_t each;       // units of a block, a multiple of 4; those behind the last are zeros
  int64_t per_unit;   // groups of a unit, 1 or more,
  int64_t per_group;  // or units of a group
  int64_t splits, stages;
};

namespace {

constexpr int UNIT = 128;  // input features

template <class T>
struct Magic;
template <>
struct Magic<__nv_bfloat16> {
  static constexpr uint32_t BITS = 0x43004300;  // 128, at which an integer's bits are a value's
  static constexpr float OFFSET = 128;
};
template <>
struct Magic<__half> {
  static constexpr uint32_t BITS = 0x64006400;
  static constexpr float OFFSET = 1024;
};

template <class T>
using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;

// Both weights of byte t of a word; pick: 0x1010 * t + 0x4400 turned by bytes (see Block).
template <class T>
DEVICE uint32_t decoded(uint32_t word, uint32_t pick, uint32_t offset, uint32_t scale) {
  uint32_t q;
  asm("lop3.b32 %0, %1, 0x000f000f, %2, 0xea;"
      : "=r"(q)
      : "r"(__byte_perm(word, word >> 4, pick)), "r"(Magic<T>::BITS));
  const auto as = [](uint32_t& v) { return reinterpret_cast<Pair<T>&>(v); };
  Pair<T> value = __hmul2(__hsub2(as(q), as(offset)), as(scale));
  return reinterpret_cast<uint32_t&>(value);
}

DEVICE uint2 load_shared(uint32_t at) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
  return v;
}

DEVICE float4 load_cluster(uint32_t at, uint32_t rank) {
  float4 v;
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %4, %5;"
      " ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there]; }"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "r"(at), "r"(rank)
      : "memory");
  return v;
}

// --- clusters ---

DEVICE uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

DEVICE void copy_plain(uint32_t to, const CUtensorMap* map, uint32_t barrier, int a, int b) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%3, %4}], [%2];" ::"r"(to), "l"(map), "r"(barrier), "r"(a), "r"(b)
      : "memory");
}

template <class T, int BM, int GROUPS>
struct Shape {
  static constexpr int N = 64 * GROUPS, ACC = BM / 2;
  static constexpr bool SHIFT = GROUPS == 2 && BM >= 128;  // registers, from the copying warps
  static constexpr int THREADS = 128 * GROUPS + (SHIFT ? 128 : 32);
  static constexpr int X_BYTES = BM * UNIT * 2, Q_BYTES = N * UNIT / 2;
  static constexpr int STAGE = X_BYTES + Q_BYTES, PITCH = N + 4;  // of the sums, in floats
  static int bytes(int stages) {
    const int sums = 4 * BM * PITCH;
    return 1024 + (stages * STAGE > sums ? stages * STAGE : sums) + 16 * stages;
  }
};

// The scale and, where there are zeros, the offset of the groups of this lane's two rows.
template <class T>
struct Factors {
  uint16_t scale[2];
  uint8_t zero[2];
};

template <class T, int BM, int GROUPS>
struct Block {
  using S = Shape<T, BM, GROUPS>;
  const Arguments& x;
  uint32_t memory, barriers;
  int n0, m0, first, rank;

  DEVICE uint32_t x_tile(int stage) const { return memory + stage * S::X_BYTES; }
  DEVICE uint32_t q_tile(int stage) const {
    return memory + int(x.stages) * S::X_BYTES + stage * S::Q_BYTES;
  }
  DEVICE uint32_t full(int stage) const { return barriers + 16 * stage; }
  DEVICE uint32_t empty(int stage) const { return barriers + 16 * stage + 8; }

  DEVICE void produce(const CUtensorMap* x_map, const CUtensorMap* q_map) const {
    const int stages = int(x.stages), each = int(x.each);
    const int ahead = stages < each ? stages : each;
    const auto weights = [&](int i, int stage) {
      barrier_expect(full(stage), S::STAGE);
      copy_plain(q_tile(stage), q_map, full(stage), (first + i) * (UNIT / 2), n0);
    };
    const auto tokens = [&](int i, int stage) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        copy_plain(x_tile(stage) + half * BM * 128, x_map, full(stage),
                   (first + i) * UNIT + half * 64, m0);
    };
    for (int i = 0; i < ahead; ++i) weights(i, i);  // older than the launch before, as x is not
    wait_for_launch_before();
    allow_launch_after();
    for (int i = 0; i < ahead; ++i) tokens(i, i);
    int stage = 0, parity = 0;
    for (int i = ahead; i < each; ++i) {
      barrier_wait(empty(stage), parity);
      weights(i, stage);
      tokens(i, stage);
      if (++stage == stages) stage = 0, parity ^= 1;
    }
  }

  DEVICE void consume(float (&acc)[S::ACC]) const {
    const int thread = threadIdx.x % 128, side = threadIdx.x / 128;
    const int row = side * 64 + thread / 32 * 16 + thread % 32 / 4, t = thread % 4;
    const int stages = int(x.stages), each = int(x.each);
    int64_t at[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      at[r] = min(int64_t(n0 + row + 8 * r), x.out_features - 1) * x.groups;
    const int inner = t * int(x.per_unit) / 4, most = int(x.groups) - 1;
    const auto* scales = reinterpret_cast<const uint16_t*>(x.scales);
    const auto* zeros = reinterpret_cast<const uint8_t*>(x.zeros);
    Factors<T> factors[4];
    const auto fetch = [&](Factors<T>& f, int unit) {
      const int group =
          x.per_group == 1 ? (first + unit) * int(x.per_unit) : (first + unit) / int(x.per_group);
      const int of = min(group + inner, most);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        f.scale[r] = __ldg(scales + at[r] + of);
        if (zeros) f.zero[r] = __ldg(zeros + at[r] + of);
      }
    };
    const uint32_t pick = t * 0x1111u + 0x4400u, lane = threadIdx.x % 32 & ~3u;
    // Scales of the rows r and r + 8 in the halves of a word, and offsets likewise.
    struct Pairs {
      uint32_t scale, offset;
    };
    const auto pairs = [&](const Factors<T>& f) {
      const float low = Magic<T>::OFFSET + (zeros ? float(f.zero[0]) : 8.f);
      const float high = Magic<T>::OFFSET + (zeros ? float(f.zero[1]) : 8.f);
      return Pairs{f.scale[0] | uint32_t(f.scale[1]) << 16, packed<T>(low, high)};
    };
    const auto words = [&](uint2 (&w)[2], int stage, int step) {
      const uint32_t from = q_tile(stage) + row * (UNIT / 2) + step * 8;
      w[0] = load_shared(from), w[1] = load_shared(from + 8 * (UNIT / 2));
    };
    // The operand of a product: the features 16 step to 16 step + 15.
    const auto decode = [&](uint32_t* a, const uint2 (&w)[2], const Pairs& all, int step) {
      const uint32_t scale = __shfl_sync(~0u, all.scale, lane + step / 2);
      const uint32_t offset = __shfl_sync(~0u, all.offset, lane + step / 2);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t half = r ? 0x3232 : 0x1010;
        const uint32_t s = __byte_perm(scale, 0, half), o = __byte_perm(offset, 0, half);
        a[r] = decoded<T>(w[r].x, pick, o, s), a[2 + r] = decoded<T>(w[r].y, pick, o, s);
      }
    };
#pragma unroll
    for (int i = 0; i < 4; ++i) fetch(factors[i], i);
    // Step s of a unit: 16 features. Four operands: two of steps under way, the next, and the one
    // that is being decoded, from words that were read a step before.
    uint32_t a[4][4];
    uint2 w[2][2];
    Pairs now = pairs(factors[0]), next;
    barrier_wait(full(0), 0);
#pragma unroll
    for (int s = 0; s < 3; ++s) {
      words(w[s % 2], 0, s);
      if (s < 2) decode(a[s], w[s], now, s);
    }
    int before = 0, stage = 0, after = 1 % stages, parity = stages == 1;
    const auto multiply_unit = [&](Factors<T>& f, int unit, bool first, bool last) {
      const Tile tile(x_tile(stage));
      if (!last) next = pairs(f);
      fetch(f, unit + 5);
#pragma unroll
      for (int s = 0; s < 8; ++s) {
        pin(a[s % 4]);
        matrix_fence();
        multiply<T, false>(acc, a[s % 4], tile[s / 4 * BM * 128 + s % 4 * 32], !first || s > 0);
        matrix_commit();
        matrix_wait<2>();
        if (s == 1 && !first && threadIdx.x % 128 == 0) barrier_arrive(empty(before));
        if (s == 5 && !last) barrier_wait(full(after), parity);
        if (s < 5)
          words(w[(s + 3) % 2], stage, s + 3);
        else if (!last)
          words(w[(s + 3) % 2], after, s - 5);
        if (s < 6)
          decode(a[(s + 2) % 4], w[s % 2], now, s + 2);
        else if (!last)
          decode(a[(s + 2) % 4], w[s % 2], next, s - 6);
      }
      now = next;
      before = stage, stage = after;
      if (++after == stages) after = 0, parity ^= 1;
    };
    multiply_unit(factors[1], 0, true, false);
    int unit = 0;
    for (; unit + 4 < each; unit += 4) {
#pragma unroll
      for (int i = 1; i < 5; ++i) multiply_unit(factors[(i + 1) % 4], unit + i, false, false);
    }
#pragma unroll
    for (int i = 1; i < 4; ++i) multiply_unit(factors[(i + 1) % 4], unit + i, false, i == 3);
    matrix_wait<0>();
    pin(acc);
  }

  // Sums to shared memory, [token][feature]; then each block writes its part of the tokens.
  DEVICE void store(float (&acc)[S::ACC]) const {
    const int thread = threadIdx.x % 128, side = threadIdx.x / 128;
    const int row = side * 64 + thread / 32 * 16 + thread % 32 / 4, t = thread % 4;
    extern __shared__ uint8_t raw[];
    auto* sums = reinterpret_cast<float*>(raw + (memory - shared_address(raw)));
    group_sync<128 * GROUPS>(1);
#pragma unroll
    for (int i = 0; i < S::ACC; ++i)
      sums[(i / 4 * 8 + t * 2 + i % 2) * S::PITCH + row + i / 2 % 2 * 8] = acc[i];
  }

  DEVICE void write() const {
    const int splits = int(x.splits);
    const auto* bias = reinterpret_cast<const T*>(x.bias);
    extern __shared__ uint8_t raw[];
    const auto* sums = reinterpret_cast<const float*>(raw + (memory - shared_address(raw)));
#pragma unroll 4
    for (int i = threadIdx.x; i < BM * S::N / 4; i += 128 * GROUPS) {
      const int m = i / (S::N / 4), n = i % (S::N / 4) * 4;
      if (m % splits != rank) continue;
      if (m0 + m >= x.rows || n0 + n >= x.out_features) continue;
      const uint32_t at = memory + 4 * (m * S::PITCH + n);
      float v[4] = {};
      if (splits == 1) {
        const float4 all = *reinterpret_cast<const float4*>(sums + m * S::PITCH + n);
        v[0] = all.x, v[1] = all.y, v[2] = all.z, v[3] = all.w;
      } else {
        for (int r = 0; r < splits; ++r) {
          const float4 part = load_cluster(at, r);
          v[0] += part.x, v[1] += part.y, v[2] += part.z, v[3] += part.w;
        }
      }
      T* y = reinterpret_cast<T*>(x.y) + (m0 + m) * x.out_features + n0 + n;
      if (x.out_features % 4 == 0) {
        if (bias)
#pragma unroll
          for (int j = 0; j < 4; ++j) v[j] += float(bias[n0 + n + j]);
        *reinterpret_cast<uint2*>(y) = make_uint2(packed<T>(v[0], v[1]), packed<T>(v[2], v[3]));
      } else {
        for (int j = 0; j < 4 && n0 + n + j < x.out_features; ++j)
          y[j] = T(v[j] + (bias ? float(bias[n0 + n + j]) : 0.f));
      }
    }
  }
};

template <class T, int BM, int GROUPS>
__global__ void __launch_bounds__(Shape<T, BM, GROUPS>::THREADS, 1)
    int4_kernel(const Arguments x, const __grid_constant__ CUtensorMap x_map,
                const __grid_constant__ CUtensorMap q_map) {
  using S = Shape<T, BM, GROUPS>;
  extern __shared__ uint8_t raw[];
  const uint32_t base = (shared_address(raw) + 1023) & ~1023u;
  const int splits = int(x.splits), rank = splits > 1 ? int(cluster_rank()) : 0;
  const int tile = int(blockIdx.x) / splits;
  const int held = int(x.stages) * S::STAGE, sums = 4 * BM * S::PITCH;
  const Block<T, BM, GROUPS> block{x, base, base + (held > sums ? held : sums), tile * S::N,
                                   int(blockIdx.y) * BM, rank * int(x.each), rank};
  if (threadIdx.x == 0) {
    for (int i = 0; i < int(x.stages); ++i) {
      barrier_init(block.full(i), 1);
      barrier_init(block.empty(i), GROUPS);
    }
    fence_async();
  }
  if (splits > 1)
    cluster_sync();
  else
    __syncthreads();
  if (threadIdx.x >= 128 * GROUPS) {
    if constexpr (S::SHIFT) fewer_registers<24>();
    if (threadIdx.x == 128 * GROUPS) block.produce(&x_map, &q_map);
    __syncwarp();
    if (splits > 1) {
      cluster_sync();
      cluster_sync();
    }
    return;
  }
  if constexpr (S::SHIFT) more_registers<240>();
  float acc[S::ACC];
  block.consume(acc);
  block.store(acc);
  if (splits > 1)
    cluster_sync();
  else
    group_sync<128 * GROUPS>(1);
  block.write();
  if (splits > 1) cluster_sync();  // others may still read here
}

// A map of a tensor, innermost dimension first: x in columns of 64 values, or the weight's bytes.
bool make_map(CUtensorMap* map, CUtensorMapDataType type, CUtensorMapSwizzle swizzle, const void* base,
              int rank, const uint64_t* sizes, const uint64_t* strides, const uint32_t* box) {
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
  const uint32_t ones[3] = {1, 1, 1};
  return encode(map, type, rank, const_cast<void*>(base), sizes, strides, box, ones,
                CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <class T, int BM, int GROUPS>
int start(const Arguments& x, const void* tokens, const void* weights, void* stream) {
  using S = Shape<T, BM, GROUPS>;
  CUtensorMap maps[2];
  const bool bf16 = std::is_same_v<T, __nv_bfloat16>;
  const uint64_t sizes[2] = {uint64_t(2 * x.packed), uint64_t(x.rows)};
  const uint64_t stride = 2 * x.x_row;
  const uint32_t box[2] = {64, BM};
  const uint64_t q_sizes[2] = {uint64_t(x.packed), uint64_t(x.out_features)};
  const uint32_t q_box[2] = {UNIT / 2, S::N};
  if (!make_map(&maps[0], bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                CU_TENSOR_MAP_SWIZZLE_128B, tokens, 2, sizes, &stride, box) ||
      !make_map(&maps[1], CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_SWIZZLE_NONE, weights, 2,
                q_sizes, q_sizes, q_box))
    return -1;
  const unsigned blocks = unsigned((x.out_features + S::N - 1) / S::N * x.splits);
  const dim3 grid(blocks, unsigned((x.rows + BM - 1) / BM));
  const auto kernel = int4_kernel<T, BM, GROUPS>;
  const int shared = S::bytes(int(x.stages));
  cudaError_t failed =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (failed != cudaSuccess) return failed;
  cudaLaunchAttribute asked[2];
  asked[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  asked[0].val.programmaticStreamSerializationAllowed = 1;
  asked[1].id = cudaLaunchAttributeClusterDimension;
  asked[1].val.clusterDim = {unsigned(x.splits), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = dim3(S::THREADS), config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(stream), config.attrs = asked, config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kernel, x, maps[0], maps[1]);
}

template <class T, int GROUPS>
auto chosen(int tokens) {
  return tokens == 16    ? start<T, 16, GROUPS>
         : tokens == 32  ? start<T, 32, GROUPS>
         : tokens == 64  ? start<T, 64, GROUPS>
         : tokens == 128 ? start<T, 128, GROUPS>
                         : start<T, 256, GROUPS>;
}

}  // namespace

// tokens [rows, in_features], weights [out_features, in_features / 2]. Returns 0, or CUDA's error, or -1 where the driver refuses a map.
extern "C" int int4_many(const Arguments* x, const void* tokens, const void* weights, int block_m,
                         int groups, int fp16, void* stream) {
  auto run = fp16 ? (groups == 1 ? chosen<__half, 1>(block_m) : chosen<__half, 2>(block_m))
                  : (groups == 1 ? chosen<__nv_bfloat16, 1>(block_m)
                                 : chosen<__nv_bfloat16, 2>(block_m));
  return run(*x, tokens, weights, stream);
}
