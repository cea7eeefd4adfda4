// The pull by groups (plan.pull = 1), for many rows of up to 4 KiB where the link is what counts. A
// warp works out up to 16 of its rows at a time, one per lane, and pulls them in groups, two under
// way at a time. What is no load or store of a row (the search, the look at the ring, the
// announcement) takes microseconds each, so it is done once per batch or group, by all lanes that
// have a row. For few rows it begins too late.
//
// Roles and global protocol: those of pull.cuh. The batch lies in shared memory, since 64 registers
// of a pull warp are under way.
#pragma once

#include "common/wait.cuh"
#include "params.h"
#include "pipeline.cuh"
#include "trace.cuh"

namespace xstage {

// A row on its way, in the registers of one warp: 16 bytes per lane and load. By assembly: the
// compiler would make an address of its own for each load.
struct RowCopy {
  static constexpr int kLoads = kGroupRowBytes / 512;
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

// Works out the rows of one warp, in block order. Lane s < world follows source s; what is the same
// for all lanes lies in the queue.
struct GroupCursor {
  uint32_t source_rows = 0;    // of this lane's source for the expert
  uint32_t source_before = 0;  // and for earlier ones

  __device__ __forceinline__ void init(MegaMoeParams const& params, CallState const& call,
                                       PullQueue& queue) {
    if (threadIdx.x % 32 == 0) {
      queue.done = queue.expert = queue.rows_before = queue.blocks_before = 0;
    }
    __syncwarp();
    load_source(params, call, 0);
  }

  __device__ __forceinline__ void load_source(MegaMoeParams const& params, CallState const& call,
                                              int32_t expert) {
    MegaMoePlan const& plan = params.plan;
    int32_t const lane = threadIdx.x % 32;
    MegaMoeView const own = params.view(params.workspace.rank);
    source_rows = lane < plan.world && expert < plan.experts_per_rank()
                      ? __ldcg(own.counts(plan, params.layout, call.bank, lane) + expert)
                      : 0;
  }

  // row_source of schedule.h for 32 rows of one expert, one per lane; a lane without asks for -1.
  // The rounds are the same for all rows, so the lanes stay together.
  __device__ __forceinline__ RowSource sources_of(int32_t world, int32_t first_source,
                                                  int32_t row) const {
    RowSource found{-1, -1};
    int32_t taken = 0;
    for (int32_t round = 0; round < world; ++round) {
      int32_t active = 0;
      int32_t least = 1 << 30;
      for (int32_t s = 0; s < world; ++s) {
        int32_t const left = static_cast<int32_t>(__shfl_sync(0xffffffffu, source_rows, s)) - taken;
        active += left > 0;
        if (left > 0) least = min_of(least, left);
      }
      if (active == 0) break;
      bool const here = row >= 0 && row < active * least;
      int32_t place = here ? row % active : -1;
      for (int32_t i = 0; i < world; ++i) {
        int32_t const s = first_source + i < world ? first_source + i : first_source + i - world;
        int32_t const rows = static_cast<int32_t>(__shfl_sync(0xffffffffu, source_rows, s));
        if (rows > taken && place-- == 0) found = {s, taken + row / active};
      }
      row -= active * least;
      taken += least;
    }
    return found;
  }

  // Entry l < count: the l-th of the next rows of this warp; the others are none.
  __device__ __forceinline__ void batch(MegaMoeParams const& params, CallState const& call,
                                        MegaMoeShared const& shared, int32_t count,
                                        PullQueue& queue) {
    MegaMoePlan const& plan = params.plan;
    int32_t const lane = threadIdx.x % 32;
    int32_t const warp = threadIdx.x / 32 - MegaMoeTraits::kFirstDispatchWarp;
    int32_t const turn = queue.done + min_of(lane, count - 1);
    int32_t const row =
        (turn * call.num_blocks + call.block) * MegaMoeTraits::kDispatchWarps + warp;
    int32_t const last = __shfl_sync(0xffffffffu, row, 31);
    int32_t const first_source = static_cast<int32_t>(params.workspace.rank + 1) % plan.world;
    int32_t padded = -1;
    RowSource from{0, 0};
    int32_t expert = queue.expert;
    int32_t rows_before = queue.rows_before;
    int32_t blocks_before = queue.blocks_before;
    while (expert < plan.experts_per_rank()) {
      int32_t const rows = static_cast<int32_t>(shared.rows[expert]);
      bool const here = row >= rows_before && row < rows_before + rows;
      if (__any_sync(0xffffffffu, here)) {
        RowSource const found = sources_of(plan.world, first_source, here ? row - rows_before : -1);
        uint32_t const list_begin =
            __shfl_sync(0xffffffffu, source_before, max_of<int32_t>(found.source, 0));
        if (here) {
          from = {found.source, static_cast<int32_t>(list_begin) + found.index};
          padded = blocks_before * MegaMoeTraits::kBlockM + row - rows_before;
        }
      }
      if (last < rows_before + rows) break;
      rows_before += rows;
      blocks_before += ceil_div<int32_t>(rows, MegaMoeTraits::kBlockM);
      source_before += source_rows;
      load_source(params, call, ++expert);
    }
    __syncwarp();
    if (lane < kPullBatch) queue.block[lane] = -1;
    if (lane == 0) {
      queue.done += count;
      queue.expert = expert;
      queue.rows_before = rows_before;
      queue.blocks_before = blocks_before;
    }
    if (lane < count && padded >= 0) enqueue(params, call, padded, from, queue);
    __syncwarp();
  }

