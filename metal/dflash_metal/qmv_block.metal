// qmv_block: a quantized linear for a few rows at once, with the bits of MLX's one-row kernels.
//
//   y[m, n] = sum_k x[m, k] * (scale[n, k / GS] * q[n, k] + bias[n, k / GS])
//
// Shapes   x [M, K], y [M, N] of type T; q packed into w [N, K * BITS / 32], lowest bits first;
//          scales and biases [N, K / GS] of type T.
//
// Template T     bfloat16_t, float16_t or float
//          GS    values that share a scale: 32, 64 or 128
//          BITS  4 or 8
//          M     rows of x, 1 to 8
//          R     outputs n that a simdgroup owns; free, no bit depends on it
//          FAST  lanes as in affine_qmv_fast (K a multiple of 64 * 32 / BITS), else as in affine_qmv
//          SUMF  sum x in float (MLX from 0.32.4), else in T; matters at 4 bits only
//
// Lanes    A threadgroup is two simdgroups of 32 lanes, grid (32, 2 * ceil(N / 2R), 1) threads. In each step
//          lane l owns the VPT consecutive k that start at l * VPT, and the simdgroup 32 * VPT of them; VPT
//          is what one packed word holds (8 or 4), with FAST twice as much. A lane whose k lie beyond K adds
//          nothing: K is a multiple of GS and so of VPT, a lane's k are all inside or all outside.
//
// Order    For every row on its own, all of it in float. With x scaled by 1, 1/16, 1/256, 1/4096, so that a
//          nibble is masked and never shifted, a lane takes at 4 bits for every four k
//            acc = acc + fma(x3, w3, fma(x2, w2, fma(x0, w0, x1 * w1)))
//          and at 8 bits for every k  acc = fma(x, w, acc). A step ends with
//            result = result + fma(scale, acc, sum * bias)
//          where sum adds the lane's x, four at a time at 4 bits. After the last step simd_sum adds the
//          lanes and the result is cast to T once. The compiler contracts a multiplication and an addition
//          only inside one expression, so the grouping of the expressions below is part of the contract.
//
// Reads    Every packed word of w once for all rows together, where N fills its simdgroups (else the last output
//          again for each one that is missing); scales and biases once a lane; x once for every R outputs.
//
// Limits   x starts at a multiple of four elements; a row of w and its scales lie together; K * BITS / 8 * N
//          is below 2^31; scales and biases have eight or more elements, with fewer MLX would place them in
//          another address space and this would not compile. For K of 64 and 128 MLX's own one-row kernel is
//          a third one, whose order this is not.

// The sum of four x, which MLX took in their own type before 0.32.4.
template <typename T, bool SUMF>
METAL_FUNC float qmv_block_sum(T x0, T x1, T x2, T x3) {
  if constexpr (SUMF) {
    return float(x0) + float(x1) + float(x2) + float(x3);
  } else {
    return float(x0 + x1 + x2 + x3);
  }
}

// One step at 4 bits of a lane: acc[r * M + m] its products and sum[m] its x. The packed words are read
// first, once; the four weights made of one are kept over the rows of x.
template <typename T, int M, int R, int VPT, bool SUMF>
METAL_FUNC void qmv_block_step4(
    const device uint8_t* w,
    thread int* w_row,
    const device T* x,
    const int K,
    thread float* acc,
    thread float* sum) {
  ushort packed[R * VPT / 4];
#pragma unroll
  for (int r = 0; r < R; r++) {
    const device ushort* words = (const device ushort*)(w + w_row[r]);
#pragma unroll
    for (int i = 0; i < VPT / 4; i++) {
      packed[r * VPT / 4 + i] = words[i];
    }
  }
#pragma unroll
  for (int i = 0; i < VPT / 4; i++) {
    float weight[R * 4];
#pragma unroll
    for (int r = 0; r < R; r++) {
      const ushort word = packed[r * VPT / 4 + i];
      weight[r * 4] = word & 0x000f;
      weight[r * 4 + 1] = word & 0x00f0;
      weight[r * 4 + 2] = word & 0x0f00;
      weight[r * 4 + 3] = word & 0xf000;
    }
#pragma unroll
    for (int m = 0; m < M; m++) {
      const vec<T, 4> four = *((const device vec<T, 4>*)(x + m * K + 4 * i));
      const float x0 = four.x;
      const float x1 = four.y / 16.0f;
      const float x2 = four.z / 256.0f;
      const float x3 = four.w / 4096.0f;
      sum[m] += qmv_block_sum<T, SUMF>(four.x, four.y, four.z, four.w);
#pragma unroll
      for (int r = 0; r < R; r++) {
        acc[r * M + m] += (x0 * weight[r * 4] + x1 * weight[r * 4 + 1] + x2 * weight[r * 4 + 2] +
                           x3 * weight[r * 4 + 3]);
      }
    }
  }
}

