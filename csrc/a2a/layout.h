// Which block of a tensor goes from which rank to which, and where it lands. Host and device.
//
// A tensor has a sequence form, [B, rows of the rank, all heads, D], and a head form,
// [B, all rows, heads of the rank, D]. Both are contiguous where they are received, but for padding
// between rows that a plan may ask for; the sender's tensor may have any strides.
#pragma once

#include "attention/layout.h"

namespace xstage {

constexpr int kMaxA2aTensors = 8;

// One tensor of a call as all ranks see it: query-like or key-like.
struct A2aForm {
  Partition rows;
  HeadRange heads[kMaxRanks];
  int32_t total_heads;
  int32_t world;
  A2aDirection direction;
  int32_t row_pad;  // bytes between received rows

  XS_HD int32_t sent_rows(int r) const {
    return direction == A2aDirection::kToHeads ? rows.count(r) : rows.total();
  }
  XS_HD int32_t sent_heads(int r) const {
    return direction == A2aDirection::kToHeads ? total_heads : heads[r].count;
  }
  XS_HD int32_t received_rows(int r) const {
    return direction == A2aDirection::kToHeads ? rows.total() : rows.count(r);
  }
  XS_HD int32_t received_heads(int r) const {
    return direction == A2aDirection::kToHeads ? heads[r].count : total_heads;
  }
};

XS_HD A2aForm make_form(AttentionLayout const& layout, A2aDirection direction, int64_t row_pad,
                        bool query) {
  A2aForm form{};
  form.row_pad = direction == A2aDirection::kToSequence ? static_cast<int32_t>(row_pad) : 0;
  form.rows = query ? layout.rows : layout.kv_rows;
  form.total_heads = query ? layout.heads.total() : layout.total_key_heads();
  form.world = layout.world;
  form.direction = direction;
  for (int r = 0; r < layout.world; ++r) {
    form.heads[r] = query ? layout.query_heads(r) : layout.key_heads(r);
  }
  return form;
}

// num_rows x num_heads head rows of D elements, per batch entry.
struct A2aBlock {
  int32_t src_row;
  int32_t src_head;
  int32_t dst_row;
  int32_t dst_head;
  int32_t num_rows;
  int32_t num_heads;
};

XS_HD A2aBlock block_between(A2aForm const& form, int src_rank, int dst_rank) {
  if (form.direction == A2aDirection::kToHeads) {
    HeadRange const wanted = form.heads[dst_rank];
    return {0, wanted.first, form.rows.begin(src_rank), 0, form.rows.count(src_rank), wanted.count};
  }
  HeadRange const computed = form.heads[src_rank];
  return {
      form.rows.begin(dst_rank), 0, 0, computed.first, form.rows.count(dst_rank), computed.count};
}

// Bytes from one received row to the next; `row_bytes` is one head of one row.
XS_HD int64_t received_pitch(A2aForm const& form, int r, int64_t row_bytes) {
  return form.received_heads(r) * row_bytes + form.row_pad;
}

// Bytes of a received tensor, with its share of padding: the next one starts behind it.
XS_HD int64_t received_bytes(A2aForm const& form, int r, int64_t batch, int64_t row_bytes) {
  return round_up(batch * form.received_rows(r) * received_pitch(form, r, row_bytes), kSlotAlign);
}

}  // namespace xstage
