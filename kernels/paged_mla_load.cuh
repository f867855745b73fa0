// What each thread block of paged_mla_hopper.cu works on, and how it reaches shared memory.

#pragma once

#include "hopper.cuh"

struct Arguments {
  int64_t q, q_rope, y, parts, logs, tables, lens, starts;  // addresses
  int64_t q_token, q_head, r_token, r_head, y_token, y_head, table;  // strides, in values
  int64_t heads, tokens, sequences, splits, page, box;
};

constexpr int ROWS = 64, TOKENS = 64, RANK = 512;
constexpr int CHUNK = 64 * 128;                    // bytes of 64 rows x 64 values
constexpr int BLOCK = 9 * CHUNK, HALF = 4 * CHUNK;  // eight of the latent, then the rope part
constexpr int THREADS = 384;  // two warpgroups that compute, one that loads
constexpr int AHEAD = 2;      // blocks whose table entries are read before they are copied
// Scores start on half of a block; blocks are on their way to the L2 cache AHEAD of their copies.
constexpr bool IN_HALVES = true, PREFETCH = false;

struct Shared {
  uint8_t blocks[2][BLOCK];
  uint8_t query[BLOCK];
  float highest[2][ROWS];
  float total[2][ROWS];
  uint64_t full[2][2], empty[2][2];  // [buffer][half]
  uint64_t weights[2];
};

DEVICE void make_barriers(Shared& s) {
  for (int i = 0; i < 2; ++i) {
    for (int half = 0; half < 2; ++half) {
      barrier_init(shared_address(&s.full[i][half]), 1);
      barrier_init(shared_address(&s.empty[i][half]), 4);
    }
    barrier_init(shared_address(&s.weights[i]), 128);
  }
  fence_async();
}

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

// Of a part without tokens: the merge skips it.
DEVICE void store_nothing(const Arguments& x, const Part& part) {
  if (x.splits == 1 || threadIdx.x >= ROWS) return;
  const int64_t row = part.token * x.heads + part.first_head + threadIdx.x;
  reinterpret_cast<float*>(x.logs)[row * x.splits + part.split] = -INFINITY;
}

DEVICE void load_blocks(const Arguments& x, const Part& part, const CUtensorMap* map, Shared& s) {
  auto table = reinterpret_cast<const int64_t*>(x.tables) + part.sequence * x.table;
  const int box = int(x.box), page = int(x.page), boxes = TOKENS / box, lane = threadIdx.x % 32;
  auto find = [&](int i) { return Boxes(table, (part.first + i) * TOKENS, box, page, part.visible); };
  // action(chunk, box, block, slot) for the boxes of some chunks, one a lane.
  auto each_box = [&](const Boxes& of, int chunks, auto&& action) {
    for (int first = 0; first < boxes * chunks; first += 32) {
      const int at = first + lane, row = at % boxes;
      const int block = __shfl_sync(~0u, of.block, row), slot = __shfl_sync(~0u, of.slot, row);
      if (at < boxes * chunks) action(at / boxes, row, block, slot);
    }
  };
  Boxes boxes_of[AHEAD + 1];
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) boxes_of[i] = find(i);
  for (int i = 0; i < part.count; ++i) {
    boxes_of[AHEAD] = find(min(i + AHEAD, part.count - 1));
    if (PREFETCH && i + AHEAD < part.count)
      each_box(boxes_of[AHEAD], 9, [&](int c, int, int block, int slot) {
        prefetch_box(map, c * 64, slot, block);
      });
    const int buffer = i & 1;
    // First the half that its owner frees by its own probabilities, then the other with the rope part.
    for (int turn = 0; turn < 2; ++turn) {
      const int half = turn ^ buffer;
      const uint32_t full = shared_address(&s.full[buffer][half]);
      barrier_wait(shared_address(&s.empty[buffer][half]), i >> 1 & 1 ^ 1);
      if (lane == 0) barrier_expect(full, (4 + turn) * CHUNK);
      __syncwarp();
      each_box(boxes_of[0], 4 + turn, [&](int at, int row, int block, int slot) {
        const int c = at < 4 ? half * 4 + at : 8;
        copy_box(shared_address(s.blocks[buffer]) + c * CHUNK + row * box * 128, map, full, c * 64,
                 slot, block);
      });
    }
#pragma unroll
    for (int j = 0; j < AHEAD; ++j) boxes_of[j] = boxes_of[j + 1];
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
