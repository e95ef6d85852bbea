// The op of the training loop that exists for CUDA alone.
#pragma once

#include <tuple>

#include "../../common/loop.h"

namespace syncfree {

// int64[rows, width] of zeros in mapped, portable, page-locked memory: as a CPU tensor, and as a tensor on the device
// of `like`, over the same bytes. The memory is never freed, since a captured graph may store to it at any later time
// and the runtime may be gone when the process ends; Python hands it on once nothing is on its way to it.
std::tuple<Tensor, Tensor> mapped_slots(Tensor like, int64_t rows, int64_t width);

}  // namespace syncfree
