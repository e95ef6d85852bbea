// Programmatic dependent launch: a launch with `overlap` may start while the one before it runs, once every block of
// that one has said so or ended.
#pragma once

namespace syncfree::sm90 {

__device__ __forceinline__ void allow_next_launch() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
// Until the launch before this one is over and its stores are visible. At once where nothing overlaps.
__device__ __forceinline__ void wait_for_previous_launch() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace syncfree::sm90
