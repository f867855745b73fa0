// Causal prefill attention over paged K and V, as paged_prefill.py describes it: 128 rows (query heads
// of one KV head x new tokens) per thread block, head dim 64 or 128, bf16 or fp16.
//
// Two warpgroups of 64 rows each share the K and V that a third loads by bulk copies. A warpgroup
// starts the next block's scores and this block's output together, and makes the next probabilities
// beside the latter; named barriers let the two take turns at the matrix units, so that one's softmax
// runs beside the other's products. Blocks are read from the last, the masked one, to the first.
// Source of the schedule: Shah et al., "FlashAttention-3", 2024.

#include "hopper.cuh"

struct Arguments {
  int64_t q, y, tables, lens, starts;                     // addresses
  int64_t q_token, q_head, y_token, y_head, table;        // strides, in values
  int64_t kv_heads, group, sequences, tiles, page, box, least;
};

namespace {

constexpr int ROWS = 128, THREADS = 384;  // two warpgroups that compute, one that loads

template <int DIM, int N, int STAGES>
struct Shared {
  uint8_t query[2][64 * DIM * 2];  // of each warpgroup; the output, at the end
  uint8_t keys[STAGES][N * DIM * 2];
  uint8_t values[STAGES][N * DIM * 2];
  uint64_t keys_full[STAGES], keys_empty[STAGES], values_full[STAGES], values_empty[STAGES];
};

// One thread block's rows: of `sequence`, from row `first` of its new * group on.
struct Part {
  int64_t start, sequence, head;
  int first, rows, past, context, blocks;
};

template <int N>
DEVICE Part find_part(const Arguments& x) {
  Part part;
  part.head = blockIdx.x;
  const int64_t tile = x.tiles - 1 - blockIdx.y;  // late tiles see the most and start first
  auto starts = reinterpret_cast<const int64_t*>(x.starts);
  const int spare = x.group % ROWS != 0;  // a part of a tile in each sequence
  int64_t low = 0, high = x.sequences;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (starts[middle] * x.group / ROWS + middle * spare <= tile ? low : high) = middle;
  }
  part.sequence = low;
  part.start = starts[low];
  const int fresh = int(starts[low + 1] - part.start), group = int(x.group);
  part.context = int(reinterpret_cast<const int64_t*>(x.lens)[low]);
  part.past = part.context - fresh;
  part.first = int(tile - (part.start * x.group / ROWS + low * spare)) * ROWS;
  part.rows = fresh < x.least ? 0 : max(0, fresh * group - part.first);
  const int seen = part.past + min((part.first + ROWS - 1) / group, fresh - 1) + 1;
  part.blocks = part.rows > 0 ? (seen + N - 1) / N : 0;
  part.rows = min(part.rows, ROWS);
  return part;
}

template <int DIM, int N, int STAGES>
DEVICE void load_block(const Arguments& x, const Part& part, const CUtensorMap* map, int j,
                       uint8_t* to, uint64_t& full) {
  auto table = reinterpret_cast<const int64_t*>(x.tables) + part.sequence * x.table;
  const int box = int(x.box), page = int(x.page);
  const int final = (part.context - 1) / box * box;  // later boxes are read again from here
  barrier_expect(shared_address(&full), N * DIM * 2);
  for (int row = 0; row < N; row += box) {
    const int at = min(j * N + row, final);
    const int block = int(table[at / page]);
    for (int c = 0; c < DIM / 64; ++c)
      copy_box(shared_address(to) + c * N * 128 + row * 128, map, shared_address(&full), c * 64,
               int(part.head), at % page, block);
  }
}

template <int DIM, int N, int STAGES>
DEVICE void load_blocks(const Arguments& x, const Part& part, const CUtensorMap* k_map,
                        const CUtensorMap* v_map, Shared<DIM, N, STAGES>& s) {
  for (int i = 0; i <= part.blocks; ++i) {
    if (i < part.blocks) {
      barrier_wait(shared_address(&s.keys_empty[i % STAGES]), i / STAGES & 1 ^ 1);
      load_block<DIM, N, STAGES>(x, part, k_map, part.blocks - 1 - i, s.keys[i % STAGES],
                                 s.keys_full[i % STAGES]);
    }
    if (i > 0) {
      const int before = i - 1;
      barrier_wait(shared_address(&s.values_empty[before % STAGES]), before / STAGES & 1 ^ 1);
      load_block<DIM, N, STAGES>(x, part, v_map, part.blocks - i, s.values[before % STAGES],
                                 s.values_full[before % STAGES]);
    }
  }
}

