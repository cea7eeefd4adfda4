// CUDA forms of fa3, fa3_a2a and fa3_a2a_virtual.
#include "launch.h"

namespace xstage::cuda {
namespace {

struct Fa3 {
  static constexpr char kAlone[] = "fa3";
  static constexpr char kA2a[] = "fa3_a2a";
  static constexpr char kVirtual[] = "fa3_a2a_virtual";

  template <class... Arguments>
  static auto attention(char const* op, Arguments const&... arguments) {
    return cuda::attention(op, fa3_generation(), arguments...);
  }
  template <class... Arguments>
  static auto attention_a2a(char const* op, Arguments const&... arguments) {
    return cuda::attention_a2a(op, fa3_generation(), arguments...);
  }
};

using Ops = AttentionOps<Fa3>;

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(xstage, CUDA, m) {
  m.impl("fa3", TORCH_BOX(&Ops::alone));
  m.impl("fa3_a2a", TORCH_BOX(&Ops::with_a2a));
  m.impl("fa3_a2a_virtual", TORCH_BOX(&Ops::with_a2a_virtual));
}

}  // namespace xstage::cuda
