// The main-loop probe: what it costs a compute kernel to send its output tiles to a peer.
//
// Computes   per block and tile t: C_t = repeats * sum over steps s of A B_(t, s)^T, bf16 in, fp32
//            accumulators, bf16 out; A [128, 64] stays in shared memory, B_(t, s) are the 128-row
//            tiles of `b` in order, cyclically. Steps per tile and repeats set the tile's time.
// Sends      tile_bytes of the staged tile (C row-major in 256-byte rows, 16-byte pieces XORed with
//            the row's low bits; beyond 32 KiB the tile again) as chunks to one destination:
//            by the math warps' 16-byte stores, as one bulk burst, or bulk paced in slices.
// Roles      warp 0 loads B by TMA (4 stages of 16 KiB); warp 1 sends; warps 4-11 multiply.
// Shared     A 16 KiB, B 4 x 16 KiB, staging 64 KiB, 145 KiB in all.
// Barriers   b_full[stage]    1 arrival + 16 KiB     math waits
//            b_empty[stage]   2 arrivals             load waits
//            staging_full     256 arrivals           send waits
//            staging_empty    1 arrival              math waits
// Stamps     int32 per block and tile: end of the tile's products (cycles since the origin),
// longest
//            wait for one load, wait for the staging buffer, time of the epilogue with its stores.
// Requires   all blocks resident (cooperative launch). mbarriers have no deadline: only this
// block's
//            own roles arrive at them.
#pragma once

#include <cute/tensor.hpp>

#include "burst/burst.cuh"
#include "burst/loop_params.h"
#include "burst/shadow.cuh"
#include "common/mbarrier.cuh"

namespace xstage {

// One tile shape: what is varied is the time of a tile and the way in which it leaves.
struct LoopTraits {
  static constexpr int kM = kLoopM, kN = kLoopN, kK = kLoopK, kStages = 4;
  static constexpr int kLoadBytes = kN * kK * 2;
  static constexpr int kStagingBytes = 65536;
  static constexpr int kTileBytes = kM * kN * 2;
  static constexpr int kMathThreads = 256;
  static constexpr int kThreads = 128 + kMathThreads;
  using Element = cute::bfloat16_t;
  using SmemAtom = cute::GMMA::Layout_K_SW128_Atom<Element>;
  using SmemLayoutA =
      decltype(cute::tile_to_shape(SmemAtom{}, cute::Shape<cute::Int<kM>, cute::Int<kK>>{}));
  using SmemLayoutB = decltype(cute::tile_to_shape(
      SmemAtom{}, cute::Shape<cute::Int<kN>, cute::Int<kK>, cute::Int<kStages>>{}));
  using Mma = decltype(cute::make_tiled_mma(
      cute::SM90_64x128x16_F32BF16BF16_SS<cute::GMMA::Major::K, cute::GMMA::Major::K>{},
      cute::Layout<cute::Shape<cute::_2, cute::_1, cute::_1>>{}));
};

struct LoopShared {
  alignas(1024) LoopTraits::Element a[LoopTraits::kM * LoopTraits::kK];
  alignas(1024) LoopTraits::Element b[LoopTraits::kN * LoopTraits::kK * LoopTraits::kStages];
  alignas(1024) char staging[LoopTraits::kStagingBytes];
  alignas(8) uint64_t a_full;
  uint64_t b_full[LoopTraits::kStages];
  uint64_t b_empty[LoopTraits::kStages];
  uint64_t staging_full;
  uint64_t staging_empty;
  Origin origin;
  int go_on;
};
static_assert(sizeof(LoopShared) <= 227 * 1024, "one block per SM");

__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}
__device__ __forceinline__ void math_barrier() {
  asm volatile("bar.sync 1, %0;" ::"n"(LoopTraits::kMathThreads) : "memory");
}

// Addresses of one block's tile on its destination: rows of a power of two bytes.
struct TilePath {
  char* base;
  int64_t row_stride;
  int row_shift;

  // Byte `at` of the tile; a multiple of 16.
  __device__ __forceinline__ char* operator()(int at) const {
    int const row = at >> row_shift;
    return base + row * row_stride + (at - (row << row_shift));
  }
};

__device__ __forceinline__ TilePath tile_path(LoopParams const& params) {
  BurstLoopPlan const& plan = params.plan;
  int const dst_rank = destination_of(static_cast<uint32_t>(plan.destinations), blockIdx.x);
  char* const base = landing_area(params.workspace, dst_rank) + blockIdx.x * plan.block_stride;
  return {base, plan.row_stride, 31 - __clz(static_cast<int>(plan.chunk_bytes))};
}

