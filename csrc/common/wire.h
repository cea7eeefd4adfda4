// Integers that travel from Python to C++: plans and workspace descriptors.
//
//   int[] = [magic, kind, version, n, field_0 ... field_{n-1}]
//
// A plan header lists its fields once, as an X-list of (name, min, max, meaning). The list makes
// the struct, the reader with its range checks, and the text that Python compares with at import
// (`xstage::plan_fields`). C++ owns the list, so Python cannot drift.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "check.h"

namespace xstage {

constexpr int64_t kWireMagic = 0x58535447;  // "XSTG"
constexpr int64_t kWireVersion = 1;
constexpr int64_t kWireHeader = 4;

enum class WireKind : int64_t {
  kMegaMoePlan = 1,
  kA2aPlan = 2,
  kWorkspace = 3,
  kBurstPlan = 4,
  kBurstLoopPlan = 5,
};

// Reads the fields of one wire message in order, with their names in every error.
class WireReader {
 public:
  WireReader(std::vector<int64_t> const& words, WireKind kind, char const* what, int64_t num_fields)
      : words_(words), what_(what) {
    int64_t const size = static_cast<int64_t>(words.size());
    XS_CHECK(size >= kWireHeader && words[0] == kWireMagic, "xstage: ", what,
             ": not a wire message (", size, " integers, bad magic); build it with xstage_ext");
    XS_CHECK(words[1] == static_cast<int64_t>(kind), "xstage: ", what, ": expected kind ",
             static_cast<int64_t>(kind), ", got ", words[1]);
    XS_CHECK(words[2] == kWireVersion, "xstage: ", what, ": expected version ", kWireVersion,
             ", got ", words[2], "; the Python package and the binary differ");
    XS_CHECK(words[3] == num_fields && size == kWireHeader + num_fields, "xstage: ", what,
             ": expected ", num_fields, " fields, got ", words[3], " announced and ",
             size - kWireHeader, " present");
  }

  int64_t next(char const* name, int64_t min, int64_t max) {
    int64_t const value = words_[kWireHeader + position_++];
    XS_CHECK(value >= min && value <= max, "xstage: ", what_, ": ", name, ": expected ", min,
             " to ", max, ", got ", value);
    return value;
  }

 private:
  std::vector<int64_t> const& words_;
  char const* what_;
  int64_t position_ = 0;
};

}  // namespace xstage
