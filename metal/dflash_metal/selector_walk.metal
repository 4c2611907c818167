// selector_walk: the walk of the candidate selector over all draft slots, in one launch.
//
//   score[l, c] = (unary[l, c] + sum_r pred[before, r] * hidden[l, r] * succ[candidates[l, c], r]) / temperature
//                 + noise[l, c]
//   path[l]     = candidates[l, argmax_c score[l, c]],  before = path[l - 1], for the first slot the anchor
//
// Shapes   candidates [L, C] token ids, unary [L, C] their logits, hidden [L, R] projected hidden states,
//          pred and succ [V, R] codebooks of type T; noise [L, C] float; path [L].
//          Greedy is noise 0 at temperature 1, which changes no bit of a score.
//
// Template T     bfloat16_t, float16_t or float, of unary, hidden and both codebooks
//          C     candidates a slot, 1 to 32
//          R     width of the codebooks
//
// Lanes    One threadgroup, a simdgroup for each candidate: grid and threadgroup (32, C, 1). Lane l owns
//          r = l, l + 32, ... and simd_sum adds the lanes. Every lane then looks for the best score itself,
//          the lowest index among equals, so that all know the next predecessor without another exchange.
//
// Order    All in float:  edge = fma(pred * hidden, succ, edge)  in ascending r, simd_sum, and
//          (unary + edge) / temperature + noise  with one rounding for each operation.
//
// Limits   Every token id is below V and V * R below 2^31. Arrays have eight or more elements, the scalars
//          L, anchor and temperature have no dimension.

template <typename T, int C, int R>
METAL_FUNC void selector_walk(
    const device uint32_t* candidates,
    const device T* unary,
    const device float* noise,
    const device T* hidden,
    const device T* pred,
    const device T* succ,
    const int L,
    const int anchor,
    const float temperature,
    device uint32_t* path,
    threadgroup float* scores,
    uint candidate,
    uint lane) {
  int before = anchor;
  for (int l = 0; l < L; l++) {
    const int at = l * C + int(candidate);
    const int token = candidates[at];
    float edge = 0;
    for (int r = int(lane); r < R; r += 32) {
      const float left = float(pred[before * R + r]) * float(hidden[l * R + r]);
      edge += left * float(succ[token * R + r]);
    }
    edge = simd_sum(edge);
    if (lane == 0) {
      const float score = (float(unary[at]) + edge) / temperature;
      scores[candidate] = score + noise[at];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    int best = 0;
    for (int c = 1; c < C; c++) {
      best = scores[c] > scores[best] ? c : best;
    }
    before = candidates[l * C + best];
    if (candidate == 0 && lane == 0) {
      path[l] = before;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the scores are read before the next slot's replace them
  }
}
