// Scalars of any dtype gathered into a slot of mapped host memory, or of device memory, by one block.
//
// Order of the stores: `begin`, columns, `end`, each visible to the whole system before the next. The host therefore
// needs no event to know that a slot has arrived, and sees one that is being rewritten. No copy engine takes part: a
// device-to-host copy would wait behind every copy that is queued there.
// Bytes: the scalars once, 8 for each column over the bus.
#include "../../common/loop_params.h"
#include "device.cuh"
#include "launch.h"

namespace syncfree {
namespace {

constexpr int kThreads = 96;

template <class T>
__device__ __forceinline__ T load(const void* p) {
  return *static_cast<const T*>(p);
}

__device__ __forceinline__ int64_t as_integer(const PublishParams::Item& item) {
  switch (item.kind) {
    case ScalarKind::i64:
      return load<int64_t>(item.source);
    case ScalarKind::i32:
      return load<int32_t>(item.source);
    case ScalarKind::i16:
      return load<int16_t>(item.source);
    case ScalarKind::i8:
      return load<int8_t>(item.source);
    case ScalarKind::u8:
      return load<uint8_t>(item.source);
    default:
      return load<uint8_t>(item.source) != 0;
  }
}

__device__ __forceinline__ double as_float(const PublishParams::Item& item) {
  if (!item.source) return item.constant;
  switch (item.kind) {
    case ScalarKind::f64:
      return load<double>(item.source);
    case ScalarKind::f32:
      return load<float>(item.source);
    case ScalarKind::bf16:
      return to_float(load<__nv_bfloat16>(item.source));
    case ScalarKind::f16:
      return to_float(load<__half>(item.source));
    default:
      return double(as_integer(item));
  }
}

__device__ __forceinline__ void store_release(int64_t* p, int64_t value) {
  asm volatile("st.release.sys.b64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}

__global__ void __launch_bounds__(kThreads) publish_kernel(const __grid_constant__ PublishParams p) {
  // Unsigned: whatever a counter holds, the row is one of these.
  const uint64_t before = uint64_t(p.counters ? p.counters[0] : p.ticket - 1);
  const int64_t ticket = int64_t(before + 1);
  int64_t* row = p.slots + int64_t(before % uint64_t(p.rows)) * p.width;
  if (threadIdx.x == 0 && p.first) {
    *static_cast<volatile int64_t*>(row + kSlotBegin) = ticket;
    __threadfence_system();
  }
  __syncthreads();  // no column before `begin`; no thread counts before all have read the counter
  for (int i = threadIdx.x; i < p.count; i += kThreads) {
    const PublishParams::Item& item = p.items[i];
    row[kSlotColumns + item.column] = item.to_integer ? as_integer(item) : __double_as_longlong(as_float(item));
  }
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x != 0 || !p.last) return;
  row[kSlotOrigin] = p.origin;
  row[kSlotRepeat] = p.counters ? p.counters[1 + p.origin]++ : 0;
  store_release(row + kSlotEnd, ticket);
  if (p.counters) p.counters[0] = ticket;
}

}  // namespace

cudaError_t launch_publish(const PublishParams& p, cudaStream_t stream) {
  publish_kernel<<<1, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace syncfree
