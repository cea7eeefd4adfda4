// Launches a kernel that may start before the one in front of it on the stream has ended (CUDA's
// programmatic dependent launch; graph captures keep it). The kernel in front says when, by
// launch_dependent_kernel(); this one orders itself behind it with wait_for_kernel_before()
// (ptx.cuh), without fail: the kernels behind this one wait for this one only.
#pragma once

#include <cuda_runtime.h>

#include "check.h"

namespace xstage {

struct LaunchShape {
  unsigned blocks;
  unsigned threads;
  size_t shared_bytes;
  cudaStream_t stream;
  bool early;  // false: an ordinary launch
};

template <class... Params>
void launch_early(void (*kernel)(Params...), LaunchShape const& shape, Params const&... params) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(shape.blocks);
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = shape.stream;
  config.attrs = &attribute;
  config.numAttrs = shape.early ? 1 : 0;
  XS_CUDA(cudaLaunchKernelEx(&config, kernel, params...));
}

}  // namespace xstage