template <class T, int DIM, int N, int STAGES, bool TURNS>
struct Consumer {
  Shared<DIM, N, STAGES>& s;
  const Arguments& x;
  const Part& part;
  const float scale;
  const int side = threadIdx.x / 128 - 1, thread = threadIdx.x % 128;
  const int row = thread / 32 * 16 + thread % 32 / 4;  // and row + 8, of the warpgroup's 64
  float y[DIM / 2], scores[N / 2];
  uint32_t weights[N / 4];
  float highest[2] = {-1e30f, -1e30f}, total[2] = {0, 0};  // finite: all of a block may be hidden
  float shrink[2];
  int seen[2], by_all;

  DEVICE Consumer(Shared<DIM, N, STAGES>& s, const Arguments& x, const Part& part, float scale)
      : s(s), x(x), part(part), scale(scale) {
    const int group = int(x.group), at = part.first + side * 64;
    for (int r = 0; r < 2; ++r) seen[r] = part.past + (at + row + 8 * r) / group + 1;
    by_all = part.past + at / group + 1;
#pragma unroll
    for (int i = 0; i < DIM / 2; ++i) y[i] = 0;
  }

  DEVICE uint8_t* own_row(int r, int unit) {
    return s.query[side] + unit / 8 * (64 * 128) + swizzled(r, unit % 8);
  }

  DEVICE void load_query() {
    const int units = DIM / 8, group = int(x.group);
    for (int i = thread; i < 64 * units; i += 128) {
      const int r = i / units, packed_row = part.first + side * 64 + r;
      uint4 value{0, 0, 0, 0};
      if (side * 64 + r < part.rows)
        value = *reinterpret_cast<const uint4*>(
            x.q + 2 * ((part.start + packed_row / group) * x.q_token +
                       (part.head * group + packed_row % group) * x.q_head) + i % units * 16);
      *reinterpret_cast<uint4*>(own_row(r, i % units)) = value;
    }
    fence_async();
    group_sync<128>(1 + side);
  }

  DEVICE void score(int i) {  // starts the scores of the i-th block read
    const Tile q(shared_address(s.query[side])), k(shared_address(s.keys[i % STAGES]));
    barrier_wait(shared_address(&s.keys_full[i % STAGES]), i / STAGES & 1);
    matrix_fence();
#pragma unroll
    for (int step = 0; step < DIM / 16; ++step)
      multiply<T, false>(scores, q[step / 4 * 64 * 128 + step % 4 * 32],
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

  DEVICE void softmax(int i) {  // probabilities in place of the scores; shrink
    const int begin = (part.blocks - 1 - i) * N;
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
    }
#pragma unroll
    for (int j = 0; j < N / 2; ++j)
      scores[j] = power_of_two(scores[j] * scale - highest[j >> 1 & 1]);
  }

  DEVICE void accept() {  // the probabilities; y must be at rest
    if (__any_sync(~0u, shrink[0] != 1 || shrink[1] != 1)) {
      total[0] *= shrink[0], total[1] *= shrink[1];
#pragma unroll
      for (int i = 0; i < DIM / 2; ++i) y[i] *= shrink[i >> 1 & 1];
    }
#pragma unroll
    for (int j = 0; j < N / 2; ++j) total[j >> 1 & 1] += scores[j];
#pragma unroll
    for (int j = 0; j < N / 4; ++j) weights[j] = packed<T>(scores[2 * j], scores[2 * j + 1]);
  }

  DEVICE void release(uint64_t& empty) {
    if (thread % 32 == 0) barrier_arrive(shared_address(&empty));
  }

  DEVICE void clean() {  // what lies behind the context: 0 * NaN would be NaN
    const int left = part.context - (part.blocks - 1) * N;
    if (left >= N) return;
    barrier_wait(shared_address(&s.values_full[0]), 0);
    for (int at = threadIdx.x - 128; at < (N - left) * (DIM / 8); at += 256) {
      const int r = left + at / (DIM / 8), unit = at % (DIM / 8);
      *reinterpret_cast<uint4*>(s.values[0] + unit / 8 * N * 128 + swizzled(r, unit % 8)) =
          uint4{0, 0, 0, 0};
    }
    fence_async();
    group_sync<256>(3);
  }

  DEVICE void run() {
    score(0);
    matrix_wait<0>();
    pin(scores);
    release(s.keys_empty[0]);
    softmax(0);
    accept();
    clean();
    if (TURNS && side == 1) group_arrive<256>(4);
    for (int i = 1; i < part.blocks; ++i) {
      if (TURNS) group_sync<256>(4 + side);
      score(i);
      mix(i - 1);
      if (TURNS) group_arrive<256>(5 - side);
      matrix_wait<1>();
      pin(scores);
      release(s.keys_empty[i % STAGES]);
      softmax(i);
      matrix_wait<0>();
      pin(y);
      release(s.values_empty[(i - 1) % STAGES]);
      accept();
    }
    if (TURNS && side == 0) group_sync<256>(4);  // as many syncs as arrivals
    mix(part.blocks - 1);
    matrix_wait<0>();
    pin(y);
  }

  DEVICE void store() {
    const int units = DIM / 8, group = int(x.group);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float inverse = 1 / sum_of_row(total[r]);
#pragma unroll
      for (int j = 0; j < DIM / 8; ++j)
        *reinterpret_cast<uint32_t*>(own_row(row + 8 * r, j) + thread % 4 * 4) =
            packed<T>(y[4 * j + 2 * r] * inverse, y[4 * j + 2 * r + 1] * inverse);
    }
    group_sync<128>(1 + side);
    for (int i = thread; i < 64 * units; i += 128) {
      const int r = i / units, packed_row = part.first + side * 64 + r;
      if (side * 64 + r < part.rows)
        *reinterpret_cast<uint4*>(
            x.y + 2 * ((part.start + packed_row / group) * x.y_token +
                       (part.head * group + packed_row % group) * x.y_head) + i % units * 16) =
            *reinterpret_cast<const uint4*>(own_row(r, i % units));
    }
  }
};

