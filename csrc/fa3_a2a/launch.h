// The compiled kernels of fa3 and fa3_a2a.
#pragma once

#include "attention/ops_cuda.h"

namespace xstage::cuda {

Generation const& fa3_generation();

}  // namespace xstage::cuda
