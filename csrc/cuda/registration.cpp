// Kernels for CUDA tensors.
#include "../common/register.h"
#include "backend.h"

STABLE_TORCH_LIBRARY_IMPL(syncfree, CUDA, m) {
  SYNCFREE_REGISTER(m, syncfree::CudaBackend);
}
