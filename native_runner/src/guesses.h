// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace farm {

// Returns at most `most` tokens that may follow `tokens`: the tokens after the latest earlier place of the last two
// tokens, or else of the last token.
std::vector<int32_t> guess(const std::vector<int32_t>& tokens, size_t most);

}  // namespace farm
