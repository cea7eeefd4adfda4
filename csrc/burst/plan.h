// What the burst operators are told: integers only, one list per message.
//
//   BurstPlan      producers that burst, pause and burst again (burst_run, burst_shadow)
//   BurstLoopPlan  a main loop whose output tiles leave for a peer (burst_loop)
#pragma once

#include <cstdint>
#include <vector>

#include "common/host_device.h"
#include "common/wire.h"

namespace xstage {

// How bytes travel. kPull is the other direction of the same wires: reads of the peer's memory, as
// a dispatch does; the owner's egress carries them.
enum class Mechanism : int64_t { kSt = 0, kBulk = 1, kTma = 2, kPull = 3 };

// When a burst begins. kFree: as soon as the gap is over. kBarrier: all producers together,
// released by relaxed atomics, without a fence. kTimetable: at fixed times by the clock, touching
// no memory.
enum class Sync : int64_t { kFree = 0, kBarrier = 1, kTimetable = 2 };

// What the shadow's probe warp does.
enum class Probe : int64_t { kLoad = 0, kAtomic = 1, kBulkLoad = 2, kTensorLoad = 3 };

// How an output tile of the main loop leaves.
enum class LoopStore : int64_t { kNone = 0, kSt = 1, kBulk = 2, kPaced = 3 };

#define XS_BURST_FIELDS(X)                                                                    \
  X(mechanism, 0, 3, "0 16-byte stores, 1 bulk copies, 2 tensor stores, 3 reads of the peer") \
  X(producers, 0, 1024, "blocks that burst, one per SM; 0 only takes part in the start")      \
  X(bytes, 128, int64_t{1} << 22, "bytes of one burst of one producer")                       \
  X(chunk_bytes, 128, 16384, "bytes of one contiguous row of a burst")                        \
  X(row_stride, 128, int64_t{1} << 30, "distance of rows of one burst at the destination")    \
  X(producer_stride, 128, int64_t{1} << 40, "distance of producers at the destination")       \
  X(slot_stride, 128, int64_t{1} << 40, "distance of consecutive bursts at the destination")  \
  X(slots, 1, 4096, "bursts until an address is used again")                                  \
  X(destinations, 1, 255, "bit r: rank r; producer k sends to the k-th of them, cyclically")  \
  X(sync, 0, 2, "0 free running, 1 barrier without a fence, 2 timetable")                     \
  X(fence, 0, 1, "1: wait for visibility after every burst (completion-coupled)")             \
  X(late_wait, 0, 1, "1: bulk, tma: wait for shared memory before its next use, not at once") \
  X(max_bursts, 1, 4096, "bursts recorded; without a window also bursts issued")              \
  X(window_cycles, 0, int64_t{1} << 31, "fixed time window; 0 issues max_bursts")             \
  X(clock_khz, 1, int64_t{1} << 31, "SM clock by which times became cycles")                  \
  X(join, 0, 1, "1: start together with every rank of the workspace")                         \
  X(seed, 0, int64_t{1} << 31, "first word of the pattern that is written")                   \
  X(probe, 0, 3, "shadow only: 0 load, 1 atomic, 2 bulk load, 3 tensor load")                 \
  X(probe_bytes, 16, 16384, "shadow only: bytes of one bulk or tensor load")

#define XS_BURST_LOOP_FIELDS(X)                                                           \
  X(blocks, 1, 1024, "blocks, one per SM")                                                \
  X(tiles, 1, 4096, "output tiles of a block")                                            \
  X(steps, 4, 4096, "main-loop steps per output tile")                                    \
  X(repeats, 1, 64, "matrix products per 16 KiB step: the arithmetic intensity")          \
  X(store, 0, 3, "0 none, 1 16-byte stores, 2 one bulk burst, 3 bulk paced in slices")    \
  X(tile_bytes, 4096, 65536, "bytes of an output tile that leave")                        \
  X(slice_bytes, 256, 65536, "paced only: bytes of a slice")                              \
  X(slice_cycles, 0, int64_t{1} << 24, "paced only: clock cycles from slice to slice")    \
  X(chunk_bytes, 128, 65536, "bytes of one contiguous row of a tile")                     \
  X(row_stride, 128, int64_t{1} << 30, "distance of rows of one tile at the destination") \
  X(block_stride, 128, int64_t{1} << 40, "distance of blocks at the destination")         \
  X(stagger_cycles, 0, int64_t{1} << 30, "spread of the blocks' start times")             \
  X(destinations, 1, 255, "bit r: rank r; block k sends to the k-th of them, cyclically") \
  X(join, 0, 1, "1: start together with every rank of the workspace")

struct BurstPlan {
#define X(name, min, max, meaning) int64_t name;
  XS_BURST_FIELDS(X)
#undef X

  // Tensor stores move boxes of up to 64 rows.
  XS_HD int64_t box_rows() const { return min_of<int64_t>(64, bytes / chunk_bytes); }
  XS_HD int64_t rows() const { return bytes / chunk_bytes; }
  // One past the last byte written, from the start of the landing area.
  XS_HD int64_t reach() const {
    return max_of<int64_t>(0, producers - 1) * producer_stride + (slots - 1) * slot_stride +
           (rows() - 1) * row_stride + chunk_bytes;
  }
};

struct BurstLoopPlan {
#define X(name, min, max, meaning) int64_t name;
  XS_BURST_LOOP_FIELDS(X)
#undef X

  XS_HD int64_t reach() const {
    return (blocks - 1) * block_stride + (tile_bytes / chunk_bytes - 1) * row_stride + chunk_bytes;
  }
};

inline BurstPlan read_burst_plan(std::vector<int64_t> const& words) {
  BurstPlan plan{};
  int64_t count = 0;
#define X(name, min, max, meaning) ++count;
  XS_BURST_FIELDS(X)
#undef X
  WireReader reader(words, WireKind::kBurstPlan, "burst plan", count);
#define X(name, min, max, meaning) plan.name = reader.next(#name, min, max);
  XS_BURST_FIELDS(X)
#undef X
  return plan;
}

inline BurstLoopPlan read_burst_loop_plan(std::vector<int64_t> const& words) {
  BurstLoopPlan plan{};
  int64_t count = 0;
#define X(name, min, max, meaning) ++count;
  XS_BURST_LOOP_FIELDS(X)
#undef X
  WireReader reader(words, WireKind::kBurstLoopPlan, "burst loop plan", count);
#define X(name, min, max, meaning) plan.name = reader.next(#name, min, max);
  XS_BURST_LOOP_FIELDS(X)
#undef X
  return plan;
}

// The start of the operators' region in every block; landing areas follow, one per source rank.
struct alignas(128) BurstControl {
  uint64_t started[8];  // started[r]: rank r has begun this call; written by rank r
  uint64_t barrier;     // arrivals of this rank's blocks in this launch; cleared before it
  uint64_t go_ns;       // when the first burst of a launch may begin, by globaltimer
  uint64_t pad[6];
};
constexpr int64_t kBurstControlBytes = 4096;

XS_HD int64_t landing_area_bytes(int64_t region_bytes, int64_t world) {
  return (region_bytes - kBurstControlBytes) / world / 4096 * 4096;
}

}  // namespace xstage
