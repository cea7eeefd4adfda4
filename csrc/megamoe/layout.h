// Where everything lies in the region that a megamoe instance owns in every rank's block.
//
// Protocol of call n (epoch n, bank n mod 2). "Source" is the rank that owns a token, "owner" the
// rank that owns an expert.
//   1. Source: count the rows per expert; store counts and routes into every owner's kCounts and
//      kRoutes (bank n mod 2); then the signal word of this epoch in the owner's kDispatchSignals
//      (a release).
//      Pull: copy x to kTokens in segments; the epoch into every owner's kStaged for each (a
//      release). A single segment is copied before the signal, and has no word of its own.
//      Push: keep the routes in kSendRoutes too.
//   2. Owner: wait for the dispatch signal of every source; the counts now fix the whole schedule.
//      Pull: load rows in block order from kTokens of the sources, each when its segment is there.
//      Push: every source stores each token that an expert here wants into a place of its own in
//      the owner's kTokens, once (or once per set of the experts, plan.token_sets), and the epoch
//      into kTokenHere (a release). The owner copies rows in block order from there, each when its
//      token is there.
//      Either way: its own rows come from x; wait for the slot of the x ring (kLinear1Done), note
//      kOrigins, count kArrived.
//   3. Linear-1 reads the x ring, writes the h ring. Linear-2 reads the h ring and stores each row
//      into kCombine[slot][token] of its source. Every element there has exactly one writer.
//   4. Owner: all stores of the call complete -> Channel::from[owner] on every source.
//   5. Source: y[token] = scale * sum of weight[slot] * kCombine[slot][token] over the slots in
//      ascending order, in fp32. Weights never travel, and nobody else adds to a row.
//
// Why no barrier at the end. A peer can begin call n + 1 while this rank is in call n, and then
// stores counts and routes of bank (n + 1) mod 2. It cannot begin call n + 2 before this rank has
// signalled call n + 1, so two banks suffice. Nothing else of call n + 1 touches this rank before
// its own signal of n + 1, which it gives when it has left call n: so one copy of kCombine is
// enough, and of kTokens where peers store into it. Where they read it, too: a rank leaves call n
// only when every row that it sent has come back, so nobody still pulls.
//
// Counters of a bank are touched by this rank only. Call n zeroes the other bank: call n - 1, which
// used it, ended before in stream order. Epoch words only grow and are never reset.
#pragma once

#include "common/workspace.h"
#include "plan.h"

