// qmm_block: a quantized linear for up to 16 rows on the simdgroup's matrix unit, blind to how many there are.
//
//   y[m, n] = sum_k x[m, k] * (scale[n, k / GS] * q[n, k] + bias[n, k / GS])
//
// Shapes   x [M, K] of type T, y [M, N] of type Y; q packed into w [N, K * BITS / 32], lowest bits first;
//          scales and biases [N, K / GS] of type T.
//
// Template T      bfloat16_t or float16_t
//          O      operands of the matrix unit: T, or float where it has no bfloat; both hold the same values
//          Y      T, or float to see the sums before they are rounded
//          GS     values that share a scale: 32, 64 or 128
//          BITS   4 or 8
//          R      tiles of 8 outputs that a simdgroup owns; free, no bit depends on it
//          C      tiles of 8 rows of x: 1 up to 8 rows, 2 up to 16; no bit depends on it
//          S      simdgroups of a threadgroup, which share out the groups of K
//          FULL   N is a multiple of 8 * R
//
// Math     A group of GS values at a time, all of it in float:
//            sum = sum_k x[k]      acc = -OFFSET * sum      acc = acc + (OFFSET + q[k]) * x[k]
//            result = fma(bias, sum, fma(scale, acc, result))
//          OFFSET + q, with OFFSET = 2 ^ BITS, is q put into the mantissa of OFFSET: exact, and no integer is
//          converted. A byte does not fit beside bfloat's OFFSET but is exact on its own: there OFFSET is 0.
//
// Matrices Outputs are the rows of A, rows of x the columns of B. Which eight k meet in a step is free, so they
//          are those that need no shuffle: of the four quarters of a group, field j and field j + P of word a,
//          where P is half the fields of a word. A lane holds the two neighbours in a row of each matrix that
//          MLX's own kernels count on (steel/gemm/mma.h, gated_delta_update.h), so that it unpacks what it
//          loaded and nothing goes through threadgroup memory.
//
// Order    sum: in each of the eight places of a step in ascending order, then the eight as a tree. acc: as the
//          matrix unit adds, which is not documented; step by step, words outside, fields inside. result: of
//          the groups s, s + S, .. in simdgroup s; then the simdgroups in ascending order. Nothing here knows
//          how many rows there are or which one a row is, so a row has the same bits in any company.
//
// Reads    Every packed word of w once for all rows together, where N fills its tiles (else the last output
//          again for each one that is missing); four lanes share a scale. Columns of B without a row of x repeat
//          the last one and are not stored: no bounds check inside the loop.
//
// Limits   1 to 16 rows; x starts at a multiple of eight bytes; K a multiple of GS; the packed words of w and the
//          values of x and y are below 2^31; scales and biases have eight or more elements, with fewer MLX would
//          place them in another address space and this would not compile.
#include <metal_simdgroup_matrix>

// Fields `field` and `field + P` of a packed word, each with OFFSET.
template <typename T, int BITS>
METAL_FUNC vec<T, 2> qmm_block_pair(const uint word, const int field) {
  constexpr bool HALF = metal::is_same_v<T, float16_t>;
  constexpr int MANTISSA = HALF ? 10 : 7;
  if constexpr (BITS > MANTISSA) {
    const float low = (word >> (8 * field)) & 0xff;
    const float high = (word >> (8 * field + 16)) & 0xff;
    return vec<T, 2>{static_cast<T>(low), static_cast<T>(high)};
  } else {
    constexpr int PLACE = MANTISSA - BITS;
    constexpr uint OFFSET = uint((HALF ? 15 : 127) + BITS) << MANTISSA;
    constexpr uint FIELD = ((1u << BITS) - 1) << PLACE;
    const int shift = BITS * field - PLACE;
    const uint moved = shift > 0 ? word >> shift : word << -shift;
    return as_type<vec<T, 2>>((moved & (FIELD << 16 | FIELD)) | (OFFSET << 16 | OFFSET));
  }
}

