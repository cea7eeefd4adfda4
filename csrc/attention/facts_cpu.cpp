// What the layout says, for Python and for tests: the very code that kernels run.
#include "a2a/call.h"

namespace xstage {
namespace {

TileSchedule schedule_of(std::vector<int64_t> const& plan_words, int64_t rank, int64_t batch,
                         int64_t block_m) {
  AttentionPlan const plan = read_attention_plan(plan_words);
  XS_CHECK(rank >= 0 && rank < plan.world, "xstage.attention_tiles: rank: expected 0 to ",
           plan.world - 1, ", got ", rank);
  XS_CHECK(block_m > 0, "xstage.attention_tiles: block_m: expected at least 1, got ", block_m);
  return make_schedule(make_layout(plan), static_cast<int>(rank), static_cast<int32_t>(batch),
                       static_cast<int32_t>(block_m), static_cast<TileOrder>(plan.tile_order));
}

Tensor attention_tiles(std::vector<int64_t> plan_words, int64_t rank, int64_t batch,
                       int64_t block_m) {
  TileSchedule const schedule = schedule_of(plan_words, rank, batch, block_m);
  std::vector<int64_t> const size = {schedule.size(), 6};
  Tensor tiles = torch::stable::empty({size.data(), size.size()}, ScalarType::Int);
  auto* row = static_cast<int32_t*>(tiles.mutable_data_ptr());
  for (int64_t index = 0; index < schedule.size(); ++index) {
    QueryTile const tile = schedule.tile(index);
    for (int32_t value :
         {tile.batch, tile.head, tile.owner, tile.owner_row, tile.row, tile.num_rows}) {
      *row++ = value;
    }
  }
  return tiles;
}

// [rounds, blocks]: which tile each block takes; -1 where there is none.
Tensor attention_deal(std::vector<int64_t> plan_words, int64_t rank, int64_t batch, int64_t block_m,
                      int64_t num_blocks) {
  TileSchedule const schedule = schedule_of(plan_words, rank, batch, block_m);
  XS_CHECK(num_blocks > 0, "xstage.attention_deal: num_blocks: expected at least 1, got ",
           num_blocks);
  std::vector<int64_t> const size = {ceil_div(schedule.size(), num_blocks), num_blocks};
  Tensor deal = torch::stable::empty({size.data(), size.size()}, ScalarType::Int);
  auto* to = static_cast<int32_t*>(deal.mutable_data_ptr());
  for (int32_t round = 0; round < size[0]; ++round) {
    for (int32_t block = 0; block < num_blocks; ++block) {
      int64_t const index = schedule.dealt(round, static_cast<int32_t>(size[0]), block,
                                           static_cast<int32_t>(num_blocks));
      *to++ = index < schedule.size() ? static_cast<int32_t>(index) : -1;
    }
  }
  return deal;
}

std::vector<int64_t> attention_key_heads(std::vector<int64_t> plan_words, int64_t rank) {
  AttentionPlan const plan = read_attention_plan(plan_words);
  XS_CHECK(rank >= 0 && rank < plan.world, "xstage.attention_key_heads: rank: expected 0 to ",
           plan.world - 1, ", got ", rank);
  HeadRange const range = make_layout(plan).key_heads(static_cast<int>(rank));
  return {range.first, range.count};
}

int64_t attention_region_bytes(std::vector<int64_t> plan_words, int64_t batch, int64_t head_dim,
                               int64_t element_bytes) {
  AttentionPlan const plan = read_attention_plan(plan_words);
  return ring_bytes(output_slot_bytes(make_layout(plan), batch, head_dim * element_bytes),
                    plan.slots);
}

int64_t ulysses_a2a_region_bytes(std::vector<int64_t> plan_words, int64_t num_tensors,
                                 int64_t batch, int64_t head_dim, int64_t element_bytes) {
  AttentionPlan const plan = read_attention_plan(plan_words);
  return ring_bytes(a2a_slot_bytes(make_forms(plan, num_tensors), batch, head_dim * element_bytes),
                    plan.slots);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(xstage, CompositeExplicitAutograd, m) {
  m.impl("attention_tiles", TORCH_BOX(&attention_tiles));
  m.impl("attention_deal", TORCH_BOX(&attention_deal));
  m.impl("attention_key_heads", TORCH_BOX(&attention_key_heads));
  m.impl("attention_region_bytes", TORCH_BOX(&attention_region_bytes));
  m.impl("ulysses_a2a_region_bytes", TORCH_BOX(&ulysses_a2a_region_bytes));
}

}  // namespace xstage