namespace xstage {

constexpr int64_t kRegionAlign = 1024;  // what a swizzled tensor map asks for, and more
constexpr int64_t kBankAlign = 128;

// Grid barriers of a call, indices into MegaMoeCounter::kGridBarriers.
enum GridBarrier : int32_t { kCountsAdded, kRoutesStored, kNumGridBarriers };

// Pull: a source copies x to kTokens in segments, and tells the owners about each: they pull the
// first rows while the last are still being copied. A segment holds at least kSegmentBytes; a
// single one is copied before the routes are told.
constexpr int32_t kMaxSegments = 16;
constexpr int64_t kSegmentBytes = int64_t{4} << 20;

// Blocks of the grid list their rows in this many groups, one behind the other within an expert,
// so that rows of an expert stand roughly in the order of their tokens, as segments do.
constexpr int32_t kRouteGroups = 16;

// Per-call counters of one bank, uint32 each: X(name, how many, meaning).
//   arrived[b]     rows of block b in the x ring; complete at rows_of_block(b)
//   linear1_done   tiles of block b in the h ring; complete at linear1_tiles(). Also says that the
//                  x ring slot of b is free: rows of block b + x_ring_blocks may come.
//   linear2_done   tiles of block b whose h ring slot is no longer read; complete at
//                  linear2_tiles(): Linear-1 of block b + h_ring_blocks may write.
#define XS_MEGAMOE_COUNTERS(X)                                                      \
  X(kGridBarriers, kNumGridBarriers, "arrivals of this rank's CTAs")                \
  X(kTickets, 1, "next cluster tile of the sequence")                               \
  X(kRowTickets, 1, "next rows to copy into the x ring")                            \
  X(kSegmentsStaged, kMaxSegments, "CTAs that have copied their part of a segment") \
  X(kSendCounts, kRouteGroups* plan.num_experts, "rows by route group and expert")  \
  X(kSendCursors, kRouteGroups* plan.num_experts, "rows of them that are listed")   \
  X(kArrived, plan.max_blocks(), "rows of each block in the x ring")                \
  X(kLinear1Done, plan.max_blocks(), "Linear-1 tiles of each block")                \
  X(kLinear2Done, plan.max_blocks(), "Linear-2 tiles of each block")

// The regions, in order: X(name, bytes, meaning). A region that needs two banks says 2 *. Those
// before kCounts must be zero at first, and again after a failed call; the others may hold
// anything.
#define XS_MEGAMOE_REGIONS(X)                                                                   \
  X(kDispatchSignals, int64_t{8} * kMaxRanks,                                                   \
    "uint64 [source]: signal word; counts and routes of that source are in place")              \
  X(kStaged, int64_t{8} * kMaxRanks * kMaxSegments,                                             \
    "uint64 [source][segment]: epoch in which that segment of the source's tokens is in place") \
  X(kTokenHere, (plan.dispatch == kPush ? int64_t{8} * plan.token_places() : 0),                \
    "uint64 [place]: epoch in which the token in that place of kTokens came")                   \
  X(kCounters, 2 * counter_bank_bytes(plan), "uint32 [bank][counter]: see XS_MEGAMOE_COUNTERS") \
  X(kCounts, int64_t{2} * 4 * plan.num_experts,                                                 \
    "uint32 [bank][source][local expert]: rows that the source sends")                          \
  X(kRoutes, int64_t{2} * 4 * plan.max_rows(),                                                  \
    "uint32 [bank][source][row]: token * topk + slot, by local expert, without gaps")           \
  X(kSendRoutes, (plan.dispatch == kPush ? int64_t{4} * plan.max_rows() : 0),                   \
    "uint32 [owner][row]: what this rank has listed in the owner's kRoutes")                    \
  X(kOrigins, int64_t{4} * plan.max_blocks() * plan.block_m,                                    \
    "uint32 [block][row]: source << 28 | token * topk + slot")                                  \
  X(kTokens, int64_t{2} * plan.token_places() * plan.hidden,                                    \
    "bf16 [place][hidden]: x of this rank; where tokens are pushed those of the others")        \
  X(kXRing, int64_t{2} * plan.x_ring_blocks * plan.block_m * plan.hidden,                       \
    "bf16 [block mod x_ring_blocks][row][hidden]: received tokens")                             \
  X(kHRing, int64_t{2} * plan.h_ring_blocks * plan.block_m * plan.intermediate,                 \
    "bf16 [block mod h_ring_blocks][row][intermediate]: Linear-1 results")                      \
  X(kCombine, int64_t{2} * plan.topk * plan.max_tokens * plan.hidden,                           \
    "bf16 [slot][token][hidden]: Linear-2 results of this rank's tokens")

enum class MegaMoeCounter : int32_t {
#define X(name, count, meaning) name,
  XS_MEGAMOE_COUNTERS(X)
#undef X
      kCount
};

enum class MegaMoeRegion : int32_t {
#define X(name, bytes, meaning) name,
  XS_MEGAMOE_REGIONS(X)
#undef X
      kCount
};

// Bytes before counter array `which` of a bank; with kCount: of the whole bank.
XS_HD int64_t counter_offset(MegaMoePlan const& plan, MegaMoeCounter which) {
  int64_t offset = 0;
  int32_t index = 0;
#define X(name, count, meaning)              \
  if (index++ < static_cast<int32_t>(which)) \
    offset += round_up<int64_t>(int64_t{4} * (count), kBankAlign);
  XS_MEGAMOE_COUNTERS(X)
#undef X
  return offset;
}

// Tokens of a segment.
XS_HD int32_t segment_tokens(MegaMoePlan const& plan) {
  int64_t const least = ceil_div<int64_t>(kSegmentBytes, int64_t{2} * plan.hidden);
  return max_of(static_cast<int32_t>(least), ceil_div(plan.max_tokens, kMaxSegments));
}

XS_HD int32_t num_segments(MegaMoePlan const& plan) {
  return ceil_div(plan.max_tokens, segment_tokens(plan));
}

XS_HD int64_t counter_bank_bytes(MegaMoePlan const& plan) {
  return counter_offset(plan, MegaMoeCounter::kCount);
}

// Offsets of all regions, made once per launch and passed by value.
struct MegaMoeLayout {
  int64_t offsets[static_cast<int32_t>(MegaMoeRegion::kCount)];
  int64_t counters[static_cast<int32_t>(MegaMoeCounter::kCount)];  // from the start of a bank
  int64_t counter_bank;                                            // bytes of one bank
  int64_t total;

  XS_HD explicit MegaMoeLayout(MegaMoePlan const& plan) {
    int64_t offset = 0;
    int32_t index = 0;
#define X(name, bytes, meaning) \
  offsets[index++] = offset;    \
  offset += round_up<int64_t>((bytes), kRegionAlign);
    XS_MEGAMOE_REGIONS(X)
#undef X
    total = offset;
    for (int32_t c = 0; c < static_cast<int32_t>(MegaMoeCounter::kCount); ++c) {
      counters[c] = counter_offset(plan, static_cast<MegaMoeCounter>(c));
    }
    counter_bank = counter_bank_bytes(plan);
  }

