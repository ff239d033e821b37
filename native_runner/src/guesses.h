// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace farm {

// At most `most` tokens that may come after `tokens`: what came after the last of them before. The last two are looked
// for, then the last one; of several places the latest one is taken.
std::vector<int32_t> guess(const std::vector<int32_t>& tokens, size_t most);

}  // namespace farm
