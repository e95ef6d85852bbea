// Positions that are set, a fixed number for each row: the first ones, or those with the smallest keys. A block a row.
//
// 1. With keys: radix select. Each pass counts the next kDigitBits bits of the keys that agree with the prefix found so
//    far, and the scan of the counts names the digit in which the last key to keep lies. It ends as soon as every key
//    of that digit is kept: after one or two passes for random keys; at the latest when all bits are known, and what
//    is left are ties.
// 2. Emission, in order of positions: a scan over the block ranks the keys below the prefix and those equal to it; of
//    the latter the first ones fill what is left. Without keys the prefix is empty, so all are equal: the same code.
// Rows of up to 32768 with keys of 32 bits stay in registers: mask and keys are read once, all loads in flight
// together, Philox keys are computed once, and one scan serves the whole emission. Longer rows and float64 keys are read
// again in each pass, a tile at a time.
// Bytes: mask and keys once, or once for each pass; 9 for each column written.
#include <type_traits>

#include "../../common/keys.h"
#include "../../common/loop_params.h"
#include "device.cuh"
#include "launch.h"

namespace syncfree {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarp;
constexpr int kEach = 4;  // consecutive positions of a thread: one Philox call, one load of four flags
constexpr int64_t kTile = kThreads * kEach;
constexpr int kDigitBits = 11;
constexpr int kDigits = 1 << kDigitBits;
static_assert(kDigits == 2 * kThreads);

struct Shared {
  unsigned histogram[kDigits];
  uint64_t warp_total[2][kWarps];
  // What the thread that finds the digit tells the others.
  int digit;
  int64_t left, in_digit;
};

// Inclusive over the warp.
template <class T>
__device__ __forceinline__ T warp_scan(T x) {
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const T left = __shfl_up_sync(0xffffffffu, x, offset);
    if (threadIdx.x % kWarp >= offset) x += left;
  }
  return x;
}

// Inclusive over the block, with one barrier; `buffer` must be free, and a barrier must follow before the next use of
// it: callers alternate, or have one anyway. total: over the block.
template <class T>
__device__ __forceinline__ T block_scan(T x, T* buffer, T& total) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  x = warp_scan(x);
  if (lane == kWarp - 1) buffer[warp] = x;
  __syncthreads();
  const T sums = warp_scan(buffer[lane]);
  total = __shfl_sync(0xffffffffu, sums, kWarps - 1);
  const T before = __shfl_sync(0xffffffffu, sums, warp ? warp - 1 : 0);
  return warp ? x + before : x;
}
static_assert(kWarps == kWarp);

// kEach consecutive entries in as few loads as there can be.
template <class T>
struct alignas(sizeof(T) * kEach < 16 ? sizeof(T) * kEach : 16) Group {
  T v[kEach];
};

// Whether the row consists of whole groups that can be loaded as such.
template <class T>
__device__ __forceinline__ bool is_grouped(const T* row, int64_t length) {
  return length % kEach == 0 && reinterpret_cast<uintptr_t>(row) % alignof(Group<T>) == 0;
}

// A row of the mask. Bit e of the flags: position base + e is set.
struct Mask {
  const uint8_t* row;
  int64_t length;
  bool grouped;
  __device__ Mask(const SelectParams& p, int64_t index)
      : row(p.mask + index * p.length), length(p.length), grouped(is_grouped(row, p.length)) {}
  __device__ __forceinline__ unsigned grouped_flags(int64_t base) const {
    if (base >= length) return 0;
    const Group<uint8_t> m = *reinterpret_cast<const Group<uint8_t>*>(row + base);
    return (m.v[0] ? 1u : 0u) | (m.v[1] ? 2u : 0u) | (m.v[2] ? 4u : 0u) | (m.v[3] ? 8u : 0u);
  }
  __device__ __forceinline__ unsigned single_flags(int64_t base) const {
    unsigned flags = 0;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      if (base + e < length && row[base + e]) flags |= 1u << e;
    }
    return flags;
  }
  __device__ __forceinline__ unsigned flags(int64_t base) const {
    return grouped ? grouped_flags(base) : single_flags(base);
  }
};
static_assert(kEach == 4);

