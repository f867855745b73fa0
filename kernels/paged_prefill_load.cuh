// The tiles of paged_prefill_hopper.cu, and the warps that load them into shared memory.

#pragma once

#include "hopper.cuh"

struct Arguments {
  int64_t q, y, tables, lens, starts;               // addresses
  int64_t q_token, q_head, y_token, y_head, table;  // strides, in values
  int64_t kv_heads, group, sequences, tiles, page, box, least;
};

constexpr int DIM = 128, ROWS = 128, N = 128, STAGES = 2, UNITS = DIM / 8;
constexpr int THREADS = 384, LOADERS = 96;  // two warpgroups that compute; three warps for queries
constexpr int CHUNK = 64 * 128;             // bytes of 64 rows x 64 values

// Rows of one KV head: of `sequence`, from row `first` of its new * group on. No blocks: no tile.
struct Part {
  int64_t start, sequence;
  int head, first, rows, past, context, blocks;
};

struct Shared {
  uint8_t query[2][ROWS * DIM * 2];  // of this tile and the next; at a tile's end its output
  uint8_t keys[STAGES][N * DIM * 2];
  uint8_t values[STAGES][N * DIM * 2];
  Part parts[2];
  uint64_t keys_full[STAGES], keys_empty[STAGES], values_full[STAGES], values_empty[STAGES];
  uint64_t query_full[2], query_empty[2];
};

DEVICE Part find_part(const Arguments& x, int number) {
  Part part;
  part.head = number % int(x.kv_heads);
  const int64_t tile = x.tiles - 1 - number / int(x.kv_heads);  // late tiles see the most: first
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

DEVICE uint32_t query_unit(Shared& s, int buffer, int row, int unit) {
  return shared_address(s.query[buffer]) + row / 64 * (2 * CHUNK) + unit / 8 * CHUNK +
         swizzled(row % 64, unit % 8);
}

// The tiles of this thread block, their queries, and at the end a tile of no blocks.
DEVICE void load_queries(const Arguments& x, Shared& s) {
  const int thread = threadIdx.x - 32, lane = thread % 32, group = int(x.group);
  const int all = int(x.tiles * x.kv_heads), each = gridDim.x, own = blockIdx.x;
  for (int taken = 0, turn = 0;;) {
    // In turns from the left and from the right: early tiles are the longest. 32 turns at once:
    // tiles of short sequences may all be empty.
    const int mine = turn + lane, number = mine * each + (mine & 1 ? each - 1 - own : own);
    Part part;
    part.blocks = 0;
    if (number < all) part = find_part(x, number);
    const unsigned there = __ballot_sync(~0u, part.blocks > 0);
    const bool end = there == 0;
    if (end && (turn + 32) * each < all) {
      turn += 32;
      continue;
    }
    const int chosen = end ? 0 : __ffs(there) - 1, buffer = taken & 1;
    turn += chosen + 1;
    barrier_wait(shared_address(&s.query_empty[buffer]), taken >> 1 & 1 ^ 1);
    if (thread == chosen) s.parts[buffer] = part;
    group_sync<LOADERS>(3);
    if (!end) {
      const Part& next = s.parts[buffer];
      for (int i = thread; i < ROWS * UNITS; i += LOADERS) {
        const int row = i / UNITS, at = next.first + min(row, next.rows - 1);
        copy_unit(query_unit(s, buffer, row, i % UNITS),
                  x.q + 2 * ((next.start + at / group) * x.q_token +
                             (next.head * group + at % group) * x.q_head) + i % UNITS * 16,
                  row >= next.rows);
      }
      copies_wait();
      fence_async();
    }
    barrier_arrive(shared_address(&s.query_full[buffer]));
    if (end) return;
    ++taken;
  }
}

// The `taken`-th tile of this thread block, from when its queries are there.
DEVICE const Part& take(Shared& s, int taken) {
  barrier_wait(shared_address(&s.query_full[taken & 1]), taken >> 1 & 1);
  return s.parts[taken & 1];
}

DEVICE void load_block(const Arguments& x, const CUtensorMap* map, int head, const Boxes& boxes,
                       uint8_t* to, uint64_t& full, uint64_t& empty, int parity) {
  const int box = int(x.box), count = N / box, lane = threadIdx.x % 32;
  barrier_wait(shared_address(&empty), parity ^ 1);
  if (lane == 0) barrier_expect(shared_address(&full), N * DIM * 2);
  __syncwarp();
  const int row = lane % count, c = lane / count;
  const int block = __shfl_sync(~0u, boxes.block, row), slot = __shfl_sync(~0u, boxes.slot, row);
  if (c < DIM / 64)
    copy_box(shared_address(to) + c * N * 128 + row * box * 128, map, shared_address(&full), c * 64,
             head, slot, block);
}

DEVICE void load_blocks(const Arguments& x, const CUtensorMap* k_map, const CUtensorMap* v_map,
                        Shared& s) {
  const int box = int(x.box), page = int(x.page);
  Boxes before;
  int head_before = 0, count = 0;
  auto load_values = [&] {
    const int i = count - 1, stage = i % STAGES;
    load_block(x, v_map, head_before, before, s.values[stage], s.values_full[stage],
               s.values_empty[stage], i / STAGES & 1);
  };
  for (int taken = 0;; ++taken) {
    const Part part = take(s, taken);
    __syncwarp();
    if (threadIdx.x == 0) barrier_arrive(shared_address(&s.query_empty[taken & 1]));
    if (part.blocks == 0) break;
    auto table = reinterpret_cast<const int64_t*>(x.tables) + part.sequence * x.table;
    Boxes next(table, (part.blocks - 1) * N, box, page, part.context);
    for (int i = part.blocks - 1; i >= 0; --i, ++count) {
      const Boxes here = next;
      next = Boxes(table, max(i - 1, 0) * N, box, page, part.context);
      const int stage = count % STAGES;
      load_block(x, k_map, part.head, here, s.keys[stage], s.keys_full[stage], s.keys_empty[stage],
                 count / STAGES & 1);
      if (count > 0) load_values();
      before = here, head_before = part.head;
    }
  }
  if (count > 0) load_values();
}
