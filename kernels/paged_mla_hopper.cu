// Absorbed MLA attention for many heads, as paged_mla_decode.py describes it: 64 heads of one token
// per thread block, rank 512 + 64, bf16 or fp16.
//
// Two warpgroups, W0 and W1, each keep one half (left, right) of the 64 x 512 output in registers.
// The scores of the even blocks of 64 tokens are made by W0, those of the odd ones by W1; each hands
// its probabilities and the rows' maxima to the other through shared memory, in the place of the
// block's rope part, which nobody reads any more. So every score is computed once, and one
// warpgroup's softmax runs beside the other's products. A warp of a third one issues bulk copies.
//
//   block 2n, buffer 0            block 2n + 1, buffer 1         what must have happened before
//   W0 scores                     W1 scores                      all of the block is there
//   W0 softmax, hands over        W1 softmax, hands over         W1: has 2n's maxima; W0: 2n - 1's
//   W0 adds left, frees it        W1 adds right, frees it        nothing: its own probabilities
//   W1 adds right, frees          W0 adds left, frees            the other has handed over
//      it and the rope part          it and the rope part
//
// W0's order: scores 2n, softmax, left of 2n, left of 2n + 1. W1's: scores 2n + 1, right of 2n
// beside the softmax, right of 2n + 1. A half is freed before the warpgroup that freed it waits for
// anything else; the rope part goes with the half whose owner reads the probabilities there.
// Source of the schedule: DeepSeek-AI, FlashMLA ("seesaw" scheduling), 2025.

#include "paged_mla_load.cuh"

namespace {

// Of one warpgroup, SIDE 0 or 1.
template <class T, int SIDE>
struct Consumer {
  Shared& s;
  const float scale;
  const int visible;                        // tokens from this part's first one on
  const int thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4;
  float y[128], scores[32];
  uint32_t weights[16];
  float highest[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0};

  DEVICE Consumer(Shared& s, float scale, int visible) : s(s), scale(scale), visible(visible) {
#pragma unroll
    for (int i = 0; i < 128; ++i) y[i] = 0;
  }

  DEVICE uint32_t block(int buffer) { return shared_address(s.blocks[buffer]); }

  DEVICE void wait_for(int buffer, int half, int parity) {
    barrier_wait(shared_address(&s.full[buffer][half]), parity);
  }

  // Starts scores = query . block
  DEVICE void score(int parity) {
    const Tile q(shared_address(s.query)), k(block(SIDE));
    wait_for(SIDE, SIDE, parity);
    if (!IN_HALVES) wait_for(SIDE, 1 - SIDE, parity);
    matrix_fence();
#pragma unroll
    for (int i = 0; i < 9; ++i) {
      if (IN_HALVES && i == 4) {
        wait_for(SIDE, 1 - SIDE, parity);
        matrix_fence();
      }
      const int chunk = i < 8 ? i ^ 4 * SIDE : 8;
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const int at = chunk * CHUNK + step * 32;
        multiply<T, false>(scores, q[at], k[at], i + step > 0);
      }
    }
    matrix_commit();
  }

  DEVICE void rescale(float first, float second) {  // to new maxima
    const float by[2] = {power_of_two(highest[0] - first), power_of_two(highest[1] - second)};
    const bool same = highest[0] == first && highest[1] == second;
    highest[0] = first, highest[1] = second;
    if (__all_sync(~0u, same)) return;
    total[0] *= by[0], total[1] *= by[1];
#pragma unroll
    for (int i = 0; i < 128; ++i) y[i] *= by[i >> 1 & 1];
  }

  // Probabilities of block i from its scores; y must be at rest.
  DEVICE void softmax(int i, float (&top)[2]) {
    const int left = visible - i * TOKENS;
    if (left < TOKENS) {
#pragma unroll
      for (int j = 0; j < 32; ++j)
        if (j / 4 * 8 + thread % 4 * 2 + j % 2 >= left) scores[j] = -INFINITY;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = scores[2 * r];
#pragma unroll
      for (int j = 0; j < 32; j += 4)
        most = fmaxf(most, fmaxf(scores[j + 2 * r], scores[j + 2 * r + 1]));
      most = largest_of_row(most) * scale;
      // The maximum may lag behind by 2^8: y and total are on the same footing, and rescaled rarely.
      top[r] = most > highest[r] + 8 ? most : highest[r];
    }
#pragma unroll
    for (int j = 0; j < 32; ++j) scores[j] = power_of_two(scores[j] * scale - top[j >> 1 & 1]);
#pragma unroll
    for (int j = 0; j < 16; ++j) weights[j] = packed<T>(scores[2 * j], scores[2 * j + 1]);
  }

