// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <cstdint>
#include <optional>

namespace farm {

// Returns the greatest resident memory of this process so far in bytes; nothing if the system does not have it.
std::optional<int64_t> peak_memory_bytes();

}  // namespace farm
