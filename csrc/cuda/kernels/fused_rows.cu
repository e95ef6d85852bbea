// The small kernels of the Hopper path, a row at a time: gather with the target's logit, losses from E's sums, the
// factor v into x, and the targets' share of dW, class by class.
#include <cfloat>
#include <type_traits>

#include "fused_rows.cuh"

namespace syncfree {
namespace {

constexpr int kThreads = 128;

template <class In>
__global__ void __launch_bounds__(kThreads) fused_gather_kernel(const __grid_constant__ FusedGatherParams p) {
  __shared__ float shared[kThreads / kWarp];
  __shared__ double smooth_shared[kThreads / kWarp];
  sm90::begin_after_previous_launch();
  const int64_t k = blockIdx.x;
  Pack<__nv_bfloat16>* out =
      reinterpret_cast<Pack<__nv_bfloat16>*>(static_cast<__nv_bfloat16*>(p.gathered) + k * p.hidden);
  if (threadIdx.x == 0 && k % kRowGroup == 0) p.rows.only[k / kRowGroup] = 0;
  if (threadIdx.x == 0 && k == 0) *p.rows.any = 0, *p.rows.ticket = 0;
  const ChunkRows chunk(p.chunk);
  if (k >= chunk.live) {
    for (int64_t i = threadIdx.x; i < p.hidden / 8; i += kThreads)
      reinterpret_cast<uint4*>(out)[i] = make_uint4(0, 0, 0, 0);
    const int64_t ignored = p.dx ? chunk.row(p.chunk, k) : -1;
    if (ignored >= 0) {
      const int64_t packs = p.hidden / 8 * (p.dx_dtype == DType::f32 ? 2 : 1);
      for (int64_t i = threadIdx.x; i < packs; i += kThreads)
        static_cast<uint4*>(p.dx)[ignored * packs + i] = make_uint4(0, 0, 0, 0);
    }
    if (threadIdx.x == 0) p.rows.exponent[k] = 0.f, p.rows.target[k] = -1, p.rows.bad[k] = 0;
    return;
  }
  const int64_t row = chunk.row(p.chunk, k), t = p.targets[row + p.shift];
  const bool known = t >= 0 && t < p.num_classes;
  const In* x = static_cast<const In*>(p.input) + row * p.input_pitch;
  const Pack<__nv_bfloat16>* w = reinterpret_cast<const Pack<__nv_bfloat16>*>(
      static_cast<const __nv_bfloat16*>(p.weight) + (known ? t : 0) * p.weight_pitch);
  float dot = 0.f;
  double smooth = 0;
  for (int64_t i = threadIdx.x; i < p.hidden / 8; i += kThreads) {
    Pack<__nv_bfloat16> a;
    load_bf16x8(x, i, a);
    out[i] = a;
    const Pack<__nv_bfloat16> b = w[i];
#pragma unroll
    for (int e = 0; e < 8; ++e) dot = fmaf(to_float(a.v[e]), to_float(b.v[e]), dot);
    if (!p.smooth.w) continue;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float4 u = reinterpret_cast<const float4*>(p.smooth.w)[i * 2 + h];
      smooth += double(to_float(a.v[h * 4]) * u.x + to_float(a.v[h * 4 + 1]) * u.y + to_float(a.v[h * 4 + 2]) * u.z +
                       to_float(a.v[h * 4 + 3]) * u.w);
    }
  }
  dot = block_reduce<kThreads>(dot, Sum(), shared);
  if (p.smooth.w) smooth = block_reduce<kThreads>(smooth, Sum(), smooth_shared);
  if (threadIdx.x == 0) {
    const float scale = float(option_logit_scale(p.options)) * kLog2e, cap = softcap_log2(p.options);
    float z = dot + (p.bias && known ? p.bias[t] : 0.f);
    z = cap > 0.f ? softcapped(z * scale / cap).tanh * cap : z * scale;
    // An exponent of -inf would make NaN of the classes that are -inf as well.
    p.rows.exponent[k] = !known ? NAN : z == -INFINITY ? -FLT_MAX : rintf(z) + kTargetExponent;
    p.rows.target[k] = known ? int32_t(t) : -1;
    p.rows.target_logit[k] = NAN;
    if (p.smooth.w) p.rows.smooth[k] = smooth + (p.smooth.bias ? *p.smooth.bias : 0.0);
    p.rows.bad[k] = 0;
  }
}

__device__ __forceinline__ void finish_rows(const FusedFinishParams& p, const ChunkRows& chunk) {
  __shared__ RowConstants<float> constants;
  const int64_t k = int64_t(blockIdx.x) * kRowsPerBlock + threadIdx.x % kRowsPerBlock, live = chunk.live;
  if (threadIdx.x == 0) constants = row_constants<float>(p.row);
  TileSums sum = sum_tiles(p.rows, p.tiles, p.chunk.size, k, k < live);
  const int64_t i = k < p.chunk.size ? chunk.row(p.chunk, k) : -1;
  if (threadIdx.x >= kRowsPerBlock || i < 0) return;
  RowGradient found{};
  float correct = 0.f;
  int predicted = -1;
  if (k < live) {
    if (!p.repair) mark_if_bad(p.rows, k, sum.exact, p.row.options);
    const float z = p.rows.target_logit[k], scale = constants.logit_scale;
    const int target = p.rows.target[k];
    const float* weights = static_cast<const float*>(p.row.weight);
    const float target_weight = !weights ? 1.f : target >= 0 ? weights[target] : NAN;
    const double residue = p.row.options.softcap > 0 ? sum.rounded : sum.exact - sum.rounded;
    found = row_gradient(p.row, constants, i, p.rows.exponent[k], sum.exact, float(residue), z, target_weight,
                         p.rows.smooth ? p.rows.smooth + k : nullptr);
    if (p.rows.best) {
      float2 best = sum.best;
      // A scale of 0 makes all logits equal, and the first class wins.
      if (scale == 0.f) best = make_float2(0.f, __int_as_float(target == 0 && p.row.num_classes > 1 ? 1 : 0));
      if (target >= 0)
        take_larger(best, make_float2(scale == 0.f ? 0.f : scale > 0.f ? z : -z, __int_as_float(target)));
      const int last = int(p.row.num_classes) - 1;
      predicted = min(__float_as_int(best.y), last);  // a row of NaN or -inf has found none
      correct = predicted == target ? 1.f : 0.f;
    }
  }
  p.rows.v[k] = found.v;
  if (k < live) p.rows.g_target[chunk.first + k] = found.g;
  if (k < live && p.rows.offset) p.rows.offset[chunk.first + k] = found.row.offset;
  if (p.row.ce) static_cast<float*>(p.row.ce)[i] = found.row.ce;
  if (p.row.z) static_cast<float*>(p.row.z)[i] = found.row.z;
  if (p.row.logsumexp) static_cast<float*>(p.row.logsumexp)[i] = found.row.logsumexp;
  if (p.row.correct) p.row.correct[i] = correct;
  if (p.row.predicted) p.row.predicted[i] = predicted;
}

// What the dW product reads: rows of x times v, a warp a row.
__device__ __forceinline__ void scale_rows(const FusedFinishParams& p, const ChunkRows& chunk) {
  const float alpha = gradient_factor(p.chunk.counts, p.chunk.upstream);
  for (int r = threadIdx.x / kWarp; r < kRowsPerBlock; r += kSlices) {
    const int64_t k = int64_t(blockIdx.x) * kRowsPerBlock + r;
    if (k >= chunk.live) return;
    scale_row(p.gathered, k, p.hidden, p.rows.v[k] * alpha);
  }
}

__global__ void __launch_bounds__(kRowsPerBlock* kSlices)
    fused_finish_kernel(const __grid_constant__ FusedFinishParams p) {
  sm90::begin_after_previous_launch();
  const ChunkRows chunk(p.chunk);
  // A group is repaired as a whole; kRowGroup is a multiple of the block's rows.
  if (!p.repair || (*p.rows.any && p.rows.only[int64_t(blockIdx.x) * kRowsPerBlock / kRowGroup])) finish_rows(p, chunk);
  if (!p.repair || !p.gathered) return;
  __syncthreads();  // v may be new
  scale_rows(p, chunk);
}

__device__ __forceinline__ int32_t sort_key(const FusedSortParams& p, int64_t i) {
  int64_t t = p.num_classes;
  if (i < int64_t(p.counts[kCountRows])) {
    t = p.targets[p.row_index[i] + p.shift] - p.first_class;
    if (t < 0 || t > p.num_classes) t = p.num_classes;
  }
  return int32_t(t);
}

// The rows of each class in their order. Tiles of rows are sorted by counting: a row's place in its tile is the number of
// the tile's rows that belong before it. Its place among all rows is that, and what belongs before it in each other tile,
// which bisection finds. Two launches, no sort of all and no memory for one.
constexpr int kTile = 2048, kRankThreads = 512, kRankRows = 64, kRankEach = kRankRows / kWarp,
              kRankSlices = kRankThreads / kWarp, kMergeThreads = 256;

// A key is the class, and in the lower bits the row in its tile, so no two are equal.
template <class Key>
__global__ void __launch_bounds__(kRankThreads) sort_tiles_kernel(FusedSortParams p) {
  struct alignas(16) Four {
    Key v[4];
  };
  __shared__ Four tile[kTile / 4];
  __shared__ int counted[kRankSlices][kRankRows];
  sm90::begin_after_previous_launch();
  const int lane = threadIdx.x % kWarp, slice = threadIdx.x / kWarp;
  const int64_t first = int64_t(blockIdx.x) * kRankRows, base = first - first % kTile;
  Key* keys = &tile[0].v[0];
#pragma unroll
  for (int j = threadIdx.x; j < kTile; j += kRankThreads)
    keys[j] = base + j < p.rows ? Key(sort_key(p, base + j)) * kTile + j : ~Key(0);
  for (int64_t c = int64_t(blockIdx.x) * kRankThreads + threadIdx.x; c < p.num_classes;
       c += int64_t(gridDim.x) * kRankThreads)
    p.starts[c] = -1;
  __syncthreads();
  Key own[kRankEach];
  int before[kRankEach] = {};
#pragma unroll
  for (int r = 0; r < kRankEach; ++r) own[r] = keys[first - base + r * kWarp + lane];
#pragma unroll 8
  for (int q = 0; q < kTile / 4 / kRankSlices; ++q) {
    const Four x = tile[slice * (kTile / 4 / kRankSlices) + q];
#pragma unroll
    for (int r = 0; r < kRankEach; ++r)
      before[r] += (x.v[0] < own[r]) + (x.v[1] < own[r]) + (x.v[2] < own[r]) + (x.v[3] < own[r]);
  }
#pragma unroll
  for (int r = 0; r < kRankEach; ++r) counted[slice][r * kWarp + lane] = before[r];
  __syncthreads();
  const int64_t i = first + threadIdx.x;
  if (threadIdx.x >= kRankRows || i >= p.rows) return;
  int64_t place = base;
  for (int s = 0; s < kRankSlices; ++s) place += counted[s][threadIdx.x];
  p.tile_keys[place] = int32_t(keys[i - base] / kTile);
  p.tile_positions[place] = int32_t(i);
}

// How many of a sorted tile belong(key) holds for: all of those before some place.
template <class Belongs>
__device__ __forceinline__ int count_first(const uint32_t (&tile)[kTile], Belongs belongs) {
  int n = 0;
#pragma unroll
  for (int step = kTile / 2; step > 0; step /= 2) n += belongs(tile[n + step - 1]) ? step : 0;
  return n + (belongs(tile[n]) ? 1 : 0);
}

__global__ void __launch_bounds__(kMergeThreads) merge_tiles_kernel(FusedSortParams p) {
  __shared__ uint32_t tile[kTile];
  sm90::begin_after_previous_launch();
  const int64_t i = int64_t(blockIdx.x) * kMergeThreads + threadIdx.x, own = i - i % kTile;
  const uint32_t key = i < p.rows ? uint32_t(p.tile_keys[i]) : 0;
  int64_t place = i - own, start = 0, end = 0;
  for (int64_t base = 0; base < p.rows; base += kTile) {
    __syncthreads();
#pragma unroll
    for (int j = threadIdx.x; j < kTile; j += kMergeThreads)
      tile[j] = base + j < p.rows ? uint32_t(p.tile_keys[base + j]) : UINT32_MAX;
    __syncthreads();
    const int less = count_first(tile, [key](uint32_t k) { return k < key; }),
              not_more = count_first(tile, [key](uint32_t k) { return k <= key; });
    start += less, end += not_more;
    if (base != own) place += base < own ? not_more : less;
  }
  if (i >= p.rows) return;
  p.keys[place] = int32_t(key);
  p.positions[place] = p.tile_positions[i];
  if (key < p.num_classes && place == start) p.starts[key] = int32_t(start), p.ends[key] = int32_t(end);
}

// Eight sums of one class from 16 bits in place and 8 in `low`, as hopper/split_accumulator.cuh left them.
__device__ __forceinline__ void read_split(const uint8_t* low, const __nv_bfloat16* high, int64_t c, int64_t i,
                                           int64_t hidden, float (&y)[8]) {
  const int64_t col = i * 8, tile = (c >> 6) * (hidden / 128) + col / 128;
  const int group = int(col % 128) / 8, upper = int(c >> 3) & 1, lane = int(c & 7) * 4, warp = int(c & 63) >> 4;
  const uint8_t* at =
      low + tile * (64 * 128) + warp * (16 * 128) + (group / 4) * 512 + lane * 16 + (group % 4) * 4 + upper * 2;
  const uint4 h = reinterpret_cast<const uint4*>(high)[i];
  const uint32_t halves[4] = {h.x, h.y, h.z, h.w};
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const uint32_t bytes = *reinterpret_cast<const uint16_t*>(at + q * 16);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const uint32_t byte = (bytes >> (8 * e)) & 0xffu, half = (halves[q] >> (16 * e)) & 0xffffu;
      y[q * 2 + e] = __uint_as_float(((half - (byte >> 7)) << 16) | (byte << 8));
    }
  }
}

