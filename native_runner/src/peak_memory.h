// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <cstdint>
#include <optional>

namespace farm {

// Greatest resident memory of this process so far, in bytes; nothing where the system does not tell.
std::optional<int64_t> peak_memory_bytes();

}  // namespace farm