// Warp 0, one thread: A once, then the steps of all tiles without regard to where a tile ends, so
// that loads run ahead into the next tile as those of a real kernel do.
__device__ __forceinline__ void loop_load(LoopParams const& params, LoopShared& shared) {
  using T = LoopTraits;
  mbarrier_arrive_expect(&shared.a_full, T::kM * T::kK * 2);
  tensor_load_2d(shared.a, &params.a_map, 0, 0, &shared.a_full);
  int64_t const total = params.plan.tiles * params.plan.steps;
  // Blocks begin at different tiles of b, as the tiles of a real matrix product do.
  int b_tile = blockIdx.x * 7 % params.num_b_tiles;
  for (int64_t step = 0; step < total; ++step) {
    int const stage = step % T::kStages;
    uint32_t const phase = (step / T::kStages) & 1;
    mbarrier_wait(&shared.b_empty[stage], phase ^ 1);
    mbarrier_arrive_expect(&shared.b_full[stage], T::kLoadBytes);
    tensor_load_2d(shared.b + stage * T::kN * T::kK, &params.b_map, 0, b_tile * T::kN,
                   &shared.b_full[stage]);
    if (++b_tile == params.num_b_tiles) b_tile = 0;
  }
}

// Warp 1, one thread: sends a staged tile, at once or slice by slice on the clock, and frees the
// buffer when its bytes have been read. Nobody waits for their arrival before the end.
__device__ __forceinline__ void loop_send(LoopParams const& params, LoopShared& shared) {
  BurstLoopPlan const& plan = params.plan;
  LoopStore const store = static_cast<LoopStore>(plan.store);
  TilePath const path = tile_path(params);
  int const tile_bytes = static_cast<int>(plan.tile_bytes);
  bool const paced = store == LoopStore::kPaced;
  int const slice =
      paced ? static_cast<int>(min_of(plan.slice_bytes, plan.tile_bytes)) : tile_bytes;
  int const slice_cycles = static_cast<int>(plan.slice_cycles);
  // One copy is never longer than a slice or a row.
  int const piece = min_of(slice, static_cast<int>(min_of<int64_t>(plan.chunk_bytes, 16384)));
  for (int64_t tile = 0; tile < plan.tiles; ++tile) {
    mbarrier_wait(&shared.staging_full, tile & 1);
    if (paced || store == LoopStore::kBulk) {
      int64_t next = clock_now();
      for (int sent = 0; sent < tile_bytes;) {
        for (int const end = sent + slice; sent < end; sent += piece) {
          bulk_store(path(sent), shared.staging + sent, static_cast<uint32_t>(piece));
        }
        next += slice_cycles;
        if (paced && sent < tile_bytes) spin_until(next);
      }
      bulk_commit();
      bulk_wait_read<0>();
    }
    mbarrier_arrive(&shared.staging_empty);
  }
  bulk_wait<0>();
}

// Accumulators to the staging buffer, and again behind it when a tile of 64 KiB leaves.
template <class Accumulators, class Coordinates>
__device__ __forceinline__ void stage_tile(Accumulators const& acc, Coordinates const& where,
                                           char* staging, int64_t tile_bytes) {
#pragma unroll
  for (int i = 0; i < cute::size(acc); i += 2) {
    int const row = cute::get<0>(where(i));
    int const col = cute::get<1>(where(i));
    cute::bfloat16_t const pair[2] = {static_cast<cute::bfloat16_t>(acc(i)),
                                      static_cast<cute::bfloat16_t>(acc(i + 1))};
    uint32_t const word = *reinterpret_cast<uint32_t const*>(pair);
    int const at = row * 256 + (col * 2 ^ (row & 7) * 16);
    *reinterpret_cast<uint32_t*>(staging + at) = word;
    if (tile_bytes > LoopTraits::kTileBytes) {
      *reinterpret_cast<uint32_t*>(staging + LoopTraits::kTileBytes + at) = word;
    }
  }
}

// All math threads: staged tile to the peer, 16 bytes a store, rows coalesced.
__device__ __forceinline__ void store_tile(LoopParams const& params, char const* staging) {
  TilePath const path = tile_path(params);
  int const tile_bytes = static_cast<int>(params.plan.tile_bytes);
#pragma unroll 4
  for (int at = (threadIdx.x - 128) * 16; at < tile_bytes; at += LoopTraits::kMathThreads * 16) {
    store_16(path(at), *reinterpret_cast<uint4 const*>(staging + at));
  }
}

