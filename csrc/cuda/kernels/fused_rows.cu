// The small kernels of the Hopper path: gather with the target's logit, losses from E's sums, the factor v into x, the
// rows sorted by class beside the first two, and the targets' share of dW, class by class.
#include <cfloat>
#include <type_traits>

#include "fused_rows.cuh"

namespace syncfree {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / kWarp;

// Slot k of the chunk, by a warp.
template <class In>
__device__ __forceinline__ void gather_row(const FusedGatherParams& p, int64_t k) {
  const int lane = threadIdx.x % kWarp;
  if (k >= p.chunk.size) return;
  Pack<__nv_bfloat16>* out =
      reinterpret_cast<Pack<__nv_bfloat16>*>(static_cast<__nv_bfloat16*>(p.gathered) + k * p.hidden);
  if (lane == 0 && k % kRowGroup == 0) p.rows.only[k / kRowGroup] = 0;
  if (lane == 0 && k == 0) *p.rows.any = 0, *p.rows.ticket = 0;
  const ChunkRows chunk(p.chunk);
  if (k >= chunk.live) {
    for (int64_t i = lane; i < p.hidden / 8; i += kWarp) reinterpret_cast<uint4*>(out)[i] = make_uint4(0, 0, 0, 0);
    const int64_t ignored = p.dx ? chunk.row(p.chunk, k) : -1;
    if (ignored >= 0) {
      const int64_t packs = p.hidden / 8 * (p.dx_dtype == DType::f32 ? 2 : 1);
      for (int64_t i = lane; i < packs; i += kWarp)
        static_cast<uint4*>(p.dx)[ignored * packs + i] = make_uint4(0, 0, 0, 0);
    }
    if (lane == 0) p.rows.exponent[k] = 0.f, p.rows.target[k] = -1, p.rows.bad[k] = 0;
    return;
  }
  const int64_t row = chunk.row(p.chunk, k), t = p.targets[row + p.shift];
  const bool known = t >= 0 && t < p.num_classes;
  const In* x = static_cast<const In*>(p.input) + row * p.input_pitch;
  const Pack<__nv_bfloat16>* w = reinterpret_cast<const Pack<__nv_bfloat16>*>(
      static_cast<const __nv_bfloat16*>(p.weight) + (known ? t : 0) * p.weight_pitch);
  constexpr int kBatch = 4;  // loads under way
  const int packs = int(p.hidden / 8);
  float dot = 0.f;
  double smooth = 0;
  for (int first = lane; first < packs; first += kBatch * kWarp) {
    Pack<__nv_bfloat16> a[kBatch], b[kBatch];
#pragma unroll
    for (int q = 0; q < kBatch; ++q) {
      const int i = min(first + q * kWarp, packs - 1);  // past the end: once more, for nothing
      load_bf16x8(x, i, a[q]), b[q] = w[i];
    }
#pragma unroll
    for (int q = 0; q < kBatch; ++q) {
      if (first + q * kWarp >= packs) break;
      out[first + q * kWarp] = a[q];
#pragma unroll
      for (int e = 0; e < 8; ++e) dot = fmaf(to_float(a[q].v[e]), to_float(b[q].v[e]), dot);
    }
  }
  if (p.smooth.w) {
    for (int64_t i = lane; i < p.hidden / 8; i += kWarp) {
      const Pack<__nv_bfloat16> a = out[i];  // what this lane has put there
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float4 u = reinterpret_cast<const float4*>(p.smooth.w)[i * 2 + h];
        smooth += double(to_float(a.v[h * 4]) * u.x + to_float(a.v[h * 4 + 1]) * u.y + to_float(a.v[h * 4 + 2]) * u.z +
                         to_float(a.v[h * 4 + 3]) * u.w);
      }
    }
    smooth = warp_reduce(smooth, Sum());
  }
  dot = warp_reduce(dot, Sum());
  if (lane != 0) return;
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

__device__ __forceinline__ void finish_rows(const FusedFinishParams& p, const ChunkRows& chunk, int64_t block) {
  __shared__ RowConstants<float> constants;
  const int64_t k = block * kRowsPerBlock + threadIdx.x % kRowsPerBlock, live = chunk.live;
  const bool is_owner = threadIdx.x < kRowsPerBlock;
  if (threadIdx.x == kRowThreads - 1) constants = row_constants<float>(p.row);
  // What the owner needs besides the sums is under way with them.
  const int64_t i = is_owner && k < p.chunk.size ? chunk.row(p.chunk, k) : -1;
  float z = 0.f, exponent = 0.f;
  int target = -1;
  if (is_owner && k < live) z = p.rows.target_logit[k], exponent = p.rows.exponent[k], target = p.rows.target[k];
  const TileSums sum = sum_tiles(p.rows, p.tiles, k, k < live);
  if (i < 0) return;
  RowGradient found{};
  float correct = 0.f;
  int predicted = -1;
  if (k < live) {
    if (!p.repair) mark_if_bad(p.rows, k, sum.exact, p.row.options);
    const float scale = constants.logit_scale;
    const float* weights = static_cast<const float*>(p.row.weight);
    const float target_weight = !weights ? 1.f : target >= 0 ? weights[target] : NAN;
    const double residue = p.row.options.softcap > 0 ? sum.rounded : sum.exact - sum.rounded;
    found = row_gradient(p.row, constants, i, exponent, sum.exact, float(residue), z, target_weight,
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
__device__ __forceinline__ void scale_rows(const FusedFinishParams& p, const ChunkRows& chunk, int64_t block) {
  const float alpha = gradient_factor(p.chunk.counts, p.chunk.upstream);
  const int64_t k = block * kRowsPerBlock + threadIdx.x / kWarp;
  if (k < chunk.live) scale_row(p.gathered, k, p.hidden, p.rows.v[k] * alpha);
}

// The rows of each class in their order. Tiles of rows are sorted by counting: a row's place in its tile is the number
// of the tile's rows that belong before it. Its place among all rows is that, and what belongs before it in each other
// tile, which bisection finds. No sort of all and no memory for one, and both steps are blocks of kernels that run anyway.
constexpr int kTile = 2048, kSortRows = 64, kSortEach = kSortRows / kWarp, kSortSlices = kWarps, kMergeRows = kWarp;
constexpr int64_t kNarrowClasses = (int64_t(1) << 32) / kTile;  // fewer: a key takes 32 bits

unsigned sort_blocks(const FusedSortParams& p) {
  return unsigned((p.rows + kSortRows - 1) / kSortRows);
}

unsigned merge_blocks(const FusedSortParams& p) {
  return unsigned((p.rows + kMergeRows - 1) / kMergeRows);
}

// By blocks of kThreads: each finds the places of kSortRows rows in their tile. A key is the class, and in the lower
// bits the row in its tile, so no two are equal.
template <class Key>
__device__ __forceinline__ void sort_tile(const FusedSortParams& p, int64_t block, int64_t blocks) {
  struct alignas(16) Four {
    Key v[4];
  };
  __shared__ Four tile[kTile / 4];
  __shared__ int counted[kSortSlices][kSortRows];
  const int lane = threadIdx.x % kWarp, slice = threadIdx.x / kWarp;
  const int64_t first = block * kSortRows, base = first - first % kTile;
  Key* keys = &tile[0].v[0];
  constexpr int kEach = kTile / kThreads;
  const int64_t live = int64_t(p.counts[kCountRows]) - base;
  int64_t target[kEach];
  int32_t row[kEach];
#pragma unroll  // all loads of a kind, before any is used
  for (int e = 0; e < kEach; ++e) {
    const int j = e * kThreads + threadIdx.x;
    row[e] = j < live ? p.row_index[base + j] : -1;
  }
#pragma unroll
  for (int e = 0; e < kEach; ++e) target[e] = row[e] >= 0 ? p.targets[row[e] + p.shift] - p.first_class : -1;
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int j = e * kThreads + threadIdx.x;
    const bool known = target[e] >= 0 && target[e] < p.num_classes;
    keys[j] = base + j < p.rows ? Key(known ? target[e] : p.num_classes) * kTile + j : ~Key(0);
  }
  for (int64_t c = block * kThreads + threadIdx.x; c < p.num_classes; c += blocks * kThreads) p.starts[c] = -1;
  __syncthreads();
  Key own[kSortEach];
  int before[kSortEach] = {};
#pragma unroll
  for (int r = 0; r < kSortEach; ++r) own[r] = keys[first - base + r * kWarp + lane];
#pragma unroll 8
  for (int q = 0; q < kTile / 4 / kSortSlices; ++q) {
    const Four x = tile[slice * (kTile / 4 / kSortSlices) + q];
#pragma unroll
    for (int r = 0; r < kSortEach; ++r)
      before[r] += (x.v[0] < own[r]) + (x.v[1] < own[r]) + (x.v[2] < own[r]) + (x.v[3] < own[r]);
  }
#pragma unroll
  for (int r = 0; r < kSortEach; ++r) counted[slice][r * kWarp + lane] = before[r];
  __syncthreads();
  const int64_t i = first + threadIdx.x;
  if (threadIdx.x >= kSortRows || i >= p.rows) return;
  int64_t place = base;
  for (int s = 0; s < kSortSlices; ++s) place += counted[s][threadIdx.x];
  p.tile_keys[place] = int32_t(keys[i - base] / kTile);
  p.tile_positions[place] = int32_t(i);
}

// By blocks of kRowThreads: a row a lane, its place among every kRowWarps-th tile a warp.
__device__ __forceinline__ void merge_tiles(const FusedSortParams& p, int64_t block) {
  struct Place {
    int32_t place, start, end;  // of the row, and of its class
  };
  __shared__ Place of_warp[kRowWarps][kMergeRows];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t i = block * kMergeRows + lane, own = i - i % kTile;
  const uint32_t key = i < p.rows ? uint32_t(p.tile_keys[i]) : 0;
  Place sum{};
  for (int64_t base = int64_t(warp) * kTile; base < p.rows; base += int64_t(kRowWarps) * kTile) {
    const int32_t* keys = p.tile_keys + base;
    const int count = int(p.rows - base < kTile ? p.rows - base : kTile);
    int less = 0, not_more = 0;  // keys of the tile below the row's, and up to it
#pragma unroll
    for (int step = kTile; step > 0; step /= 2) {
      if (less + step <= count && uint32_t(keys[less + step - 1]) < key) less += step;
      if (not_more + step <= count && uint32_t(keys[not_more + step - 1]) <= key) not_more += step;
    }
    sum.start += less, sum.end += not_more;
    sum.place += base == own ? int(i - own) : base < own ? not_more : less;
  }
  of_warp[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || i >= p.rows) return;
  for (int w = 1; w < kRowWarps; ++w) {
    const Place& other = of_warp[w][lane];
    sum.place += other.place, sum.start += other.start, sum.end += other.end;
  }
  p.keys[sum.place] = int32_t(key);
  p.positions[sum.place] = p.tile_positions[i];
  if (key < p.num_classes && sum.place == sum.start) p.starts[key] = sum.start, p.ends[key] = sum.end;
}

template <class Key>
__global__ void __launch_bounds__(kThreads) sort_tiles_kernel(const __grid_constant__ FusedSortParams p) {
  sm90::begin_after_previous_launch();
  sort_tile<Key>(p, blockIdx.x, gridDim.x);
}

__global__ void __launch_bounds__(kRowThreads) merge_tiles_kernel(const __grid_constant__ FusedSortParams p) {
  sm90::begin_after_previous_launch();
  merge_tiles(p, blockIdx.x);
}

template <class In, class Key>
__global__ void __launch_bounds__(kThreads)
    fused_gather_kernel(const __grid_constant__ FusedGatherParams p, unsigned sorting) {
  sm90::begin_after_previous_launch();
  if (blockIdx.x < sorting)
    sort_tile<Key>(p.sort, blockIdx.x, sorting);
  else
    gather_row<In>(p, int64_t(blockIdx.x - sorting) * kWarps + threadIdx.x / kWarp);
}

__global__ void __launch_bounds__(kRowThreads, kRowBlocks)
    fused_finish_kernel(const __grid_constant__ FusedFinishParams p, unsigned merging) {
  sm90::begin_after_previous_launch();
  if (blockIdx.x < merging) return merge_tiles(p.sort, blockIdx.x);
  const int64_t block = blockIdx.x - merging;
  const ChunkRows chunk(p.chunk);
  // A group is repaired as a whole; kRowGroup is a multiple of the block's rows.
  if (!p.repair || (*p.rows.any && p.rows.only[block * kRowsPerBlock / kRowGroup])) finish_rows(p, chunk, block);
  if (!p.repair || !p.gathered) return;
  __syncthreads();  // v may be new
  scale_rows(p, chunk, block);
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
  const unsigned sorting = sort_blocks(p.sort);
  const auto launch = [&](auto kernel) {
    return sm90::launch_dependent(kernel, unsigned((p.chunk.size + kWarps - 1) / kWarps) + sorting, kThreads, stream, p,
                                  sorting);
  };
  const bool narrow = p.sort.num_classes < kNarrowClasses;
  switch (p.input_dtype) {
    case DType::f32:
      return narrow ? launch(fused_gather_kernel<float, uint32_t>) : launch(fused_gather_kernel<float, uint64_t>);
    case DType::bf16:
      return narrow ? launch(fused_gather_kernel<__nv_bfloat16, uint32_t>)
                    : launch(fused_gather_kernel<__nv_bfloat16, uint64_t>);
    case DType::f16:
      return narrow ? launch(fused_gather_kernel<__half, uint32_t>) : launch(fused_gather_kernel<__half, uint64_t>);
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t launch_fused_finish(const FusedFinishParams& p, cudaStream_t stream) {
  const unsigned merging = merge_blocks(p.sort),
                 blocks = unsigned((p.chunk.size + kRowsPerBlock - 1) / kRowsPerBlock) + merging;
  return sm90::launch_dependent(fused_finish_kernel, blocks, kRowThreads, stream, p, merging);
}

cudaError_t launch_fused_sort(const FusedSortParams& p, cudaStream_t stream) {
  const auto sort_tiles = p.num_classes < kNarrowClasses ? sort_tiles_kernel<uint32_t> : sort_tiles_kernel<uint64_t>;
  if (cudaError_t e = sm90::launch_dependent(sort_tiles, sort_blocks(p), kThreads, stream, p)) return e;
  return sm90::launch_dependent(merge_tiles_kernel, merge_blocks(p), kRowThreads, stream, p);
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
