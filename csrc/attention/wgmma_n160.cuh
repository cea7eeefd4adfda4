// The 64 x 160 x 16 matrix product as a CuTe atom, both operands in shared memory.
//
// CuTe has this shape only behind a switch that adds 17 s to every compilation that includes it,
// for thousands of shapes that nobody here uses.
#pragma once

#include <cute/atom/mma_traits_sm90_gmma.hpp>

// Ten consecutive operand numbers with the tens digit t (empty for 0 to 9), through a macro of one
// number, separated by commas.
#define XS_TEN(each, t)                                                                           \
  each(t##0), each(t##1), each(t##2), each(t##3), each(t##4), each(t##5), each(t##6), each(t##7), \
      each(t##8), each(t##9)
#define XS_EIGHTY(each)                                                               \
  XS_TEN(each, ), XS_TEN(each, 1), XS_TEN(each, 2), XS_TEN(each, 3), XS_TEN(each, 4), \
      XS_TEN(each, 5), XS_TEN(each, 6), XS_TEN(each, 7)
#define XS_TEN_TEXT(t)                                                                             \
  "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t \
  "9"
#define XS_PARAMETER(n) float& d##n
#define XS_OPERAND(n) "+f"(d##n)
#define XS_WGMMA_N160(type) \
  asm volatile(                                                                                   \
      "{\n"                                                                                       \
      ".reg .pred p;\n"                                                                           \
      "setp.ne.b32 p, %82, 0;\n"                                                                  \
      "wgmma.mma_async.sync.aligned.m64n160k16.f32." type "." type " {" XS_TEN_TEXT() ", "        \
      XS_TEN_TEXT(1) ", " XS_TEN_TEXT(2) ", " XS_TEN_TEXT(3) ", " XS_TEN_TEXT(4) ", "             \
      XS_TEN_TEXT(5) ", " XS_TEN_TEXT(6) ", " XS_TEN_TEXT(7) "}, %80, %81, p, 1, 1, 0, 0;\n"      \
      "}\n"                                                                                       \
      : XS_EIGHTY(XS_OPERAND)                                                                     \
      : "l"(desc_a), "l"(desc_b), "r"(static_cast<int32_t>(scale_d)))

namespace xstage {

// D (+)= A B^T, A [64, 16] and B [160, 16], both K-major.
template <class Element>
struct WgmmaN160 {
  using DRegisters = void;
  using ARegisters = uint64_t[1];
  using BRegisters = uint64_t[1];
  using CRegisters = float[80];

  CUTE_HOST_DEVICE static void fma(uint64_t const& desc_a, uint64_t const& desc_b,
                                   XS_EIGHTY(XS_PARAMETER), cute::GMMA::ScaleOut const scale_d) {
#if defined(CUTE_ARCH_MMA_SM90A_ENABLED)
    if constexpr (cute::is_same_v<Element, cutlass::bfloat16_t>) {
      XS_WGMMA_N160("bf16");
    } else {
      XS_WGMMA_N160("f16");
    }
#endif
  }
};

}  // namespace xstage

#undef XS_TEN
#undef XS_EIGHTY
#undef XS_TEN_TEXT
#undef XS_PARAMETER
#undef XS_OPERAND
#undef XS_WGMMA_N160

template <class Element>
struct cute::MMA_Traits<xstage::WgmmaN160<Element>> {
  using ValTypeD = float;
  using ValTypeA = Element;
  using ValTypeB = Element;
  using ValTypeC = float;
  using FrgTypeA = GMMA::smem_desc<GMMA::Major::K>;
  using FrgTypeB = GMMA::smem_desc<GMMA::Major::K>;
  using Shape_MNK = Shape<_64, Int<160>, _16>;
  using ThrID = Layout<_128>;
  using ALayout = GMMA::ABLayout<64, 16>;
  using BLayout = GMMA::ABLayout<160, 16>;
  using CLayout = GMMA::CLayout_64xN<160>;

  GMMA::ScaleOut accumulate_ = GMMA::ScaleOut::One;
};
