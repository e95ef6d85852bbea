// Tiles by ticket, for a launch that shares the device with the one before it: its blocks start when those of the other
// end, so each cluster takes the next tile when it is free.
//
// The producer of a cluster's first block draws from a counter in device memory, one tile ahead, and puts the tile into
// a ring in the shared memory of every block. An entry of the ring is free again when the consumers that it is meant
// for, and the producers of the other blocks, have read it. Entries come in order, the consumer warpgroups take turns;
// two entries of -1, one for each, are the last.
#pragma once

#include "mbarrier.cuh"

namespace syncfree::sm90 {

// A store to the same offset in block `cta` that counts as the 4 bytes which the barrier there, arrived at here, waits
// for.
__device__ __forceinline__ void send_cluster(uint32_t to, uint32_t bar, int value, uint32_t cta) {
  asm volatile(
      "{\n.reg .b32 a, b;\nmapa.shared::cluster.u32 a, %0, %3;\nmapa.shared::cluster.u32 b, %1, %3;\n"
      "mbarrier.arrive.expect_tx.shared::cluster.b64 _, [b], 4;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.s32 [a], %2, [b];\n}\n" ::"r"(to),
      "r"(bar), "r"(value), "r"(cta)
      : "memory");
}

template <int kCluster>
struct TileQueue {
  static constexpr int kEntries = 4;  // even, so that an entry always belongs to the same consumer warpgroup
  static constexpr int kBytes = kEntries * (8 + 8 + 4);
  static constexpr int kWarps = 4;  // of the consumer warpgroup that reads an entry

  uint32_t base;

  __device__ __forceinline__ uint32_t full(int i) const { return base + 8 * (i % kEntries); }
  __device__ __forceinline__ uint32_t empty(int i) const { return base + 8 * kEntries + 8 * (i % kEntries); }
  __device__ __forceinline__ uint32_t tile(int i) const { return base + 16 * kEntries + 4 * (i % kEntries); }
  __device__ __forceinline__ uint32_t round(int i) const { return (i / kEntries) & 1; }

  // One thread, before the cluster's barrier.
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < kEntries; ++i) {
      mbar_init(full(i), 1);
      mbar_init(empty(i), kWarps * kCluster + kCluster - 1);
    }
  }

  // The first block's producer.
  __device__ __forceinline__ void put(int i, int value) const {
    mbar_wait(empty(i), round(i) ^ 1);
#pragma unroll
    for (int cta = 0; cta < kCluster; ++cta) send_cluster(tile(i), full(i), value, cta);
  }

  __device__ __forceinline__ int get(int i) const {
    mbar_wait(full(i), round(i));
    int value;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(value) : "r"(tile(i)) : "memory");
    return value;
  }

  // One thread of each warp that got the entry, and each producer but the first.
  __device__ __forceinline__ void release(int i) const { mbar_arrive_cluster(empty(i), 0); }
};

}  // namespace syncfree::sm90
