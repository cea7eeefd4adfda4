// The operator of the simulator: numbers in, numbers out, no workspace and no peers.
#include <algorithm>
#include <cmath>

#include "common/torch_glue.h"
#include "simulation.h"

namespace xstage {
namespace {

std::string megamoe_simulation_fields() {
  std::string lines;
#define X(name, meaning) lines += concat(#name, ' ', meaning, '\n');
  XS_SIMULATION_FIELDS(X)
#undef X
  return lines;
}

std::vector<double> doubles(char const* name, Tensor const& tensor, int64_t size) {
  check_shape("megamoe_simulate", name, tensor, {size});
  check_dtype("megamoe_simulate", name, tensor, ScalarType::Double);
  check_contiguous("megamoe_simulate", name, tensor);
  double const* data = static_cast<double const*>(tensor.mutable_data_ptr());
  return {data, data + tensor.numel()};
}

SimulatedMachine read_machine(Tensor const& tensor) {
  int64_t num_fields = 0;
#define X(name, meaning) ++num_fields;
  XS_SIMULATION_FIELDS(X)
#undef X
  std::vector<double> const values = doubles("machine", tensor, num_fields);
  SimulatedMachine machine{};
  int64_t field = 0;
#define X(name, meaning)                                                                   \
  machine.name = values[field++];                                                          \
  XS_CHECK(std::isfinite(machine.name), "xstage.megamoe_simulate: machine: " #name " is ", \
           machine.name);
  XS_SIMULATION_FIELDS(X)
#undef X
  XS_CHECK(machine.hbm_GBps > 0 && machine.hbm_sm_GBps > 0 && machine.pull_GBps > 0 &&
               machine.bin_us > 0,
           "xstage.megamoe_simulate: machine: rates and bin_us must be positive");
  return machine;
}

// Rows of other ranks in every block: rows of an expert come from all sources in turn where they are
// pulled, else this rank's own first.
std::vector<int32_t> remote_rows(MegaMoePlan const& plan, std::vector<int64_t> const& counts,
                                 int32_t rank) {
  std::vector<int32_t> result;
  int32_t const experts = plan.experts_per_rank();
  for (int32_t expert = 0; expert < experts; ++expert) {
    auto const count_of = [&](int32_t source) { return counts[source * experts + expert]; };
    int32_t rows = 0;
    for (int32_t source = 0; source < plan.world; ++source) {
      rows += static_cast<int32_t>(count_of(source));
    }
    for (int32_t row = 0; row < rows; ++row) {
      if (row % plan.block_m == 0) result.push_back(0);
      result.back() += row_source(plan, rank, row, count_of).source != rank;
    }
  }
  return result;
}

// Rows that cross the link for every block. Where tokens are pushed these are the ones that no earlier
// expert of the set has wanted, if the choices of a source's `tokens` are independent; an expert's
// are spread evenly over its blocks.
std::vector<double> link_rows(MegaMoePlan const& plan, std::vector<int64_t> const& counts,
                              int32_t rank, double tokens,
                              std::vector<int32_t> const& remote_rows) {
  std::vector<double> result(remote_rows.begin(), remote_rows.end());
  if (plan.dispatch != kPush) return result;
  int32_t const experts = plan.experts_per_rank();
  std::vector<double> listed(plan.world, 0.0);  // choices of the set so far, by source
  size_t block = 0;
  for (int32_t expert = 0; expert < experts; ++expert) {
    if (expert > 0 && plan.token_set(expert) != plan.token_set(expert - 1)) {
      std::fill(listed.begin(), listed.end(), 0.0);
    }
    int64_t rows = 0;
    double sent = 0.0;
    for (int32_t source = 0; source < plan.world; ++source) {
      int64_t const count = counts[source * experts + expert];
      rows += count;
      if (source == rank) continue;
      // A token is missing as long as none of its choices is listed.
      auto const missing = [&](double choices) {
        double const share = tokens > 0.0 ? std::min(1.0, choices / (tokens * plan.topk)) : 1.0;
        return tokens * std::pow(1.0 - share, plan.topk);
      };
      sent += missing(listed[source]) - missing(listed[source] + static_cast<double>(count));
      listed[source] += static_cast<double>(count);
    }
    for (int64_t row = 0; row < rows; row += plan.block_m) {
      result[block++] =
          sent * static_cast<double>(min_of<int64_t>(rows - row, plan.block_m)) / rows;
    }
  }
  return result;
}

Tensor table(std::vector<double> const& cells, int64_t columns) {
  int64_t const rows = static_cast<int64_t>(cells.size()) / columns;
  torch::stable::Device const cpu(torch::headeronly::DeviceType::CPU);
  Tensor result = torch::stable::empty({rows, columns}, ScalarType::Double, std::nullopt, cpu);
  std::copy(cells.begin(), cells.end(), static_cast<double*>(result.mutable_data_ptr()));
  return result;
}

// (summary [1, 6], workers [clusters, columns], link bins [bins, 2], tiles [tiles, 8] or [0, 8]).
std::tuple<Tensor, Tensor, Tensor, Tensor> megamoe_simulate(std::vector<int64_t> plan_words,
                                                            std::vector<int64_t> counts,
                                                            int64_t rank, Tensor machine,
                                                            Tensor rates, bool trace) {
  MegaMoePlan const plan = read_megamoe_plan(plan_words);
  int64_t const experts = plan.experts_per_rank();
  XS_CHECK(static_cast<int64_t>(counts.size()) == plan.world * experts,
           "xstage.megamoe_simulate: counts: expected rows by source and local expert (",
           plan.world, " x ", experts, "), got ", counts.size(), " numbers");
  XS_CHECK(rank >= 0 && rank < plan.world, "xstage.megamoe_simulate: rank: expected 0 to ",
           plan.world - 1, ", got ", rank);
  std::vector<int32_t> rows(experts, 0);
  int64_t all = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    XS_CHECK(counts[i] >= 0 && (all += counts[i]) <= plan.max_rows(),
             "xstage.megamoe_simulate: counts: expected 0 to ", plan.max_rows(),
             " rows in all, got ", counts[i], " (sum ", all, ")");
    rows[i % experts] += static_cast<int32_t>(counts[i]);
  }
  std::vector<int32_t> const remote = remote_rows(plan, counts, static_cast<int32_t>(rank));
  SimulatedMachine const numbers = read_machine(machine);
  MegaMoeSimulation simulation(
      plan, numbers, doubles("rates", rates, plan.num_sms + 1), rows, remote,
      link_rows(plan, counts, static_cast<int32_t>(rank), numbers.tokens, remote), trace);
  simulation.run();
  std::vector<double> workers;
  double end = 0.0;
  for (SimulatedWorker const& worker : simulation.workers()) {
    workers.insert(workers.end(), worker.times, worker.times + kColumns);
    end = std::max(end, worker.times[kEnd]);
  }
  std::vector<double> const summary = {end,
                                       simulation.drained_us(),
                                       simulation.pulled_us(),
                                       simulation.store_bytes(),
                                       simulation.pull_bytes(),
                                       simulation.memory_bytes()};
  return {table(summary, 6), table(workers, kColumns), table(simulation.bins(), 2),
          table(simulation.trace(), 8)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(xstage, CompositeExplicitAutograd, m) {
  m.impl("megamoe_simulate", TORCH_BOX(&megamoe_simulate));
  m.impl("megamoe_simulation_fields", TORCH_BOX(&megamoe_simulation_fields));
}

}  // namespace xstage
