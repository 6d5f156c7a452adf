// Definitions that CPU and CUDA kernels share: the macros that mark a function for both, and Row, a
// value of four numbers.
#pragma once

#ifdef __CUDACC__
#define CALCOPS_HD __host__ __device__
#define CALCOPS_HD_INLINED CALCOPS_HD
#else
#define CALCOPS_HD
// The ABI of a function that takes or returns a Row depends on AVX. An inlined function has no ABI.
#define CALCOPS_HD_INLINED __attribute__((always_inline))
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

namespace calcops {

#ifdef __CUDACC__
template <int kCount>
struct Numbers {
  double x[kCount];
  CALCOPS_HD double& operator[](int k) { return x[k]; }
  CALCOPS_HD double operator[](int k) const { return x[k]; }
};
template <int kCount>
CALCOPS_HD inline Numbers<kCount> operator*(double x, Numbers<kCount> v) {
  for (int k = 0; k < kCount; ++k) v[k] *= x;
  return v;
}
template <int kCount>
CALCOPS_HD inline Numbers<kCount> operator+(Numbers<kCount> v, const Numbers<kCount>& w) {
  for (int k = 0; k < kCount; ++k) v[k] += w[k];
  return v;
}
template <int kCount>
CALCOPS_HD inline Numbers<kCount> operator-(Numbers<kCount> v, const Numbers<kCount>& w) {
  for (int k = 0; k < kCount; ++k) v[k] -= w[k];
  return v;
}
template <int kCount>
CALCOPS_HD inline void operator-=(Numbers<kCount>& v, const Numbers<kCount>& w) {
  v = v - w;
}
using Row = Numbers<4>;
#else
typedef double Row __attribute__((vector_size(32)));
#endif

}  // namespace calcops
