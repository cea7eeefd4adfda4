// Tensor maps (TMA descriptors), encoded on the host for local or peer-mapped memory.
//
// The driver's function is looked up at run time, so that nothing links against libcuda. A map on a
// peer's address works; a negative start coordinate of a *store* traps on sm_90, so kernels never
// pass one.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "check.h"

namespace xstage {

inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static PFN_cuTensorMapEncodeTiled_v12000 const encoder = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    XS_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                             cudaEnableDefault, &found));
    XS_CHECK(found == cudaDriverEntryPointSuccess && entry != nullptr,
             "xstage: the driver has no cuTensorMapEncodeTiled; CUDA 12 or newer is needed");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry);
  }();
  return encoder;
}

// A bf16 tensor of `rank` dimensions, fastest first. `strides_bytes[i]` is the distance between
// neighbours of dimension i + 1. Boxes outside the tensor read zeros and store nothing.
inline CUtensorMap encode_bf16_map(void* base, int rank, uint64_t const* dims,
                                   uint64_t const* strides_bytes, uint32_t const* box,
                                   CUtensorMapSwizzle swizzle) {
  CUtensorMap map{};
  uint32_t const ones[5] = {1, 1, 1, 1, 1};
  CUresult const status = tensor_map_encoder()(
      &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, static_cast<uint32_t>(rank), base,
      reinterpret_cast<cuuint64_t const*>(dims), reinterpret_cast<cuuint64_t const*>(strides_bytes),
      box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  XS_CHECK(status == CUDA_SUCCESS, "xstage: cuTensorMapEncodeTiled refused (CUresult ",
           static_cast<int>(status), "): rank ", rank, ", dims ", dims[0], " x ", dims[1], ", box ",
           box[0], " x ", box[1], ", row stride ", strides_bytes[0],
           " bytes (multiples of 16 below 2^40; boxes up to 256; base aligned to 16)");
  return map;
}

}  // namespace xstage
