// The push (plan.dispatch = 1): rows of this rank's tokens, from x straight into the x rings of the
// experts' owners. Stores carry more than loads of a peer's memory do, x needs no copy that peers
// can read, and an owner has nothing to look for.
//
// A source knows how many rows every source sends to every expert, so where its own rows stand: the
// rows of an expert lie source after source. The push warps are shared out among the owners by the
// rows that go to each, at least one warp per owner with rows; the warps of an owner take its rows in
// turns, in block order. So what a warp may wait for, a ring slot at its owner, is freed by tiles that
// need only rows before it, of its own and of the warps beside it: no warp waits for another owner's
// tiles.
//
// Roles: warps 2 and 3, beside the tiles.
// Global protocol:
//   kRoutesStored (this rank's)      red.release.gpu of every block -> acquire: the lists are whole
//   kLinear1Done (the owner's)       acquire.sys: the x ring slot is free. Its release is at gpu scope:
//                                    what it stands for here are reads, which were over before
//   kArrived[b], kOrigins (theirs)   red.release.sys per row, for a group at a time -> acquire.sys by
//                                    the owner's schedulers
#pragma once

#include "common/wait.cuh"
#include "params.h"
#include "pipeline.cuh"
#include "trace.cuh"

namespace xstage {

constexpr int kPushBatch = 16;             // rows that a warp works out together, one per lane
constexpr int32_t kGroupBytes = 16 << 10;  // sent between two announcements

// Up to 4 KiB of a row, in the registers of one warp: 16 bytes per lane and load. By assembly: the
// compiler would make an address of its own for each load.
struct RowPiece {
  static constexpr int kLoads = 8;
  static constexpr int32_t kBytes = kLoads * 512;
  uint4 values[kLoads];

  // `bytes` from `from` on, which is this lane's first 16.
  template <int kLoad>
  __device__ __forceinline__ void load(char const* from, int32_t bytes) {
    asm volatile(
        "{\n"
        ".reg .pred wanted;\n"
        "setp.gt.s32 wanted, %5, %6;\n"
        "@wanted ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4 + %6];\n"
        "}"
        : "=r"(values[kLoad].x), "=r"(values[kLoad].y), "=r"(values[kLoad].z), "=r"(values[kLoad].w)
        : "l"(from), "r"(bytes), "n"(kLoad * 512)
        : "memory");
    if constexpr (kLoad + 1 < kLoads) load<kLoad + 1>(from, bytes);
  }
  template <int kStore>
  __device__ __forceinline__ void store(char* to, int32_t bytes) const {
    asm volatile(
        "{\n"
        ".reg .pred wanted;\n"
        "setp.gt.s32 wanted, %5, %6;\n"
        "@wanted st.global.v4.u32 [%4 + %6], {%0, %1, %2, %3};\n"
        "}" ::"r"(values[kStore].x),
        "r"(values[kStore].y), "r"(values[kStore].z), "r"(values[kStore].w), "l"(to), "r"(bytes),
        "n"(kStore * 512)
        : "memory");
    if constexpr (kStore + 1 < kLoads) store<kStore + 1>(to, bytes);
  }
};

// A warp's share: every `warps`-th row for one owner, from `first` on.
struct PushShare {
  int32_t owner = -1;  // none
  int32_t first = 0;
  int32_t warps = 0;
  int32_t rows = 0;

  __device__ __forceinline__ PushShare(MegaMoeParams const& params, CallState const& call,
                                       MegaMoeShared const& shared) {
    constexpr int kWarps = MegaMoeTraits::kDispatchWarps;
    int32_t const world = params.plan.world;
    int64_t total = 0;
    for (int32_t o = 0; o < world; ++o) total += shared.sent[o];
    int32_t mine =
        (threadIdx.x / 32 - MegaMoeTraits::kFirstDispatchWarp) * call.num_blocks + call.block;
    for (int32_t i = 1; i <= world; ++i) {
      int32_t const to = (static_cast<int32_t>(params.workspace.rank) + i) % world;
      int32_t const sent = static_cast<int32_t>(shared.sent[to]);
      if (sent == 0) continue;
      int32_t const more = kWarps * call.num_blocks - world;
      int32_t const share = 1 + static_cast<int32_t>(more * int64_t{sent} / total);
      if (mine < share) {
        owner = to;
        first = mine;
        warps = share;
        rows = sent;
        return;
      }
      mine -= share;
    }
  }
};

// Where a row of the owner's list stands among the owner's rows, padding counted. Follows 32 experts
// of the owner at a time, one per lane; positions only grow.
struct PushCursor {
  int32_t first_expert = -32;
  int32_t end;                // this rank's rows up to the end of this lane's expert
  int32_t shift;              // from a position of this lane's expert to its row at the owner
  int32_t rows_before = 0;    // up to the end of the 32 experts
  int32_t blocks_before = 0;  // the same, in blocks of the owner

