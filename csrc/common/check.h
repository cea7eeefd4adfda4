// Host-side checks. A failed check raises RuntimeError in Python with values in the message:
//   "xstage.megamoe: topk_idx: expected [128, 4], got [128, 3]".
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace xstage {

template <class... Parts>
std::string concat(Parts const&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace xstage

// XS_CHECK(condition, parts...): parts are streamed into the message. The message is all that users
// see: torch's own macro would put function, file and line of the build machine in front.
#define XS_CHECK(condition, ...)                                               \
  do {                                                                         \
    if (!(condition)) throw std::runtime_error(::xstage::concat(__VA_ARGS__)); \
  } while (0)

#if defined(USE_CUDA)
#include <cuda_runtime_api.h>

// XS_CUDA(expression): raises with the text of the CUDA error.
#define XS_CUDA(expression)                                                                      \
  do {                                                                                           \
    cudaError_t const xs_status = (expression);                                                  \
    XS_CHECK(xs_status == cudaSuccess, "xstage: " #expression ": ", cudaGetErrorName(xs_status), \
             ": ", cudaGetErrorString(xs_status));                                               \
  } while (0)

// After every kernel launch.
#define XS_LAUNCH_CHECK() XS_CUDA(cudaGetLastError())
#endif