__device__ __forceinline__ uint64_t ordered_element(double x) {
  return ordered_key(x);
}
template <class T>
__device__ __forceinline__ uint32_t ordered_element(T x) {
  return ordered_key(to_float(x));
}

// Sources of keys. load_group is for rows that are `grouped`, and reads whole groups; load_set reads only what is set:
// other positions may lie behind the end. Keys of positions that are not set mean nothing.
template <class T>
struct ArrayKeys {
  using Key = decltype(ordered_element(T()));
  const T* row;
  int64_t length;
  bool grouped;
  __device__ ArrayKeys(const SelectParams& p, int64_t index)
      : row(static_cast<const T*>(p.keys) + index * p.length), length(p.length), grouped(is_grouped(row, p.length)) {}
  __device__ __forceinline__ void load_group(int64_t base, Key (&out)[kEach]) const {
    if (base >= length) return;
    const Group<T> keys = *reinterpret_cast<const Group<T>*>(row + base);
#pragma unroll
    for (int e = 0; e < kEach; ++e) out[e] = ordered_element(keys.v[e]);
  }
  __device__ __forceinline__ void load_set(int64_t base, unsigned flags, Key (&out)[kEach]) const {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      if (flags >> e & 1) out[e] = ordered_element(row[base + e]);
    }
  }
};

struct PhiloxKeys {
  using Key = uint32_t;
  static constexpr bool grouped = false;  // groups without a position that is set are not computed
  uint64_t seed;
  int64_t row_id;
  __device__ PhiloxKeys(const SelectParams& p, int64_t row) : seed(p.seed), row_id(p.row_ids ? p.row_ids[row] : row) {}
  __device__ __forceinline__ void load_group(int64_t, Key (&)[kEach]) const {}
  __device__ __forceinline__ void load_set(int64_t base, unsigned flags, Key (&out)[kEach]) const {
    if (!flags) return;
    const Philox4 words = philox_keys(seed, row_id, base / kEach);
#pragma unroll
    for (int e = 0; e < kEach; ++e) out[e] = words.word[e];
  }
};

struct NoKeys {
  using Key = uint32_t;
  static constexpr bool grouped = false;
  __device__ NoKeys(const SelectParams&, int64_t) {}
  __device__ __forceinline__ void load_group(int64_t, Key (&)[kEach]) const {}
  __device__ __forceinline__ void load_set(int64_t, unsigned, Key (&)[kEach]) const {}
};

template <class Keys>
__device__ __forceinline__ void load_keys(const Keys& keys, int64_t base, unsigned flags,
                                          typename Keys::Key (&out)[kEach]) {
  if (keys.grouped) {
    keys.load_group(base, out);
  } else {
    keys.load_set(base, flags, out);
  }
}

__device__ __forceinline__ int64_t room_of(const SelectParams& p, int64_t row) {
  if (!p.limit) return p.max_kept;
  const int64_t limit = p.limit[row];
  return limit < 0 ? 0 : limit < p.max_kept ? limit : p.max_kept;
}

// All but the selected positions. kept: how many those are.
__device__ __forceinline__ void finish_row(const SelectParams& p, int64_t row, int64_t count, int64_t kept) {
  for (int64_t i = threadIdx.x; i < p.size; i += kThreads) {
    p.valid[row * p.size + i] = i < kept;
    if (i >= kept) p.indices[row * p.size + i] = p.fill_value;
  }
  if (threadIdx.x == 0) p.count[row] = count;
}

// Keys with (key & known) < prefix are kept, and the first `ties` of those that are equal to it.
template <class Key>
struct Threshold {
  Key known, prefix;
  int64_t ties;
};

