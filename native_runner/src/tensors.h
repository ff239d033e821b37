// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <executorch/runtime/core/evalue.h>
#include <executorch/runtime/executor/method_meta.h>

#include <cstdint>
#include <string>
#include <vector>

namespace farm {

// Input or output in a raw file: elements in the order of the memory, native byte order. A scalar has an empty shape.
struct TensorSpec {
  std::vector<int64_t> shape;
  std::string dtype;  // name as in numpy, or bfloat16
  size_t nbytes = 0;
  size_t itemsize = 0;  // bytes of one element
};

// All functions throw Failure at load for values without a raw file: an unknown dtype, a value that is neither a tensor
// nor a number.

TensorSpec spec_of(const executorch::runtime::TensorInfo& info);
TensorSpec spec_of(const executorch::aten::Tensor& tensor);

// Returns the declared shape and dtype; for a dynamic shape the upper bound.
std::vector<TensorSpec> input_specs(const executorch::runtime::MethodMeta& meta);
std::vector<TensorSpec> output_specs(const executorch::runtime::MethodMeta& meta);

// Returns "float32[1,3,16,16]".
std::string to_string(const TensorSpec& spec);

}  // namespace farm