  __device__ __forceinline__ void next_experts(MegaMoeParams const& params, CallState const& call,
                                               int32_t owner) {
    MegaMoePlan const& plan = params.plan;
    int32_t const rank = static_cast<int32_t>(params.workspace.rank);
    MegaMoeView const own = params.view(rank);
    first_expert += 32;
    int32_t const expert = first_expert + static_cast<int32_t>(threadIdx.x % 32);
    bool const valid = expert < plan.experts_per_rank();
    int32_t total = 0;
    int32_t mine = 0;
    int32_t earlier = 0;  // of sources before this rank
    for (int32_t s = 0; s < plan.world; ++s) {
      int32_t const rows =
          valid ? __ldcg(own.counts(plan, params.layout, call.bank, s, owner) + expert) : 0;
      total += rows;
      if (s < rank) earlier += rows;
      if (s == rank) mine = rows;
    }
    int32_t const blocks = ceil_div<int32_t>(total, MegaMoeTraits::kBlockM);
    int32_t const blocks_end = warp_inclusive_sum(blocks);
    end = rows_before + warp_inclusive_sum(mine);
    shift = (blocks_before + blocks_end - blocks) * MegaMoeTraits::kBlockM + earlier - (end - mine);
    rows_before = __shfl_sync(0xffffffffu, end, 31);
    blocks_before += __shfl_sync(0xffffffffu, blocks_end, 31);
  }

  // The owner's row of this lane's position, or -1 when the lane has none; whole warp.
  __device__ __forceinline__ int32_t find(MegaMoeParams const& params, CallState const& call,
                                          int32_t owner, int32_t position, bool wanted) {
    int32_t found = -1;
    for (;;) {
      int32_t lane = 0;  // experts of the 32 that end at or before the position
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        if (__shfl_sync(0xffffffffu, end, lane + step - 1) <= position) lane += step;
      }
      int32_t const row = __shfl_sync(0xffffffffu, shift, lane) + position;
      if (wanted && found < 0 && position < rows_before) found = row;
      if (!__any_sync(0xffffffffu, wanted && found < 0)) return found;
      next_experts(params, call, owner);
    }
  }
};

// The x ring of one owner, as a source sees it.
struct OwnerRing {
  MegaMoeParams const& params;
  CallState const& call;
  int32_t owner;

  __device__ __forceinline__ uint32_t const* word(int32_t block) const {
    return params.view(owner).counter(params.layout, call.bank, MegaMoeCounter::kLinear1Done) +
           block - params.plan.x_ring_blocks;
  }
  __device__ __forceinline__ uint32_t target() const { return whole_linear1(params.plan); }
  __device__ __forceinline__ bool free(int32_t block) const {
    return block < params.plan.x_ring_blocks || ld_acquire_sys(word(block)) >= target();
  }
  // Whole warp. False when it gave up.
  __device__ __forceinline__ bool wait(int32_t block) const {
    uint32_t const* const slot = word(block);
    WaitSite const site{Phase::kDispatchRows, owner, call.epoch, target()};
    return warp_wait_until(params.workspace, site,
                           [&]() -> uint64_t { return ld_acquire_sys(slot); });
  }
  __device__ __forceinline__ char* row(int32_t padded) const {
    int32_t const block = padded / MegaMoeTraits::kBlockM;
    int32_t const in_ring = block % params.plan.x_ring_blocks * MegaMoeTraits::kBlockM +
                            padded % MegaMoeTraits::kBlockM;
    return params.view(owner).x_block<char>(params.plan, params.layout, 0) +
           int64_t{2} * in_ring * params.plan.hidden;
  }
};

