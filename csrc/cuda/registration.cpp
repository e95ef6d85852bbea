// Kernels for CUDA tensors.
#include "../common/register.h"
#include "backend.h"
#include "ops/fused_shard.h"
#include "ops/mapped.h"

STABLE_TORCH_LIBRARY_IMPL(syncfree, CUDA, m) {
  SYNCFREE_REGISTER(m, syncfree::CudaBackend);
  m.impl("flce_shard_fused_begin", TORCH_BOX(&syncfree::flce_shard_fused_begin));
  m.impl("flce_shard_fused_logits", TORCH_BOX(&syncfree::flce_shard_fused_logits));
  m.impl("flce_shard_fused_gradient", TORCH_BOX(&syncfree::flce_shard_fused_gradient));
  m.impl("flce_shard_fused_weight_gradient", TORCH_BOX(&syncfree::flce_shard_fused_weight_gradient));
  m.impl("flce_shard_fused_add_targets", TORCH_BOX(&syncfree::flce_shard_fused_add_targets));
  m.impl("flce_shard_fused_store_dx", TORCH_BOX(&syncfree::flce_shard_fused_store_dx));
  m.impl("mapped_slots", TORCH_BOX(&syncfree::mapped_slots));
}
