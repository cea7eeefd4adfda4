// What the trace build records.
//
// trace[CTA][track][record] of kTraceWords int64: kind, tile (phase << 48 | block << 24 | n), start
// and end in ns of globaltimer, then cycles: waiting for the tile's first stage, waiting for its
// other stages (where only the partner's rows are late, also for these), handing over the results,
// all of the tile. Records that are no tiles have zeros there, unless said otherwise. A track is
// written by one thread; records that do not fit are dropped.
#pragma once

#include <cstdint>

namespace xstage {

constexpr int kTraceTracks = 4;
constexpr int kTraceWords = 8;

enum class TraceTrack : int { kPhases = 0, kMath0 = 1, kMath1 = 2, kRows = 3 };
enum class TraceKind : int64_t {
  kNone = 0,
  kTile = 1,      // math: first stage there .. results handed over
  kPrologue = 2,  // from the start of the call on; handing over: ns until all counts were known
  kRows = 3,  // warp 2: a group of rows copied into the x ring (block: of its batch's first row)
  kTail = 4,  // all tiles of this CTA done .. all ranks done
  kCombine = 5,
};

}  // namespace xstage
