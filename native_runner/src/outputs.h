// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <executorch/runtime/core/evalue.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tensors.h"

namespace farm {

// Returns a hash of all outputs of an execution, over the bytes that `write_outputs` would write. Hashes are compared
// within one process only. Throws Failure at outputs.
uint64_t digest_outputs(int64_t line, const std::vector<executorch::runtime::EValue>& values,
                        const std::vector<TensorSpec>& expected);

// Writes `output_{line}_{index}.raw` into `folder` and returns the written tensors. `expected` has the shapes of
// dynamic outputs; if it is empty, tensors keep their shape. Throws Failure at outputs.
std::vector<TensorSpec> write_outputs(const std::string& folder, int64_t line,
                                      const std::vector<executorch::runtime::EValue>& values,
                                      const std::vector<TensorSpec>& expected);

}  // namespace farm
