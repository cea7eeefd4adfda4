// What Python, the simulator and the tests ask about plans: bytes, addresses, the order of tiles.
#include "common/torch_glue.h"
#include "layout.h"
#include "schedule.h"

namespace xstage {
namespace {

Tensor table(std::vector<int32_t> const& cells, int64_t columns) {
  int64_t const rows = static_cast<int64_t>(cells.size()) / columns;
  torch::stable::Device const cpu(torch::headeronly::DeviceType::CPU);
  Tensor result = torch::stable::empty({rows, columns}, ScalarType::Int, std::nullopt, cpu);
  std::copy(cells.begin(), cells.end(), static_cast<int32_t*>(result.mutable_data_ptr()));
  return result;
}

std::vector<int32_t> checked_counts(char const* op, std::vector<int64_t> const& counts,
                                    int64_t num_experts, int64_t most) {
  XS_CHECK(static_cast<int64_t>(counts.size()) == num_experts, "xstage.", op,
           ": counts: expected one per local expert (", num_experts, "), got ", counts.size());
  std::vector<int32_t> result;
  int64_t sum = 0;
  for (int64_t count : counts) {
    sum += count;
    XS_CHECK(count >= 0 && sum <= most, "xstage.", op, ": counts: expected 0 to ", most,
             " rows in all, got ", count, " (sum ", sum, ")");
    result.push_back(static_cast<int32_t>(count));
  }
  return result;
}

int64_t megamoe_workspace_bytes(std::vector<int64_t> plan_words) {
  return MegaMoeLayout(read_megamoe_plan(plan_words)).total;
}

// One line per region: "name offset bytes meaning"; last line "total 0 bytes".
std::string megamoe_layout(std::vector<int64_t> plan_words) {
  MegaMoePlan const plan = read_megamoe_plan(plan_words);
  MegaMoeLayout const layout(plan);
  std::string lines;
  int32_t index = 0;
#define X(name, bytes, meaning)                                                               \
  lines += concat(#name, ' ', layout.offsets[index++], ' ', static_cast<int64_t>(bytes), ' ', \
                  meaning, '\n');
  XS_MEGAMOE_REGIONS(X)
#undef X
#define X(name, count, meaning)                                                            \
  lines += concat("counter.", #name, ' ', counter_offset(plan, MegaMoeCounter::name), ' ', \
                  int64_t{4} * (count), ' ', meaning, '\n');
  XS_MEGAMOE_COUNTERS(X)
#undef X
  return lines + concat("total 0 ", layout.total, " all regions\n");
}

// Tiles in the order of the schedule, int32 [tiles, 9]: cluster tile, CTA, phase, share, expert,
// block, row, rows, n. CTAs without a tile (phase 0) are listed too.
Tensor megamoe_tiles(std::vector<int64_t> plan_words, std::vector<int64_t> counts) {
  MegaMoePlan const plan = read_megamoe_plan(plan_words);
  std::vector<int32_t> const rows =
      checked_counts("megamoe_tiles", counts, plan.experts_per_rank(), int64_t{1} << 30);
  std::vector<int32_t> cells;
  TileCursor<int32_t const*> cursor(plan, rows.data());
  for (int32_t index = 0; cursor.seek(index); ++index) {
    for (int32_t cta = 0; cta < plan.cluster_size; ++cta) {
      Tile const tile = cursor.tile(cta);
      cells.insert(cells.end(),
                   {index, cta, static_cast<int32_t>(tile.phase), static_cast<int32_t>(tile.share),
                    tile.expert, tile.block, tile.row, tile.rows, tile.n});
    }
  }
  return table(cells, 9);
}

// Cluster tiles of every worker under the static deal, walked as a kernel walks them: int32
// [tiles, 2] = (worker, cluster tile), worker after worker.
Tensor megamoe_deal(std::vector<int64_t> plan_words, std::vector<int64_t> counts) {
  MegaMoePlan const plan = read_megamoe_plan(plan_words);
  std::vector<int32_t> const rows =
      checked_counts("megamoe_deal", counts, plan.experts_per_rank(), int64_t{1} << 30);
  std::vector<int32_t> cells;
  for (int32_t worker = 0; worker < plan.num_clusters(); ++worker) {
    TileCursor<int32_t const*> cursor(plan, rows.data());
    for (int32_t turn = 0;; ++turn) {
      int32_t const index = dealt_tile(plan, turn, worker);
      if (!cursor.seek(index)) break;
      cells.insert(cells.end(), {worker, index});
    }
  }
  return table(cells, 2);
}

// Source of every row of one expert at its owner `rank`, int32 [rows, 2] = (source, index within the
// source's rows).
Tensor megamoe_row_sources(std::vector<int64_t> counts, int64_t rank, int64_t dispatch) {
  MegaMoePlan plan{};
  plan.world = static_cast<int32_t>(counts.size());
  plan.dispatch = static_cast<int32_t>(dispatch);
  XS_CHECK(plan.world >= 1 && plan.world <= kMaxRanks,
           "xstage.megamoe_row_sources: counts: expected 1 to ", kMaxRanks, " sources, got ",
           plan.world);
  XS_CHECK(rank >= 0 && rank < plan.world, "xstage.megamoe_row_sources: rank: expected 0 to ",
           plan.world - 1, ", got ", rank);
  int64_t total = 0;
  for (int64_t count : counts) total += count;
  std::vector<int32_t> cells;
  for (int32_t row = 0; row < total; ++row) {
    RowSource const from = row_source(plan, static_cast<int32_t>(rank), row,
                                      [&](int32_t source) { return counts[source]; });
    cells.insert(cells.end(), {from.source, from.index});
  }
  return table(cells, 2);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(xstage, CompositeExplicitAutograd, m) {
  m.impl("megamoe_workspace_bytes", TORCH_BOX(&megamoe_workspace_bytes));
  m.impl("megamoe_layout", TORCH_BOX(&megamoe_layout));
  m.impl("megamoe_tiles", TORCH_BOX(&megamoe_tiles));
  m.impl("megamoe_deal", TORCH_BOX(&megamoe_deal));
  m.impl("megamoe_row_sources", TORCH_BOX(&megamoe_row_sources));
}

}  // namespace xstage