  XS_HD int64_t offset(MegaMoeRegion region) const { return offsets[static_cast<int32_t>(region)]; }
};

// Typed addresses of one rank's region, as this process maps it.
struct MegaMoeView {
  char* base;

  template <class T>
  XS_HD T* at(MegaMoeLayout const& layout, MegaMoeRegion region, int64_t index = 0) const {
    return reinterpret_cast<T*>(base + layout.offset(region)) + index;
  }
  XS_HD uint64_t* dispatch_signal(MegaMoeLayout const& layout, int32_t source) const {
    return at<uint64_t>(layout, MegaMoeRegion::kDispatchSignals, source);
  }
  XS_HD uint64_t* staged(MegaMoeLayout const& layout, int32_t source, int32_t segment) const {
    return at<uint64_t>(layout, MegaMoeRegion::kStaged, source * kMaxSegments + segment);
  }
  // [local expert] of one source.
  XS_HD uint32_t* counts(MegaMoePlan const& plan, MegaMoeLayout const& layout, int32_t bank,
                         int32_t source) const {
    return at<uint32_t>(layout, MegaMoeRegion::kCounts,
                        (bank * plan.world + source) * plan.experts_per_rank());
  }
  // Rows of one source by local expert; expert e starts after the counts of experts 0 .. e - 1.
  XS_HD uint32_t* routes(MegaMoePlan const& plan, MegaMoeLayout const& layout, int32_t bank,
                         int32_t source) const {
    return at<uint32_t>(layout, MegaMoeRegion::kRoutes,
                        int64_t{1} * (bank * plan.world + source) * plan.max_tokens * plan.topk);
  }
  // What this rank has listed for one owner, as it lies in kRoutes there.
  XS_HD uint32_t* send_routes(MegaMoePlan const& plan, MegaMoeLayout const& layout,
                              int32_t owner) const {
    return at<uint32_t>(layout, MegaMoeRegion::kSendRoutes,
                        int64_t{1} * owner * plan.max_tokens * plan.topk);
  }
  XS_HD uint64_t* token_here(MegaMoeLayout const& layout, int64_t place) const {
    return at<uint64_t>(layout, MegaMoeRegion::kTokenHere, place);
  }
  XS_HD uint32_t* counter(MegaMoeLayout const& layout, int32_t bank, MegaMoeCounter which) const {
    return reinterpret_cast<uint32_t*>(base + layout.offset(MegaMoeRegion::kCounters) +
                                       bank * layout.counter_bank +
                                       layout.counters[static_cast<int32_t>(which)]);
  }
  XS_HD uint32_t* origins(MegaMoePlan const& plan, MegaMoeLayout const& layout,
                          int64_t block) const {
    return at<uint32_t>(layout, MegaMoeRegion::kOrigins, block * plan.block_m);
  }
  // Two-byte elements: uint16_t stands for bf16 on the host.
  template <class T>
  XS_HD T* token(MegaMoePlan const& plan, MegaMoeLayout const& layout, int64_t place) const {
    return at<T>(layout, MegaMoeRegion::kTokens, place * plan.hidden);
  }
  template <class T>
  XS_HD T* x_block(MegaMoePlan const& plan, MegaMoeLayout const& layout, int64_t block) const {
    return at<T>(layout, MegaMoeRegion::kXRing,
                 block % plan.x_ring_blocks * plan.block_m * plan.hidden);
  }
  template <class T>
  XS_HD T* h_block(MegaMoePlan const& plan, MegaMoeLayout const& layout, int64_t block) const {
    return at<T>(layout, MegaMoeRegion::kHRing,
                 block % plan.h_ring_blocks * plan.block_m * plan.intermediate);
  }
  template <class T>
  XS_HD T* combine_row(MegaMoePlan const& plan, MegaMoeLayout const& layout, int32_t slot,
                       int64_t token) const {
    return at<T>(layout, MegaMoeRegion::kCombine,
                 (int64_t{1} * slot * plan.max_tokens + token) * plan.hidden);
  }
};

// Where a received row came from.
constexpr int32_t kOriginShift = 28;
static_assert(MegaMoeLimits::max_tokens * MegaMoeLimits::topk <= int64_t{1} << kOriginShift &&
                  MegaMoeLimits::world <= int64_t{1} << (32 - kOriginShift),
              "an origin is one word");
XS_HD uint32_t pack_origin(int32_t source, uint32_t route) {
  return static_cast<uint32_t>(source) << kOriginShift | route;
}
XS_HD int32_t origin_source(uint32_t origin) {
  return static_cast<int32_t>(origin >> kOriginShift);
}
XS_HD uint32_t origin_route(uint32_t origin) {
  return origin & ((uint32_t{1} << kOriginShift) - 1);
}

}  // namespace xstage
