// Dynamic shared memory of the kernels, which ptxas does not know: a line per kernel, how its name
// begins (* stands for a template argument) and bytes. Runs without a GPU, for
// tools/ptxas_report.py. Built once per family, since families share names.
#include <cstdio>

#if defined(XS_FAMILY_ATTENTION)
#include "a2a/kernel_sm90.cuh"
#include "fa3_a2a/traits_sm90.h"

template <int kHeadDim, int kBlockM, int kBlockN>
void print_fa3() {
  using Traits = xstage::Fa3Traits<cutlass::bfloat16_t, kHeadDim, kBlockM, kBlockN, false>;
  std::printf("fa3_kernel<Fa3Traits<*, %d, %d, %d, %zu\n", kHeadDim, kBlockM, kBlockN,
              sizeof(xstage::Fa3SharedStorage<Traits>));
}

int main() {
  print_fa3<128, 128, 160>();
  print_fa3<64, 192, 128>();
  std::printf("a2a_bulk_kernel %zu\n", sizeof(xstage::BulkStorage));
}
#elif defined(XS_FAMILY_BURST)
#include "burst/loop.cuh"

int main() {
  std::printf("shadow_kernel %zu\n", sizeof(xstage::ShadowShared));
  std::printf("burst_loop_kernel %zu\n", sizeof(xstage::LoopShared));
  // Beside it 16 bytes a burst and 4 a gap, by the plan.
  std::printf("burst_kernel %zu\n", sizeof(xstage::BurstShared));
}
#elif defined(XS_FAMILY_MEGAMOE)
#include "megamoe/pipeline.cuh"

int main() { std::printf("megamoe_sm90 %zu\n", sizeof(xstage::MegaMoeShared)); }
#endif
