// Host side of the sm_90a kernel: what was compiled, tensor maps, the cooperative launch.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "params.h"

namespace xstage {

// Refuses plans that no compiled kernel runs; values in the message.
void check_megamoe_instance(MegaMoePlan const& plan);

// One line per kernel: "block_m block_n cluster_size store".
std::string megamoe_instances();

// Fills in the tensor maps of one rank from its plan, layout, workspace and weights.
void encode_megamoe_maps(MegaMoeParams& params, void const* w13, void const* w2);

// One launch plays one rank, or all virtual ranks of a world.
void launch_megamoe(std::vector<MegaMoeParams> const& ranks, cudaStream_t stream);

}  // namespace xstage
