// Programmatic dependent launch: a kernel may be put on the device while the one before it runs, once every block of that
// one has allowed it or ended. All kernels of a chunk are launched so and begin with begin_after_previous_launch, which
// hides the launch itself; dW alone starts to work beside dX.
#pragma once

#include <cuda_runtime_api.h>

namespace syncfree::sm90 {

__device__ __forceinline__ void allow_next_launch() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
// Until the launch before this one is over and its stores are visible. At once where nothing overlaps.
__device__ __forceinline__ void wait_for_previous_launch() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
// In this order: what comes next may rely on everything before this launch without waiting for it again.
__device__ __forceinline__ void begin_after_previous_launch() {
  wait_for_previous_launch();
  allow_next_launch();
}

// A kernel that begins with begin_after_previous_launch.
template <class... Params, class... Args>
cudaError_t launch_dependent(void (*kernel)(Params...), dim3 blocks, unsigned threads, cudaStream_t stream,
                             const Args&... args) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks, config.blockDim = dim3(threads), config.stream = stream;
  config.attrs = &attribute, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace syncfree::sm90
