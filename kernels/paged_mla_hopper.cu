// Absorbed MLA attention for many heads, as paged_mla_decode.py describes it: 64 heads of one token
// per thread block, rank 512 + 64, bf16 or fp16.
//
// Two warpgroups each keep one half of the 64 x 512 output in registers. The scores of the even
// blocks of 64 tokens are made by the first, those of the odd ones by the second; each hands its
// probabilities and the rows' maxima to the other through shared memory, in the place of the
// block's rope part, which nobody reads any more. So every score is computed once, and one
// warpgroup's softmax runs beside the other's products. A third warpgroup issues the bulk copies:
// the left half of a block (256 of 512 columns) is free again when the first warpgroup's product
// over it is done, the right half when the second's is.
// Source of the schedule: DeepSeek-AI, FlashMLA ("seesaw" scheduling), 2025.

#include "hopper.cuh"

struct Arguments {
  int64_t q, q_rope, y, parts, logs, tables, lens, starts;  // addresses
  int64_t q_token, q_head, r_token, r_head, y_token, y_head, table;  // strides, in values
  int64_t heads, tokens, sequences, splits, page, box;
};

namespace {

constexpr int ROWS = 64, TOKENS = 64, RANK = 512;
constexpr int CHUNK = 64 * 128;                    // bytes of 64 rows x 64 values
constexpr int BLOCK = 9 * CHUNK, HALF = 4 * CHUNK;  // eight of the latent, then the rope part
constexpr int THREADS = 384;  // two warpgroups that compute, one that loads

struct Shared {
  uint8_t blocks[2][BLOCK];
  uint8_t query[BLOCK];
  float highest[2][ROWS];
  float total[2][ROWS];
  uint64_t full[2][2];   // [buffer][half]; the rope part comes with the half of the warpgroup
  uint64_t empty[2][2];  // that does not make the block's scores, which reads it last
  uint64_t weights[2];
};

// One thread block's part of the work.
struct Part {
  int64_t token, sequence;
  int first_head, split, first, count, visible;  // first, count: blocks of 64 tokens
};

DEVICE Part find_part(const Arguments& x) {
  Part part;
  const int tiles = int(x.heads) / ROWS;
  part.token = blockIdx.x / tiles;
  part.first_head = blockIdx.x % tiles * ROWS;
  part.split = blockIdx.y;
  auto starts = reinterpret_cast<const int64_t*>(x.starts);
  part.sequence = sequence_of(starts, part.token, x.sequences);
  const int64_t end = starts[part.sequence + 1];
  part.visible = part.token < end  // else a padding row
                     ? int(reinterpret_cast<const int64_t*>(x.lens)[part.sequence] - (end - 1 - part.token))
                     : 0;
  const int all = (part.visible + TOKENS - 1) / TOKENS;
  const int each = (all + gridDim.y - 1) / gridDim.y;
  part.first = part.split * each;
  part.count = max(0, min(each, all - part.first));
  return part;
}

// PAIR: the cluster's two thread blocks, which read the same blocks for other heads, load half each.
template <bool PAIR>
DEVICE void load_blocks(const Arguments& x, const Part& part, const CUtensorMap* map, Shared& s) {
  auto table = reinterpret_cast<const int64_t*>(x.tables) + part.sequence * x.table;
  const int box = int(x.box), page = int(x.page), rank = PAIR ? cluster_rank() : 0;
  const int final = (part.visible - 1) / box * box;  // later boxes are read again from here
  for (int i = 0; i < part.count; ++i) {
    const int buffer = i & 1, parity = i >> 1 & 1, rope_half = 1 - buffer;
    for (int half = 0; half < 2; ++half) {
      const uint32_t full = shared_address(&s.full[buffer][half]);
      barrier_wait(shared_address(&s.empty[buffer][half]), parity ^ 1);
      barrier_expect(full, HALF + (half == rope_half ? CHUNK : 0));
      for (int row = 0; row < TOKENS; row += box) {
        const int at = min((part.first + i) * TOKENS + row, final);
        const int block = int(table[at / page]), slot = at % page;
        const uint32_t to = shared_address(s.blocks[buffer]) + row * 128;
        if constexpr (PAIR) {
          for (int c = half * 4 + rank * 2; c < half * 4 + rank * 2 + 2; ++c)
            copy_box_twice(to + c * CHUNK, map, full, c * 64, slot, block);
          if (half == rope_half && rank == parity)
            copy_box_twice(to + 8 * CHUNK, map, full, RANK, slot, block);
        } else {
          for (int c = half * 4; c < half * 4 + 4; ++c)
            copy_box(to + c * CHUNK, map, full, c * 64, slot, block);
          if (half == rope_half) copy_box(to + 8 * CHUNK, map, full, RANK, slot, block);
        }
      }
    }
  }
}

DEVICE void load_query(const Arguments& x, const Part& part, Shared& s) {
  for (int i = threadIdx.x; i < ROWS * 72; i += 256) {
    const int row = i / 72, unit = i % 72;
    const int64_t head = part.first_head + row;
    const int64_t from = unit < 64 ? x.q + 2 * (part.token * x.q_token + head * x.q_head) + unit * 16
                                   : x.q_rope + 2 * (part.token * x.r_token + head * x.r_head) +
                                         (unit - 64) * 16;
    *reinterpret_cast<uint4*>(s.query + unit / 8 * CHUNK + swizzled(row, unit % 8)) =
        *reinterpret_cast<const uint4*>(from);
  }
}

// Of one warpgroup, SIDE 0 or 1.
template <class T, int SIDE, bool PAIR, int HELD>
struct Consumer {
  Shared& s;
  const float scale;
  const int visible;                        // tokens from this part's first one on
  const int thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4;
  float y[128], scores[32];
  uint32_t weights[16];
  uint32_t query[HELD * 16 + 1];  // its last columns: less is read from shared memory
  float highest[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0};

