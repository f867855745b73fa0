// INT4 weights in registers: two of a byte to a pair of two-byte values; matrix products with few
// columns, beside those of hopper.cuh.

#pragma once

#include "hopper.cuh"

#define LIST8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define LIST16 TEN("") ",%10,%11,%12,%13,%14,%15"
#define ACC8(d, i) ACC4(d, i), ACC4(d, i + 4)
PRODUCTS(8, "16", "8", "9", "10", "11", "12", "13", "14")
PRODUCTS(16, "32", "16", "17", "18", "19", "20", "21", "22")

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

struct Pairs {  // of two rows, in the halves of a word; the offset is larger than the zero by Magic's
  uint32_t scale, offset;
};

// Scale and zero of a group, of two rows.
struct Factors {
  uint16_t scale[2];
  uint8_t zero[2];

  DEVICE void fetch(const uint16_t* scales, const uint8_t* zeros, const int64_t (&at)[2], int group) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      scale[r] = __ldg(scales + at[r] + group);
      if (zeros) zero[r] = __ldg(zeros + at[r] + group);
    }
  }

  template <class T>
  DEVICE Pairs pairs(bool zeros) const {
    const float low = Magic<T>::OFFSET + (zeros ? float(zero[0]) : 8.f);
    const float high = Magic<T>::OFFSET + (zeros ? float(zero[1]) : 8.f);
    return {scale[0] | uint32_t(scale[1]) << 16, packed<T>(low, high)};
  }
};

// Both weights of byte t of a word, by a row's scale and offset; pick: 0x1111 * t + 0x4400.
template <class T>
DEVICE uint32_t decoded(uint32_t word, uint32_t pick, const Pairs& of, int row) {
  uint32_t q;
  asm("lop3.b32 %0, %1, 0x000f000f, %2, 0xea;"
      : "=r"(q)
      : "r"(__byte_perm(word, word >> 4, pick)), "r"(Magic<T>::BITS));
  const auto twice = [&](uint32_t both) {
    const uint32_t v = __byte_perm(both, 0, row ? 0x3232 : 0x1010);
    return reinterpret_cast<const Pair<T>&>(v);
  };
  const Pair<T> value =
      __hmul2(__hsub2(reinterpret_cast<Pair<T>&>(q), twice(of.offset)), twice(of.scale));
  return reinterpret_cast<const uint32_t&>(value);
}

DEVICE uint2 load_shared(uint32_t at) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
  return v;
}
