// What a Hopper GEMM is made of: tile shape, layouts, epilogue and bound at compile time; descriptors and pointers at
// run time.
#pragma once

#include <cuda_bf16.h>

#include "../kernels/fused_chunk.cuh"
#include "dependent_launch.cuh"
#include "mbarrier.cuh"
#include "registers.cuh"
#include "tile_queue.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

namespace syncfree::sm90 {

// row_exp:   stores E = bf16(2^(z - exponent[row])) with the target's column 0, sums of E a (row, tile) before and
// after rounding
// row_stats: the same without the store
// .._argmax: also the largest logit of another class a (row, tile), and its class
// row_max:   the maximum of z a (row, tile); nothing is stored
// rows:      dX, see store_rows.cuh; rows_smoothed: with label smoothing; rows_share: a slice's share of it, in float32
// split:     D kept in 24 bits over several launches, see split_accumulator.cuh
// z is scale * log2(e) times the product (and bias), scale being the logit scale; with a softcap, capped.
enum class Epilogue {
  bf16,
  f32,
  bf16_add,
  f32_add,
  row_exp,
  row_stats,
  row_exp_argmax,
  row_stats_argmax,
  row_max,
  rows,
  split,
  rows_smoothed,
  rows_share
};
// The logit that row_.. epilogues are about: the product alone, with a bias, or with a bias and a softcap. With a
// softcap E times the derivative of the cap is stored, and beside the sum of E itself goes what rounding took from what
// is stored.
enum class Logit { plain, biased, capped };
// What the count in device memory bounds: rows of D, or the reduction.
enum class Bound { m, k };

// kPingPong: each consumer warpgroup owns a whole tile of 64 * MI rows and they take turns. Otherwise both share a tile
// of 2 * 64 * MI rows. kCluster: blocks stacked along M that share (multicast) the B tile. kAmn, kBmn: the operand is
// contiguous along M or N instead of K.
template <int BN_, int MI_, int STAGES_, int CLUSTER_, bool PING_, bool AMN_, bool BMN_, Epilogue EPILOGUE_,
          Bound BOUND_, int PRODUCER_REGS_, int CONSUMER_REGS_, Logit LOGIT_ = Logit::plain>
struct Config {
  static constexpr int kBN = BN_, kMI = MI_, kStages = STAGES_, kCluster = CLUSTER_, kBM = 64 * MI_ * (PING_ ? 1 : 2),
                       kBK = 64;
  static constexpr bool kPing = PING_, kAmn = AMN_, kBmn = BMN_;
  static constexpr Epilogue kEpilogue = EPILOGUE_;
  static constexpr Bound kBound = BOUND_;
  static constexpr Logit kLogit = LOGIT_;
  static constexpr bool kBiased = LOGIT_ != Logit::plain;
  // The arithmetic of an epilogue is written out for a whole tile, or where it is long, for a part of it that the other
  // parts move down to in turn: a hundred kilobytes of code would be fetched once a tile.
  static constexpr bool kLoops = kBiased && EPILOGUE_ != Epilogue::row_max;
  static_assert(!kLoops || kMI <= 2);
  // A tile whose second half has no live row multiplies the first one alone. With a softcap ptxas would let products
  // wait for one another, if there were two copies of the loop.
  static constexpr bool kHalves = BOUND_ == Bound::m && kMI == 2 && LOGIT_ != Logit::capped;
  static constexpr bool kF32 = EPILOGUE_ == Epilogue::f32 || EPILOGUE_ == Epilogue::f32_add;
  static constexpr bool kAdd = EPILOGUE_ == Epilogue::bf16_add || EPILOGUE_ == Epilogue::f32_add;
  static constexpr bool kSplit = EPILOGUE_ == Epilogue::split;
  static constexpr bool kArgmax = EPILOGUE_ == Epilogue::row_exp_argmax || EPILOGUE_ == Epilogue::row_stats_argmax;
  static constexpr bool kRowExp = kArgmax || EPILOGUE_ == Epilogue::row_exp || EPILOGUE_ == Epilogue::row_stats;
  static constexpr bool kSmoothed = EPILOGUE_ == Epilogue::rows_smoothed, kShare = EPILOGUE_ == Epilogue::rows_share,
                        kRows = kSmoothed || kShare || EPILOGUE_ == Epilogue::rows;
  static constexpr bool kStores = EPILOGUE_ != Epilogue::row_stats && EPILOGUE_ != Epilogue::row_stats_argmax &&
                                  EPILOGUE_ != Epilogue::row_max && !kRows;
  static constexpr int kProducerRegs = PRODUCER_REGS_, kConsumerRegs = CONSUMER_REGS_;
  static constexpr int kABytes = kBM * kBK * 2, kBBytes = kBN * kBK * 2, kStageBytes = kABytes + kBBytes;
  static constexpr int kBuffer = 64 * 128;        // one staging buffer: 64 rows of 128 bytes
  static constexpr int kBuffers = PING_ ? 1 : 2;  // a consumer warpgroup
  static constexpr int kStaging = 2 * kBuffers * kBuffer;
  // dW works beside the launch before it, dX, and takes its tiles by ticket.
  static constexpr bool kTickets = BOUND_ == Bound::k;
  static constexpr int kSmem =
      1024 + kStages * kStageBytes + kStaging + 2 * 8 * kStages + 16 + (kTickets ? TileQueue<CLUSTER_>::kBytes : 0);
  static_assert(!kTickets || PING_);
  static constexpr int kThreads = 384;
  static constexpr bool kSplitBoxes =
      (BN_ / 64) % CLUSTER_ == 0;  // MN-major B: split the multicast by boxes, else by k rows
  static_assert(kSmem <= 232448);
};

template <bool AMN, bool BMN, Epilogue E, Bound R>
using Cooperative = Config<256, 1, 4, 2, false, AMN, BMN, E, R, 40, 232>;
template <bool AMN, bool BMN, Epilogue E, Bound R, Logit L = Logit::plain>
using PingPong = Config<192, 2, 5, 2, true, AMN, BMN, E, R, 24, 240, L>;
template <bool AMN, bool BMN, Epilogue E, Bound R>
using PingPongTall = Config<128, 3, 5, 2, true, AMN, BMN, E, R, 24, 240>;

struct GemmArgs {
  CUtensorMap a, b, d;
  FusedChunk chunk;  // its live rows bound m or k
  int m, n, k;
  int tiles;    // of n
  int splits;   // parts of the reduction, added into D one after the other (f32_add, cooperative); two of them commute
  int* ticket;  // tickets: 0 before the launch
  int group;    // tiles of the resident operand (A for Bound::m, B for Bound::k) swept before the other one moves on
  const int* any;               // nullable: 0 ends the launch at once
  const int* only;              // with any: row groups (kBM * kCluster rows) whose flag is 0 are skipped
  const float* exponent;        // [m]
  const int* target;            // [m], -1: none
  const float *v, *g_target;    // rows: [m], and [all rows] by position
  const __nv_bfloat16* weight;  // rows: that of the targets
  int64_t weight_pitch;
  void* out;  // rows: dX, contiguous; rows_share: [m, n] of float32
  DType out_dtype;
  float2* sums;         // fused_pairs: of E before and after rounding; row_max: (maximum, unused)
  float* target_logit;  // [m]: the product in the target's column, not scaled
  float2* best;         // argmax: fused_pairs of (logit in the sense of the scale's sign, class as bits)
  float scale_log2e;
  const double* scale_ptr;         // nullable: logit scale on the device, in place of scale_log2e / log2(e)
  uint8_t* low;                    // split: [m / 64, n / BN, 64 * BN] bytes
  uint8_t* high;                   // split: D's memory
  int64_t high_pitch;              // bytes
  bool load;                       // split: there is something to add to
  const int* starts;               // split: [m], rows with an entry >= 0 keep their low bytes to the end
  const float* bias;               // biased, capped: [n rounded up to BN]
  const float *offset, *smooth;    // rows_smoothed: [all rows] by position, and [n]
  float softcap, inverse_softcap;  // capped: the bound, in units of log2, and its reciprocal
};

}  // namespace syncfree::sm90