// Warps 4-11: products, staging, and with LoopStore::kSt the stores as well. Thread 128 reports.
__device__ __forceinline__ void loop_math(LoopParams const& params, LoopShared& shared) {
  using namespace cute;
  using T = LoopTraits;
  BurstLoopPlan const& plan = params.plan;
  int const thread = threadIdx.x - 128;
  bool const reports = thread == 0;
  T::Mma mma;
  auto const slice = mma.get_thread_slice(thread);
  Tensor sA = make_tensor(make_smem_ptr(shared.a), T::SmemLayoutA{});  // (M,K)
  Tensor sB = make_tensor(make_smem_ptr(shared.b), T::SmemLayoutB{});  // (N,K,STAGE)
  Tensor tCrA = slice.make_fragment_A(slice.partition_A(sA));          // (MMA,MMA_M,MMA_K)
  Tensor tCrB = slice.make_fragment_B(slice.partition_B(sB));          // (MMA,MMA_N,MMA_K,STAGE)
  Tensor acc = partition_fragment_C(mma, Shape<Int<T::kM>, Int<T::kN>>{});  // (MMA,MMA_M,MMA_N)
  Tensor where = slice.partition_C(
      make_identity_tensor(Shape<Int<T::kM>, Int<T::kN>>{}));  // (MMA,MMA_M,MMA_N)

  mbarrier_wait(&shared.a_full, 0);
  int64_t step = 0;
  for (int64_t tile = 0; tile < plan.tiles; ++tile) {
    int64_t longest_wait = 0;
    mma.accumulate_ = GMMA::ScaleOut::Zero;
    for (int64_t s = 0; s < plan.steps; ++s, ++step) {
      int const stage = step % T::kStages;
      int64_t const asked = clock_now();
      mbarrier_wait(&shared.b_full[stage], (step / T::kStages) & 1);
      longest_wait = max_of(longest_wait, clock_now() - asked);
      warpgroup_fence_operand(acc);
      warpgroup_arrive();
      // `repeats` sets arithmetic against loads: the operands stay, only the time grows.
      for (int64_t repeat = 0; repeat < plan.repeats; ++repeat) {
#pragma unroll
        for (int k = 0; k < size<2>(tCrA); ++k) {
          gemm(mma, tCrA(_, _, k), tCrB(_, _, k, stage), acc);
          mma.accumulate_ = GMMA::ScaleOut::One;
        }
      }
      warpgroup_commit_batch();
      // The step before this one is complete: its stage may be loaded again.
      warpgroup_wait<1>();
      warpgroup_fence_operand(acc);
      if (s > 0 && thread % 128 == 0) mbarrier_arrive(&shared.b_empty[(step - 1) % T::kStages]);
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(acc);
    if (thread % 128 == 0) mbarrier_arrive(&shared.b_empty[(step - 1) % T::kStages]);
    int64_t const products_end = clock_now();

    mbarrier_wait(&shared.staging_empty, (tile & 1) ^ 1);
    int64_t const staging_free = clock_now();
    stage_tile(acc, where, shared.staging, plan.tile_bytes);
    fence_proxy_async_shared();
    math_barrier();
    if (plan.store == static_cast<int64_t>(LoopStore::kSt)) {
      store_tile(params, shared.staging);
    }
    mbarrier_arrive(&shared.staging_full);
    if (reports) {
      // Clamped in 64 bits, so that the clocks are read by CS2R (see BurstShared).
      auto const since = [](int64_t end, int64_t begin) {
        return static_cast<int>(max_of<int64_t>(0, end - begin));
      };
      int64_t const stored = clock_now();
      params.stamps[blockIdx.x * plan.tiles + tile] = {
          since(products_end, shared.origin.clock), since(longest_wait, 0),
          since(staging_free, products_end), since(stored, staging_free)};
    }
  }
}

__global__ void __launch_bounds__(LoopTraits::kThreads, 1)
    burst_loop_kernel(const __grid_constant__ LoopParams params) {
  extern __shared__ __align__(1024) char memory[];
  LoopShared& shared = *reinterpret_cast<LoopShared*>(memory);
  if (threadIdx.x == 0) {
    mbarrier_init(&shared.a_full, 1);
    for (int i = 0; i < LoopTraits::kStages; ++i) {
      mbarrier_init(&shared.b_full[i], 1);
      mbarrier_init(&shared.b_empty[i], 2);
    }
    mbarrier_init(&shared.staging_full, LoopTraits::kMathThreads);
    mbarrier_init(&shared.staging_empty, 1);
    fence_mbarrier_init_release_cluster();
    shared.go_on = begin_together(params.workspace, params.plan.join, gridDim.x, shared.origin);
    if (shared.go_on) {
      spin_until(shared.origin.go_clock +
                 params.plan.stagger_cycles * blockIdx.x / params.plan.blocks);
    }
  }
  __syncthreads();
  int64_t const begin = clock_now();
  bool const ran = shared.go_on;
  int const warp = threadIdx.x / 32;
  if (ran) {
    if (warp >= 4) {
      loop_math(params, shared);
    } else if (warp == 0 && threadIdx.x == 0) {
      loop_load(params, shared);
    } else if (warp == 1 && threadIdx.x == 32) {
      loop_send(params, shared);
    }
  }
  __syncthreads();
  // How long the last tiles are still on their way when the loop is over.
  int64_t const end = clock_now();
  fence_acq_rel_sys();
  __syncthreads();
  if (threadIdx.x == 0) {
    int64_t const visible = clock_now();
    params.heads[blockIdx.x] = {sm_index(),
                                shared.origin.clock_ns,
                                static_cast<int64_t>(global_timer_ns()),
                                shared.origin.clock,
                                visible,
                                begin - shared.origin.clock,
                                visible - end,
                                ran && !aborted(params.workspace)};
  }
}

}  // namespace xstage
