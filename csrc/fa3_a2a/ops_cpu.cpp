// CPU forms of fa3, fa3_a2a and fa3_a2a_virtual.
#include "attention/ops_cpu.h"

namespace xstage::cpu {
namespace {

struct Fa3 : CpuKernels {
  static constexpr char kAlone[] = "fa3";
  static constexpr char kA2a[] = "fa3_a2a";
  static constexpr char kVirtual[] = "fa3_a2a_virtual";
};

using Ops = AttentionOps<Fa3>;

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(xstage, CPU, m) {
  m.impl("fa3", TORCH_BOX(&Ops::alone));
  m.impl("fa3_a2a", TORCH_BOX(&Ops::with_a2a));
  m.impl("fa3_a2a_virtual", TORCH_BOX(&Ops::with_a2a_virtual));
}

}  // namespace xstage::cpu
