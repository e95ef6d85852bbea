// Registers every kernel op for one backend.
#pragma once

#include "count_scale.h"
#include "cross_entropy.h"
#include "flce.h"
#include "flce_shard.h"
#include "loop.h"

#define SYNCFREE_REGISTER(m, Backend)                                                                                  \
  m.impl("flce_forward", TORCH_BOX(&syncfree::flce_forward<Backend>));                                                 \
  m.impl("flce_backward", TORCH_BOX(&syncfree::flce_backward<Backend>));                                               \
  m.impl("cross_entropy_forward", TORCH_BOX(&syncfree::cross_entropy_forward<Backend>));                               \
  m.impl("cross_entropy_backward", TORCH_BOX(&syncfree::cross_entropy_backward<Backend>));                             \
  m.impl("flce_shard_logits", TORCH_BOX(&syncfree::flce_shard_logits<Backend>));                                       \
  m.impl("flce_shard_gradient", TORCH_BOX(&syncfree::flce_shard_gradient<Backend>));                                   \
  m.impl("flce_shard_weight_gradient", TORCH_BOX(&syncfree::flce_shard_weight_gradient<Backend>));                     \
  m.impl("flce_shard_store_dx", TORCH_BOX(&syncfree::flce_shard_store_dx<Backend>));                                   \
  m.impl("flce_shard_fused_rows", TORCH_BOX(&syncfree::flce_shard_fused_rows<Backend>));                               \
  m.impl("count_targets", TORCH_BOX(&syncfree::count_targets<Backend>));                                               \
  m.impl("scale_unless_one_", TORCH_BOX(&syncfree::scale_unless_one_<Backend>));                                       \
  m.impl("publish_", TORCH_BOX(&syncfree::publish_<Backend>));                                                         \
  m.impl("masked_indices", TORCH_BOX(&syncfree::masked_indices<Backend>))
