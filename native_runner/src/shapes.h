// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <string>
#include <vector>

#include "failure.h"
#include "tensors.h"

namespace farm {

// Returns `bounds` with the shapes of a file: one tensor per line, its sizes separated by ", ", an empty line for a
// tensor without dimensions. `what` is "input" or "output", for messages. Throws Failure at inputs for a file that
// cannot be read or parsed, another number of lines, and a shape above its bound.
std::vector<TensorSpec> read_shapes(const std::string& path, const std::vector<TensorSpec>& bounds,
                                    const std::string& what);

}  // namespace farm
