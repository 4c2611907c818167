// qmm_few: the sums of qmm_block for one to three rows without the matrix unit, a lane for each chain of them.
//
//   y[m, n] = sum_k x[m, k] * (scale[n, k / GS] * q[n, k] + bias[n, k / GS])
//
// It has the bits of qmm_block if, and only if, a step of the matrix unit adds its eight products to the
// accumulator one after the other, in ascending order, each with one rounding. No document says so: use it
// where it was compared with qmm_block, on the same GPU.
//
// Shapes   as in qmm_block; so are the math, OFFSET and the order.
//
// Template T, Y, GS, BITS, S  as in qmm_block
//          M     rows of x, 1 to 3
//          R     outputs n of a lane; free, no bit depends on it
//
// Lanes    A threadgroup is two simdgroups. S consecutive lanes share an output, lane s of them does what
//          simdgroup s does in qmm_block: the groups s, s + S, .. of K. 32 / S outputs are side by side, R of
//          them one below the other, so grid (32, 2 * ceil(N / (2 * R * 32 / S)), 1) threads.
//
// Reads    Every packed word of w once for all rows together, where N fills its simdgroups (else the last output
//          again for each one that is missing); every scale once; x once for every R outputs.
//
// Limits   as in qmm_block.

// Field `field` of a packed word, with OFFSET.
template <typename T, int BITS>
METAL_FUNC float qmm_few_field(const uint word, const int field) {
  if constexpr (BITS > (metal::is_same_v<T, float16_t> ? 10 : 7)) {
    return (word >> (BITS * field)) & ((1u << BITS) - 1);
  } else {
    constexpr int PLACE = 23 - BITS;
    constexpr uint OFFSET = uint(127 + BITS) << 23;
    constexpr uint FIELD = ((1u << BITS) - 1) << PLACE;
    const int shift = BITS * field - PLACE;
    const uint moved = shift > 0 ? word >> shift : word << -shift;
    return as_type<float>((moved & FIELD) | OFFSET);
  }
}

// The sum of a row of x over a group, in the order of qmm_block.
template <typename T, int GS, int BITS>
METAL_FUNC float qmm_few_sum(const device T* x) {
  constexpr int P = 16 / BITS;
  float sum[8];
#pragma unroll
  for (int place = 0; place < 8; place++) {
    sum[place] = 0;
#pragma unroll
    for (int k = 0; k < GS / 4; k += 2 * P) {
      const vec<T, P> values = *((const device vec<T, P>*)(x + (place / 2) * (GS / 4) + k + (place % 2) * P));
#pragma unroll
      for (int j = 0; j < P; j++) {
        sum[place] += float(values[j]);
      }
    }
  }
  return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

template <typename T, typename Y, int GS, int BITS, int M, int R, int S>
METAL_FUNC void qmm_few(
    const device uint32_t* w,
    const device T* scales,
    const device T* biases,
    const device T* x,
    device Y* y,
    const int K,
    const int N,
    uint3 at,
    uint simd_index,
    uint lane) {
  constexpr int P = 16 / BITS;
  constexpr int W = GS * BITS / 128;  // words in a quarter of a group
  constexpr int A = W == 1 ? 1 : 2;   // of them that are loaded at once
  constexpr int SIDE = 32 / S;
  constexpr float OFFSET = BITS > (metal::is_same_v<T, float16_t> ? 10 : 7) ? 0 : 1 << BITS;
  const int start = int(at.y * 2 + simd_index) * (SIDE * R);  // of the outputs n of this simdgroup
  const int first = start + int(lane) / S;  // and of this lane
  const int groups = K / GS;
  if (start >= N) {
    return;
  }

  int w_row[R];
  int scale_row[R];
#pragma unroll
  for (int r = 0; r < R; r++) {
    const int n = min(first + r * SIDE, N - 1);
    w_row[r] = n * (K * BITS / 32);
    scale_row[r] = n * groups;
  }
  float result[R * M];
#pragma unroll
  for (int i = 0; i < R * M; i++) {
    result[i] = 0;
  }

  for (int group = int(lane) % S; group < groups; group += S) {
    float sum[M];
    float acc[R * M];
#pragma unroll
    for (int m = 0; m < M; m++) {
      sum[m] = qmm_few_sum<T, GS, BITS>(x + m * K + group * GS);
#pragma unroll
      for (int r = 0; r < R; r++) {
        acc[r * M + m] = -OFFSET * sum[m];
      }
    }
    for (int a = 0; a < W; a += A) {  // a loop: unrolled too, the code would be very long
      uint words[R * 4 * A];
#pragma unroll
      for (int i = 0; i < R * 4; i++) {
        const device uint32_t* from = w + w_row[i / 4] + group * (4 * W) + (i % 4) * W + a;
        if constexpr (A == 1) {
          words[i] = from[0];
        } else {
          const vec<uint32_t, 2> two = *((const device vec<uint32_t, 2>*)from);
          words[2 * i] = two.x;
          words[2 * i + 1] = two.y;
        }
      }
#pragma unroll
      for (int b = 0; b < A; b++) {
        vec<T, P> values[M * 8];
#pragma unroll
        for (int i = 0; i < M * 8; i++) {
          const int k = group * GS + (i % 8 / 2) * (GS / 4) + (a + b) * (2 * P) + (i % 2) * P;
          values[i] = *((const device vec<T, P>*)(x + (i / 8) * K + k));
        }
#pragma unroll
        for (int j = 0; j < P; j++) {
#pragma unroll
          for (int place = 0; place < 8; place++) {
#pragma unroll
            for (int r = 0; r < R; r++) {
              const uint word = words[(r * 4 + place / 2) * A + b];
              const float weight = qmm_few_field<T, BITS>(word, j + (place % 2) * P);
#pragma unroll
              for (int m = 0; m < M; m++) {
                acc[r * M + m] = metal::fma(weight, float(values[m * 8 + place][j]), acc[r * M + m]);
              }
            }
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
      const float scale = scales[scale_row[r] + group];
      const float bias = biases[scale_row[r] + group];
#pragma unroll
      for (int m = 0; m < M; m++) {
        result[r * M + m] = metal::fma(bias, sum[m], metal::fma(scale, acc[r * M + m], result[r * M + m]));
      }
    }
  }

#pragma unroll
  for (int r = 0; r < R; r++) {
#pragma unroll
    for (int m = 0; m < M; m++) {
      float total = result[r * M + m];
#pragma unroll
      for (int s = 1; s < S; s++) {
        total += simd_shuffle_down(result[r * M + m], ushort(s));
      }
      const int n = first + r * SIDE;
      if (int(lane) % S == 0 && n < N) {
        y[m * N + n] = static_cast<Y>(total);
      }
    }
  }
}