// Eight columns of one class: a thread keeps them while it walks the class's rows in order.
template <class In, class SumT, class Out>
__device__ __forceinline__ void add_rows_of(const FusedTargetsParams& p, int64_t c, int32_t start, int64_t i) {
  const float alpha = gradient_factor(p.counts, p.upstream);
  const SumT* sum = static_cast<const SumT*>(p.sum) + c * p.hidden;
  Out* out = static_cast<Out*>(p.out) + c * p.hidden;
  float y[8];
  bool read = false;
  if constexpr (std::is_same_v<SumT, __nv_bfloat16>)
    if ((read = p.low != nullptr)) read_split(p.low, sum, c, i, p.hidden, y);
  if (!read) {
#pragma unroll
    for (int a = 0; a < 8 / Pack<SumT>::kSize; ++a) {
      const Pack<SumT> s = reinterpret_cast<const Pack<SumT>*>(sum + i * 8)[a];
#pragma unroll
      for (int e = 0; e < Pack<SumT>::kSize; ++e) y[a * Pack<SumT>::kSize + e] = to_float(s.v[e]);
    }
  }
  if (start >= 0) {
    const int32_t end = p.ends[c];
#pragma unroll 4
    for (int32_t j = start; j < end; ++j) {
      const int32_t position = p.positions[j];
      const float g = p.g_target[position] * alpha;
      Pack<__nv_bfloat16> x;
      load_bf16x8(static_cast<const In*>(p.input) + p.row_index[position] * p.input_pitch, i, x);
#pragma unroll
      for (int e = 0; e < 8; ++e) y[e] = fmaf(g, to_float(x.v[e]), y[e]);
    }
  }
  if (p.smooth) subtract8((p.class_weight ? p.class_weight[c] : 1.f) * alpha, p.smooth, i, y);
  store8(out + i * 8, y);
}

