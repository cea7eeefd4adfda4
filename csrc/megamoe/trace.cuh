// The trace build: who did what when (trace_format.h). Compiles to nothing in the normal build.
#pragma once

#include "common/ptx.cuh"
#include "pipeline.cuh"
#include "trace_format.h"

namespace xstage {

struct TraceBuffer {
  int64_t* words;  // null: no trace
  int32_t records;
};

template <bool kOn>
struct Tracer {
  __device__ __forceinline__ Tracer(TraceBuffer, int, TraceTrack, bool) {}
  __device__ __forceinline__ static uint64_t now() { return 0; }
  __device__ __forceinline__ static int64_t cycles() { return 0; }
  __device__ __forceinline__ void add(TraceKind, int64_t, uint64_t, int64_t, int64_t, int64_t,
                                      int64_t) {}
};

template <>
struct Tracer<true> {
  int64_t* next;
  int32_t left;

  __device__ __forceinline__ Tracer(TraceBuffer buffer, int cta, TraceTrack track, bool writer) {
    left = writer && buffer.words != nullptr ? buffer.records : 0;
    next = buffer.words + (int64_t{1} * cta * kTraceTracks + static_cast<int>(track)) *
                              buffer.records * kTraceWords;
  }
  __device__ __forceinline__ static uint64_t now() { return global_timer_ns(); }
  __device__ __forceinline__ static int64_t cycles() { return clock64(); }
  __device__ __forceinline__ void add(TraceKind kind, int64_t tile, uint64_t start_ns,
                                      int64_t first, int64_t others, int64_t handing, int64_t all) {
    if (left-- <= 0) return;
    int64_t const record[kTraceWords] = {static_cast<int64_t>(kind),
                                         tile,
                                         static_cast<int64_t>(start_ns),
                                         static_cast<int64_t>(now()),
                                         first,
                                         others,
                                         handing,
                                         all};
#pragma unroll
    for (int i = 0; i < kTraceWords; ++i) next[i] = record[i];
    next += kTraceWords;
  }
};

__device__ __forceinline__ int64_t trace_tile(WarpgroupWork const& work) {
  return static_cast<int64_t>(work.phase) << 48 | int64_t{work.block} << 24 | work.n;
}

}  // namespace xstage
