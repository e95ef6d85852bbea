// Persistent warp-specialised GEMM for Hopper: D[M, N] = A B^T, bf16 in, fp32 accumulation, either operand K-major or
// MN-major, M or K bounded by a count in device memory.
//
// A block is one producer warpgroup (one thread of it drives the copy engine) and two consumer warpgroups (wgmma,
// epilogue). Tiles are dealt round-robin; tiles past the count are never dealt. Blocks of a cluster stack along M and
// share each B tile. Reads on the device: counts (live rows), and what the epilogue names. Bytes and flops: those of
// the product within the bound.
//
// E rows between the live count and the next multiple of 64 are read by Bound::k; they and their partners must be zero.
#pragma once

#include <type_traits>

#include "epilogue.cuh"

namespace syncfree::sm90 {

template <class C>
using Accumulators = float[C::kMI][C::kBN / 2];

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) gemm_kernel(const __grid_constant__ GemmArgs p) {
  extern __shared__ uint8_t smem_raw[];
  const uint32_t base = (smem_u32(smem_raw) + 1023) & ~1023u;
  const uint32_t staging = base + C::kStages * C::kStageBytes, full = staging + C::kStaging,
                 empty = full + 8 * C::kStages, order = empty + 8 * C::kStages;
  const TileQueue<C::kCluster> queue{order + 16};
  const int wg = threadIdx.x >> 7, lane = threadIdx.x & 31;
  const uint32_t rank = C::kCluster > 1 ? cluster_rank() : 0;

  if (threadIdx.x == 0) {
    tma_prefetch(&p.a), tma_prefetch(&p.b);
    if constexpr (C::kStores) tma_prefetch(&p.d);
    for (int s = 0; s < C::kStages; ++s) {
      mbar_init(full + 8 * s, 1);
      mbar_init(empty + 8 * s, (C::kPing ? 4 : 8) * C::kCluster);
    }
    mbar_init(order, 4), mbar_init(order + 8, 4);
    if constexpr (C::kTickets) queue.init();
    fence_barrier_init();
  }
  if constexpr (!C::kTickets) begin_after_previous_launch();
  if (p.any && *p.any == 0) return;  // before any block waits for another
  const ChunkRows chunk(p.chunk);
  const bool last = chunk.last;
  const int live = static_cast<int>(chunk.live);
  // A scale of 0 would turn the -inf of padding into NaN; one this small leaves every product at 0 as well.
  float scale = p.scale_ptr ? static_cast<float>(*p.scale_ptr) * kLog2e : p.scale_log2e;
  if (scale == 0.f) scale = 1e-30f;
  const int m_live = C::kBound == Bound::m ? live : p.m;
  const int k_steps = ((C::kBound == Bound::k ? live : p.k) + C::kBK - 1) / C::kBK;
  constexpr int kRows = C::kBM * C::kCluster;
  const int m_groups = (m_live + kRows - 1) / kRows, n_tiles = p.tiles, plane = m_groups * n_tiles;
  const int splits = C::kPing ? 1 : p.splits, part = C::kPing ? k_steps : (k_steps + splits - 1) / splits;
  const int tiles = (C::kAdd || (C::kSplit && p.load)) && k_steps == 0 ? 0 : plane * splits;
  const int first = blockIdx.x / C::kCluster, stride = gridDim.x / C::kCluster;
  // Raster: sweep `group` tiles of the operand that stays in the L2 cache, then move the other one on; balanced so that
  // no group is small.
  const int inner_all = C::kBound == Bound::m ? m_groups : n_tiles,
            outer_all = C::kBound == Bound::m ? n_tiles : m_groups;
  const int sweeps = (inner_all + p.group - 1) / p.group, group = sweeps ? (inner_all + sweeps - 1) / sweeps : 1;
  auto place = [&](int t, int& row, int& col) {
    if constexpr (!C::kPing) t %= plane;
    const int sweep = t / (group * outer_all), rest = t - sweep * group * outer_all,
              size = min(group, inner_all - sweep * group);
    const int outer = rest / size, inner = sweep * group + rest - outer * size;
    const int mg = C::kBound == Bound::m ? inner : outer, nt = C::kBound == Bound::m ? outer : inner;
    row = (mg * C::kCluster + rank) * C::kBM, col = nt * C::kBN;
    return !p.any || p.only[mg] != 0;
  };
  if constexpr (C::kCluster > 1)
    cluster_sync();
  else
    __syncthreads();

  if (wg == 2) {  // producer
    regs_dec<C::kProducerRegs>();
    if ((threadIdx.x & 127) == 0) {
      int s = 0;
      uint32_t phase = 0;
      auto load = [&](int t) {
        int row, col;
        if (!place(t, row, col)) return;
        const int k_begin = C::kPing ? 0 : t / plane * part, k_end = min(k_steps, k_begin + part);
        for (int kb = k_begin; kb < k_end; ++kb) {
          const uint32_t bar = full + 8 * s, a = base + s * C::kStageBytes, b = a + C::kABytes;
          const int k = kb * C::kBK;
          mbar_wait(empty + 8 * s, phase ^ 1);
          mbar_expect(bar, C::kStageBytes);
          if constexpr (C::kAmn) {
#pragma unroll
            for (int i = 0; i < C::kBM / 64; ++i) tma_load(a + i * 8192, &p.a, bar, row + i * 64, k);
          } else {
            tma_load(a, &p.a, bar, k, row);
          }
          constexpr uint16_t mask = (1 << C::kCluster) - 1;
          if constexpr (C::kBmn) {
            if constexpr (C::kCluster == 1) {
#pragma unroll
              for (int i = 0; i < C::kBN / 64; ++i) tma_load(b + i * 8192, &p.b, bar, col + i * 64, k);
            } else if constexpr (C::kSplitBoxes) {
              constexpr int kEach = C::kBN / 64 / C::kCluster;
#pragma unroll
              for (int i = 0; i < kEach; ++i) {
                const int box = rank * kEach + i;
                tma_load_multicast(b + box * 8192, &p.b, bar, col + box * 64, k, mask);
              }
            } else {
              constexpr int kEach = C::kBK / C::kCluster;
#pragma unroll
              for (int i = 0; i < C::kBN / 64; ++i)
                tma_load_multicast(b + i * 8192 + rank * kEach * 128, &p.b, bar, col + i * 64, k + rank * kEach, mask);
            }
          } else {
            if constexpr (C::kCluster == 1)
              tma_load(b, &p.b, bar, k, col);
            else
              tma_load_multicast(b + rank * (C::kBBytes / C::kCluster), &p.b, bar, k,
                                 col + rank * (C::kBN / C::kCluster), mask);
          }
          if (++s == C::kStages) s = 0, phase ^= 1;
        }
      };
      if constexpr (C::kTickets) {
        int drawn = rank == 0 ? atomicAdd(p.ticket, 1) : 0;
        for (int i = 0;; ++i) {
          int t;
          if (rank == 0) {
            t = drawn < tiles ? drawn : -1;
            queue.put(i, t);
            if (t < 0) {
              queue.put(i + 1, -1);
              break;
            }
            drawn = atomicAdd(p.ticket, 1);  // is back by the time the loads are under way
          } else {
            t = queue.get(i);
            queue.release(i);
            if (t < 0) break;
          }
          load(t);
        }
      } else {
        for (int t = first; t < tiles; t += stride) load(t);
      }
    }
    __syncwarp();
  } else {
    regs_inc<C::kConsumerRegs>();
    using Mma = Wgmma<C::kBN, C::kAmn, C::kBmn>;
    constexpr int kAStep = C::kAmn ? 2048 >> 4 : 32 >> 4, kBStep = C::kBmn ? 2048 >> 4 : 32 >> 4;
    const uint32_t a_offset = C::kPing ? 0 : wg * C::kMI * 8192;
    auto release = [&](int s) {
      if constexpr (C::kCluster > 1) {
        if (lane < C::kCluster) mbar_arrive_cluster(empty + 8 * s, lane);
      } else {
        if (lane == 0) mbar_arrive(empty + 8 * s);
      }
    };
    int s = 0;
    uint32_t phase = 0;
    int sequence = C::kTickets ? wg - 2 : -1, t = first - stride;
    while (true) {
      if constexpr (C::kTickets) {
        sequence += 2;
        t = queue.get(sequence);
        __syncwarp();
        if (lane == 0) queue.release(sequence);
        if (t < 0) break;
      } else {
        t += stride;
        if (t >= tiles) break;
      }
      int row, col;
      if (!place(t, row, col)) continue;
      if constexpr (!C::kTickets) {
        ++sequence;
        if (C::kPing && (sequence & 1) != wg) continue;
      }
      if constexpr (C::kPing) {
        const uint32_t step = static_cast<uint32_t>(sequence) * k_steps;
        s = step % C::kStages, phase = (step / C::kStages) & 1;
      }
      Accumulators<C> acc;
      const int steps = C::kPing ? k_steps : max(0, min(part, k_steps - t / plane * part));
      const int out = row + (C::kPing ? 0 : wg * C::kMI * 64);
      // What this warpgroup holds of a tile is left out of the product if no row of it lives, and where kHalves, the
      // second half of it.
      const int rest = C::kBound == Bound::m ? m_live - out : C::kMI * 64;
      // The first product overwrites, but without the zeros ptxas keeps the old values alive between tiles, and spills.
      if (C::kPing || steps == 0 || rest <= 0) {
#pragma unroll
        for (int i = 0; i < C::kMI; ++i)
#pragma unroll
          for (int j = 0; j < C::kBN / 2; ++j) acc[i][j] = 0.f;
      }
      // Turns: a parity wait is only meaningful within one phase of the barrier, so a warpgroup must not look at a
      // stage before its partner is done with its own tile.
      if constexpr (C::kPing) mbar_wait(order + 8 * wg, ((sequence >> 1) & 1) ^ (wg == 0));
      int previous = 0;
      const auto next_stage = [&](int kb) {
        if (kb) release(previous);
        previous = s;
        if (++s == C::kStages) s = 0, phase ^= 1;
      };
      const auto pass_turn = [&] {
        if (C::kPing && lane == 0) mbar_arrive(order + 8 * (wg ^ 1));
      };
      const auto multiply = [&](auto blocks) {
        constexpr int kBlocks = decltype(blocks)::value;
        for (int kb = 0; kb < steps; ++kb) {
          mbar_wait(full + 8 * s, phase);
          const uint32_t a = base + s * C::kStageBytes;
          uint64_t da = make_desc<C::kAmn, 8192>(a + a_offset), db = make_desc<C::kBmn, 8192>(a + C::kABytes);
          wgmma_fence();
#pragma unroll
          for (int kk = 0; kk < C::kBK / 16; ++kk)
#pragma unroll
            for (int i = 0; i < kBlocks; ++i)
              Mma::mma(acc[i], da + kk * kAStep + i * (8192 >> 4), db + kk * kBStep, (kb | kk) != 0);
          wgmma_commit();
          wgmma_wait<1>();
          next_stage(kb);
        }
        pass_turn();
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < kBlocks; ++i)
#pragma unroll
          for (int j = 0; j < C::kBN / 2; ++j) asm volatile("" : "+f"(acc[i][j])::"memory");
      };
      if (rest > (C::kHalves ? 64 : 0)) {
        multiply(std::integral_constant<int, C::kMI>());
      } else if (C::kHalves && rest > 0) {
        multiply(std::integral_constant<int, 1>());
      } else {  // the loads go on
        for (int kb = 0; kb < steps; ++kb) {
          mbar_wait(full + 8 * s, phase);
          next_stage(kb);
        }
        pass_turn();
      }
      if (steps) release(previous);
      // Rows up to the next multiple of 128 are written (as zeros): Bound::k reads them.
      const auto is_stored = [&](int i) {
        return out + i * 64 < (C::kBound == Bound::m ? (m_live + 127) / 128 * 128 : m_live);
      };
      if constexpr (C::kLoops) {
#pragma unroll 1
        for (int i = 0; i < C::kMI; ++i) {
          if (is_stored(i)) store_tile<C>(p, acc[0], staging, wg, out + i * 64, col, m_live, scale, last);
#pragma unroll
          for (int j = 0; j < C::kBN / 2; ++j) acc[0][j] = acc[C::kMI - 1][j];
        }
      } else {
#pragma unroll
        for (int i = 0; i < C::kMI; ++i)
          if (is_stored(i)) store_tile<C>(p, acc[i], staging, wg, out + i * 64, col, m_live, scale, last);
      }
    }
    if constexpr (C::kStores) {
      if ((threadIdx.x & 127) == 0) tma_store_wait<0>();
    }
    __syncwarp();
  }
  // What comes after this launch may rely on the one before it.
  if constexpr (C::kTickets) wait_for_previous_launch();
  if constexpr (C::kCluster > 1) cluster_sync();
}

