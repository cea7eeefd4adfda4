// Operators that report facts about this binary.
#include "attention/plan.h"
#include "burst/plan.h"
#include "fault.h"
#include "megamoe/plan.h"
#include "torch_glue.h"
#include "workspace.h"

namespace xstage {
namespace {

std::string phase_names() {
  std::string names;
#define X(name, text) names += (names.empty() ? "" : "\n") + std::string(text);
  XS_PHASES(X)
#undef X
  return names;
}

// One line per field: "name min max meaning".
std::string plan_fields(std::string kind) {
  std::string lines;
#define X(name, min, max, meaning)                                                            \
  lines += concat(#name, ' ', static_cast<int64_t>(min), ' ', static_cast<int64_t>(max), ' ', \
                  meaning, '\n');
  if (kind == "workspace") {
    XS_WORKSPACE_FIELDS(X)
    for (int r = 0; r < kMaxRanks; ++r)
      lines += concat("base_", r, " 0 ", INT64_MAX, " block of rank ", r, '\n');
    return lines;
  }
  if (kind == "megamoe") {
    XS_MEGAMOE_FIELDS(X)
    return lines;
  }
  if (kind == "attention") {
    XS_ATTENTION_FIELDS(X)
    for (char const* array : {"rows", "kv_rows", "heads"}) {
      int64_t const most = array[0] == 'h' ? kMaxHeads : kMaxRows;
      for (int r = 0; r < kMaxRanks; ++r) {
        lines += concat(array, '_', r, " 0 ", most, " share of rank ", r, '\n');
      }
    }
    return lines;
  }
  if (kind == "burst") {
    XS_BURST_FIELDS(X)
    return lines;
  }
  if (kind == "burst_loop") {
    XS_BURST_LOOP_FIELDS(X)
    return lines;
  }
#undef X
  XS_CHECK(
      false,
      "xstage.plan_fields: kind: expected workspace, megamoe, attention, burst or burst_loop, got ",
      kind);
  return lines;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(xstage, CompositeExplicitAutograd, m) {
  m.impl("phase_names", TORCH_BOX(&phase_names));
  m.impl("plan_fields", TORCH_BOX(&plan_fields));
}

}  // namespace xstage
