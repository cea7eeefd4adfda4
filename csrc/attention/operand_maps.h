// Tensor maps of attention operands and outputs: [B, rows, heads, D] as four dimensions, fastest
// first (D, heads, rows, B), in boxes of one panel of 64 columns, swizzled by 128 bytes. Host only.
#pragma once

#include "common/tensor_map.h"
#include "problem.h"

namespace xstage {

constexpr int64_t kMapAlign = 16;  // bytes; of base and strides
constexpr uint32_t kMapCols = 64;

// True when a tensor map can describe the tensor where it lies.
inline bool fits_tensor_map(Tensor const& tensor) {
  if (reinterpret_cast<int64_t>(tensor.const_data_ptr()) % kMapAlign != 0) return false;
  if (tensor.stride(3) != 1) return false;
  for (int64_t dim = 0; dim < 3; ++dim) {
    int64_t const bytes = tensor.stride(dim) * element_bytes(tensor.scalar_type());
    bool const fits = bytes > 0 && bytes % kMapAlign == 0 && bytes < (int64_t{1} << 40);
    if (tensor.size(dim) > 1 && !fits) return false;
  }
  return true;
}

// The tensor itself, or a contiguous copy where its strides or its address suit no tensor map.
inline Tensor mappable(Tensor const& tensor) {
  if (tensor.numel() == 0 || fits_tensor_map(tensor)) return tensor;
  std::vector<int64_t> const size = {tensor.size(0), tensor.size(1), tensor.size(2),
                                     tensor.size(3)};
  Tensor copy = torch::stable::new_empty(tensor, {size.data(), size.size()});
  torch::stable::copy_(copy, tensor);
  return copy;
}

struct MapShape {
  int64_t head_dim;
  int64_t heads;
  int64_t rows;
  int64_t batch;
};

// Both 16-bit types are moved as bf16: only bytes travel. A map of no elements is never used.
inline CUtensorMap encode_operand(void* base, MapShape const& shape, OperandStrides const& strides,
                                  int64_t box_rows) {
  if (shape.heads * shape.rows * shape.batch == 0) return CUtensorMap{};
  uint64_t const dims[4] = {static_cast<uint64_t>(shape.head_dim),
                            static_cast<uint64_t>(shape.heads), static_cast<uint64_t>(shape.rows),
                            static_cast<uint64_t>(shape.batch)};
  // The stride of a dimension of one element says nothing; any legal one will do.
  auto const stride_bytes = [&](int64_t size, int64_t stride) {
    return static_cast<uint64_t>((size == 1 ? shape.head_dim : stride) * 2);
  };
  uint64_t const stride[3] = {stride_bytes(shape.heads, strides.head),
                              stride_bytes(shape.rows, strides.row),
                              stride_bytes(shape.batch, strides.batch)};
  uint32_t const box[4] = {kMapCols, 1, static_cast<uint32_t>(box_rows), 1};
  return encode_bf16_map(base, 4, dims, stride, box, CU_TENSOR_MAP_SWIZZLE_128B);
}

inline CUtensorMap encode_input(Tensor const& tensor, int64_t box_rows) {
  MapShape const shape{tensor.size(3), tensor.size(2), tensor.size(1), tensor.size(0)};
  // A tensor map has no const form; the kernel only loads through this one.
  return encode_operand(const_cast<void*>(tensor.const_data_ptr()), shape, operand_strides(tensor),
                        box_rows);
}

}  // namespace xstage
