// float16 and bfloat16 for kernels. GCC 11 has no types for them, and CPU kernels do not include
// PyTorch's. Conversions have no branches, so that a loop over them is vectorised.
#pragma once

#include <calcops/numbers.h>

#include <cstdint>
#include <cstring>

namespace calcops {

CALCOPS_HD inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

CALCOPS_HD inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// IEEE 754's binary16: a sign, five bits of exponent, ten of fraction.
struct Float16 {
  uint16_t bits;

  Float16() = default;

  // Rounded half to even.
  CALCOPS_HD explicit Float16(float value) {
    // Infinity, 2^16, and the least normal float16, 2^-14, in the bits of a float32.
    constexpr uint32_t kInfinity = 0x7f800000, kTooLarge = 0x47800000, kNormal = 0x38800000;
    const uint32_t all = bits_of_float(value), magnitude = all & 0x7fffffff;
    // A normal number: the exponent's bias changes from 127 to 15. 13 bits of the fraction are
    // rounded away.
    const uint32_t normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
    // A smaller number: adding 1/2 rounds it to a multiple of 2^-24.
    const uint32_t small = bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000;
    uint32_t rounded = magnitude < kNormal ? small : normal;
    rounded = magnitude >= kTooLarge ? 0x7c00 : rounded;
    rounded = magnitude > kInfinity ? 0x7e00 : rounded;
    bits = static_cast<uint16_t>(rounded | (all >> 16 & 0x8000));
  }

  CALCOPS_HD operator float() const {
    const uint32_t magnitude = uint32_t(bits & 0x7fff) << 13, exponent = magnitude & 0x0f800000;
    const float normal = float_of_bits(magnitude + 0x38000000);
    const float small = float_of_bits(magnitude + 0x38800000) - 0x1p-14f;
    const float large = float_of_bits(magnitude + 0x70000000);  // infinity, NaN
    const float value = exponent == 0 ? small : exponent == 0x0f800000 ? large : normal;
    return float_of_bits(bits_of_float(value) | uint32_t(bits & 0x8000) << 16);
  }
};

// The upper half of a float32.
struct BFloat16 {
  uint16_t bits;

  BFloat16() = default;

  // Rounded half to even.
  CALCOPS_HD explicit BFloat16(float value) {
    const uint32_t all = bits_of_float(value), rounded = (all + 0x7fff + (all >> 16 & 1)) >> 16;
    bits = static_cast<uint16_t>(value == value ? rounded : 0x7fc0);
  }

  CALCOPS_HD operator float() const { return float_of_bits(uint32_t(bits) << 16); }
};

}  // namespace calcops
