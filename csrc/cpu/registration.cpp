// Kernels for CPU tensors.
#include "../common/register.h"
#include "backend.h"

STABLE_TORCH_LIBRARY_IMPL(syncfree, CPU, m) {
  SYNCFREE_REGISTER(m, syncfree::CpuBackend);
  m.impl("read_slot", TORCH_BOX(&syncfree::read_slot));
}
