// Launches a kernel that may start before the one in front of it on the stream has ended (CUDA's
// programmatic dependent launch; graph captures keep it). The kernel in front says when, by
// launch_dependent_kernel(), or it is when its blocks end. This one orders itself behind it with
// wait_for_kernel_before() (ptx.cuh), without fail: the kernels behind this one wait for this one
// only.
#pragma once

#include <cuda_runtime.h>

#include "check.h"

namespace xstage {

enum class LaunchKind { kOrdinary, kEarly, kCooperative };

struct LaunchShape {
  dim3 blocks;
  unsigned threads;
  size_t shared_bytes;
  cudaStream_t stream;
  LaunchKind kind;
};

template <class... Params>
void launch_kernel(void (*kernel)(Params...), LaunchShape const& shape, Params const&... params) {
  cudaLaunchAttribute attribute{};
  if (shape.kind == LaunchKind::kEarly) {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  } else {
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = shape.blocks;
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = shape.stream;
  config.attrs = &attribute;
  config.numAttrs = shape.kind == LaunchKind::kOrdinary ? 0 : 1;
  XS_CUDA(cudaLaunchKernelEx(&config, kernel, params...));
}

}  // namespace xstage
