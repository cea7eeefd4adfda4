#include <atomic>

#include "common/launch.h"
#include "kernel_sm90.cuh"
#include "launch.h"

namespace xstage::cuda {
namespace {

// The attribute is set once per device.
template <class Traits>
void launch(AttentionParams const& params, int num_blocks, cudaStream_t stream, LaunchKind kind) {
  constexpr int kSharedBytes = sizeof(Fa3SharedStorage<Traits>);
  static std::atomic<uint64_t> prepared{0};
  int device = 0;
  XS_CUDA(cudaGetDevice(&device));
  uint64_t const bit = uint64_t{1} << (device % 64);
  if ((prepared.load(std::memory_order_relaxed) & bit) == 0) {
    XS_CUDA(cudaFuncSetAttribute(fa3_kernel<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 kSharedBytes));
    prepared.fetch_or(bit, std::memory_order_relaxed);
  }
  LaunchShape const shape{static_cast<unsigned>(num_blocks), Traits::kThreads, kSharedBytes, stream,
                          kind};
  launch_kernel(fa3_kernel<Traits>, shape, params);
}

template <class Element, int kHeadDim, int kBlockM, int kBlockN, bool kCausal>
Instance instance() {
  return {std::is_same_v<Element, cutlass::half_t> ? ScalarType::Half : ScalarType::BFloat16,
          kHeadDim,
          kCausal,
          kBlockM,
          kBlockN,
          &launch<Fa3Traits<Element, kHeadDim, kBlockM, kBlockN, kCausal>>};
}

template <class Element>
void add_instances(Generation& all) {
  all.push_back(instance<Element, 128, 128, 160, false>());
  all.push_back(instance<Element, 128, 128, 160, true>());
  all.push_back(instance<Element, 64, 192, 128, false>());
  all.push_back(instance<Element, 64, 192, 128, true>());
}

}  // namespace

Generation const& fa3_generation() {
  static Generation const all = [] {
    Generation instances;
    add_instances<cutlass::bfloat16_t>(instances);
    add_instances<cutlass::half_t>(instances);
    return instances;
  }();
  return all;
}

}  // namespace xstage::cuda