// blockIdx.x is a class, or in place, where classes without rows stay as they are, a place among the sorted rows.
template <class In, class SumT, class Out, bool kInPlace>
__global__ void __launch_bounds__(kThreads) fused_targets_kernel(const __grid_constant__ FusedTargetsParams p) {
  const int64_t i = int64_t(blockIdx.y) * kThreads + threadIdx.x;
  if constexpr (kInPlace) {
    const int32_t j = int32_t(blockIdx.x), c = p.keys[j];
    if (c >= p.num_classes || (j > 0 && p.keys[j - 1] == c) || i >= p.hidden / 8) return;
    add_rows_of<In, SumT, Out>(p, c, j, i);
  } else {
    if (i < p.hidden / 8) add_rows_of<In, SumT, Out>(p, blockIdx.x, p.starts[blockIdx.x], i);
  }
}

template <class In, class SumT, class Out>
cudaError_t launch_targets(const FusedTargetsParams& p, cudaStream_t stream) {
  const unsigned columns = unsigned((p.hidden / 8 + kThreads - 1) / kThreads);
  if constexpr (std::is_same_v<SumT, Out>) {
    if (p.sum == p.out && !p.smooth) {
      fused_targets_kernel<In, SumT, Out, true><<<dim3(unsigned(p.rows), columns), kThreads, 0, stream>>>(p);
      return cudaGetLastError();
    }
  }
  fused_targets_kernel<In, SumT, Out, false><<<dim3(unsigned(p.num_classes), columns), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

template <class In>
cudaError_t launch_targets_of(const FusedTargetsParams& p, cudaStream_t stream) {
  if (p.sum_dtype == DType::f32 && p.out_dtype == DType::f32) return launch_targets<In, float, float>(p, stream);
  if (p.sum_dtype == DType::f32 && p.out_dtype == DType::bf16)
    return launch_targets<In, float, __nv_bfloat16>(p, stream);
  if (p.sum_dtype == DType::bf16 && p.out_dtype == DType::bf16)
    return launch_targets<In, __nv_bfloat16, __nv_bfloat16>(p, stream);
  return cudaErrorInvalidValue;
}

}  // namespace

