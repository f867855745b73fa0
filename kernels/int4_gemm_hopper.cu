// An INT4 linear layer for some dozens of tokens and more: y^T = W x^T on Hopper's matrix units.
//
// A warpgroup decodes the weights of 64 output features into the registers from which the matrix
// unit takes its first operand; the second, x, lies in shared memory. One warp keeps the bulk copies
// of both running, STAGES units ahead. Of each eight features, four bytes, a lane of four needs one
// byte: it reads all, so that x may lie as it is. Products are issued a step or two at a time, and
// the steps after them decoded meanwhile: were a whole unit issued at once, its warps would wait
// while the matrix unit is busy, and decode while it is idle.
// Thread blocks of a cluster may share the input features (few tokens); they add up their parts
// through each other's shared memory.

#include "cluster.cuh"
#include "int4_decode.cuh"

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

template <class T, int BM, int GROUPS>
struct Shape {
  static constexpr int N = 64 * GROUPS, ACC = BM / 2;
  static constexpr int AT_ONCE = BM <= 64 ? 2 : 1;  // steps: of few tokens they are short
  static constexpr bool SHIFT = GROUPS == 2 && BM >= 128;  // registers, from the copying warps
  static constexpr int THREADS = 128 * GROUPS + (SHIFT ? 128 : 32);
  static constexpr int X_BYTES = BM * UNIT * 2, Q_BYTES = N * UNIT / 2;
  static constexpr int STAGE = X_BYTES + Q_BYTES, PITCH = N + 4;  // of the sums, in floats
  static int bytes(int stages) {
    const int sums = 4 * BM * PITCH;
    return 1024 + (stages * STAGE > sums ? stages * STAGE : sums) + 16 * stages;
  }
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
  // A thread of the consumers, of the accumulators: feature (and the one 8 behind), token pair.
  DEVICE int row() const {
    return threadIdx.x / 128 * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  }
  DEVICE int lane() const { return threadIdx.x % 4; }
  DEVICE uint32_t full(int stage) const { return barriers + 16 * stage; }
  DEVICE uint32_t empty(int stage) const { return barriers + 16 * stage + 8; }