  DEVICE Consumer(Shared& s, float scale, int visible) : s(s), scale(scale), visible(visible) {
#pragma unroll
    for (int i = 0; i < 128; ++i) y[i] = 0;
#pragma unroll
    for (int i = 0; i < HELD * 16; ++i)
      query[i] = *reinterpret_cast<const uint32_t*>(
          s.query + (9 - HELD + i / 16) * CHUNK + thread % 4 * 4 +
          swizzled(row + i % 2 * 8, i % 16 / 4 * 2 + i / 2 % 2));
  }

  DEVICE uint32_t block(int buffer) { return shared_address(s.blocks[buffer]); }

  // Starts scores = query . block
  DEVICE void score(int buffer, int parity) {
    const Tile q(shared_address(s.query)), k(block(buffer));
#pragma unroll
    for (int c = 0; c < 9; ++c) {
      if (c % 4 == 0 && c < 8) {
        barrier_wait(shared_address(&s.full[buffer][c / 4]), parity);
        matrix_fence();
      }
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const int at = c * CHUNK + step * 32;
        if (c < 9 - HELD)
          multiply<T, false>(scores, q[at], k[at], c + step > 0);
        else
          multiply<T, false>(scores, query + (c - 9 + HELD) * 16 + step * 4, k[at]);
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

  template <int PENDING>
  DEVICE void wait() {
    matrix_wait<PENDING>();
  }

  DEVICE void release(int buffer) {
    const uint32_t empty = shared_address(&s.empty[buffer][SIDE]);
    if constexpr (PAIR) {
      if (thread % 32 < 2) barrier_arrive(empty, thread % 32);
    } else {
      if (thread % 32 == 0) barrier_arrive(empty);
    }
  }

  // The other's probabilities of block i.
  DEVICE void receive(int buffer, int parity, int i) {
    barrier_wait(shared_address(&s.weights[buffer]), parity);
    rescale(s.highest[buffer][row], s.highest[buffer][row + 8]);
    barrier_wait(shared_address(&s.full[buffer][SIDE]), parity);
    clean(buffer, i);
    mix<false>(buffer);
  }

  // The loops are turned so that nothing is under way at their ends: else the compiler would wait
  // after each matrix instruction.

  DEVICE void own_mix(int i, const float (&top)[2]) {
    rescale(top[0], top[1]);
    clean(SIDE, i);
    mix<true>(SIDE);
    add_total();
  }

  DEVICE void settle(int buffer) {  // y is at rest, and done with that buffer
    pin(y);
    release(buffer);
  }

  DEVICE void run_even(int blocks, int odd) {
    float top[2];
    score(0, 0);
    wait<0>();
    pin(scores);
    for (int n = 0;; ++n) {
      softmax(2 * n, top);
      publish(0, top);
      own_mix(2 * n, top);
      wait<0>();
      settle(0);
      if (n + 1 == blocks) break;
      receive(1, n & 1, 2 * n + 1);
      score(0, n + 1 & 1);
      wait<1>();
      settle(1);
      wait<0>();
      pin(scores);
    }
    if (odd == blocks) receive(1, blocks - 1 & 1, 2 * blocks - 1);
    wait<0>();
    pin(y);
  }

  DEVICE void softmax_beside(int n, float (&top)[2]) {
    receive(0, n & 1, 2 * n);
    wait<1>();
    pin(scores);
    softmax(2 * n + 1, top);
    publish(1, top);
    wait<0>();
    settle(0);
  }

  DEVICE void run_odd(int blocks, int even) {
    float top[2];
    if (blocks > 0) {
      score(1, 0);
      softmax_beside(0, top);
      for (int n = 0; n + 1 < blocks; ++n) {
        own_mix(2 * n + 1, top);
        score(1, n + 1 & 1);
        wait<1>();
        settle(1);
        softmax_beside(n + 1, top);
      }
      own_mix(2 * blocks - 1, top);
      wait<0>();
      settle(1);
    }
    if (even > blocks) {
      receive(0, blocks & 1, 2 * blocks);
      wait<0>();
      pin(y);
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

template <class T, int SIDE, bool PAIR, int HELD>
DEVICE void consume(const Arguments& x, const Part& part, Shared& s, float scale) {
  Consumer<T, SIDE, PAIR, HELD> consumer(s, scale, part.visible - part.first * TOKENS);
  if constexpr (SIDE == 0)
    consumer.run_even((part.count + 1) / 2, part.count / 2);
  else
    consumer.run_odd(part.count / 2, (part.count + 1) / 2);
  consumer.store(x, part);
}

template <class T, bool PAIR, int HELD>
__global__ void __launch_bounds__(THREADS, 1)
    mla_kernel(const Arguments x, const __grid_constant__ CUtensorMap map, const float scale) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  allow_launch_after();
  const Part part = find_part(x);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 4; ++i) {
      barrier_init(shared_address(&s.full[i / 2][i % 2]), 1);
      barrier_init(shared_address(&s.empty[i / 2][i % 2]), PAIR ? 8 : 4);
    }
    for (int i = 0; i < 2; ++i) barrier_init(shared_address(&s.weights[i]), 128);
    fence_async();
  }
  PAIR ? cluster_sync() : __syncthreads();
  wait_for_launch_before();
  if (part.count == 0) {
    if (x.splits > 1 && threadIdx.x < ROWS) {
      const int64_t head = part.first_head + threadIdx.x;
      reinterpret_cast<float*>(x.logs)[(part.token * x.heads + head) * x.splits + part.split] =
          -INFINITY;
    }
    return;
  }
  if (threadIdx.x >= 256) {
    fewer_registers<24>();
    if (threadIdx.x == 256) load_blocks<PAIR>(x, part, &map, s);
  } else {
    more_registers<240>();
    load_query(x, part, s);
    fence_async();
    group_sync<256>(3);
    if (threadIdx.x < 128)
      consume<T, 0, PAIR, HELD>(x, part, s, scale);
    else
      consume<T, 1, PAIR, HELD>(x, part, s, scale);
  }
  if (PAIR) {  // the other thread block may still signal here
    __syncwarp();
    cluster_sync();
  }
}

template <class T, bool PAIR, int HELD>
int start(const Arguments& x, const CUtensorMap& map, float scale, void* stream) {
  const dim3 grid(unsigned(x.tokens * (x.heads / ROWS)), unsigned(x.splits));
  return launch(mla_kernel<T, PAIR, HELD>, grid, PAIR ? 2 : 1, THREADS, int(sizeof(Shared)), stream,
                x, map, scale);
}

}  // namespace

// Returns 0, or CUDA's error, or -1 where the driver refuses the map of the pool.
extern "C" int paged_mla(const Arguments* x, void* pool, int64_t blocks, int64_t block_bytes,
                         int64_t slot_bytes, float scale, int fp16, int variant, void* stream) {
  CUtensorMap map;
  const uint64_t sizes[3] = {RANK + 64, uint64_t(x->page), uint64_t(blocks)};
  const uint64_t strides[2] = {uint64_t(slot_bytes), uint64_t(block_bytes)};
  const uint32_t box[3] = {64, uint32_t(x->box), 1};
  if (!make_map(&map, !fp16, pool, 3, sizes, strides, box)) return -1;
  using B = __nv_bfloat16;
  auto run = variant == 0 ? start<B, false, 0> : variant == 1 ? start<B, false, 1>
           : variant == 2 ? start<B, true, 0>  : variant == 3 ? start<B, true, 1>
           : variant == 4 ? start<B, false, 2> : start<B, true, 2>;
  if (fp16) run = start<__half, false, 0>;
  return run(*x, map, scale, stream);
}
