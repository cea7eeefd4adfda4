#include "channel.cuh"
#include "channel_kernels.h"
#include "check.h"
#include "launch.h"

namespace xstage {
namespace {

constexpr int kWarp = 32;

// By value: 1.2 KB of kernel parameters, no memory that could outlive a captured graph.
struct Ranks {
  Workspace workspaces[kMaxRanks];
  PoisonRange poison[kMaxRanks];
};

Ranks pack(std::vector<Workspace> const& ranks, std::vector<PoisonRange> const& poison = {}) {
  XS_CHECK(!ranks.empty() && ranks.size() <= kMaxRanks, "xstage: ranks per launch: expected 1 to ",
           kMaxRanks, ", got ", ranks.size());
  XS_CHECK(poison.empty() || poison.size() == ranks.size(), "xstage: poison ranges: expected ",
           ranks.size(), ", got ", poison.size());
  Ranks packed{};
  for (size_t r = 0; r < ranks.size(); ++r) packed.workspaces[r] = ranks[r];
  for (size_t r = 0; r < poison.size(); ++r) packed.poison[r] = poison[r];
  return packed;
}

__global__ void __launch_bounds__(kWarp)
    grant_slot_kernel(__grid_constant__ Ranks const ranks, int slot, uint32_t free_slots) {
  launch_dependent_kernel();
  grant_slot(ranks.workspaces[blockIdx.x], slot, free_slots);
}

__global__ void __launch_bounds__(kWarp)
    wait_for_ranks_kernel(__grid_constant__ Ranks const ranks, Phase phase) {
  Workspace const& workspace = ranks.workspaces[blockIdx.x];
  bool const ok = wait_for_ranks(workspace, finished_epoch(workspace), phase);
  PoisonRange const range = ranks.poison[blockIdx.x];
  if (!ok) poison(range.bytes, range.num_bytes, threadIdx.x, kWarp);
}

__global__ void __launch_bounds__(kWarp)
    wait_beside_kernel(__grid_constant__ Ranks const ranks, Phase phase, int slot) {
  Workspace const& workspace = ranks.workspaces[blockIdx.x];
  bool const ok = wait_for_ranks(workspace, slot_epoch(workspace, slot), phase);
  wait_for_kernel_before();
  PoisonRange const range = ranks.poison[blockIdx.x];
  if (!ok) poison(range.bytes, range.num_bytes, threadIdx.x, kWarp);
}

__global__ void announce_failure_kernel(__grid_constant__ Workspace const workspace,
                                        Failure failure) {
  announce_failure(workspace, failure, call_epoch(workspace));
}

}  // namespace

void load_channel_kernels() {
  cudaFuncAttributes attributes;
  XS_CUDA(cudaFuncGetAttributes(&attributes, grant_slot_kernel));
  XS_CUDA(cudaFuncGetAttributes(&attributes, wait_for_ranks_kernel));
  XS_CUDA(cudaFuncGetAttributes(&attributes, wait_beside_kernel));
  XS_CUDA(cudaFuncGetAttributes(&attributes, announce_failure_kernel));
}

void launch_grant_slot(std::vector<Workspace> const& ranks, int slot, uint32_t free_slots,
                       cudaStream_t stream) {
  XS_CHECK(slot >= 0 && slot < kMaxSlots, "xstage: slot: expected 0 to ", kMaxSlots - 1, ", got ",
           slot);
  // The slot that this call takes is free by definition: its reader came before in the stream.
  uint32_t const announced = free_slots | (1u << slot);
  grant_slot_kernel<<<static_cast<unsigned>(ranks.size()), kWarp, 0, stream>>>(pack(ranks), slot,
                                                                               announced);
  XS_LAUNCH_CHECK();
}

void launch_wait_for_ranks(std::vector<Workspace> const& ranks, Phase phase,
                           std::vector<PoisonRange> const& poison, cudaStream_t stream) {
  wait_for_ranks_kernel<<<static_cast<unsigned>(ranks.size()), kWarp, 0, stream>>>(
      pack(ranks, poison), phase);
  XS_LAUNCH_CHECK();
}

void launch_wait_beside(std::vector<Workspace> const& ranks, Phase phase, int slot,
                        std::vector<PoisonRange> const& poison, cudaStream_t stream) {
  LaunchShape const shape{static_cast<unsigned>(ranks.size()), kWarp, 0, stream,
                          LaunchKind::kEarly};
  launch_kernel(wait_beside_kernel, shape, pack(ranks, poison), phase, slot);
}

void launch_announce_failure(Workspace const& rank, Failure failure, cudaStream_t stream) {
  announce_failure_kernel<<<1, 1, 0, stream>>>(rank, failure);
  XS_LAUNCH_CHECK();
}

}  // namespace xstage
