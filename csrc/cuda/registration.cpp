// Kernels for CUDA tensors.
#include "../common/register.h"
#include "backend.h"
#include "ops/mapped.h"

STABLE_TORCH_LIBRARY_IMPL(syncfree, CUDA, m) {
  SYNCFREE_REGISTER(m, syncfree::CudaBackend);
  m.impl("mapped_slots", TORCH_BOX(&syncfree::mapped_slots));
}
