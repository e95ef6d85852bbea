// Several arrays in one allocation: a call to the allocator costs the host as much as a launch.
#pragma once

#include <cstdint>

#include "chunk_plan.h"

namespace syncfree {

// Hands out pieces of `base`, each aligned to 256 bytes. Without a base it only adds up, so the same code that names the
// arrays says how large the allocation must be.
class Carver {
 public:
  explicit Carver(void* base = nullptr) : base_(static_cast<char*>(base)) {}

  template <class T>
  T* take(int64_t count) {
    const int64_t at = bytes_;
    bytes_ = round_up(at + count * int64_t(sizeof(T)), 256);
    return base_ && count ? reinterpret_cast<T*>(base_ + at) : nullptr;
  }

  int64_t bytes() const { return bytes_; }

 private:
  char* base_;
  int64_t bytes_ = 0;
};

}  // namespace syncfree
