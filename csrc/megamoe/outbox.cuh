// What a math warp still has to send or to announce while it computes the next tile.
//
// A warp owns 16 rows of 512 bytes of a Linear-2 tile, and staging memory for 8 of them. The other
// half stays in 32 registers until the first has left. Rows leave as bulk copies, one per lane, so
// that no thread waits for another's copies.
//
//   burst: rows 0-7 at once, rows 8-15 at once a few steps of the next main loop later
//   paced: plan.slice_rows rows per step of the next main loop, from step 0 on
//
// Announcing (a release at gpu scope) is also put off, so that it finds the stores complete. But a
// warp never blocks before it has announced what tiles wait for.
#pragma once

#include "params.h"
#include "pipeline.cuh"

namespace xstage {

__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t const (&v)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
               : "memory");
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  __nv_bfloat162 const pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t const*>(&pair);
}

// What a counter says about this warp. Reads have been performed when it is raised, so it need not
// order anything; a release would wait until all stores of the SM have left.
enum class Announce : int { kReads = 0, kStores = 1 };

// The counters of both banks, in one piece.
__device__ __forceinline__ uint32_t* counters(MegaMoeParams const& params) {
  return params.view(params.workspace.rank).counter(params.layout, 0, MegaMoeCounter(0));
}

// A counter to raise, by how much, and what it says: in one register, of which math warps have none
// to spare. Counters of both banks have indices below 2^23: blocks have 128 rows, of at most 2^27.
struct Announcement {
  int32_t packed = -1;  // none

  Announcement() = default;
  // Word `i` of an array of counters.
  __device__ __forceinline__ Announcement(MegaMoeParams const& params, CallState const& call,
                                          MegaMoeCounter which, int32_t i, int32_t by,
                                          Announce kind) {
    int64_t const bytes =
        call.bank * params.layout.counter_bank + params.layout.counters[static_cast<int>(which)];
    packed = (static_cast<int32_t>(bytes / 4) + i) << 8 | by << 2 | static_cast<int32_t>(kind);
  }
  __device__ __forceinline__ bool pending() const { return packed >= 0; }
  __device__ __forceinline__ int32_t index() const { return packed >> 8; }
  __device__ __forceinline__ uint32_t amount() const { return packed >> 2 & 63; }
  __device__ __forceinline__ Announce kind() const { return static_cast<Announce>(packed & 3); }
};

struct Outbox {
  using Traits = MegaMoeTraits;
  static constexpr int kHalf = Traits::kStagingRows;

  char* staging;      // of this warp
  uint32_t held[32];  // rows 8-15: bf16 pairs of 8 x 256, as stmatrix takes them
  char* destination;  // lane l < 16: where row l goes; null: nowhere
  uint32_t bytes;     // of a row
  int next_row;       // rows before it have left; 2 * kHalf: nothing is pending
  int wait_steps;     // steps before the held half is due
  Announcement announcement;
  int announce_steps;  // steps before that

  __device__ __forceinline__ void init(char* warp_staging) {
    staging = warp_staging;
    next_row = 2 * kHalf;
    announcement = {};
    destination = nullptr;
    bytes = 0;
    wait_steps = announce_steps = 0;
  }

  // Address for stmatrix: lane l gives row l % 8 of matrix l / 8.
  __device__ __forceinline__ uint32_t matrix_address() const {
    int const lane = threadIdx.x % 32;
    return smem_address(staging) + lane % 8 * Traits::kStagingRow + lane / 8 * 16;
  }

  // Waits until staging may be overwritten; whole warp.
  __device__ __forceinline__ void reserve() {
    bulk_wait_read<0>();
    __syncwarp();
  }

  // Writes 8 rows of 512 bytes.
  __device__ __forceinline__ void write_half(uint32_t const (&pairs)[32]) {
    uint32_t const address = matrix_address();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      uint32_t const v[4] = {pairs[4 * j], pairs[4 * j + 1], pairs[4 * j + 2], pairs[4 * j + 3]};
      store_matrices(address + j * 64, v);
    }
    fence_proxy_async_shared();
    __syncwarp();
  }

  // Issues up to `count` rows of the half that is staged.
  __device__ __forceinline__ void issue_rows(int count) {
    int const lane = threadIdx.x % 32;
    int const end = min_of(next_row + count, next_row < kHalf ? kHalf : 2 * kHalf);
    if (lane >= next_row && lane < end && destination != nullptr) {
      bulk_store(destination, staging + lane % kHalf * Traits::kStagingRow, bytes);
      bulk_commit();
    }
    next_row = end;
  }

  // Nothing is held: tells the compiler that an epilogue may use these registers.
  __device__ __forceinline__ void forget_held() {
#pragma unroll
    for (int j = 0; j < 32; ++j) held[j] = 0;
  }

  __device__ __forceinline__ void stage_held() {
    reserve();
    write_half(held);
  }

  // One step of the next main loop.
  __device__ __forceinline__ void step(MegaMoeParams const& params) {
    MegaMoePlan const& plan = params.plan;
    if (next_row < 2 * kHalf) {
      bool const paced = plan.store == kBulkPaced;
      if (next_row != kHalf) {
        issue_rows(paced ? plan.slice_rows : kHalf);
      } else if (--wait_steps < 0) {
        stage_held();
        issue_rows(paced ? plan.slice_rows : kHalf);
      }
    }
    if (announcement.pending() && --announce_steps < 0) publish(params);
  }

  // Raises the pending counter, after this warp's stores where it stands for them.
  __device__ __forceinline__ void publish(MegaMoeParams const& params) {
    if (!announcement.pending()) return;
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      uint32_t* const counter = counters(params) + announcement.index();
      if (announcement.kind() == Announce::kReads) {
        red_add_relaxed_gpu(counter, announcement.amount());
      } else {
        red_add_release_gpu(counter, announcement.amount());
      }
    }
    announcement = {};
  }

  __device__ __forceinline__ void announce_later(Announcement later) {
    announcement = later;
    announce_steps = Traits::kPublishSteps;
  }

  // Sends and announces all that is pending.
  __device__ __forceinline__ void drain(MegaMoeParams const& params) {
    if (next_row < kHalf) issue_rows(kHalf);
    if (next_row < 2 * kHalf) {
      if (next_row == kHalf) stage_held();
      issue_rows(kHalf);
    }
    publish(params);
  }
};

}  // namespace xstage
