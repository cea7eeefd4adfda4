// Cooperative launches of the burst and shadow kernels, and the choice of the instance.
#include "burst/burst.cuh"
#include "burst/launch.h"
#include "burst/shadow.cuh"
#include "common/check.h"

namespace xstage {
namespace {

template <class Kernel>
void launch_resident(Kernel* kernel, BurstParams params, int blocks, int threads, size_t bytes,
                     cudaStream_t stream) {
  XS_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(bytes)));
  // Meetings of the blocks count from zero in every launch; `started` belongs to the peers.
  BurstControl* const control = params.workspace.region<BurstControl>(params.workspace.rank);
  XS_CUDA(cudaMemsetAsync(&control->barrier, 0, sizeof(uint64_t), stream));
  void* arguments[] = {&params};
  XS_CUDA(cudaLaunchCooperativeKernel(reinterpret_cast<void const*>(kernel), dim3(blocks),
                                      dim3(threads), arguments, bytes, stream));
}

template <Mechanism kMechanism>
void launch_burst_as(BurstParams const& params, int blocks, cudaStream_t stream) {
  size_t const bytes = sizeof(BurstShared) + params.plan.max_bursts * sizeof(int4) +
                       params.num_gaps * sizeof(int32_t);
  launch_resident(burst_kernel<kMechanism>, params, blocks, kBurstThreads, bytes, stream);
}

template <Mechanism kMechanism>
void launch_shadow_as(BurstParams const& params, int blocks, cudaStream_t stream) {
  launch_resident(shadow_kernel<kMechanism>, params, blocks, kShadowThreads, sizeof(ShadowShared),
                  stream);
}

}  // namespace

int num_sms() {
  int device = 0, count = 0;
  XS_CUDA(cudaGetDevice(&device));
  XS_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

void launch_burst(BurstParams const& params, int blocks, cudaStream_t stream) {
  switch (static_cast<Mechanism>(params.plan.mechanism)) {
    case Mechanism::kSt:
      return launch_burst_as<Mechanism::kSt>(params, blocks, stream);
    case Mechanism::kBulk:
      return launch_burst_as<Mechanism::kBulk>(params, blocks, stream);
    case Mechanism::kTma:
      return launch_burst_as<Mechanism::kTma>(params, blocks, stream);
    case Mechanism::kPull:
      return launch_burst_as<Mechanism::kPull>(params, blocks, stream);
  }
}

void launch_shadow(BurstParams const& params, int blocks, cudaStream_t stream) {
  switch (static_cast<Mechanism>(params.plan.mechanism)) {
    case Mechanism::kSt:
      return launch_shadow_as<Mechanism::kSt>(params, blocks, stream);
    case Mechanism::kBulk:
      return launch_shadow_as<Mechanism::kBulk>(params, blocks, stream);
    case Mechanism::kTma:
      return launch_shadow_as<Mechanism::kTma>(params, blocks, stream);
    case Mechanism::kPull:
      return launch_shadow_as<Mechanism::kPull>(params, blocks, stream);
  }
}

}  // namespace xstage