  // Writes down a row: `padded` of all blocks, `from.index` in its source's list. Notes where it
  // comes from.
  __device__ __forceinline__ static void enqueue(MegaMoeParams const& params, CallState const& call,
                                                 int32_t padded, RowSource from, PullQueue& queue) {
    MegaMoePlan const& plan = params.plan;
    MegaMoeView const own = params.view(params.workspace.rank);
    int const lane = threadIdx.x % 32;
    int32_t const block = padded / MegaMoeTraits::kBlockM;
    int32_t const in_block = padded % MegaMoeTraits::kBlockM;
    uint32_t const route =
        __ldcg(own.routes(plan, params.layout, call.bank, from.source) + from.index);
    own.origins(plan, params.layout, block)[in_block] = pack_origin(from.source, route);
    uint32_t const token = route / plan.topk;
    int64_t const row_bytes = int64_t{2} * plan.hidden;
    queue.block[lane] = block;
    queue.token[lane] = pack_origin(from.source, token);
    char const* const rows = from.source == params.workspace.rank
                                 ? reinterpret_cast<char const*>(params.x)
                                 : params.view(from.source).token<char>(plan, params.layout, 0);
    queue.from[lane] = rows + token * row_bytes;
    int32_t const ring_row = block % plan.x_ring_blocks * MegaMoeTraits::kBlockM + in_block;
    queue.to[lane] = own.x_block<char>(plan, params.layout, 0) + ring_row * row_bytes;
  }
};

// What must be there before a row can be pulled.
struct PullGate {
  MegaMoeParams const& params;
  CallState const& call;
  bool staged;  // all tokens of all sources are in place

  __device__ __forceinline__ PullGate(MegaMoeParams const& p, CallState const& c)
      : params(p), call(c), staged(p.plan.world == 1 || num_segments(p.plan) == 1) {}

  __device__ __forceinline__ uint32_t const* slot_word(int32_t block) const {
    return params.view(params.workspace.rank)
               .counter(params.layout, call.bank, MegaMoeCounter::kLinear1Done) +
           block - params.plan.x_ring_blocks;
  }
  __device__ __forceinline__ uint64_t slot_target() const {
    return params.plan.linear1_tiles() * MegaMoeTraits::kMathWarps;
  }
  // token: as an origin.
  __device__ __forceinline__ bool in_place(uint32_t token) const {
    return staged || origin_source(token) == params.workspace.rank;
  }
  __device__ __forceinline__ uint64_t const* staged_word(uint32_t token) const {
    int32_t const index = static_cast<int32_t>(origin_route(token));
    return params.view(params.workspace.rank)
        .staged(params.layout, origin_source(token), index / segment_tokens(params.plan));
  }