template <class Keys>
__device__ Threshold<typename Keys::Key> find_threshold(const Mask& mask, const Keys& keys, int64_t room,
                                                        int64_t& count, Shared& shared) {
  using Key = typename Keys::Key;
  constexpr int kBits = int(sizeof(Key)) * 8;
  Threshold<Key> t{0, 0, room};
  int buffer = 0;
  for (int bits_left = kBits; bits_left > 0;) {
    const int bits = bits_left < kDigitBits ? bits_left : kDigitBits, shift = bits_left - bits;
    shared.histogram[threadIdx.x] = shared.histogram[threadIdx.x + kThreads] = 0;
    __syncthreads();
    for (int64_t base = threadIdx.x * kEach; base < mask.length; base += kTile) {
      const unsigned flags = mask.flags(base);
      Key key[kEach] = {};
      load_keys(keys, base, flags, key);
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        if ((flags >> e & 1) && (key[e] & t.known) == t.prefix)
          atomicAdd(&shared.histogram[int(key[e] >> shift) & (kDigits - 1) & ((1 << bits) - 1)], 1u);
      }
    }
    __syncthreads();
    const unsigned low = shared.histogram[2 * threadIdx.x], high = shared.histogram[2 * threadIdx.x + 1];
    uint64_t total = 0;
    const int64_t through = int64_t(block_scan(uint64_t(low) + high, shared.warp_total[buffer ^= 1], total));
    if (bits_left == kBits) {
      count = int64_t(total);
      if (room <= 0 || count <= room) return t;  // none or all: no key decides
    }
    const int64_t before = through - low - high;
    if (before < t.ties && t.ties <= through) {  // one thread: the ranges are disjoint
      const bool upper = t.ties > before + low;
      shared.digit = 2 * threadIdx.x + upper;
      shared.left = t.ties - before - (upper ? low : 0);
      shared.in_digit = upper ? high : low;
    }
    __syncthreads();
    t.prefix |= Key(shared.digit) << shift;
    t.known |= ((Key(1) << bits) - 1) << shift;
    t.ties = shared.left;
    if (shared.left == shared.in_digit) break;
    bits_left = shift;
    __syncthreads();  // what the others read is written again
  }
  return t;
}

template <class Keys>
__global__ void __launch_bounds__(kThreads, 1) select_kernel(const __grid_constant__ SelectParams p) {
  using Key = typename Keys::Key;
  __shared__ Shared shared;
  const int64_t row = blockIdx.x;
  int64_t* indices = p.indices + row * p.size;
  int64_t room = room_of(p, row);
  const Mask mask(p, row);
  const Keys keys(p, row);
  constexpr bool kHasKeys = !std::is_same_v<Keys, NoKeys>;
  int64_t count = 0;
  Threshold<Key> t{0, 0, room};
  if constexpr (kHasKeys) {
    t = find_threshold(mask, keys, room, count, shared);
    room = count < room ? count : room;
    __syncthreads();  // warp_total is written again
  }

  // Both counts in one scan: those below in the upper half.
  int64_t below_before = 0, equal_before = 0;
  int buffer = 0;
  for (int64_t start = 0; start < p.length; start += kTile) {
    if (kHasKeys && below_before + (equal_before < t.ties ? equal_before : t.ties) >= room) break;
    const int64_t base = start + threadIdx.x * kEach;
    const unsigned flags = mask.flags(base);
    Key key[kEach] = {};
    load_keys(keys, base, flags, key);
    unsigned below = 0, equal = 0;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const Key head = key[e] & t.known;
      below |= (flags >> e & 1) && head < t.prefix ? 1u << e : 0u;
      equal |= (flags >> e & 1) && head == t.prefix ? 1u << e : 0u;
    }
    const uint64_t own = uint64_t(__popc(below)) << 32 | unsigned(__popc(equal));
    uint64_t total = 0;
    const uint64_t before = block_scan(own, shared.warp_total[buffer ^= 1], total) - own;
    int64_t below_at = below_before + int64_t(before >> 32), equal_at = equal_before + int64_t(before & 0xffffffffu);
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const bool is_below = below >> e & 1, is_equal = equal >> e & 1;
      if (is_below || (is_equal && equal_at < t.ties)) {
        const int64_t at = below_at + (equal_at < t.ties ? equal_at : t.ties);
        if (at < room) indices[at] = base + e;
      }
      below_at += is_below;
      equal_at += is_equal;
    }
    below_before += int64_t(total >> 32);
    equal_before += int64_t(total & 0xffffffffu);
  }
  if constexpr (!kHasKeys) {
    count = equal_before;
    room = count < room ? count : room;
  }
  finish_row(p, row, count, room);
}

