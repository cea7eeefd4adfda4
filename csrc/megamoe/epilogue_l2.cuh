// Epilogue of Linear-2: every row goes to the rank that owns its token, into the slot that nobody
// else writes.
//
// kPlainStores: the math warps store 16 bytes per lane and feel back-pressure: the way of public
// kernels, kept as the baseline. kBulkBurst, kBulkPaced: asynchronous, see outbox.cuh.
#pragma once

#include "outbox.cuh"

namespace xstage {

// Lane l < 16: where row l of this warp came from. Read before the main loop, used behind it.
__device__ __forceinline__ uint32_t load_origin(MegaMoeParams const& params,
                                                WarpgroupWork const& work) {
  int const row = (threadIdx.x / 32 - 4) * MegaMoeTraits::kWarpRows + threadIdx.x % 32;
  if (work.phase != TilePhase::kLinear2 || threadIdx.x % 32 >= MegaMoeTraits::kWarpRows ||
      row >= work.rows) {
    return 0;
  }
  MegaMoeView const own = params.view(params.workspace.rank);
  return __ldcg(own.origins(params.plan, params.layout, work.block) + row);
}

// Lane l < 16: where row l of this warp goes, or null.
__device__ __forceinline__ char* scatter_address(MegaMoeParams const& params,
                                                 WarpgroupWork const& work, uint32_t origin,
                                                 int first_row, int column) {
  MegaMoePlan const& plan = params.plan;
  int const lane = threadIdx.x % 32;
  if (lane >= MegaMoeTraits::kWarpRows || first_row + lane >= work.rows) return nullptr;
  if (column >= plan.hidden) return nullptr;  // of a halved tile
  int32_t const route = static_cast<int32_t>(origin_route(origin));
  int32_t const token = route / plan.topk;
  int32_t const row = (route - token * plan.topk) * plan.max_tokens + token;
  return params.view(origin_source(origin)).combine_row<char>(plan, params.layout, 0, 0) +
         2 * (int64_t{1} * row * plan.hidden + column);
}

// The staged half by plain stores; `base` is the lane that holds the address of its first row.
__device__ __forceinline__ void store_half_plain(Outbox const& outbox, char* destination,
                                                 uint32_t bytes, int base) {
  uint32_t const offset = threadIdx.x % 32 * 16;
#pragma unroll
  for (int r = 0; r < Outbox::kHalf; ++r) {
    uint4 const value =
        *reinterpret_cast<uint4 const*>(outbox.staging + r * MegaMoeTraits::kStagingRow + offset);
    char* const row = reinterpret_cast<char*>(
        __shfl_sync(0xffffffffu, reinterpret_cast<uint64_t>(destination), base + r));
    if (row != nullptr && offset < bytes) *reinterpret_cast<uint4*>(row + offset) = value;
  }
  __syncwarp();
}

template <class Acc>
__device__ __forceinline__ void store_linear2(MegaMoeParams const& params, CallState const& call,
                                              WarpgroupWork const& work, uint32_t origin,
                                              Acc const& acc, Outbox& outbox) {
  using Traits = MegaMoeTraits;
  MegaMoePlan const& plan = params.plan;
  int const first_row = (threadIdx.x / 32 - 4) * Traits::kWarpRows;
  outbox.drain(params);
  // The loads of this tile are over: its h ring slot has one reader less.
  outbox.announce_later({params, call, MegaMoeCounter::kLinear2Done, work.block,
                         static_cast<int32_t>(work.count), Announce::kReads});
  if (first_row >= work.rows) {
    outbox.forget_held();
    return;
  }

  int32_t const columns = work.halved ? Traits::kBlockN / 2 : Traits::kBlockN;
  int32_t const column = work.n * Traits::kBlockN + work.half * columns;
  outbox.destination = scatter_address(params, work, origin, first_row, column);
  outbox.bytes = 2 * min_of<int32_t>(columns, plan.hidden - column);
  outbox.reserve();
  uint32_t first[32];
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    first[j] = pack_bf16(acc(4 * j), acc(4 * j + 1));
    outbox.held[j] = pack_bf16(acc(4 * j + 2), acc(4 * j + 3));
  }
  outbox.write_half(first);
  if (plan.store == kPlainStores) {
    store_half_plain(outbox, outbox.destination, outbox.bytes, 0);
    outbox.write_half(outbox.held);
    store_half_plain(outbox, outbox.destination, outbox.bytes, Outbox::kHalf);
    outbox.forget_held();
    return;
  }
  outbox.next_row = 0;
  outbox.wait_steps = Traits::kHeldSteps;
  if (plan.store == kBulkBurst) outbox.issue_rows(Outbox::kHalf);
}

}  // namespace xstage
