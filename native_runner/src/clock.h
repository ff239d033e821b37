// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <chrono>
#include <cstdint>

namespace farm {

// Clock of all measured times.
using Clock = std::chrono::steady_clock;

inline int64_t ns_between(Clock::time_point start, Clock::time_point end) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(end - start).count();
}

inline int64_t ns_since(Clock::time_point start) { return ns_between(start, Clock::now()); }

}  // namespace farm
