// Parameters of the two kernels that serve the training loop. No torch here, and no device code.
#pragma once

#include <cstdint>

namespace syncfree {

enum class ScalarKind : int32_t { f64, f32, bf16, f16, i64, i32, i16, i8, u8, b8 };

// A row of slots, in units of 8 bytes: this header, then the columns. A writer stores `begin` first and `end` last; a
// reader loads them the other way round, so what it has read is whole when both are the ticket it looked for.
enum SlotHeader : int32_t {
  kSlotEnd = 0,     // the ticket of the values in the row; 0: never written
  kSlotBegin = 1,   // the ticket that writing began with
  kSlotOrigin = 2,  // which put wrote it
  kSlotRepeat = 3,  // how many times that put had run before; counted on the device alone
  kSlotColumns = 4,
};

constexpr int kMaxPublishItems = 96;  // parameters of a launch stay below 4 KiB

// Gathers scalars into row (ticket - 1) % rows. Columns that no item names keep what they held.
struct PublishParams {
  struct Item {
    const void* source;  // null: constant
    double constant;
    ScalarKind kind;
    int32_t column;
    bool to_integer;  // int64 in the slot, float64 otherwise
  };
  int64_t* slots;  // [rows, width]
  int64_t rows;
  int64_t width;
  int64_t ticket;     // 1 or more; read only without counters
  int64_t* counters;  // nullable: [0] tickets given so far, [1 + origin] runs of this put so far
  int64_t origin;
  bool first, last;  // of the launches for one ticket
  int32_t count;
  Item items[kMaxPublishItems];
};
static_assert(sizeof(PublishParams) <= 4096);

enum class KeyKind : int32_t { none, philox, f32, bf16, f16, f64 };

// Of each row the positions that are set, up to `kept` of them in ascending order: the first ones, or those with the
// smallest keys, ties going to the lower position.
struct SelectParams {
  const uint8_t* mask;  // [rows, length], 0 or not
  int64_t rows;
  int64_t length;
  int64_t size;          // columns of the result
  int64_t max_kept;      // at most size
  const int64_t* limit;  // nullable: [rows], another bound; negative counts as 0
  KeyKind key_kind;
  const void* keys;  // [rows, length]; null for none and philox
  uint64_t seed;
  const int64_t* row_ids;  // philox, nullable: [rows]; null: the row's own number
  int64_t fill_value;
  int64_t* indices;  // [rows, size]
  bool* valid;       // [rows, size]
  int64_t* count;    // [rows]: all that are set
};

}  // namespace syncfree
