// The little that operators need from torch, over the stable ABI only.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "check.h"

namespace xstage {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline char const* dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::Byte:
      return "uint8";
    default:
      return "another dtype";
  }
}

inline std::string shape_text(Tensor const& tensor) {
  std::string text = "[";
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    text += (i ? ", " : "") + std::to_string(tensor.size(i));
  }
  return text + "]";
}

// Refuses a tensor of another shape. A dimension of -1 accepts any size.
inline void check_shape(char const* op, char const* name, Tensor const& tensor,
                        std::initializer_list<int64_t> expected) {
  bool ok = tensor.dim() == static_cast<int64_t>(expected.size());
  std::string wanted = "[";
  int64_t i = 0;
  for (int64_t dim : expected) {
    ok = ok && (dim < 0 || tensor.size(i) == dim);
    wanted += (i ? ", " : "") + (dim < 0 ? std::string("*") : std::to_string(dim));
    ++i;
  }
  XS_CHECK(ok, "xstage.", op, ": ", name, ": expected shape ", wanted, "], got ",
           shape_text(tensor));
}

inline void check_dtype(char const* op, char const* name, Tensor const& tensor,
                        ScalarType expected) {
  XS_CHECK(tensor.scalar_type() == expected, "xstage.", op, ": ", name, ": expected ",
           dtype_name(expected), ", got ", dtype_name(tensor.scalar_type()));
}

inline void check_contiguous(char const* op, char const* name, Tensor const& tensor) {
  XS_CHECK(tensor.is_contiguous(), "xstage.", op, ": ", name,
           ": expected a contiguous tensor; call .contiguous()");
}

#if defined(USE_CUDA)
inline cudaStream_t current_stream(Tensor const& tensor) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

using torch::stable::accelerator::DeviceGuard;
#endif

}  // namespace xstage
