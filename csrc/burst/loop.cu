// Launch of the main-loop probe. A file of its own: the matrix product takes long to compile.
#include "burst/launch.h"
#include "burst/loop.cuh"
#include "common/check.h"

namespace xstage {

void launch_loop(LoopParams const& params, cudaStream_t stream) {
  LoopParams copy = params;
  XS_CUDA(cudaFuncSetAttribute(burst_loop_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(sizeof(LoopShared))));
  BurstControl* const control = params.workspace.region<BurstControl>(params.workspace.rank);
  XS_CUDA(cudaMemsetAsync(&control->barrier, 0, sizeof(uint64_t), stream));
  void* arguments[] = {&copy};
  XS_CUDA(cudaLaunchCooperativeKernel(reinterpret_cast<void const*>(burst_loop_kernel),
                                      dim3(static_cast<unsigned>(params.plan.blocks)),
                                      dim3(LoopTraits::kThreads), arguments, sizeof(LoopShared),
                                      stream));
}

}  // namespace xstage