// A row-major matrix in device memory; pitch in elements.
struct Matrix {
  const void* data;
  int64_t rows, columns, pitch;
};

constexpr int kMaxDevices = 64;

// A persistent grid must be resident at once, and not every multiprocessor has partners for a cluster: asked once a
// device.
template <class C>
cudaError_t resident_clusters(int* clusters, cudaLaunchConfig_t& config) {
  static int known[kMaxDevices] = {};
  int device = 0;
  if (cudaError_t e = cudaGetDevice(&device)) return e;
  if (device >= kMaxDevices) return cudaErrorInvalidDevice;
  if (known[device] == 0) {
    if (cudaError_t e = cudaFuncSetAttribute(gemm_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSmem))
      return e;
    int multiprocessors = 0, found = 0;
    if (cudaError_t e = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device)) return e;
    config.gridDim = dim3(multiprocessors / C::kCluster * C::kCluster);
    if (cudaError_t e = cudaOccupancyMaxActiveClusters(&found, gemm_kernel<C>, &config)) return e;
    if (found == 0) return cudaErrorLaunchOutOfResources;
    known[device] = found;
  }
  *clusters = known[device];
  return cudaSuccess;
}

// d: what is stored, ignored by epilogues that store nothing. args carries chunk and epilogue; the rest is filled in
// here. beside: with tickets, this launch reads nothing of what the one before it writes, and works beside it.
template <class C>
cudaError_t launch_gemm(const Matrix& a, const Matrix& b, const Matrix& d, GemmArgs args, cudaStream_t stream,
                        bool beside = false) {
  args.m = static_cast<int>(C::kAmn ? a.columns : a.rows);
  args.n = static_cast<int>(C::kBmn ? b.columns : b.rows);
  args.k = static_cast<int>(C::kAmn ? a.rows : a.columns);
  args.tiles = (args.n + C::kBN - 1) / C::kBN;
  if (args.splits < 1) args.splits = 1;
  const auto key = [&](const Matrix& x, int box_rows, int box_columns, bool f32) {
    return MapKey{
        x.data, uint64_t(x.rows), uint64_t(x.columns), uint64_t(x.pitch), uint32_t(box_rows), uint32_t(box_columns),
        f32};
  };
  constexpr int kBRows =
      C::kBmn ? (C::kCluster > 1 && !C::kSplitBoxes ? C::kBK / C::kCluster : C::kBK) : C::kBN / C::kCluster;
  cudaError_t e = make_map(&args.a, key(a, C::kAmn ? C::kBK : C::kBM, C::kAmn ? 64 : C::kBK, false));
  if (!e) e = make_map(&args.b, key(b, kBRows, C::kBmn ? 64 : C::kBK, false));
  if constexpr (C::kStores)
    if (!e) e = make_map(&args.d, key(d, 64, C::kF32 ? 32 : 64, C::kF32));
  if (e) return e;
  // About 16 MiB of the resident operand at a time.
  const int resident = args.k <= 16384 ? (16 << 20) / (2 * args.k) : 2048;
  args.group = resident / (C::kBound == Bound::m ? C::kBM * C::kCluster : C::kBN);
  if (args.group < 1) args.group = 1;

  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {C::kCluster, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.blockDim = dim3(C::kThreads), config.dynamicSmemBytes = C::kSmem, config.stream = stream;
  config.attrs = attributes, config.numAttrs = 1;
  int clusters = 0;
  if ((e = resident_clusters<C>(&clusters, config))) return e;
  config.gridDim = dim3(clusters * C::kCluster), config.numAttrs = !C::kTickets || beside ? 2 : 1;
  return cudaLaunchKernelEx(&config, gemm_kernel<C>, args);
}

}  // namespace syncfree::sm90