template <typename T, typename O, typename Y, int GS, int BITS, int R, int C, int S, bool FULL>
METAL_FUNC void qmm_block(
    const device uint32_t* w,
    const device T* scales,
    const device T* biases,
    const device T* x,
    device Y* y,
    const int K,
    const int N,
    const int M,
    threadgroup float* parts,
    uint3 at,
    uint simd_index,
    uint lane) {
  constexpr int P = 16 / BITS;
  constexpr int W = GS * BITS / 128;  // words of a lane in a group: a quarter
  constexpr bool HALF = metal::is_same_v<T, float16_t>;
  constexpr float OFFSET = BITS > (HALF ? 10 : 7) ? 0 : 1 << BITS;
  const int row = int(lane / 4 & 4) + int(lane / 2 % 4);
  const int column = int(lane / 4 & 2) * 2 + int(lane % 2) * 2;  // and the next one
  const int first = int(at.y) * (8 * R);  // of the outputs n of this threadgroup
  const int groups = K / GS;

  // A: this lane's outputs. B: its rows of x, and of each group the quarter and the half word that it feeds.
  int w_row[R];
  int scale_row[R];
#pragma unroll
  for (int r = 0; r < R; r++) {
    const int n = first + 8 * r + row;
    const int inside = FULL ? n : min(n, N - 1);
    w_row[r] = inside * (K * BITS / 32) + (column / 2) * W;
    scale_row[r] = inside * groups;
  }
  int x_row[C * 2];
#pragma unroll
  for (int i = 0; i < C * 2; i++) {
    x_row[i] = min(8 * (i / 2) + column + i % 2, M - 1) * K + (row / 2) * (GS / 4) + (row % 2) * P;
  }
  float result[R * C * 2];
#pragma unroll
  for (int i = 0; i < R * C * 2; i++) {
    result[i] = 0;
  }

  for (int group = int(simd_index); group < groups; group += S) {
    uint words[R * W];
#pragma unroll
    for (int r = 0; r < R; r++) {
      const device uint32_t* from = w + w_row[r] + group * (4 * W);
      if constexpr (W == 1) {
        words[r] = from[0];
      } else {
#pragma unroll
        for (int a = 0; a < W; a += 2) {
          const vec<uint32_t, 2> two = *((const device vec<uint32_t, 2>*)(from + a));
          words[r * W + a] = two.x;
          words[r * W + a + 1] = two.y;
        }
      }
    }
    vec<T, P> values[C * 2 * W];
    float sum[C * 2];
#pragma unroll
    for (int i = 0; i < C * 2; i++) {
      float own = 0;
#pragma unroll
      for (int a = 0; a < W; a++) {
        values[i * W + a] = *((const device vec<T, P>*)(x + x_row[i] + group * GS + a * (2 * P)));
#pragma unroll
        for (int j = 0; j < P; j++) {
          own += float(values[i * W + a][j]);
        }
      }
      // The lanes that hold the same column of B.
      own += simd_shuffle_xor(own, ushort(2));
      own += simd_shuffle_xor(own, ushort(4));
      own += simd_shuffle_xor(own, ushort(16));
      sum[i] = own;
    }

    simdgroup_matrix<float, 8, 8> acc[R * C];
#pragma unroll
    for (int i = 0; i < R * C; i++) {
      acc[i].thread_elements()[0] = -OFFSET * sum[i % C * 2];
      acc[i].thread_elements()[1] = -OFFSET * sum[i % C * 2 + 1];
    }
#pragma unroll
    for (int a = 0; a < W; a++) {
#pragma unroll
      for (int j = 0; j < P; j++) {
        simdgroup_matrix<O, 8, 8> B[C];
#pragma unroll
        for (int c = 0; c < C; c++) {
          B[c].thread_elements()[0] = O(values[c * 2 * W + a][j]);
          B[c].thread_elements()[1] = O(values[(c * 2 + 1) * W + a][j]);
        }
#pragma unroll
        for (int r = 0; r < R; r++) {
          const vec<T, 2> pair = qmm_block_pair<T, BITS>(words[r * W + a], j);
          simdgroup_matrix<O, 8, 8> A;
          A.thread_elements()[0] = O(pair.x);
          A.thread_elements()[1] = O(pair.y);
#pragma unroll
          for (int c = 0; c < C; c++) {
            simdgroup_multiply_accumulate(acc[r * C + c], A, B[c], acc[r * C + c]);
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
      const float scale = scales[scale_row[r] + group];
      const float bias = biases[scale_row[r] + group];
#pragma unroll
      for (int i = 0; i < C * 2; i++) {
        const float scaled = metal::fma(scale, acc[r * C + i / 2].thread_elements()[i % 2], result[r * C * 2 + i]);
        result[r * C * 2 + i] = metal::fma(bias, sum[i], scaled);
      }
    }
  }

  // parts [S, 8 * C, 8 * R]: what each simdgroup has of every row of x and output of the threadgroup.
  constexpr int PART = 64 * C * R;
#pragma unroll
  for (int r = 0; r < R; r++) {
#pragma unroll
    for (int i = 0; i < C * 2; i++) {
      const int m = 8 * (i / 2) + column + i % 2;
      parts[int(simd_index) * PART + m * (8 * R) + 8 * r + row] = result[r * C * 2 + i];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = int(simd_index * 32 + lane); i < PART; i += S * 32) {
    float total = parts[i];
#pragma unroll
    for (int s = 1; s < S; s++) {
      total += parts[s * PART + i];
    }
    const int m = i / (8 * R);
    const int n = first + i % (8 * R);
    if (m < M && (FULL || n < N)) {
      y[m * N + n] = static_cast<Y>(total);
    }
  }
}
