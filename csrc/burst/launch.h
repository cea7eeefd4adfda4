// Launches of the burst operators; ops.cu checks the arguments, launch.cu and loop.cu hold kernels.
#pragma once

#include <cuda_runtime_api.h>

namespace xstage {

struct BurstParams;
struct LoopParams;

// Blocks that one cooperative launch can hold on the current device: one per SM.
int num_sms();

void launch_burst(BurstParams const& params, int blocks, cudaStream_t stream);
void launch_shadow(BurstParams const& params, int blocks, cudaStream_t stream);
void launch_loop(LoopParams const& params, cudaStream_t stream);

}  // namespace xstage
