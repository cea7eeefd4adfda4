// Calls of one channel follow each other, also when they come from different streams: the later
// stream waits on the device for the earlier one. Host only, CUDA only.
//
// Inside a graph capture nothing is added: captured calls are ordered by the graph itself, and a
// replay against eager calls by the streams that the user launches both on.
#pragma once

#include <map>
#include <mutex>
#include <utility>

#include "call.h"

namespace xstage {

class StreamOrder {
 public:
  // Before a call of this channel is launched on `stream`.
  static void follow(Workspace const& workspace, cudaStream_t stream) {
    if (is_capturing(stream)) return;
    std::lock_guard<std::mutex> lock(mutex());
    auto const [position, first] = last_streams().try_emplace(workspace.host_channel(), stream);
    cudaStream_t const last = std::exchange(position->second, stream);
    if (first || last == stream) return;
    cudaEvent_t event = nullptr;
    XS_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    cudaError_t status = cudaEventRecord(event, last);
    if (status == cudaSuccess) status = cudaStreamWaitEvent(stream, event, 0);
    cudaEventDestroy(event);
    // A stream that its owner destroyed has nothing left to wait for.
    if (status == cudaErrorInvalidResourceHandle) {
      cudaGetLastError();
      return;
    }
    XS_CUDA(status);
  }

 private:
  static std::mutex& mutex() {
    static std::mutex mutex;
    return mutex;
  }
  static std::map<HostChannel*, cudaStream_t>& last_streams() {
    static std::map<HostChannel*, cudaStream_t> streams;
    return streams;
  }
};

inline void follow_last_stream(RingCall const& call, cudaStream_t stream) {
  for (RankCall const& rank : call.ranks) StreamOrder::follow(rank.workspace, stream);
}

}  // namespace xstage
