// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "tensors.h"

#include <executorch/runtime/core/exec_aten/util/scalar_type_util.h>

#include "failure.h"

namespace farm {

namespace {

using executorch::aten::ScalarType;
using executorch::runtime::MethodMeta;
using executorch::runtime::Result;
using executorch::runtime::Tag;
using executorch::runtime::TensorInfo;

std::string dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Byte: return "uint8";
    case ScalarType::Char: return "int8";
    case ScalarType::Short: return "int16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::UInt16: return "uint16";
    case ScalarType::UInt32: return "uint32";
    case ScalarType::UInt64: return "uint64";
    case ScalarType::Half: return "float16";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::Bool: return "bool";
    default:
      throw Failure(Stage::kLoad, "a tensor has the scalar type " + std::to_string(static_cast<int>(type)) +
                                      ", which a raw file cannot hold");
  }
}

std::vector<int64_t> shape_of(const int32_t* sizes, size_t count) { return {sizes, sizes + count}; }

template <typename InfoOf>
std::vector<TensorSpec> specs(size_t count, const char* what, const InfoOf& info_of) {
  std::vector<TensorSpec> list;
  for (size_t i = 0; i < count; ++i) {
    try {
      list.push_back(info_of(i));
    } catch (const Failure& failure) {
      throw Failure(failure.stage, std::string(what) + " " + std::to_string(i) + ": " + failure.what());
    }
  }
  return list;
}

TensorSpec checked(const Result<TensorInfo>& info) {
  if (!info.ok()) {
    throw Failure(Stage::kLoad, "the program does not describe the tensor", static_cast<int64_t>(info.error()));
  }
  return spec_of(*info);
}

}  // namespace

TensorSpec spec_of(const TensorInfo& info) {
  return {shape_of(info.sizes().data(), info.sizes().size()), dtype_name(info.scalar_type()), info.nbytes(),
          executorch::runtime::elementSize(info.scalar_type())};
}

TensorSpec spec_of(const executorch::aten::Tensor& tensor) {
  return {shape_of(tensor.sizes().data(), tensor.sizes().size()), dtype_name(tensor.scalar_type()), tensor.nbytes(),
          executorch::runtime::elementSize(tensor.scalar_type())};
}

std::vector<TensorSpec> input_specs(const MethodMeta& meta) {
  return specs(meta.num_inputs(), "input", [&](size_t i) {
    const Result<Tag> tag = meta.input_tag(i);
    if (!tag.ok() || *tag != Tag::Tensor) throw Failure(Stage::kLoad, "is not a tensor, and only tensors can be read");
    return checked(meta.input_tensor_meta(i));
  });
}

std::vector<TensorSpec> output_specs(const MethodMeta& meta) {
  return specs(meta.num_outputs(), "output", [&](size_t i) -> TensorSpec {
    const Result<Tag> tag = meta.output_tag(i);
    if (!tag.ok()) throw Failure(Stage::kLoad, "has no type", static_cast<int64_t>(tag.error()));
    switch (*tag) {
      case Tag::Tensor: return checked(meta.output_tensor_meta(i));
      case Tag::Int: return {{}, "int64", sizeof(int64_t), sizeof(int64_t)};
      case Tag::Double: return {{}, "float64", sizeof(double), sizeof(double)};
      case Tag::Bool: return {{}, "bool", sizeof(bool), sizeof(bool)};
      default: throw Failure(Stage::kLoad, "is neither a tensor nor a number");
    }
  });
}

std::string to_string(const TensorSpec& spec) {
  std::string text = spec.dtype + "[";
  for (size_t i = 0; i < spec.shape.size(); ++i) text += (i == 0 ? "" : ",") + std::to_string(spec.shape[i]);
  return text + "]";
}

}  // namespace farm
