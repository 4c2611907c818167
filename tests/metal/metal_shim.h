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

enum Operation { operation_sum = 1, operation_xor = 2 };

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

}  // namespace metal

using namespace metal;
#pragma GCC poison double