// ------------------------------------------------------------------------------------------- rows kept in registers

constexpr int kCopies = 4;  // of the histogram, by lane: keys of a warp often agree in a digit (floats, above all)

template <int kTiles>
struct ShortShared {
  alignas(16) unsigned histogram[kDigits * kCopies];
  unsigned warp_total[kWarps];
  unsigned tile_total[kTiles][kWarps];
  unsigned digit, left, in_digit;
};

template <int kTiles>
__device__ __forceinline__ Threshold<uint32_t> find_short_threshold(const uint32_t (&key)[kTiles][kEach],
                                                                    unsigned flags, unsigned room, unsigned& count,
                                                                    ShortShared<kTiles>& shared) {
  uint32_t known = 0, prefix = 0;
  unsigned ties = room;
  // Digits 2 * thread and 2 * thread + 1, which this thread alone reads and clears.
  uint4* own = reinterpret_cast<uint4*>(shared.histogram) + 2 * threadIdx.x;
  static_assert(kCopies == 4);
  own[0] = own[1] = make_uint4(0, 0, 0, 0);
  __syncthreads();
  for (int bits_left = 32; bits_left > 0;) {
    const int bits = bits_left < kDigitBits ? bits_left : kDigitBits, shift = bits_left - bits;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        if ((flags >> (t * kEach + e) & 1) && (key[t][e] & known) == prefix)
          atomicAdd(&shared.histogram[(key[t][e] >> shift & ((1u << bits) - 1)) * kCopies + threadIdx.x % kCopies], 1u);
      }
    }
    __syncthreads();
    const uint4 a = own[0], b = own[1];
    own[0] = own[1] = make_uint4(0, 0, 0, 0);
    const unsigned low = a.x + a.y + a.z + a.w, high = b.x + b.y + b.z + b.w;
    unsigned total = 0;
    const unsigned through = block_scan(low + high, shared.warp_total, total);
    if (bits_left == 32) {
      count = total;
      if (room == 0 || count <= room) return {0, 0, room};  // none or all: no key decides
    }
    const unsigned before = through - low - high;
    if (before < ties && ties <= through) {  // one thread: the ranges are disjoint
      const bool upper = ties > before + low;
      shared.digit = 2 * threadIdx.x + upper;
      shared.left = ties - before - (upper ? low : 0);
      shared.in_digit = upper ? high : low;
    }
    // Behind it the histogram is clear and warp_total free. What is read here is written again two barriers later.
    __syncthreads();
    prefix |= shared.digit << shift;
    known |= ((1u << bits) - 1) << shift;
    ties = shared.left;
    if (shared.left == shared.in_digit) break;
    bits_left = shift;
  }
  return {known, prefix, ties};
}