// One step at 8 bits of a lane, as above.
template <typename T, int M, int R, int VPT>
METAL_FUNC void qmv_block_step8(
    const device uint8_t* w,
    thread int* w_row,
    const device T* x,
    const int K,
    thread float* acc,
    thread float* sum) {
#pragma unroll
  for (int i = 0; i < VPT / 4; i++) {
    float weight[R * 4];
#pragma unroll
    for (int r = 0; r < R; r++) {
      const device uint8_t* bytes = w + w_row[r] + 4 * i;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        weight[r * 4 + j] = bytes[j];
      }
    }
#pragma unroll
    for (int m = 0; m < M; m++) {
      const vec<T, 4> four = *((const device vec<T, 4>*)(x + m * K + 4 * i));
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float value = four[j];
        sum[m] += value;
#pragma unroll
        for (int r = 0; r < R; r++) {
          acc[r * M + m] += value * weight[r * 4 + j];
        }
      }
    }
  }
}

template <typename T, int GS, int BITS, int M, int R, bool FAST, bool SUMF>
METAL_FUNC void qmv_block(
    const device uint32_t* w,
    const device T* scales,
    const device T* biases,
    const device T* x,
    device T* y,
    const int K,
    const int N,
    uint3 at,
    uint simd_index,
    uint lane) {
  constexpr int VPT = (FAST ? 2 : 1) * 32 / BITS;
  constexpr int STEP = 32 * VPT;
  const int first = int(at.y * 2 + simd_index) * R;  // of the outputs n of this simdgroup
  if (first >= N) {
    return;
  }

  // Outputs past the last one repeat it and are not stored: no bounds check inside the loop.
  int w_row[R];
  int scale_row[R];
#pragma unroll
  for (int r = 0; r < R; r++) {
    const int n = min(first + r, N - 1);
    w_row[r] = n * (K * BITS / 8);
    scale_row[r] = n * (K / GS);
  }
  float result[R * M];
#pragma unroll
  for (int i = 0; i < R * M; i++) {
    result[i] = 0;
  }

  const device uint8_t* bytes = (const device uint8_t*)w;
  for (int k = int(lane) * VPT; k < K; k += STEP) {
    float acc[R * M];
    float sum[M];
#pragma unroll
    for (int i = 0; i < R * M; i++) {
      acc[i] = 0;
    }
#pragma unroll
    for (int m = 0; m < M; m++) {
      sum[m] = 0;
    }
    if constexpr (BITS == 4) {
      qmv_block_step4<T, M, R, VPT, SUMF>(bytes + k / 2, w_row, x + k, K, acc, sum);
    } else {
      qmv_block_step8<T, M, R, VPT>(bytes + k, w_row, x + k, K, acc, sum);
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
      const float scale = scales[scale_row[r] + uint(k) / GS];
      const float bias = biases[scale_row[r] + uint(k) / GS];
#pragma unroll
      for (int m = 0; m < M; m++) {
        const float part = scale * acc[r * M + m] + sum[m] * bias;
        result[r * M + m] += part;
      }
    }
  }

#pragma unroll
  for (int r = 0; r < R; r++) {
#pragma unroll
    for (int m = 0; m < M; m++) {
      const float total = simd_sum(result[r * M + m]);
      if (lane == 0 && first + r < N) {
        y[m * N + first + r] = static_cast<T>(total);
      }
    }
  }
}
