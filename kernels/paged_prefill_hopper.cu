// Causal prefill attention over paged K and V, as paged_prefill.py describes it: tiles of 128 rows
// (query heads of one KV head x new tokens), head dim 128, bf16 or fp16.
//
// Each thread block takes tiles until none is left, and does not pause between them. A warp loads K
// and V by bulk copies, three others the queries of the tile after this one. Two warpgroups of 64
// rows each start the next block's scores and this block's output together, and make the next
// probabilities beside the latter, also where the next block is the next tile's first; named barriers
// let the two take turns at the matrix units, so that one's softmax runs beside the other's products.
// Blocks are read from the last, the masked one, to the first.
// Source of the schedule: Shah et al., "FlashAttention-3", 2024.

#include "paged_prefill_load.cuh"

namespace {

template <class T>
struct Consumer {
  Shared& s;
  const Arguments& x;
  const float scale;
  const int side = threadIdx.x / 128 - 1, thread = threadIdx.x % 128;
  const int row = thread / 32 * 16 + thread % 32 / 4;  // and row + 8, of the warpgroup's 64
  int context, blocks;  // of this tile
  float y[DIM / 2], scores[N / 2];
  uint32_t weights[N / 4];
  float highest[2], total[2], shrink[2];
  int seen[2], by_all;

  DEVICE Consumer(Shared& s, const Arguments& x, float scale) : s(s), x(x), scale(scale) {}

  DEVICE bool begin(int taken) {  // whether there is another tile
    const Part& part = take(s, taken);
    const int group = int(x.group), at = part.first + side * 64;
    context = part.context, blocks = part.blocks, by_all = part.past + at / group + 1;
    for (int r = 0; r < 2; ++r) {
      seen[r] = part.past + (at + row + 8 * r) / group + 1;
      highest[r] = -1e30f, total[r] = 0;  // finite: all of a block may be hidden
    }
    return blocks > 0;
  }

  DEVICE void score(int i, int buffer) {  // starts the scores of the i-th block read
    const Tile q(shared_address(s.query[buffer]) + side * (2 * CHUNK));
    const Tile k(shared_address(s.keys[i % STAGES]));
    barrier_wait(shared_address(&s.keys_full[i % STAGES]), i / STAGES & 1);
    matrix_fence();
#pragma unroll
    for (int step = 0; step < DIM / 16; ++step)
      multiply<T, false>(scores, q[step / 4 * CHUNK + step % 4 * 32],
                         k[step / 4 * N * 128 + step % 4 * 32], step > 0);
    matrix_commit();
  }

  DEVICE void mix(int i) {  // starts y += weights . values
    const Tile v(shared_address(s.values[i % STAGES]), N * 128);
    barrier_wait(shared_address(&s.values_full[i % STAGES]), i / STAGES & 1);
    pin(y);
    pin(weights);
    matrix_fence();
#pragma unroll
    for (int step = 0; step < N / 16; ++step)
      multiply<T, true>(y, weights + 4 * step, v[step * 16 * 128]);
    matrix_commit();
  }

  // Probabilities of block `at` of the tile in place of the scores; shrink.
  DEVICE void softmax(int at) {
    const int begin = at * N;
    if (begin + N > by_all) {
#pragma unroll
      for (int j = 0; j < N / 2; ++j)
        if (begin + j / 4 * 8 + thread % 4 * 2 + j % 2 >= seen[j >> 1 & 1]) scores[j] = -INFINITY;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = fmaxf(scores[2 * r], scores[2 * r + 1]);
#pragma unroll
      for (int j = 4; j < N / 2; j += 4)
        most = fmaxf(most, fmaxf(scores[j + 2 * r], scores[j + 2 * r + 1]));
      most = largest_of_row(most) * scale;
      // The maximum may lag behind by 2^8: y and total are on the same footing, and rescaled rarely.
      const float top = most > highest[r] + 8 ? most : highest[r];
      shrink[r] = power_of_two(highest[r] - top);
      highest[r] = top;
      total[r] *= shrink[r];
    }
#pragma unroll
    for (int j = 0; j < N / 2; ++j)
      scores[j] = power_of_two(scores[j] * scale - highest[j >> 1 & 1]);
#pragma unroll
    for (int j = 0; j < N / 2; ++j) total[j >> 1 & 1] += scores[j];
  }

  DEVICE void accept() {  // the probabilities; y must be at rest
    if (__any_sync(~0u, shrink[0] != 1 || shrink[1] != 1)) {
#pragma unroll
      for (int i = 0; i < DIM / 2; ++i) y[i] *= shrink[i >> 1 & 1];
    }
    pack();
  }

  DEVICE void accept_first() {
#pragma unroll
    for (int i = 0; i < DIM / 2; ++i) y[i] = 0;
    pack();
  }

  DEVICE void pack() {
#pragma unroll
    for (int j = 0; j < N / 4; ++j) weights[j] = packed<T>(scores[2 * j], scores[2 * j + 1]);
  }

  DEVICE void release(uint64_t& empty) {
    if (thread % 32 == 0) barrier_arrive(shared_address(&empty));
  }

  // What lies behind the context in the i-th block read, the tile's last one: 0 * NaN would be NaN.
  DEVICE void clean(int i) {
    const int left = context - (blocks - 1) * N;
    if (left >= N) return;
    barrier_wait(shared_address(&s.values_full[i % STAGES]), i / STAGES & 1);
    for (int at = thread; at < (N - left) * UNITS; at += 128) {  // each warpgroup for itself
      const int r = left + at / UNITS, unit = at % UNITS;
      *reinterpret_cast<uint4*>(s.values[i % STAGES] + unit / 8 * N * 128 + swizzled(r, unit % 8)) =
          uint4{0, 0, 0, 0};
    }
    fence_async();
    group_sync<128>(1 + side);
  }

