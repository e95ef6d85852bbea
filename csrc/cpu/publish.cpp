// Scalars into a slot, in the order that lets a reader on another thread tell a whole slot from a torn one.
#include "backend.h"
#include "numbers.h"

namespace syncfree {
namespace {

template <class T>
T load(const void* p) {
  return *static_cast<const T*>(p);
}

int64_t as_integer(const PublishParams::Item& item) {
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

double as_float(const PublishParams::Item& item) {
  if (!item.source) return item.constant;
  switch (item.kind) {
    case ScalarKind::f64:
      return load<double>(item.source);
    case ScalarKind::f32:
      return load<float>(item.source);
    case ScalarKind::bf16:
      return widen(load<Bf16>(item.source));
    case ScalarKind::f16:
      return widen(load<Half>(item.source));
    default:
      return double(as_integer(item));
  }
}

int64_t slot_value(const PublishParams::Item& item) {
  if (item.to_integer) return as_integer(item);
  const double value = as_float(item);
  int64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

}  // namespace

void publish_cpu(const PublishParams& p) {
  // Unsigned: whatever a counter holds, the row is one of these.
  const uint64_t before = p.counters ? uint64_t(p.counters[0]) : uint64_t(p.ticket) - 1;
  const int64_t ticket = int64_t(before + 1);
  int64_t* row = p.slots + int64_t(before % uint64_t(p.rows)) * p.width;
  if (p.first) __atomic_store_n(row + kSlotBegin, ticket, __ATOMIC_RELAXED);
  __atomic_thread_fence(__ATOMIC_RELEASE);
  for (int i = 0; i < p.count; ++i)
    __atomic_store_n(row + kSlotColumns + p.items[i].column, slot_value(p.items[i]), __ATOMIC_RELAXED);
  if (!p.last) return;
  __atomic_store_n(row + kSlotOrigin, p.origin, __ATOMIC_RELAXED);
  const int64_t repeat = p.counters ? p.counters[1 + p.origin] : 0;
  if (p.counters) p.counters[1 + p.origin] = int64_t(uint64_t(repeat) + 1);
  __atomic_store_n(row + kSlotRepeat, repeat, __ATOMIC_RELAXED);
  __atomic_store_n(row + kSlotEnd, ticket, __ATOMIC_RELEASE);
  if (p.counters) p.counters[0] = ticket;
}

}  // namespace syncfree