  // Looks whether everything has been staged by now; whole warp.
  __device__ __forceinline__ void look() {
    if (staged) return;
    int32_t const segments = num_segments(params.plan);
    bool all = true;
    for (int32_t i = threadIdx.x % 32; i < params.plan.world * segments; i += 32) {
      int32_t const source = i / segments;
      uint64_t const* const word =
          params.view(params.workspace.rank).staged(params.layout, source, i - source * segments);
      if (source != params.workspace.rank) all = all && ld_acquire_sys(word) >= call.epoch;
    }
    staged = __all_sync(0xffffffffu, all);
  }
  // Whether a row can be pulled.
  __device__ __forceinline__ bool open(int32_t block, uint32_t token) const {
    return (in_place(token) || ld_acquire_sys(staged_word(token)) >= call.epoch) &&
           (block < params.plan.x_ring_blocks || ld_acquire_gpu(slot_word(block)) >= slot_target());
  }
  // Waits for one; whole warp. False when it gave up.
  __device__ __forceinline__ bool wait(int32_t block, uint32_t token) const {
    if (block >= params.plan.x_ring_blocks) {
      uint32_t const* const word = slot_word(block);
      WaitSite const site{Phase::kDispatchRows, -1, call.epoch, slot_target()};
      if (!wait_until(params.workspace, site, [&]() -> uint64_t { return ld_acquire_gpu(word); })) {
        return false;
      }
    }
    if (in_place(token)) return true;
    uint64_t const* const word = staged_word(token);
    WaitSite const site{Phase::kDispatchRows, origin_source(token), call.epoch, call.epoch};
    return wait_until(params.workspace, site, [&] { return ld_acquire_sys(word); });
  }
};

// Copies rows [at, end), two under way at a time. `meanwhile` runs behind the loads of each two.
template <class Meanwhile>
__device__ __forceinline__ void copy_group(PullQueue const& queue, int at, int end,
                                           int32_t row_bytes, Meanwhile meanwhile) {
  int32_t const offset = threadIdx.x % 32 * 16;
#pragma unroll 1
  for (; at < end; at += 2) {
    RowCopy one, two;
    int32_t const bytes = row_bytes - offset;
    int32_t const bytes_two = at + 1 < end ? bytes : 0;
    one.load<0>(queue.from[at] + offset, bytes);
    two.load<0>(queue.from[at + 1 < end ? at + 1 : at] + offset, bytes_two);
    meanwhile();
    one.store<0>(queue.to[at] + offset, bytes);
    two.store<0>(queue.to[at + 1 < end ? at + 1 : at] + offset, bytes_two);
  }
}

// Warps 2 and 3. While the first loads of a group are under way the group before is announced.
template <bool kTrace>
__device__ __forceinline__ void pull_groups(MegaMoeParams const& params, CallState const& call,
                                            MegaMoeShared& shared) {
  using Traits = MegaMoeTraits;
  Tracer<kTrace> tracer({params.trace, params.trace_records}, blockIdx.x, TraceTrack::kPull,
                        threadIdx.x == 32 * Traits::kFirstDispatchWarp);
  PullQueue& queue = shared.pulls[threadIdx.x / 32 - Traits::kFirstDispatchWarp];
  GroupCursor cursor;
  cursor.init(params, call, queue);
  PullGate gate(params, call);
  int32_t pending = -1;  // block of this lane's row in the group before
  auto const announce = [&] {
    uint32_t* const arrived = params.view(params.workspace.rank)
                                  .counter(params.layout, call.bank, MegaMoeCounter::kArrived);
    __syncwarp();
    if (pending >= 0) red_add_release_gpu(arrived + pending, 1);
    pending = -1;
  };
  int32_t count = 2;  // of a batch: few at first, so that loads begin early
  for (;;) {
    gate.look();
    cursor.batch(params, call, shared, count, queue);
    for (int at = 0; at < count;) {
      uint64_t const start_ns = Tracer<kTrace>::now();
      int const mine = at + threadIdx.x % 32;
      bool const here = mine < min_of(at + kPullGroup, count);
      int32_t const block = here ? queue.block[mine] : -1;
      uint32_t const rows = __ballot_sync(0xffffffffu, block >= 0);
      if (rows == 0) {
        announce();
        return;
      }
      // Rows up to the first that has to wait: it may wait for those before it.
      bool const open = block >= 0 && gate.open(block, queue.token[mine]);
      int ready = __ffs(~__ballot_sync(0xffffffffu, open)) - 1;
      if (ready == 0) {
        announce();
        if (!gate.wait(queue.block[at], queue.token[at])) return;
        ready = 1;
      }
      copy_group(queue, at, at + ready, 2 * params.plan.hidden, announce);
      pending = static_cast<int>(threadIdx.x % 32) < ready ? block : -1;
      tracer.add(TraceKind::kPull, int64_t{queue.block[at]} << 24, start_ns, ready, 0, 0, 0);
      at += ready;
    }
    count = min_of(2 * count, kPullBatch);
  }
}

}  // namespace xstage