// Sends rows [at, end) of a batch: lane l holds the l-th's addresses. `meanwhile` runs behind the
// loads of each piece.
template <class Meanwhile>
__device__ __forceinline__ void send_rows(char const* from, char* to, int at, int end,
                                          int32_t row_bytes, Meanwhile meanwhile) {
  int32_t const offset = static_cast<int32_t>(threadIdx.x % 32) * 16;
  auto const of_lane = [](auto pointer, int lane) {
    return reinterpret_cast<decltype(pointer)>(
        __shfl_sync(0xffffffffu, reinterpret_cast<uint64_t>(pointer), lane));
  };
#pragma unroll 1
  for (; at < end; ++at) {
    char const* const row_from = of_lane(from, at);
    char* const row_to = of_lane(to, at);
#pragma unroll 1
    for (int32_t start = offset; start - offset < row_bytes; start += RowPiece::kBytes) {
      RowPiece piece;
      piece.load<0>(row_from + start, row_bytes - start);
      meanwhile();
      piece.store<0>(row_to + start, row_bytes - start);
    }
  }
}

// Warps 2 and 3. A group of rows is announced behind the first loads of the next, when most of its
// stores have arrived.
template <bool kTrace>
__device__ __forceinline__ void push_rows(MegaMoeParams const& params, CallState const& call,
                                          MegaMoeShared const& shared) {
  using Traits = MegaMoeTraits;
  MegaMoePlan const& plan = params.plan;
  int const lane = threadIdx.x % 32;
  int32_t const rank = static_cast<int32_t>(params.workspace.rank);
  PushShare const share(params, call, shared);
  if (share.owner < 0) return;
  MegaMoeView const own = params.view(rank);
  MegaMoeView const there = params.view(share.owner);
  uint32_t const* const lists =
      own.counter(params.layout, call.bank, MegaMoeCounter::kGridBarriers) + kRoutesStored;
  WaitSite const site{Phase::kGridBarrier, -1, call.epoch, static_cast<uint64_t>(call.num_blocks)};
  if (!warp_wait_until(params.workspace, site,
                       [&]() -> uint64_t { return ld_acquire_gpu(lists); })) {
    return;
  }
  Tracer<kTrace> tracer({params.trace, params.trace_records}, blockIdx.x, TraceTrack::kPull,
                        threadIdx.x == 32 * Traits::kFirstDispatchWarp);
  PushCursor cursor;
  cursor.next_experts(params, call, share.owner);
  OwnerRing const ring{params, call, share.owner};
  uint32_t const* const routes = own.routes(plan, params.layout, call.bank, share.owner);
  uint32_t* const arrived = there.counter(params.layout, call.bank, MegaMoeCounter::kArrived);
  int32_t const row_bytes = 2 * plan.hidden;
  int const most = max_of(1, kGroupBytes / row_bytes);
  int32_t pending = -1;  // block of this lane's row in the group before
  auto const announce = [&] {
    if (!__any_sync(0xffffffffu, pending >= 0)) return;
    __syncwarp();
    if (pending >= 0) red_add_release_sys(arrived + pending, 1);
    pending = -1;
  };
  for (int32_t done = 0;; done += kPushBatch) {
    int32_t const position = share.first + (done + lane) * share.warps;
    bool const here = lane < kPushBatch && position < share.rows;
    uint32_t const route = here ? __ldcg(routes + position) : 0;
    int32_t const padded = cursor.find(params, call, share.owner, position, here);
    int32_t const block = padded / Traits::kBlockM;  // of a lane that is here
    int const count = __popc(__ballot_sync(0xffffffffu, here));
    if (count == 0) break;
    char const* const from =
        reinterpret_cast<char const*>(params.x) + int64_t{route / plan.topk} * row_bytes;
    char* const to = ring.row(here ? padded : 0);
    if (here) bulk_prefetch_l2(from, row_bytes);
    bool open = here && ring.free(block);
    for (int at = 0; at < count;) {
      uint64_t const start_ns = Tracer<kTrace>::now();
      // Rows up to the first that has to wait: it may wait for those before it.
      uint32_t const closed = ~__ballot_sync(0xffffffffu, open) >> at;
      __syncwarp();  // all lanes store into a slot that one has seen free
      int ready = min_of(__ffs(closed) - 1, most);
      ready = min_of(ready, count - at);
      if (ready == 0) {
        announce();
        if (!ring.wait(__shfl_sync(0xffffffffu, block, at))) return;
        open = here && (open || lane == at || ring.free(block));
        continue;
      }
      bool const mine = lane >= at && lane < at + ready;
      if (mine) {
        there.origins(plan, params.layout, block)[padded % Traits::kBlockM] =
            pack_origin(rank, route);
      }
      send_rows(from, to, at, at + ready, row_bytes, announce);
      pending = mine ? block : -1;
      tracer.add(TraceKind::kPull, int64_t{block} << 24, start_ns, ready, 0, 0, 0);
      at += ready;
    }
  }
  announce();
}

}  // namespace xstage