  DEVICE void add_total() {
#pragma unroll
    for (int j = 0; j < 32; ++j) total[j >> 1 & 1] += scores[j];
  }

  // Hands the probabilities and the maxima to the other warpgroup.
  DEVICE void publish(int buffer, const float (&top)[2]) {
    group_sync<128>(1 + SIDE);  // all have read the rope part
    uint8_t* to = s.blocks[buffer] + 8 * CHUNK;
#pragma unroll
    for (int j = 0; j < 16; ++j)
      *reinterpret_cast<uint32_t*>(to + swizzled(row + j % 2 * 8, j / 2) + thread % 4 * 4) = weights[j];
    if (thread % 4 == 0) s.highest[buffer][row] = top[0], s.highest[buffer][row + 8] = top[1];
    fence_async();
    barrier_arrive(shared_address(&s.weights[buffer]));
  }

  // Zero in place of whatever lies behind the context: 0 * NaN would be NaN.
  DEVICE void clean(int buffer, int i) {
    const int left = visible - i * TOKENS;
    if (left >= TOKENS) return;
    for (int at = thread; at < (TOKENS - left) * 32; at += 128) {
      uint8_t* chunk = s.blocks[buffer] + (SIDE * 4 + at % 32 / 8) * CHUNK;
      *reinterpret_cast<uint4*>(chunk + swizzled(left + at / 32, at % 8)) = uint4{0, 0, 0, 0};
    }
    fence_async();
    group_sync<128>(1 + SIDE);
  }

  // Starts y += weights . own half of the block; the weights are our own, or the other's.
  template <bool OWN>
  DEVICE void mix(int buffer) {
    const Tile v(block(buffer) + SIDE * HALF, CHUNK), p(block(buffer) + 8 * CHUNK);
    pin(y);
    if constexpr (OWN) pin(weights);
    matrix_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      if constexpr (OWN)
        multiply<T, true>(y, weights + 4 * step, v[step * 16 * 128]);
      else
        multiply<T, true>(y, p[step * 32], v[step * 16 * 128]);
    }
    matrix_commit();
  }

  // y is at rest, and done with its half of that buffer.
  DEVICE void settle(int buffer) {
    matrix_wait<0>();
    pin(y);
    if (thread % 32 == 0) barrier_arrive(shared_address(&s.empty[buffer][SIDE]));
  }

  // Starts y += the other's probabilities of block i . its own half.
  DEVICE void receive(int buffer, int parity, int i) {
    barrier_wait(shared_address(&s.weights[buffer]), parity);
    rescale(s.highest[buffer][row], s.highest[buffer][row + 8]);
    wait_for(buffer, SIDE, parity);
    clean(buffer, i);
    mix<false>(buffer);
  }

  DEVICE void own_mix(int i, const float (&top)[2]) {
    rescale(top[0], top[1]);
    clean(SIDE, i);
    mix<true>(SIDE);
    add_total();
    settle(SIDE);
  }

  // The loops are turned so that nothing is under way at their ends: else the compiler would wait
  // after each matrix instruction.

  DEVICE void run_even(int blocks, int odd) {
    float top[2];
    for (int n = 0; n < blocks; ++n) {
      score(n & 1);
      matrix_wait<0>();
      pin(scores);
      softmax(2 * n, top);
      publish(0, top);
      own_mix(2 * n, top);
      if (n < odd) {
        receive(1, n & 1, 2 * n + 1);
        settle(1);
      }
    }
  }

  DEVICE void run_odd(int blocks, int even) {
    float top[2];
    for (int n = 0; n < blocks; ++n) {
      score(n & 1);
      receive(0, n & 1, 2 * n);
      matrix_wait<1>();
      pin(scores);
      softmax(2 * n + 1, top);
      publish(1, top);
      settle(0);
      own_mix(2 * n + 1, top);
    }
    if (even > blocks) {
      receive(0, blocks & 1, 2 * blocks);
      settle(0);
    }
  }

  DEVICE void store(const Arguments& x, const Part& part) {
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = sum_of_row(total[r]);
      if (thread % 4 == 0) s.total[SIDE][row + 8 * r] = sum;
    }
    group_sync<256>(3);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = s.total[0][row + 8 * r] + s.total[1][row + 8 * r];
      inverse[r] = 1 / sum;
      const int64_t head = part.first_head + row + 8 * r;
      const int column = SIDE * 256 + thread % 4 * 2;
      if (x.splits > 1) {
        const int64_t own = (part.token * x.heads + head) * x.splits + part.split;
        float* to = reinterpret_cast<float*>(x.parts) + own * RANK + column;
#pragma unroll
        for (int j = 0; j < 32; ++j)
          *reinterpret_cast<float2*>(to + 8 * j) =
              float2{y[4 * j + 2 * r] * inverse[r], y[4 * j + 2 * r + 1] * inverse[r]};
        if (SIDE == 0 && thread % 4 == 0)
          reinterpret_cast<float*>(x.logs)[own] = highest[r] + log2f(sum);
      } else {
        T* to = reinterpret_cast<T*>(x.y) + part.token * x.y_token + head * x.y_head + column;
#pragma unroll
        for (int j = 0; j < 32; ++j)
          *reinterpret_cast<uint32_t*>(to + 8 * j) =
              packed<T>(y[4 * j + 2 * r] * inverse[r], y[4 * j + 2 * r + 1] * inverse[r]);
      }
    }
  }
};