// A thread has positions (tile * kThreads + thread) * kEach + e; tiles are in order, and so are threads in a tile.
template <class Keys, int kTiles>
__global__ void __launch_bounds__(kThreads, 1) select_short_kernel(const __grid_constant__ SelectParams p) {
  static_assert(kTiles * kEach <= 32, "a flag for each position of a thread");
  static_assert(kTiles * kTile < 1 << 16, "two counts of a row in 32 bits");
  __shared__ ShortShared<kTiles> shared;
  const int64_t row = blockIdx.x;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, first = threadIdx.x * kEach;
  const Mask mask(p, row);
  const Keys keys(p, row);

  // The branches are outside of the loops, so that all loads of a loop are in flight together.
  uint32_t key[kTiles][kEach] = {};
  if (keys.grouped) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) keys.load_group(first + t * kTile, key[t]);
  }
  unsigned flags = 0;
  if (mask.grouped) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) flags |= mask.grouped_flags(first + t * kTile) << (t * kEach);
  } else {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) flags |= mask.single_flags(first + t * kTile) << (t * kEach);
  }
  if (!keys.grouped) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      keys.load_set(first + t * kTile, flags >> (t * kEach) & ((1u << kEach) - 1), key[t]);
    }
  }

  // No row has more than kTiles * kTile.
  const int64_t wanted = room_of(p, row);
  const unsigned room = unsigned(wanted < kTiles * kTile ? wanted : kTiles * kTile);
  unsigned count = 0;
  Threshold<uint32_t> threshold{0, 0, room};
  if constexpr (!std::is_same_v<Keys, NoKeys>) threshold = find_short_threshold(key, flags, room, count, shared);
  const unsigned ties = unsigned(threshold.ties);

  unsigned below = 0, equal = 0;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const uint32_t head = key[t][e] & threshold.known;
      below |= (head < threshold.prefix ? 1u : 0u) << (t * kEach + e);
      equal |= (head == threshold.prefix ? 1u : 0u) << (t * kEach + e);
    }
  }
  below &= flags;
  equal &= flags;

  // Both counts in one scan: those below in the upper half.
  unsigned before[kTiles];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const unsigned in_tile = ((1u << kEach) - 1) << (t * kEach);
    const unsigned own = unsigned(__popc(below & in_tile)) << 16 | unsigned(__popc(equal & in_tile));
    const unsigned through = warp_scan(own);
    before[t] = through - own;
    if (lane == kWarp - 1) shared.tile_total[t][warp] = through;
  }
  __syncthreads();
  unsigned tiles_before = 0;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const unsigned in_warp = shared.tile_total[t][lane];
    before[t] += tiles_before + __reduce_add_sync(0xffffffffu, lane < warp ? in_warp : 0u);
    tiles_before += __reduce_add_sync(0xffffffffu, in_warp);
  }
  if constexpr (std::is_same_v<Keys, NoKeys>) count = tiles_before & 0xffffu;
  const unsigned kept = count < room ? count : room;

  int64_t* indices = p.indices + row * p.size;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    unsigned below_at = before[t] >> 16, equal_at = before[t] & 0xffffu;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const bool is_below = below >> (t * kEach + e) & 1, is_equal = equal >> (t * kEach + e) & 1;
      const unsigned at = below_at + (equal_at < ties ? equal_at : ties);
      if ((is_below || (is_equal && equal_at < ties)) && at < kept) indices[at] = first + t * kTile + e;
      below_at += is_below;
      equal_at += is_equal;
    }
  }
  finish_row(p, row, count, kept);
}

template <class Keys>
void launch_for(const SelectParams& p, cudaStream_t stream) {
  const dim3 grid{unsigned(p.rows)};
  if constexpr (sizeof(typename Keys::Key) == 4) {
    if (p.length <= 2 * kTile) return select_short_kernel<Keys, 2><<<grid, kThreads, 0, stream>>>(p);
    if (p.length <= 8 * kTile) return select_short_kernel<Keys, 8><<<grid, kThreads, 0, stream>>>(p);
  }
  select_kernel<Keys><<<grid, kThreads, 0, stream>>>(p);
}

}  // namespace

cudaError_t launch_select(const SelectParams& p, cudaStream_t stream) {
  switch (p.key_kind) {
    case KeyKind::none:
      launch_for<NoKeys>(p, stream);
      break;
    case KeyKind::philox:
      launch_for<PhiloxKeys>(p, stream);
      break;
    case KeyKind::f32:
      launch_for<ArrayKeys<float>>(p, stream);
      break;
    case KeyKind::bf16:
      launch_for<ArrayKeys<__nv_bfloat16>>(p, stream);
      break;
    case KeyKind::f16:
      launch_for<ArrayKeys<__half>>(p, stream);
      break;
    case KeyKind::f64:
      launch_for<ArrayKeys<double>>(p, stream);
      break;
  }
  return cudaGetLastError();
}

}  // namespace syncfree
