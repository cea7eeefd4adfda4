// CPU forms of fa4, fa4_a2a and fa4_a2a_virtual.
#include "attention/ops_cpu.h"

namespace xstage::cpu {
namespace {

struct Fa4 : CpuKernels {
  static constexpr char kAlone[] = "fa4";
  static constexpr char kA2a[] = "fa4_a2a";
  static constexpr char kVirtual[] = "fa4_a2a_virtual";
};

using Ops = AttentionOps<Fa4>;

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(xstage, CPU, m) {
  m.impl("fa4", TORCH_BOX(&Ops::alone));
  m.impl("fa4_a2a", TORCH_BOX(&Ops::with_a2a));
  m.impl("fa4_a2a_virtual", TORCH_BOX(&Ops::with_a2a_virtual));
}

}  // namespace xstage::cpu