  DEVICE void produce(const CUtensorMap* x_map, const CUtensorMap* q_map) const {
    const int stages = int(x.stages), each = int(x.each);
    const int ahead = stages < each ? stages : each;
    const auto weights = [&](int i, int stage) {
      barrier_expect(full(stage), S::STAGE);
      copy_box(q_tile(stage), q_map, full(stage), (first + i) * (UNIT / 2), n0);
    };
    const auto tokens = [&](int i, int stage) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        copy_box(x_tile(stage) + half * BM * 128, x_map, full(stage),
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
    const int row = this->row(), t = lane();
    const int stages = int(x.stages), each = int(x.each);
    int64_t at[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      at[r] = min(int64_t(n0 + row + 8 * r), x.out_features - 1) * x.groups;
    const int inner = t * int(x.per_unit) / 4, most = int(x.groups) - 1;
    const auto* scales = reinterpret_cast<const uint16_t*>(x.scales);
    const auto* zeros = reinterpret_cast<const uint8_t*>(x.zeros);
    Factors factors[4];
    const auto fetch = [&](Factors& f, int unit) {
      const int group =
          x.per_group == 1 ? (first + unit) * int(x.per_unit) : (first + unit) / int(x.per_group);
      f.fetch(scales, zeros, at, min(group + inner, most));
    };
    const uint32_t pick = t * 0x1111u + 0x4400u, lane = threadIdx.x % 32 & ~3u;
    const int first_word = row * (UNIT / 2) + row / 2 % 4 * 16;  // swizzled; that of row + 8 likewise
    const auto words = [&](uint2 (&w)[2], int stage, int step) {
      const uint32_t from = ((q_tile(stage) + first_word) ^ step / 2 * 16) + step % 2 * 8;
      w[0] = load_shared(from), w[1] = load_shared(from + 8 * (UNIT / 2));
    };
    // The operand of a product: the features 16 step to 16 step + 15.
    const auto decode = [&](uint32_t* a, const uint2 (&w)[2], const Pairs& all, int step) {
      const Pairs of{__shfl_sync(~0u, all.scale, lane + step / 2),
                     __shfl_sync(~0u, all.offset, lane + step / 2)};
#pragma unroll
      for (int r = 0; r < 2; ++r)
        a[r] = decoded<T>(w[r].x, pick, of, r), a[2 + r] = decoded<T>(w[r].y, pick, of, r);
    };
#pragma unroll
    for (int i = 0; i < 4; ++i) fetch(factors[i], i);
    // Steps of 16 features, G at once. Four operands: two of the steps under way, and two that are
    // being decoded or wait, from words that were read before.
    constexpr int G = S::AT_ONCE;
    uint32_t a[4][4];
    uint2 w[2][2];
    Pairs now = factors[0].pairs<T>(zeros), next;
    fetch(factors[0], 4);
    barrier_wait(full(0), 0);
#pragma unroll
    for (int k = 0; k < 2 + G; ++k) {
      words(w[k % 2], 0, k);
      if (k < 2) decode(a[k], w[k], now, k);
    }
    int before = 0, stage = 0, after = 1 % stages, parity = stages == 1;
    const auto multiply_unit = [&](Factors& f, int unit, bool first, bool last) {
      const Tile tile(x_tile(stage));
      if (!last) next = f.pairs<T>(zeros);
      fetch(f, unit + 5);
#pragma unroll
      for (int s = 0; s < 8; s += G) {
#pragma unroll
        for (int k = s; k < s + G; ++k) pin(a[k % 4]);
        matrix_fence();
#pragma unroll
        for (int k = s; k < s + G; ++k)
          multiply<T, false>(acc, a[k % 4], tile[k / 4 * BM * 128 + k % 4 * 32], !first || k > 0);
        matrix_commit();
        matrix_wait<3 - G>();
        if (s == 2 - G && !first && threadIdx.x % 32 == 0) barrier_arrive(empty(before));
#pragma unroll
        for (int k = s + 2; k < s + 2 + G; ++k)
          if (k < 8 || !last) decode(a[k % 4], w[k % 2], k < 8 ? now : next, k % 8);
        if (s == 6 - G && !last) barrier_wait(full(after), parity);
#pragma unroll
        for (int k = s + 2 + G; k < s + 2 + 2 * G; ++k)
          if (k < 8 || !last) words(w[k % 2], k < 8 ? stage : after, k % 8);
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

  DEVICE float* sums() const {
    extern __shared__ uint8_t raw[];
    return reinterpret_cast<float*>(raw + (memory - shared_address(raw)));
  }

  // Sums to shared memory, [token][feature]; then each block writes its part of the tokens.
  DEVICE void store(float (&acc)[S::ACC]) const {
    float* sums = this->sums();
    group_sync<128 * GROUPS>(1);
#pragma unroll
    for (int i = 0; i < S::ACC; ++i)
      sums[(i / 4 * 8 + lane() * 2 + i % 2) * S::PITCH + row() + i / 2 % 2 * 8] = acc[i];
  }

  DEVICE void write() const {
    const int splits = int(x.splits);
    const auto* bias = reinterpret_cast<const T*>(x.bias);
    const float* sums = this->sums();
#pragma unroll 4
    for (int i = threadIdx.x; i < BM * S::N / 4; i += 128 * GROUPS) {
      const int m = i / (S::N / 4), n = i % (S::N / 4) * 4;
      if (m % splits != rank) continue;
      if (m0 + m >= x.rows || n0 + n >= x.out_features) continue;
      const int at = m * S::PITCH + n;
      float4 all = *reinterpret_cast<const float4*>(sums + at);
      if (splits > 1) all = make_float4(0, 0, 0, 0);
      for (int r = 0; splits > 1 && r < splits; ++r) {
        const float4 part = load_cluster(memory + 4 * at, r);
        all.x += part.x, all.y += part.y, all.z += part.z, all.w += part.w;
      }
      float v[4] = {all.x, all.y, all.z, all.w};
      T* y = reinterpret_cast<T*>(x.y) + (m0 + m) * x.out_features + n0 + n;
      const int there = min(int64_t(4), x.out_features - n0 - n);
      const bool whole = x.out_features % 4 == 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (bias && j < there) v[j] += float(bias[n0 + n + j]);
        if (!whole && j < there) y[j] = T(v[j]);
      }
      if (whole)
        *reinterpret_cast<uint2*>(y) = make_uint2(packed<T>(v[0], v[1]), packed<T>(v[2], v[3]));
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
      barrier_init(block.empty(i), 4 * GROUPS);
    }
    fence_async();
  }
  splits > 1 ? cluster_sync() : __syncthreads();
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
  splits > 1 ? cluster_sync() : group_sync<128 * GROUPS>(1);
  block.write();
  if (splits > 1) cluster_sync();  // others may still read here
}

template <class T, int BM, int GROUPS>
int start(const Arguments& x, void* tokens, void* weights, void* stream) {
  using S = Shape<T, BM, GROUPS>;
  CUtensorMap maps[2];
  const bool bf16 = std::is_same_v<T, __nv_bfloat16>;
  const uint64_t sizes[2] = {uint64_t(2 * x.packed), uint64_t(x.rows)};
  const uint64_t stride = 2 * x.x_row;
  const uint32_t box[2] = {64, BM};
  const uint64_t q_sizes[2] = {uint64_t(x.packed), uint64_t(x.out_features)};
  const uint32_t q_box[2] = {UNIT / 2, S::N};
  if (!make_map(&maps[0], bf16, tokens, 2, sizes, &stride, box) ||
      !make_map(&maps[1], false, weights, 2, q_sizes, q_sizes, q_box, true))
    return -1;
  const unsigned blocks = unsigned((x.out_features + S::N - 1) / S::N * x.splits);
  const dim3 grid(blocks, unsigned((x.rows + BM - 1) / BM));
  return launch_clusters(int4_kernel<T, BM, GROUPS>, grid, unsigned(x.splits), S::THREADS,
                         S::bytes(int(x.stages)), stream, x, maps[0], maps[1]);
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

// tokens [rows, in_features], weights [out_features, in_features / 2]. Returns 0, or CUDA's error, or
// -1 where the driver refuses a map.
extern "C" int int4_many(const Arguments* x, void* tokens, void* weights, int block_m, int groups,
                         int fp16, void* stream) {
  auto run = fp16 ? (groups == 1 ? chosen<__half, 1>(block_m) : chosen<__half, 2>(block_m))
                  : (groups == 1 ? chosen<__nv_bfloat16, 1>(block_m)
                                 : chosen<__nv_bfloat16, 2>(block_m));
  return run(*x, tokens, weights, stream);
}