bool fused_supported_device() {
  int device = 0, major = 0, minor = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess && major == 9 &&
         minor == 0;
}

cudaError_t launch_fused_gather(const FusedGatherParams& p, cudaStream_t stream) {
  const unsigned blocks = unsigned(p.chunk.size);
  switch (p.input_dtype) {
    case DType::f32:
      return sm90::launch_dependent(fused_gather_kernel<float>, blocks, kThreads, stream, p);
    case DType::bf16:
      return sm90::launch_dependent(fused_gather_kernel<__nv_bfloat16>, blocks, kThreads, stream, p);
    case DType::f16:
      return sm90::launch_dependent(fused_gather_kernel<__half>, blocks, kThreads, stream, p);
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t launch_fused_finish(const FusedFinishParams& p, cudaStream_t stream) {
  return sm90::launch_dependent(fused_finish_kernel, unsigned((p.chunk.size + kRowsPerBlock - 1) / kRowsPerBlock),
                                kRowsPerBlock * kSlices, stream, p);
}

cudaError_t launch_fused_sort(const FusedSortParams& p, cudaStream_t stream) {
  const auto blocks = [&](int rows) { return unsigned((p.rows + rows - 1) / rows); };
  const auto sort_tiles =
      p.num_classes < (int64_t(1) << 32) / kTile ? sort_tiles_kernel<uint32_t> : sort_tiles_kernel<uint64_t>;
  if (cudaError_t e = sm90::launch_dependent(sort_tiles, blocks(kRankRows), kRankThreads, stream, p)) return e;
  return sm90::launch_dependent(merge_tiles_kernel, blocks(kMergeThreads), kMergeThreads, stream, p);
}

cudaError_t launch_fused_targets(const FusedTargetsParams& p, cudaStream_t stream) {
  switch (p.input_dtype) {
    case DType::f32:
      return launch_targets_of<float>(p, stream);
    case DType::bf16:
      return launch_targets_of<__nv_bfloat16>(p, stream);
    case DType::f16:
      return launch_targets_of<__half>(p, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace syncfree