template <class T, int DIM, int N, int STAGES, bool TURNS>
__global__ void __launch_bounds__(THREADS, 1)
    prefill_kernel(const Arguments x, const __grid_constant__ CUtensorMap k_map,
                   const __grid_constant__ CUtensorMap v_map, const float scale) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& s = *reinterpret_cast<Shared<DIM, N, STAGES>*>(memory);
  allow_launch_after();
  const Part part = find_part<N>(x);
  if (part.blocks == 0) return;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(shared_address(&s.keys_full[i]), 1);
      barrier_init(shared_address(&s.values_full[i]), 1);
      barrier_init(shared_address(&s.keys_empty[i]), 8);
      barrier_init(shared_address(&s.values_empty[i]), 8);
    }
    fence_async();
  }
  __syncthreads();
  wait_for_launch_before();
  if (threadIdx.x < 128) {
    fewer_registers<24>();
    if (threadIdx.x == 0) load_blocks(x, part, &k_map, &v_map, s);
  } else {
    more_registers<240>();
    Consumer<T, DIM, N, STAGES, TURNS> consumer(s, x, part, scale);
    consumer.load_query();
    consumer.run();
    consumer.store();
  }
}

template <class T, int DIM, int N, int STAGES, bool TURNS>
int start(const Arguments& x, const CUtensorMap& k_map, const CUtensorMap& v_map, float scale,
          void* stream) {
  return launch(prefill_kernel<T, DIM, N, STAGES, TURNS>, dim3(x.kv_heads, x.tiles), 1, THREADS,
                int(sizeof(Shared<DIM, N, STAGES>)), stream, x, k_map, v_map, scale);
}

}  // namespace

// k_bytes, v_bytes: strides of the pools' blocks, slots and heads. Returns 0, or CUDA's error, or -1
// where the driver refuses the map of a pool.
extern "C" int paged_prefill(const Arguments* x, void* k_pool, void* v_pool, int64_t blocks,
                             const int64_t* k_bytes, const int64_t* v_bytes, float scale, int fp16,
                             int variant, void* stream) {
  CUtensorMap maps[2];
  const uint64_t sizes[4] = {128, uint64_t(x->kv_heads), uint64_t(x->page), uint64_t(blocks)};
  const uint32_t box[4] = {64, 1, uint32_t(x->box), 1};
  for (int i = 0; i < 2; ++i) {
    const int64_t* given = i ? v_bytes : k_bytes;
    const uint64_t strides[3] = {uint64_t(given[2]), uint64_t(given[1]), uint64_t(given[0])};
    if (!make_map(&maps[i], !fp16, i ? v_pool : k_pool, 4, sizes, strides, box)) return -1;
  }
  using B = __nv_bfloat16;
  auto run = variant == 0   ? start<B, 128, 128, 2, true>
             : variant == 1 ? start<B, 128, 128, 2, false>
             : variant == 2 ? start<B, 128, 64, 4, true>
                            : start<B, 128, 64, 4, false>;
  if (fp16) run = start<__half, 128, 128, 2, true>;
  return run(*x, maps[0], maps[1], scale, stream);
}
