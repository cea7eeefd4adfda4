// One-warp kernels around an operator's kernel, for every operator alike. Each takes the ranks that
// this launch plays: one, or all virtual ranks of a world (one block each, one launch).
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "workspace.h"

namespace xstage {

// Where a failed wait leaves all-ones bytes (NaN), so that nobody takes stale data for a result.
struct PoisonRange {
  void* bytes;
  int64_t num_bytes;
};

// Before an operator that stores into output slot `slot`; channel.cuh's grant_slot. The operator's
// kernel may be launched early (launch.h) and wait for this one before its first store.
void launch_grant_slot(std::vector<Workspace> const& ranks, int slot, uint32_t free_slots,
                       cudaStream_t stream);

// Behind an operator's kernel: waits for all ranks' signals of the channel's last call. `poison`
// has one range per rank, or is empty.
void launch_wait_for_ranks(std::vector<Workspace> const& ranks, Phase phase,
                           std::vector<PoisonRange> const& poison, cudaStream_t stream);

// The same behind a kernel that took `slot` and says launch_dependent_kernel() when all its blocks
// are about to end: the wait is already running when the signals come.
void launch_wait_beside(std::vector<Workspace> const& ranks, Phase phase, int slot,
                        std::vector<PoisonRange> const& poison, cudaStream_t stream);

// Loads these kernels now. The driver would load each at its first launch, and waits for
// running kernels to do so: an announcement that should end a wait would wait for it.
void load_channel_kernels();

// Tells all peers, in stream order, that this rank takes no further part.
void launch_announce_failure(Workspace const& rank, Failure failure, cudaStream_t stream);

}  // namespace xstage
