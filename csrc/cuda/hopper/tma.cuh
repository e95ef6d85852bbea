// Bulk tensor copies and their host-side descriptors.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace syncfree::sm90 {

__device__ __forceinline__ void tma_prefetch(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap* map, uint32_t bar, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          to),
      "l"(map), "r"(bar), "r"(x), "r"(y)
      : "memory");
}

// The box lands at the same offset in every block of `mask` and counts towards the barrier at the same offset there.
__device__ __forceinline__ void tma_load_multicast(uint32_t to, const CUtensorMap* map, uint32_t bar, int x, int y,
                                                   uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%4, %5}], [%2], %3;" ::
          "r"(to),
      "l"(map), "r"(bar), "h"(mask), "r"(x), "r"(y)
      : "memory");
}

template <bool ADD>
__device__ __forceinline__ void tma_store(const CUtensorMap* map, uint32_t from, int x, int y) {
  if constexpr (ADD)
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(from), "r"(x), "r"(y)
                 : "memory");
  else
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from),
                 "r"(x), "r"(y)
                 : "memory");
}
__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int N>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
template <int N>
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

// A descriptor is a function of these alone, so a few are kept a thread: the chunks of a call, and steps that get the
// same memory back from the allocator, ask for the same ones.
struct MapKey {
  const void* data;
  uint64_t rows, columns, pitch;
  uint32_t box_rows, box_columns;
  bool f32;
  bool operator==(const MapKey&) const = default;
};

inline cudaError_t encode_map(CUtensorMap* map, const MapKey& key) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const bool ok = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                                     &found) == cudaSuccess &&
                    found == cudaDriverEntryPointSuccess;
    return ok ? reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function) : nullptr;
  }();
  if (!encode) return cudaErrorSymbolNotFound;
  const uint32_t bytes = key.f32 ? 4 : 2;
  const cuuint64_t dims[2] = {key.columns, key.rows}, strides[1] = {key.pitch * bytes};
  const cuuint32_t box[2] = {key.box_columns, key.box_rows}, steps[2] = {1, 1};
  const CUresult result =
      encode(map, key.f32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2,
             const_cast<void*>(key.data), dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Row-major [rows, columns] with `pitch` elements between rows, boxes of [box_rows, box_columns], 128-byte swizzle;
// zeros are read outside.
inline cudaError_t make_map(CUtensorMap* map, const MapKey& key) {
  constexpr int kKept = 16;
  struct Kept {
    MapKey keys[kKept] = {};
    CUtensorMap maps[kKept];
    int next = 0;
  };
  thread_local Kept kept;
  for (int i = 0; i < kKept; ++i)
    if (kept.keys[i] == key) {
      *map = kept.maps[i];
      return cudaSuccess;
    }
  if (cudaError_t e = encode_map(map, key)) return e;
  kept.keys[kept.next] = key;
  kept.maps[kept.next] = *map;
  kept.next = (kept.next + 1) % kKept;
  return cudaSuccess;
}

}  // namespace syncfree::sm90