template <class T, int SIDE>
DEVICE void consume(const Arguments& x, const Part& part, Shared& s, float scale) {
  Consumer<T, SIDE> consumer(s, scale, part.visible - part.first * TOKENS);
  if constexpr (SIDE == 0)
    consumer.run_even((part.count + 1) / 2, part.count / 2);
  else
    consumer.run_odd(part.count / 2, (part.count + 1) / 2);
  consumer.store(x, part);
}

template <class T>
__global__ void __launch_bounds__(THREADS, 1)
    mla_kernel(const Arguments x, const __grid_constant__ CUtensorMap map, const float scale) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  allow_launch_after();
  const Part part = find_part(x);
  if (threadIdx.x == 0) make_barriers(s);
  __syncthreads();
  wait_for_launch_before();
  if (part.count == 0) return store_nothing(x, part);
  if (threadIdx.x >= 256) {
    fewer_registers<24>();
    if (threadIdx.x < 288) load_blocks(x, part, &map, s);
  } else {
    more_registers<240>();
    load_query(x, part, s);
    fence_async();
    group_sync<256>(3);
    if (threadIdx.x < 128)
      consume<T, 0>(x, part, s, scale);
    else
      consume<T, 1>(x, part, s, scale);
  }
}

template <class T>
int start(const Arguments& x, const CUtensorMap& map, float scale, void* stream) {
  const dim3 grid(unsigned(x.tokens * (x.heads / ROWS)), unsigned(x.splits));
  return launch(mla_kernel<T>, grid, THREADS, int(sizeof(Shared)), stream, x, map, scale);
}

}  // namespace

// Returns 0, or CUDA's error, or -1 where the driver refuses the map of the pool.
extern "C" int paged_mla(const Arguments* x, void* pool, int64_t blocks, int64_t block_bytes,
                         int64_t slot_bytes, float scale, int fp16, void* stream) {
  CUtensorMap map;
  const uint64_t sizes[3] = {RANK + 64, uint64_t(x->page), uint64_t(blocks)};
  const uint64_t strides[2] = {uint64_t(slot_bytes), uint64_t(block_bytes)};
  const uint32_t box[3] = {64, uint32_t(x->box), 1};
  if (!make_map(&map, !fp16, pool, 3, sizes, strides, box)) return -1;
  return (fp16 ? start<__half> : start<__nv_bfloat16>)(*x, map, scale, stream);
}