  // Starts the scores of block i and the output of the one before; returns when the scores are there.
  DEVICE void step(int i, int buffer) {
    group_sync<256>(4 + side);
    score(i, buffer);
    mix(i - 1);
    group_arrive<256>(5 - side);
    matrix_wait<1>();
    pin(scores);
    release(s.keys_empty[i % STAGES]);
  }

  DEVICE void settle(int i) {  // y is at rest, and done with block i
    matrix_wait<0>();
    pin(y);
    release(s.values_empty[i % STAGES]);
  }

  DEVICE void run() {
    if (!begin(0)) return;
    score(0, 0);
    matrix_wait<0>();
    pin(scores);
    release(s.keys_empty[0]);
    softmax(blocks - 1);
    accept_first();
    clean(0);
    if (side == 1) group_arrive<256>(4);
    for (int taken = 0, i = 0;; ++taken) {  // block i has its probabilities
      for (int at = blocks - 2; at >= 0; --at) {
        step(++i, taken & 1);
        softmax(at);
        settle(i - 1);
        accept();
      }
      const float sums[2] = {total[0], total[1]};
      if (!begin(taken + 1)) {
        if (side == 0) group_sync<256>(4);  // as many syncs as arrivals
        mix(i);
        settle(i);
        store(taken & 1, sums);
        return;
      }
      step(++i, taken + 1 & 1);
      softmax(blocks - 1);
      settle(i - 1);
      store(taken & 1, sums);
      accept_first();
      clean(i);
    }
  }

  DEVICE void store(int buffer, const float (&sums)[2]) {
    const Part& done = s.parts[buffer];
    const int group = int(x.group);
    group_sync<128>(1 + side);  // all have read the queries there
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float inverse = 1 / sum_of_row(sums[r]);
#pragma unroll
      for (int j = 0; j < UNITS; ++j) {
        const uint32_t both = packed<T>(y[4 * j + 2 * r] * inverse, y[4 * j + 2 * r + 1] * inverse);
        const uint32_t to = query_unit(s, buffer, side * 64 + row + 8 * r, j) + thread % 4 * 4;
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(both) : "memory");
      }
    }
    __syncwarp();
    for (int i = thread % 32; i < 16 * UNITS; i += 32) {  // a warp's own rows
      const int r = side * 64 + thread / 32 * 16 + i / UNITS, at = done.first + r;
      uint4 value;
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                   : "r"(query_unit(s, buffer, r, i % UNITS))
                   : "memory");
      if (r < done.rows)
        *reinterpret_cast<uint4*>(
            x.y + 2 * ((done.start + at / group) * x.y_token +
                       (done.head * group + at % group) * x.y_head) + i % UNITS * 16) = value;
    }
    __syncwarp();
    release(s.query_empty[buffer]);
  }
};

template <class T>
__global__ void __launch_bounds__(THREADS, 1)
    prefill_kernel(const Arguments x, const __grid_constant__ CUtensorMap k_map,
                   const __grid_constant__ CUtensorMap v_map, const float scale) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& s = *reinterpret_cast<Shared*>(memory);
  allow_launch_after();
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(shared_address(&s.keys_full[i]), 1);
      barrier_init(shared_address(&s.values_full[i]), 1);
      barrier_init(shared_address(&s.keys_empty[i]), 8);
      barrier_init(shared_address(&s.values_empty[i]), 8);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(shared_address(&s.query_full[i]), LOADERS);
      barrier_init(shared_address(&s.query_empty[i]), 9);  // the warps that compute or load K and V
    }
    fence_async();
  }
  __syncthreads();
  wait_for_launch_before();
  static_assert(128 * 40 + 256 * 232 <= THREADS * 168, "registers of a launch");
  if (threadIdx.x < 128) {
    fewer_registers<40>();
    if (threadIdx.x < 32)
      load_blocks(x, &k_map, &v_map, s);
    else
      load_queries(x, s);
  } else {
    more_registers<232>();
    Consumer<T>(s, x, scale).run();
  }
}

template <class T>
int start(const Arguments& x, const CUtensorMap& k_map, const CUtensorMap& v_map, float scale,
          int processors, void* stream) {
  const int64_t tiles = x.kv_heads * x.tiles;
  return launch(prefill_kernel<T>, dim3(unsigned(tiles < processors ? tiles : processors)), THREADS,
                int(sizeof(Shared)), stream, x, k_map, v_map, scale);
}

}  // namespace

// k_bytes, v_bytes: strides of the pools' blocks, slots and heads. Returns 0, or CUDA's error, or -1
// where the driver refuses the map of a pool.
extern "C" int paged_prefill(const Arguments* x, void* k_pool, void* v_pool, int64_t blocks,
                             const int64_t* k_bytes, const int64_t* v_bytes, float scale, int fp16,
                             int processors, void* stream) {
  CUtensorMap maps[2];
  const uint64_t sizes[4] = {DIM, uint64_t(x->kv_heads), uint64_t(x->page), uint64_t(blocks)};
  const uint32_t box[4] = {64, 1, uint32_t(x->box), 1};
  for (int i = 0; i < 2; ++i) {
    const int64_t* given = i ? v_bytes : k_bytes;
    const uint64_t strides[3] = {uint64_t(given[2]), uint64_t(given[1]), uint64_t(given[0])};
    if (!make_map(&maps[i], !fp16, i ? v_pool : k_pool, 4, sizes, strides, box)) return -1;
  }
  return (fp16 ? start<__half> : start<__nv_bfloat16>)(*x, maps[0], maps[1], scale, processors,
                                                       stream);
}
