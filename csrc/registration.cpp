// Every operator of xstage, on one page: schemas only. Implementations register themselves for CPU
// (this library) and CUDA (_cuda_sm90) from the folder of their operator.
//
// Arguments named `plan` and `workspace` are wire messages (csrc/common/wire.h). No operator takes
// its workspace as a mutated Tensor: torch.compile may hand over a clone, and a clone is not mapped
// by peers. Every communicating operator returns something that its caller needs, since an
// operator whose result is unused may be removed from a graph.
#include <Python.h>
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(xstage, m) {
  // Microbenchmarks of remote stores (csrc/burst/README.md). Results: one row of facts per block,
  // and clock stamps per block and burst, or per block and output tile.
  m.def("burst_run(Tensor gap_cycles, int[] plan, int[] workspace) -> (Tensor, Tensor)");
  m.def(
      "burst_shadow(Tensor gap_cycles, Tensor delay_cycles, int[] plan, int[] workspace) "
      "-> (Tensor, Tensor)");
  m.def("burst_loop(Tensor a, Tensor b, int[] plan, int[] workspace) -> (Tensor, Tensor)");

  // Every rank pushes payload [...] to every rank: [world, ...]. With slots > 0 the result lies in
  // a slot of the region's ring (csrc/common/slots.h), else it is a copy. The smallest operator
  // that uses the whole protocol of a call.
  m.def("handshake(Tensor payload, int[] workspace, int slots=0) -> Tensor");
  m.def("handshake_virtual(Tensor[] payloads, int[] workspaces, int slots=0) -> Tensor[]");
  m.def("handshake_region_bytes(int world, int row_bytes, int slots=0) -> int");

  // Sizes of the structures that Python shares with the binary, in the order of _faults.Layout.
  m.def("workspace_layout() -> int[]");

  // Loads the kernels of the protocol and of the handshake; collective set-up calls it.
  m.def("workspace_load(Tensor block) -> ()");

  // Tells all peers, in stream order, that this rank takes no further part (Failure in
  // csrc/common/workspace.h). `block` is this rank's memory; it selects the device.
  m.def("workspace_announce(Tensor block, int failure, int[] workspace) -> ()");

  // Facts about this binary.
  m.def("plan_fields(str kind) -> str");
  m.def("phase_names() -> str");

  // Attention: q [B, Sq, Hq, D], k and v [B, Sk, Hkv, D], any strides whose last is 1; out
  // [B, Sq, Hq, D], lse float32 [B, Hq, Sq] (empty unless want_lse). key_segments int32 [B, N, 2]:
  // half-open runs of valid keys. Query head i reads key head (i + head_phase) / kv_group.
  m.def(
      "fa3(Tensor q, Tensor k, Tensor v, Tensor? key_segments=None, float? scale=None, "
      "bool causal=False, bool want_lse=False, int head_phase=0, int[] plan=[]) -> (Tensor, "
      "Tensor)");
  m.def(
      "fa4(Tensor q, Tensor k, Tensor v, Tensor? key_segments=None, float? scale=None, "
      "bool causal=False, bool want_lse=False, int head_phase=0, int[] plan=[]) -> (Tensor, "
      "Tensor)");

  // The All-to-All of Ulysses, several tensors in one call. To heads: each input [B, rows of this
  // rank, all heads, D], each output [B, all rows, heads of this rank, D]; to sequence: the
  // reverse. Outputs lie in a slot of the workspace's ring.
  m.def("ulysses_a2a(Tensor[] inputs, int[] plan, int[] workspace) -> Tensor[]");

  // Attention over this rank's heads whose output tiles go straight to the ranks that own the rows:
  // out [B, rows of this rank, all query heads, D], in a slot of the workspace's ring; lse float32
  // [B, heads of this rank, Sq], kept by the rank that computes it.
  m.def(
      "fa3_a2a(Tensor q, Tensor k, Tensor v, Tensor? key_segments, float? scale, bool causal, "
      "bool want_lse, int[] plan, int[] workspace) -> (Tensor, Tensor)");
  m.def(
      "fa4_a2a(Tensor q, Tensor k, Tensor v, Tensor? key_segments, float? scale, bool causal, "
      "bool want_lse, int[] plan, int[] workspace) -> (Tensor, Tensor)");

  // The same for all ranks of a virtual group: inputs rank after rank, descriptors one behind the
  // other, outputs rank after rank.
  m.def("ulysses_a2a_virtual(Tensor[] inputs, int[] plan, int[] workspaces) -> Tensor[]");
  m.def(
      "fa3_a2a_virtual(Tensor[] q, Tensor[] k, Tensor[] v, Tensor? key_segments, float? scale, "
      "bool causal, bool want_lse, int[] plan, int[] workspaces) -> (Tensor[], Tensor[])");
  m.def(
      "fa4_a2a_virtual(Tensor[] q, Tensor[] k, Tensor[] v, Tensor? key_segments, float? scale, "
      "bool causal, bool want_lse, int[] plan, int[] workspaces) -> (Tensor[], Tensor[])");

  // Facts for Python and tests: the schedule's tiles in order, int32 [tiles, 6] = (batch, head,
  // owner, owner_row, row, num_rows); bytes of a region for one call of these shapes.
  m.def("attention_tiles(int[] plan, int rank, int batch, int block_m) -> Tensor");
  m.def("attention_deal(int[] plan, int rank, int batch, int block_m, int num_blocks) -> Tensor");
  m.def("attention_key_heads(int[] plan, int rank) -> int[]");
  m.def("attention_region_bytes(int[] plan, int batch, int head_dim, int element_bytes) -> int");
  m.def(
      "ulysses_a2a_region_bytes(int[] plan, int num_tensors, int batch, int head_dim, "
      "int element_bytes) -> int");

  // MegaMoE: y = routed_scaling_factor * sum over slots of topk_weights * expert(x). x [T, hidden]
  // and weights bf16; topk_idx [T, topk] int32 or int64, -1 skips a slot; topk_weights [T, topk]
  // float32, applied in float32 when the slots of a token are added up; w13 [local experts, 2 *
  // intermediate, hidden] in the plan's weight_layout; w2 [local experts, hidden, intermediate];
  // x, topk_idx and topk_weights may have any strides (they are copied then), w13 and w2 may not;
  // num_tokens: int32 or int64 of one element on the device of x, when only the first rows of x are
  // tokens (the other rows of the result are zero); expert_load int64 [local experts], to which
  // received rows are added.
  m.def(
      "megamoe(Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor w13, Tensor w2, int[] plan, "
      "int[] workspace, Tensor? num_tokens=None, float? clamp=None, "
      "float routed_scaling_factor=1.0, Tensor(a!)? expert_load=None) -> Tensor");
  m.def(
      "megamoe_out(Tensor(b!) out, Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor w13, "
      "Tensor w2, int[] plan, int[] workspace, Tensor? num_tokens=None, float? clamp=None, "
      "float routed_scaling_factor=1.0, Tensor(a!)? expert_load=None) -> ()");
  // All ranks of a virtual group: lists in rank order, descriptors one behind the other.
  m.def(
      "megamoe_virtual(Tensor[] x, Tensor[] topk_idx, Tensor[] topk_weights, Tensor[] w13, "
      "Tensor[] w2, int[] plan, int[] workspaces, float? clamp=None, "
      "float routed_scaling_factor=1.0) -> Tensor[]");

  // The trace build: y, and int64 [CTA, 4 tracks, records, 8 words] as csrc/megamoe/trace_format.h
  // says.
  m.def(
      "megamoe_traced(Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor w13, Tensor w2, "
      "int[] plan, int[] workspace, int records) -> (Tensor, Tensor)");

  // Facts about megamoe plans: bytes of a region, its map, the tiles in order (int32 [tiles, 9]),
  // who computes them (int32 [tiles, 2]), and where the rows of an expert come from (int32
  // [rows, 2]).
  m.def("megamoe_workspace_bytes(int[] plan) -> int");
  m.def("megamoe_layout(int[] plan) -> str");
  m.def("megamoe_tiles(int[] plan, int[] counts) -> Tensor");
  m.def("megamoe_deal(int[] plan, int[] counts) -> Tensor");
  m.def("megamoe_row_sources(int[] counts, int rank, int dispatch) -> Tensor");
  // Predicts a call of one rank by its schedule and the Burst-Gap law (csrc/megamoe/simulation.h).
  // counts: rows by [source, local expert]; machine float64 [fields of megamoe_simulation_fields];
  // rates float64 [num_sms + 1], GB/s by SMs that store. Results: summary, workers, link, tiles.
  m.def(
      "megamoe_simulate(int[] plan, int[] counts, int rank, Tensor machine, Tensor rates, "
      "bool trace) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("megamoe_simulation_fields() -> str");
  // What _cuda_sm90 was compiled for, one line per kernel: "block_m block_n cluster_size store".
  m.def("megamoe_instances() -> str");
}

// The module is empty: importing it runs the static initialisers above.
extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C() {
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&definition);
}
