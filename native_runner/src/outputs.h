// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <executorch/runtime/core/evalue.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tensors.h"

namespace farm {

// A hash of all outputs of one execution, of the bytes that `write_outputs` would write: for telling executions of one
// process apart. Throws Failure at outputs.
uint64_t digest_outputs(int64_t line, const std::vector<executorch::runtime::EValue>& values,
                        const std::vector<TensorSpec>& expected);

// Writes `output_{line}_{index}.raw` into `folder` and returns what was written. `expected` has the shapes of
// dynamic outputs, or is empty: then a tensor is written as it is. Throws Failure at outputs.
std::vector<TensorSpec> write_outputs(const std::string& folder, int64_t line,
                                      const std::vector<executorch::runtime::EValue>& values,
                                      const std::vector<TensorSpec>& expected);

}  // namespace farm
