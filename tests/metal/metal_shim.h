// The part of Metal's language and library that the kernels use, for clang on x86-64 Linux.
//
// Address spaces are clang's own, so that mixing them up does not compile. A lane is a fiber of runtime.cpp;
// simdgroup operations and barriers are where fibers wait for each other. What is missing here does not
// compile either: add it when a kernel needs it and MLX's own kernels use it.
#pragma once

#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#define METAL_FUNC inline __attribute__((always_inline))

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef _Float16 half;
typedef _Float16 float16_t;
typedef __bf16 bfloat;
typedef __bf16 bfloat16_t;
typedef uint uint3 __attribute__((ext_vector_type(3)));
typedef unsigned long ulong;
struct ulong2 {
  ulong x, y;
  ulong2(ulong x, ulong y) : x(x), y(y) {}
};

// Where a lane is, under the names of Metal's attributes.
struct Position {
  uint3 thread_position_in_grid;
  uint3 thread_position_in_threadgroup;
  uint3 threadgroup_position_in_grid;
  uint3 threadgroups_per_grid;
  uint3 threads_per_grid;
  uint3 threads_per_threadgroup;
  uint simdgroup_index_in_threadgroup;
  uint thread_index_in_simdgroup;
  uint thread_index_in_threadgroup;
  uint threads_per_simdgroup;
};

enum Operation { operation_sum = 1, operation_xor, operation_down, operation_multiply };

extern "C" {
const Position* emulator_position();
float emulator_exchange(float value, int operation, int argument, int line);
void emulator_barrier(int flags, int line);
threadgroup void* emulator_threadgroup_memory(long bytes);
}

namespace metal {

template <typename T, int N>
struct vector_of {
  typedef T type __attribute__((ext_vector_type(N)));
};
template <typename T, int N>
using vec = typename vector_of<T, N>::type;

}  // namespace metal

// A lane's part of a * b + c for 8 x 8 matrices; its elements go in and come out.
metal::vec<float, 2> emulator_multiply(metal::vec<float, 2> a, metal::vec<float, 2> b, metal::vec<float, 2> c, int line);
metal::vec<float, 2> emulator_multiply(metal::vec<half, 2> a, metal::vec<half, 2> b, metal::vec<float, 2> c, int line);
metal::vec<float, 2> emulator_multiply(metal::vec<bfloat, 2> a, metal::vec<bfloat, 2> b, metal::vec<float, 2> c, int line);

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };

inline void threadgroup_barrier(mem_flags flags, int line = __builtin_LINE()) {
  emulator_barrier(int(flags), line);
}

inline float simd_sum(float value, int line = __builtin_LINE()) {
  return emulator_exchange(value, operation_sum, 0, line);
}

inline float simd_shuffle_xor(float value, ushort mask, int line = __builtin_LINE()) {
  return emulator_exchange(value, operation_xor, mask, line);
}

inline float simd_shuffle_down(float value, ushort delta, int line = __builtin_LINE()) {
  return emulator_exchange(value, operation_down, delta, line);
}

template <typename T>
inline T min(T a, T b) {
  return b < a ? b : a;
}

template <typename T>
inline T max(T a, T b) {
  return a < b ? b : a;
}

inline float fma(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}

template <typename A, typename B>
inline constexpr bool is_same_v = __is_same(A, B);

template <typename To, typename From>
inline To as_type(From value) {
  return __builtin_bit_cast(To, value);
}

// An 8 x 8 matrix of a simdgroup. Which two elements a lane holds Metal does not say; these are the places
// that MLX's own kernels count on (get_coord in steel/gemm/mma.h). Only thread_elements() tells.
template <typename T, int Columns, int Rows = Columns>
struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "Metal has 8 x 8 matrices");
  static_assert(__is_floating_point(T), "Metal has matrices of floating point numbers");
  vec<T, 2> elements;

  vec<T, 2>& thread_elements() {
    return elements;
  }
  static int row(uint lane) {
    return (lane / 4 & 4) + lane / 2 % 4;
  }
  static int column(uint lane) {
    return (lane / 4 & 2) * 2 + lane % 2 * 2;
  }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;

template <typename T, int Columns, int Rows = Columns>
inline simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T value) {
  return {{value, value}};
}

// Where the element `i` of this lane lies in memory.
inline ulong emulator_place(int i, ulong elements_per_row, ulong2 origin, bool transpose) {
  const uint lane = emulator_position()->thread_index_in_simdgroup;
  const ulong row = simdgroup_float8x8::row(lane), column = simdgroup_float8x8::column(lane) + i;
  return ((transpose ? column : row) + origin.y) * elements_per_row + (transpose ? row : column) + origin.x;
}

template <typename T, typename Pointer>
inline void simdgroup_load(simdgroup_matrix<T, 8, 8>& matrix, Pointer source, ulong elements_per_row = 8,
                           ulong2 origin = {0, 0}, bool transpose = false) {
  for (int i = 0; i < 2; i++) {
    matrix.elements[i] = source[emulator_place(i, elements_per_row, origin, transpose)];
  }
}

template <typename T, typename Pointer>
inline void simdgroup_store(simdgroup_matrix<T, 8, 8> matrix, Pointer target, ulong elements_per_row = 8,
                            ulong2 origin = {0, 0}, bool transpose = false) {
  for (int i = 0; i < 2; i++) {
    target[emulator_place(i, elements_per_row, origin, transpose)] = matrix.elements[i];
  }
}

template <typename T>
inline void simdgroup_multiply_accumulate(simdgroup_matrix<float, 8, 8>& d, simdgroup_matrix<T, 8, 8> a,
                                          simdgroup_matrix<T, 8, 8> b, simdgroup_matrix<float, 8, 8> c,
                                          int line = __builtin_LINE()) {
  d.elements = emulator_multiply(a.elements, b.elements, c.elements, line);
}

}  // namespace metal

using namespace metal;
#pragma GCC poison double
